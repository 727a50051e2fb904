"""The files that a survival study leaves behind.

predictions.csv   what was predicted for every case, and how
summary.json      figures with intervals, verdict, remarks
submission.csv    case id and days, without a header, as the challenge takes it
"""

import csv
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS
from brats_seg.files import whole_file
from brats_seg.survival.cross_validation import SELECTED, CrossValidationPlan, Predictions, Study
from brats_seg.survival.table import FeatureTable
from brats_seg.survival.verdict import FamilyFigures, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """All that is known of the predictions as a whole."""

    figures: tuple[FamilyFigures, ...]
    verdict: Verdict
    remarks: tuple[str, ...]


def write_predictions(study: Study, predictions: Predictions, path: Path) -> None:
    """Write a row for each case.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    table, outcomes = study.table, study.outcomes
    names = [f"{name}_days" for name in predictions.names]
    header = ("case_id", "patient_id", "fold", "reported_days", "censored", *names)
    with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for place, (case_id, patient_id) in enumerate(
            zip(table.case_ids, table.patient_ids, strict=True)
        ):
            reported = outcomes.days[place]
            known = outcomes.known[place]
            fold = predictions.folds[place]
            writer.writerow(
                (
                    case_id,
                    patient_id,
                    "" if fold is None else fold,
                    f"{reported:g}" if known else "",
                    ("yes" if outcomes.censored[place] else "no") if known else "",
                    *(f"{days:.1f}" for days in predictions.days[:, place]),
                )
            )


def write_submission(
    table: FeatureTable,
    predictions: Predictions,
    path: Path,
    wanted: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Write the selected days of the wanted cases, given in lower case, or of all.

    Returns:
        The wanted cases that there is no prediction for.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    days = predictions.of(SELECTED)
    with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for case_id, predicted in zip(table.case_ids, days, strict=True):
            if wanted is None or case_id.lower() in wanted:
                writer.writerow((case_id, round(float(predicted))))
    there = {case_id.lower() for case_id in table.case_ids}
    return tuple(case_id for case_id in wanted or () if case_id not in there)


def write_summary(
    summary: Summary, study: Study, predictions: Predictions, plan: CrossValidationPlan, path: Path
) -> None:
    """Write figures, verdict and how they came about as JSON.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    outcomes, verdict = study.outcomes, summary.verdict
    content = {
        "research_use_only": True,
        "version": version("brats_seg"),
        "n_cases": len(outcomes.days),
        "n_died": int(outcomes.died.sum()),
        "n_censored": int(outcomes.lived.sum()),
        "n_features": len(study.columns),
        "class_days": SURVIVAL_CLASS_DAYS,
        "n_folds": len({fold for fold in predictions.folds if fold is not None}),
        "n_repeats": plan.n_repeats,
        "seed": plan.seed,
        "times_selected": dict(predictions.chosen),
        "verdict": asdict(verdict)
        | {
            "is_significant": verdict.is_significant,
            "beats_age": verdict.beats_age,
            "words": str(verdict),
        },
        "remarks": summary.remarks,
        "figures": {one.name: _as_json(one) for one in summary.figures},
    }
    with whole_file(path) as beside:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _as_json(figures: FamilyFigures) -> dict[str, object]:
    content: dict[str, object] = {
        one.name: {"value": one.value, "low": one.low, "high": one.high}
        for one in figures.estimates
    }
    return content | {"n_censored_contradicted": figures.n_contradicted}
