"""Read settings from YAML, presets and `key=value` texts, describe them, and compare them.

A text of a few lines can be endless as YAML, or nested too deeply for Python, so that its length, depth
and aliases are checked before it is parsed.
"""

import reprlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from brats_seg.config import Config, plain
from brats_seg.errors import ConfigError
from brats_seg.presets import NETWORK_DEFAULTS, PRESETS

LONGEST_YAML = 1 << 15
"""Characters of the longest text that is parsed as YAML; all settings together have 2,000."""
_DEEPEST_YAML = 20
"""Levels of lists and mappings in YAML; settings have three."""


def load_config(
    *,
    preset: str | None = None,
    text: str = "",
    assignments: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
) -> Config:
    """Build the settings of a run; each source overrides the ones before it.

    The order is: defaults, preset, the defaults of the network, YAML text, assignments, values.

    Args:
        preset: A name in `PRESETS`.
        text: The content of a YAML file.
        assignments: `key=value` texts, where the value is YAML: `training.n_epochs=10`.
        values: Values by dotted key: `{"training.n_epochs": 10}`.

    Raises:
        ConfigError: A key is unknown or a value is not allowed; the message names the key, the
            value and what was expected.

    Example:
        >>> config = load_config(preset="demo", values={"training.n_epochs": 3})
        >>> config.training.n_epochs, config.patch.size
        (3, (40, 40, 40))
    """
    if preset is not None and preset not in PRESETS:
        msg = f"preset {preset!r} is unknown; there are {', '.join(PRESETS)}"
        raise ConfigError(msg)
    given: dict[str, Any] = {}
    sources = (
        [_parsed(text, "the configuration file")],
        map(_assigned, assignments),
        (_nested(key, value) for key, value in (values or {}).items()),
    )
    for source in chain.from_iterable(sources):
        _merge(given, source)
    settings: dict[str, Any] = {}
    for source in (PRESETS[preset] if preset else {}, _network_defaults(given), given):
        _merge(settings, source)
    return config_of(settings)


