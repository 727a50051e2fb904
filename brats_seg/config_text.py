"""Read settings from YAML, presets and `key=value` texts, describe them, and compare them.

A text of a few lines can be endless as YAML, or nested too deeply for Python, so that its length, depth
and aliases are checked before it is parsed.
"""

import reprlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from brats_seg.config import Config, plain
from brats_seg.errors import ConfigError
from brats_seg.presets import NETWORK_DEFAULTS, PRESETS

LONGEST_YAML = 1 << 15
"""Characters of the longest text that is parsed as YAML; all settings together have 2,000."""
_N_PROBLEMS = 3
"""Problems of a file that a message lists at most."""
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
        (3, (32, 32, 32))
    """
    given: dict[str, Any] = {}
    _merge(given, _parsed(text, "the configuration file"))
    for assignment in assignments:
        _merge(given, _assigned(assignment))
    for key, value in (values or {}).items():
        _merge(given, _nested(key, value))
    settings: dict[str, Any] = {}
    if preset is not None:
        _merge(settings, _preset(preset))
    _merge(settings, _network_defaults(given))
    _merge(settings, given)
    return config_of(settings)


def config_of(settings: object) -> Config:
    """Validate settings given as a mapping, such as those of a checkpoint."""
    if not isinstance(settings, Mapping):
        msg = f"found {type(settings).__name__} in place of settings; expected key: value"
        raise ConfigError(msg)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_explained(error)) from None


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
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema["type"] == "array":
        return _allowed_list(schema)
    bounds = [words + str(schema[key]) for key, words in _BOUNDS.items() if key in schema]
    return " ".join([_JSON_TYPES[schema["type"]], " and ".join(bounds)]).strip()


def _allowed_list(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        example = "64,64,64" if schema["prefixItems"][0]["type"] == "integer" else "1,1,1"
        return f"{schema['minItems']} numbers such as {example}"
    return "numbers such as 16,32,64" if schema["items"]["type"] == "integer" else "list"


_BOUNDS = {
    "exclusiveMinimum": "> ",
    "minimum": ">= ",
    "exclusiveMaximum": "< ",
    "maximum": "<= ",
    "multipleOf": "multiple of ",
}
_JSON_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "string": "text",
    "object": "key: value",
    "null": "null",
}


def problems_of(error: ValidationError) -> str:
    """Return the first problems that a validation has found, as one line for a message."""
    problems = error.errors(include_url=False)
    lines = [
        f"{'.'.join(map(str, problem['loc'])) or 'all'}: {words_of(problem)} "
        f"(got {reprlib.repr(problem['input'])})"
        for problem in problems[:_N_PROBLEMS]
    ]
    more = [f"{len(problems) - _N_PROBLEMS} more"] * (len(problems) > _N_PROBLEMS)
    return "; ".join([*lines, *more])


def words_of(problem: Mapping[str, Any]) -> str:
    """Return what a validation expected, in the words of a person who sets a value.

    Example:
        >>> from pydantic import TypeAdapter
        >>> try:
        ...     TypeAdapter(int).validate_python("ten")
        ... except ValidationError as error:
        ...     words_of(error.errors()[0])
        'expected a whole number'
    """
    words = _WORDS.get(problem["type"])
    if words is None:
        return problem["msg"].removeprefix("Value error, ")
    return f"expected {words.format(**problem.get('ctx', {}))}".replace(" 1 items", " 1 item")


_WORDS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list of values"),
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type"), "key: value"),
    "int_parsing_size": "a smaller whole number",
    "finite_number": "a finite number",
    "string_type": "text",
    "none_required": "null",
    "missing": "one more value",
    "literal_error": "{expected}",
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "a number greater than or equal to {ge:g}",
    "less_than": "a number less than {lt:g}",
    "less_than_equal": "a number less than or equal to {le:g}",
    "multiple_of": "a multiple of {multiple_of:g}",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
}
"""Words for the expected value, by the type of a problem that pydantic reports."""


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


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        msg = f"preset {name!r} is unknown; there are {', '.join(PRESETS)}"
        raise ConfigError(msg)
    return PRESETS[name]


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


def _explained(error: ValidationError) -> str:
    """Return one line for each setting that is wrong."""
    lines: dict[str, str] = {}
    problems: dict[str, list[Mapping[str, Any]]] = {}
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines[key] = f"setting {key} is unknown; {_alternatives(problem['loc'])}"
        else:
            # further parts of the location are the types that were tried, and places in a list
            setting = ".".join(str(part) for part in problem["loc"][:2])
            problems.setdefault(setting, []).append(problem)
    for key, found in problems.items():
        # a list whose values are refused counts as empty as well
        found = [one for one in found if one["type"] != "too_short"] or found
        what = " or ".join(dict.fromkeys(map(words_of, found))).replace(" or expected ", " or ")
        lines[key] = (
            f"setting {key}: {what} (got {reprlib.repr(found[0]['input'])})" if key else what
        )
    return "\n".join(lines.values())


def _alternatives(location: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    return f"there are {', '.join(section.model_fields)}"
