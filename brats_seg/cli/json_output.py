"""Define the JSON that commands print with `--json`, and print its schema.

`python -m brats_seg.cli.json_output` prints the JSON schema (2020-12) of the output of every command,
under `properties`.
"""

import json
import sys
from collections.abc import Mapping
from functools import reduce
from operator import attrgetter, or_
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from pydantic import ConfigDict, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema, to_jsonable_python

_FAILURES = ["cases.many:Failure"]
_SUMMARIES = ["evaluation.scores:RegionSummary"]
_COMPARISON = ("evaluation.compare:Comparison", None)
_TEXTS = list[str]
_CASE = dict.fromkeys(("case_id", "patient_id", "release", "convention"), str)
_SERIES = {"number": int, "description": str, "modality": str, "reason": str}
_STUDY = {"study.case_id": str, "study.folder": Path, "study.series": [_SERIES]}
_SCORED = {
    **dict.fromkeys(("case_ids", "missing", "left_out", "without_reference", "remarks"), _TEXTS),
    "failures": _FAILURES,
}

OUTPUTS: dict[str, Any] = {
    "index": {"table": Path, "cases": [{**_CASE, "problems": _TEXTS, "remarks": _TEXTS}]},
    "prepare": {
        "folder": Path,
        "case_ids": _TEXTS,
        "damage": _TEXTS,
        "n_folds": int | None,
        "folds_table": Path | None,
    },
    "convert": {"path": Path, "cases": [{**_STUDY, "case.problems": _TEXTS}]},
    "phantom": {"path": Path},
    "doctor": "doctor:Diagnosis",
    "plan": ["training.memory_plan:PlanRow"],
    "train": {
        "run": Path,
        "finished": bool,
        "reason": str,
        "signal": str | None,
        "best": float | None,
        "history": list[dict[str, float]],
    },
    "settings": ["config_text:Setting"],
    "certify": ["training.certificate:CertificateRow"],
    "tune": "inference.tuning:Tuning",
    "crossval": {
        "output": Path,
        "runs": list[Path],
        "finished": bool,
        "fingerprint": str | None,
        "tuning": ("inference.tuning:Tuning", None),
        "evaluation.summaries": _SUMMARIES,
        "evaluation.predicted_summaries": _SUMMARIES,
        "failures": _FAILURES,
    },
    "predict": "inference.results:Record | cases.many:Failure",
    "export": {"path": Path, "n_networks": int, "fingerprint": str},
    "reconstruct": {
        "case_id": str,
        "rmse": dict[str, float],
        "mean_rmse": float,
        "picture": Path,
        "warnings": _TEXTS,
    },
    "features": {"table": Path, "case_ids": _TEXTS, "columns": _TEXTS, "failures": _FAILURES},
    "survival": {
        "folder": Path,
        "figures": ["survival.results:FamilyFigures"],
        "verdict": "survival.results:Verdict",
        "conclusion": str,
        "remarks": _TEXTS,
        "missing": _TEXTS,
    },
    "evaluate": {
        "table": Path,
        "evaluations": [_SCORED],
        "summaries": _SUMMARIES,
        "predicted_summaries": _SUMMARIES,
        "comparison": _COMPARISON,
        "predicted_comparison": _COMPARISON,
    },
    "report": {"pages": list[Path], "failures": _FAILURES},
    "figure": {"path": Path},
}
"""Output of each command: an object with its fields, a list, a type, or `module:name` of a type.

A tuple with None is a value that may be missing. Of an object only the fields named here are printed,
each under the last part of its name.
"""
LINES = ("predict", "reconstruct")
"""Commands that print a line for each case as it ends."""


def json_text(command: str, value: object, extra: Mapping[str, object] = {}) -> str:
    """Return the result of a command as JSON, with further fields; a number that is not finite is null."""
    plain = to_jsonable_python(_fields_of(value, OUTPUTS[command], extra), inf_nan_mode="null")
    # ASCII alone, because file names need not be UTF-8
    return json.dumps(plain, indent=None if command in LINES else 2)


def _fields_of(value: Any, output: Any, extra: Mapping[str, object] = {}) -> Any:
    """Return the fields of a value that its output names; one that it has not is null."""
    if isinstance(output, dict):
        return {
            name.rpartition(".")[2]: _fields_of(
                extra[name] if name in extra else _attribute(value, name), below
            )
            for name, below in output.items()
        }
    if isinstance(output, list):
        return [_fields_of(below, output[0]) for below in value or ()]
    return value


def _attribute(value: object, path: str) -> Any:
    """Return an attribute below a value by its dotted path; None if there is no value."""
    return None if value is None else attrgetter(path)(value)


def output_schema() -> dict[str, Any]:
    """Return the JSON schema of the output of every command."""
    adapters = [
        (command, "serialization", TypeAdapter(_type_of(output, command)))
        for command, output in OUTPUTS.items()
    ]
    by_command, schema = TypeAdapter.json_schemas(
        adapters,  # type: ignore[arg-type]
        title="Output of the commands of brats-seg with --json",
        schema_generator=_NullableNumbers,
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {name: by_command[name, "serialization"] for name, _, _ in adapters},
    }


def _type_of(output: Any, name: str) -> Any:
    match output:
        case str():
            return reduce(or_, (resolve_name(f"brats_seg.{part}") for part in output.split(" | ")))
        case [below, None]:
            return _type_of(below, name) | None
        case [below]:
            return list[_type_of(below, name)]  # type: ignore[misc]
        case dict():
            fields = {
                (key := path.rpartition(".")[2]): (_type_of(below, f"{name}_{key}"), ...)
                for path, below in output.items()
            }
            forbidden = ConfigDict(extra="forbid")
            return create_model(name, __config__=forbidden, **cast("dict[str, Any]", fields))
    return output


class _NullableNumbers(GenerateJsonSchema):
    """Schemas in which a number may be null, as one that is not finite is printed."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        """Return the schema of a number."""
        return {**super().float_schema(schema), "type": ["number", "null"]}


if __name__ == "__main__":
    json.dump(output_schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