def config_of(settings: object) -> Config:
    """Validate settings given as a mapping, such as those of a checkpoint."""
    if not isinstance(settings, Mapping):
        msg = f"found {type(settings).__name__} in place of settings; expected key: value"
        raise ConfigError(msg)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        unknown = [one["loc"] for one in error.errors() if one["type"] == "extra_forbidden"]
        lines = [_unknown(location) for location in unknown] or explained(error, depth=2)
        raise ConfigError("\n".join(f"setting {line}" for line in lines)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting, as a table of settings shows it."""

    key: str
    """Dotted name, such as `training.n_epochs`."""
    value: str
    """Value as YAML."""
    allowed: str
    """Values that are allowed, in words."""
    meaning: str
    """First paragraph of its documentation."""


def describe_settings(config: Config) -> tuple[Setting, ...]:
    """Return all settings with their values, in the order in which they are declared.

    Example:
        >>> describe_settings(Config())[0].key
        'cases.labels'
    """
    schema = Config.model_json_schema()["$defs"]
    return tuple(
        Setting(
            key=f"{section}.{key}",
            value=_yaml_of(getattr(getattr(config, section), key)),
            allowed=_allowed(schema[type(getattr(config, section)).__name__]["properties"][key]),
            meaning=(field.description or "").partition("\n\n")[0],
        )
        for section in Config.model_fields
        for key, field in type(getattr(config, section)).model_fields.items()
    )


def _yaml_of(value: Any) -> str:
    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _allowed(schema: Mapping[str, Any]) -> str:
    """Describe a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(_allowed, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        items = schema.get("prefixItems", [schema.get("items")])
        return f"{f'{len(items)} x' if len(items) > 1 else 'list of'} {_allowed(items[0])}"
    bounds = [sign + str(schema[key]) for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([schema["type"], " and ".join(bounds)]).strip()


_BOUNDS = {
    "exclusiveMinimum": "> ",
    "minimum": ">= ",
    "exclusiveMaximum": "< ",
    "maximum": "<= ",
    "multipleOf": "multiple of ",
}


def explained(error: ValidationError, *, depth: int | None = None) -> list[str]:
    """Return a line for each value that a validation has refused: its key, what was expected, the value.

    Parts of a location below the depth are the types that were tried, and indices in a list.

    Example:
        >>> from pydantic import TypeAdapter
        >>> try:
        ...     TypeAdapter(dict[str, bool]).validate_python({"tta": "maybe"})
        ... except ValidationError as error:
        ...     explained(error)
        ["tta: expected a valid boolean, unable to interpret input (got 'maybe')"]
    """
    problems: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors(include_url=False):
        problems.setdefault(".".join(map(str, problem["loc"][:depth])), []).append(problem)
    lines = []
    for key, refused in problems.items():
        messages = (problem["msg"].removeprefix("Value error, ") for problem in refused)
        text = " or ".join(dict.fromkeys(messages)).replace("Input should be", "expected")
        lines.append(f"{key}: {text} (got {reprlib.repr(refused[0]['input'])})" if key else text)
    return lines


def differing_settings(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted name, with the old and the new value."""
    before, after = flat_settings(old), flat_settings(new)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def flat_settings(config: Config) -> dict[str, Any]:
    """Return all settings by dotted name."""
    return {
        f"{section}.{key}": value
        for section, values in config.model_dump().items()
        for key, value in values.items()
    }


def _network_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    model = given.get("model")
    # values of a wrong type are refused by the validation of the whole
    name = model.get("name") if isinstance(model, dict) else None
    return NETWORK_DEFAULTS.get(name, {}) if isinstance(name, str) else {}


def read_yaml(path: Path) -> str:
    """Return the text of a YAML file, cut off where it is too long to be accepted."""
    try:
        # it may be a pipe of the shell, as in --config <(command)
        with path.open(encoding="utf-8") as file:
            return file.read(LONGEST_YAML + 1)
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        msg = f"{path} is not a text file: {error.reason} at byte {error.start}"
    raise ConfigError(msg)


def parse_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text, which messages call by its origin.

    Example:
        >>> parse_yaml("{0: 8, 40: 16}", "--effective-batch")
        {0: 8, 40: 16}
    """
    try:
        if found := _wrong_yaml(text):
            msg = f"{origin} holds {found}; expected settings as key: value"
            raise ConfigError(msg)
        return yaml.safe_load(text)
    # values such as a date of the 99th day, or a number of 5,000 digits
    except (yaml.YAMLError, ValueError) as error:
        msg = f"{origin} is not YAML: {error}"
        raise ConfigError(msg) from None


def _wrong_yaml(text: str) -> str:
    """Return what is wrong with a text that may be YAML, or nothing."""
    if len(text) > LONGEST_YAML:
        return f"{len(text)} characters, where settings have at most {LONGEST_YAML}"
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            return f"the alias *{event.anchor}, which is not supported: write the value itself"
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            return f"more than {_DEEPEST_YAML} levels of lists or mappings"
    return ""


def _parsed(text: str, origin: str) -> dict[str, Any]:
    value = parse_yaml(text, origin) or {}
    if not isinstance(value, dict):
        msg = f"{origin} holds {type(value).__name__}; expected settings as key: value"
        raise ConfigError(msg)
    return value


def _assigned(assignment: str) -> dict[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals:
        msg = f"--set {assignment!r} has no '='; expected for example training.n_epochs=10"
        raise ConfigError(msg)
    if key.count(".") > _DEEPEST_YAML:
        msg = f"--set {assignment[:40]}... has {key.count('.')} dots; expected section.key=value"
        raise ConfigError(msg)
    return _nested(key, _parsed(f"value: {text}", f"--set {assignment}")["value"])


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for the key `a.b`."""
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return dict(value)


def _merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        below = settings.get(key)
        # a mapping by epoch such as {0: 8} is one value; only sections, whose keys are texts, are merged
        is_section = isinstance(value, dict) and all(isinstance(name, str) for name in value)
        if isinstance(below, dict) and is_section:
            _merge(below, value)
        else:
            settings[key] = deepcopy(value)


def _unknown(location: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    key = ".".join(map(str, location))
    return f"{key} is unknown; there are {', '.join(section.model_fields)}"
