"""Write the JSON schema of what the commands print with `--json`.

The schema is made from the types of what the commands print, values that the package returns anyway or
those of `json_results`, by
`python -m brats_seg.json_schema > docs/json-output.schema.json`.
"""

import json
import sys
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from brats_seg import json_results


def outputs() -> dict[str, TypeAdapter[Any]]:
    """Return the type of the JSON of each command; `predict` and `reconstruct` print a line for each case."""
    # pydantic looks up the names in the annotations of `json_results` among the names of this function
    from brats_seg.cases.many import Failure  # noqa: F401
    from brats_seg.config_text import Setting
    from brats_seg.doctor import Diagnosis
    from brats_seg.evaluation.compare import Comparison  # noqa: F401
    from brats_seg.evaluation.scores import RegionSummary  # noqa: F401
    from brats_seg.inference.output import Record
    from brats_seg.inference.tuning import Tuning
    from brats_seg.survival.verdict import FamilyFigures, Verdict  # noqa: F401
    from brats_seg.training.certificate import CertificateRow
    from brats_seg.training.memory_plan import PlanRow

    return {
        "index": TypeAdapter(json_results.IndexedFolder),
        "prepare": TypeAdapter(json_results.PreparedFolder),
        "convert": TypeAdapter(json_results.ConvertedFolder),
        "phantom": TypeAdapter(json_results.WrittenFile),
        "plan": TypeAdapter(tuple[PlanRow, ...]),
        "train": TypeAdapter(json_results.TrainedRun),
        "settings": TypeAdapter(tuple[Setting, ...]),
        "certify": TypeAdapter(tuple[CertificateRow, ...]),
        "tune": TypeAdapter(Tuning),
        "crossval": TypeAdapter(json_results.CrossValidated),
        "predict": TypeAdapter(Record),
        "export": TypeAdapter(json_results.ExportedFolder),
        "features": TypeAdapter(json_results.MeasuredCases),
        "survival": TypeAdapter(json_results.SurvivalResult),
        "evaluate": TypeAdapter(json_results.Scores),
        "reconstruct": TypeAdapter(json_results.ReconstructedCase),
        "doctor": TypeAdapter(Diagnosis),
        "figure": TypeAdapter(json_results.WrittenFile),
        "report": TypeAdapter(json_results.WrittenPages),
    }


def output_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of the output of every command, under `properties`."""
    adapters = [(name, "serialization", adapter) for name, adapter in outputs().items()]
    by_command, schema = TypeAdapter.json_schemas(
        adapters,  # type: ignore[arg-type]
        title="Output of the commands of brats-seg with --json",
        schema_generator=_ClosedSchema,
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {name: by_command[name, "serialization"] for name, _, _ in adapters},
    }


class _ClosedSchema(GenerateJsonSchema):
    """Schemas of objects without further keys, and of numbers that may be missing."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        """Return the schema of a number; one that is not finite is written as null."""
        return {**super().float_schema(schema), "type": ["number", "null"]}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        """Return the schema of a dataclass, which has no other keys."""
        return {**super().dataclass_schema(schema), "additionalProperties": False}


if __name__ == "__main__":
    json.dump(output_schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
