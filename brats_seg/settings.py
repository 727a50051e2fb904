"""How settings are read and changed: presets, YAML text and key=value pairs to `Config`.

An unknown key is an error that names it. Files are read elsewhere.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from brats_seg.config import Config
from brats_seg.errors import ConfigError
from brats_seg.presets import OF_MODEL, PRESETS


def load_config(
    *, preset: str | None = None, text: str = "", assignments: Iterable[str] = ()
) -> Config:
    """Build the settings: defaults, then a preset, then YAML text, then `key=value` pairs.

    What the network itself starts from lies between the preset and the text. Raises `ConfigError`
    naming the key, what was got and what is allowed.
    """
    given: dict[str, Any] = {}
    _merge(given, _parsed(text, "the configuration file"))
    for assignment in assignments:
        _merge(given, _assigned(assignment))
    settings: dict[str, Any] = {}
    if preset is not None:
        _merge(settings, _preset(preset))
    _merge(settings, _of_model(given))
    _merge(settings, given)
    return config_of(settings)


def config_of(settings: Mapping[str, Any]) -> Config:
    """Validate settings that are already a mapping, such as those of a checkpoint."""
    model = settings.get("model")
    if isinstance(model, Mapping) and model.get("name") == "segresnet-vae":  # in older runs
        settings = {**settings, "model": {**model, "name": "vae-unet"}}
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_explained(error)) from None


def differing_settings(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return every setting that differs, by its dotted name, with the old and the new value."""
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def _of_model(given: Mapping[str, Any]) -> dict[str, Any]:
    model = given.get("model")
    # what is no mapping, or no name, is refused when all is checked
    name = model.get("name") if isinstance(model, dict) else None
    return OF_MODEL.get(name, {}) if isinstance(name, str) else {}


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        msg = f"preset {name!r} is unknown; there are {', '.join(PRESETS)}"
        raise ConfigError(msg)
    return PRESETS[name]


def _parsed(text: str, origin: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        msg = f"{origin} is not YAML: {error}"
        raise ConfigError(msg) from None
    if not isinstance(value, dict):
        msg = f"{origin} holds {type(value).__name__}; expected settings as key: value"
        raise ConfigError(msg)
    return value


def _assigned(assignment: str) -> dict[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals:
        msg = f"--set {assignment!r} has no '='; expected for example training.n_epochs=10"
        raise ConfigError(msg)
    value = _parsed(f"value: {text}", f"--set {assignment}")["value"]
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return dict(value)


def _merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        below = settings.get(key)
        # a schedule by epoch, {0: 8}, is one value: only sections, whose keys are words, are merged
        if isinstance(below, dict) and isinstance(value, dict) and all(map(_is_word, value)):
            _merge(below, value)
        else:
            settings[key] = _copied(value)


def _is_word(key: object) -> bool:
    return isinstance(key, str)


def _copied(value: Any) -> Any:
    return (
        {key: _copied(below) for key, below in value.items()} if isinstance(value, dict) else value
    )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in settings.items()
        for key, value in values.items()
    }


def _explained(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"setting {key} is unknown; {_alternatives(problem['loc'])}")
        else:
            what = problem["msg"].removeprefix("Value error, ")
            lines.append(f"setting {key}: {what} (got {problem['input']!r})" if key else what)
    return "\n".join(lines)


def _alternatives(location: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    return f"there are {', '.join(section.model_fields)}"
