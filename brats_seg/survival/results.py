"""Study survival from a table of features, and write the results to a folder.

predictions.csv   predictions for every case: days by family, hazard ratio of the Cox model
summary.json      figures with intervals, verdict, remarks
submission.csv    case id and days, without a header, as the challenge takes it
survival.png      predicted over reported days
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS
from brats_seg.cases.folds import read_folds
from brats_seg.figures.charts import survival_figure
from brats_seg.figures.sections import write_figure
from brats_seg.files import alone_at, write_json
from brats_seg.progress import Track, untracked
from brats_seg.survival.cox import is_installed
from brats_seg.survival.cross_validation import (
    SELECTED,
    CrossValidationPlan,
    Predictions,
    Study,
    cross_validate,
)
from brats_seg.survival.models import FAMILIES
from brats_seg.survival.outcomes import read_ids, read_outcomes
from brats_seg.survival.table import FeatureTable, read_features
from brats_seg.survival.verdict import FamilyFigures, Verdict, figures_of, judge, remarks_on
from brats_seg.tables import write_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Scores of the predictions as a whole."""

    figures: tuple[FamilyFigures, ...]
    verdict: Verdict
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SurvivalStudy:
    """A finished study of survival."""

    study: Study
    predictions: Predictions
    summary: Summary
    missing: tuple[str, ...]
    """Cases to submit that have no features."""


def study_survival(  # noqa: PLR0913 - each is a choice of its own
    features: Path,
    table: Path,
    output: Path,
    *,
    mapping: Sequence[Path] = (),
    folds: Path | None = None,
    n_folds: int = 5,
    n_repeats: int = 3,
    seed: int = 55,
    submit: Path | None = None,
    track: Track = untracked,
) -> SurvivalStudy:
    """Predict survival by nested cross-validation, test against chance, and write the results.

    No case is predicted by a model that was trained on it or on its patient. Where lifelines is
    installed, a Cox model learns from censored cases as well.

    Args:
        features: Table that `features_of_folder` wrote.
        table: Table of survival, of any BraTS release.
        output: Folder to write to.
        mapping: Tables `name_mapping.csv`, if the features have ids of another year than the table.
            Those beside the table are found.
        folds: Fold table of the project; without it, new folds.
        n_folds: Number of new folds.
        n_repeats: Number of cross-validations to average.
        seed: Seed of the folds, models and intervals.
        submit: Table of the cases to submit; without it, all.
        track: Shows progress.

    Raises:
        UsageError: A table cannot be read or does not fit the others, or has too few deaths.
        FoldError: The fold table lacks a case, or leaves too few deaths to learn from.
        EnvironmentalError: The folder cannot be written to.

    Example:
        >>> paths = Path("features.csv"), Path("survival_info.csv"), Path("survival")
        >>> study_survival(*paths).summary.verdict.heading  # doctest: +SKIP
        'more than chance, better than age alone'
    """
    wanted = None if submit is None else read_ids(submit)
    found = read_features(features)
    study = Study.of(found, read_outcomes(found, table, mapping))
    plan = CrossValidationPlan(
        n_folds=n_folds,
        n_repeats=n_repeats,
        seed=seed,
        families=FAMILIES,
        with_cox=is_installed(),
    )
    fold_table = None if folds is None else read_folds(folds)
    predictions = cross_validate(study, plan, fold_table, track)
    summary = _summary_of(study, predictions, plan)
    with alone_at(output, is_folder=True, wait=True):
        write_predictions(study, predictions, output / "predictions.csv")
        write_summary(summary, study, predictions, plan, output / "summary.json")
        _write_figure(study, predictions, summary, output / "survival.png")
        missing = write_submission(found, predictions, output / "submission.csv", wanted)
    return SurvivalStudy(study=study, predictions=predictions, summary=summary, missing=missing)


def write_predictions(study: Study, predictions: Predictions, path: Path) -> None:
    """Write a row for each case."""
    columns = ["case_id", "patient_id", "fold", "reported_days", "censored"]
    columns += [f"{name}_days" for name in predictions.names]
    if predictions.log_hazards is not None:
        columns.append("cox_risk")
    n_cases = len(study.table.case_ids)
    rows = [tuple(_cells(study, predictions, place)) for place in range(n_cases)]
    write_table(path, columns, rows)


def write_submission(
    table: FeatureTable,
    predictions: Predictions,
    path: Path,
    wanted: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Write the selected days of the wanted cases, given in lower case, or of all.

    Returns:
        The wanted cases without a prediction.
    """
    rows = [
        (case_id, round(float(days)))
        for case_id, days in zip(table.case_ids, predictions.of(SELECTED), strict=True)
        if wanted is None or case_id.lower() in wanted
    ]
    write_table(path, ("case_id", "days"), rows, header=False)
    there = {case_id.lower() for case_id in table.case_ids}
    return tuple(case_id for case_id in wanted or () if case_id not in there)


def write_summary(
    summary: Summary, study: Study, predictions: Predictions, plan: CrossValidationPlan, path: Path
) -> None:
    """Write figures, verdict and settings as JSON."""
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
    write_json(path, content)


def _summary_of(study: Study, predictions: Predictions, plan: CrossValidationPlan) -> Summary:
    rng = np.random.default_rng(plan.seed)
    figures = figures_of(study, predictions, rng)
    return Summary(
        figures=figures,
        verdict=judge(study, predictions, figures, rng),
        remarks=remarks_on(study, with_cox=plan.with_cox),
    )


def _write_figure(study: Study, predictions: Predictions, summary: Summary, path: Path) -> None:
    shown = predictions.held_out & study.outcomes.known
    figure = survival_figure(
        study.outcomes.days[shown],
        predictions.of(SELECTED)[shown],
        study.outcomes.censored[shown],
        title=f"Held-out cases: {summary.verdict.heading}",
    )
    write_figure(figure, path)


def _cells(study: Study, predictions: Predictions, place: int) -> Iterator[object]:
    table, outcomes = study.table, study.outcomes
    known = outcomes.known[place]
    yield table.case_ids[place]
    yield table.patient_ids[place]
    yield predictions.folds[place]
    yield f"{outcomes.days[place]:g}" if known else None
    yield ("yes" if outcomes.censored[place] else "no") if known else None
    for days in predictions.days[:, place]:
        yield f"{days:.1f}"
    if predictions.log_hazards is not None:
        yield f"{np.exp(predictions.log_hazards[place]):.4g}"


def _as_json(figures: FamilyFigures) -> dict[str, object]:
    content: dict[str, object] = {
        one.name: {"value": one.value, "low": one.low, "high": one.high}
        for one in figures.estimates
    }
    if figures.n_contradicted is not None:
        content["n_censored_contradicted"] = figures.n_contradicted
    return content
