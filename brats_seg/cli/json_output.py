"""Select the fields that commands print with `--json`, and print the JSON schema of them.

`json_output.toml` lists them. `python -m brats_seg.cli.json_output` prints the JSON schema (2020-12) of the
output of every command, under `properties`.
"""

import json
import sys
from collections.abc import Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import ConfigDict, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema, to_jsonable_python

from brats_seg.files import table_beside

OUTPUTS: dict[str, Any] = table_beside(__file__)
"""Output of each command."""
LINES = ("predict", "reconstruct")
"""Commands that print a line for each case as it ends."""
_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (str, int, float, bool, Path)},
    "dict[str, float]": dict[str, float],
}


def json_text(command: str, value: object, extra: Mapping[str, object] = {}) -> str:
    """Return the result of a command as JSON, with further fields; a number that is not finite is null."""
    plain = to_jsonable_python(_select_fields(value, OUTPUTS[command], extra), inf_nan_mode="null")
    # ASCII alone, because file names need not be UTF-8
    return json.dumps(plain, indent=None if command in LINES else 2)


def _select_fields(value: Any, output: Any, extra: Mapping[str, object] = {}) -> Any:
    """Return the fields of a value that its output names; one that it has not is null."""
    if isinstance(output, dict):
        return {
            path.rpartition(".")[2]: _select_fields(
                extra[path] if path in extra else reduce(_field, path.split("."), value), below
            )
            for path, below in output.items()
        }
    if isinstance(output, list):
        return [_select_fields(below, output[0]) for below in value or ()]
    return value


def _field(value: object, name: str) -> Any:
    return getattr(value, name, None)


def output_schema() -> dict[str, Any]:
    """Return the JSON schema of the output of every command, under `properties`."""
    schema = TypeAdapter(_output_type(OUTPUTS)).json_schema(
        mode="serialization", schema_generator=_NullableNumbers
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "required": []}


def _output_type(output: Any, name: str = "") -> Any:
    match output:
        case [below]:
            return list[_output_type(below, name)]  # type: ignore[misc]
        case dict():
            names = {path: path.rpartition(".")[2] for path in output}
            fields: dict[str, Any] = {
                names[path]: (_output_type(below, f"{name}_{names[path]}".strip("_")), ...)
                for path, below in output.items()
            }
            return create_model(name or "outputs", __config__=ConfigDict(extra="forbid"), **fields)
    kinds = [
        _TYPES.get(kind) or resolve_name(f"brats_seg.{kind}")
        for kind in output.rstrip("?").split(" | ")
    ]
    return reduce(or_, kinds + [None] * output.endswith("?"))


class _NullableNumbers(GenerateJsonSchema):
    """Schemas in which a number may be null, as one that is not finite is printed."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        """Return the schema of a number."""
        return {**super().float_schema(schema), "type": ["number", "null"]}


if __name__ == "__main__":
    json.dump(output_schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
