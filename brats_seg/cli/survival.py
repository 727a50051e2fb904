"""Commands `features` and `survival`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from brats_seg.cli.options import emit, importing, print_table
from brats_seg.errors import counted
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.survival.features import Row
    from brats_seg.survival.results import Estimate, SurvivalStudy

_SHOWN = (
    ("accuracy", "accuracy", 1.0, 2),
    ("mse_days2", "MSE (1000 days2)", 1000.0, 0),
    ("median_se_days2", "median SE (1000)", 1000.0, 0),
    ("spearman", "Spearman", 1.0, 2),
    ("mae_days", "mean error (days)", 1.0, 0),
    ("concordance", "concordance", 1.0, 2),
)
"""Scores that are printed: name, heading, unit and digits; the summary has all scores."""


def features(
    scans: Path,
    output: Path = Path("features.csv"),
    model: list[Path] | None = None,
    autoencoder: Path | None = None,
    predict_all: bool = False,
    clinical: list[Path] | None = None,
    labels: str | None = None,
    prepared: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> None:
    """Measure each case: size, shape and intensities of the tumour, and its latent vector.

    With several runs, a case is predicted by those that were not trained on its patient. Exit code
    1: some cases failed; they are listed in failures.csv beside the table.
    """
    with importing():
        from brats_seg.survival.features import features_of_folder

    extraction = features_of_folder(
        scans,
        output,
        autoencoder=autoencoder,
        segmentations=model or (),
        predicted=predict_all,
        tables=clinical or (),
        labels=labels,
        prepared_path=prepared,
        device=device,
        precision=precision,
        track=tracked,
    )
    rows = extraction.results
    case_ids = [row["case_id"] for row in rows]
    columns = [name for row in rows[:1] for name, cell in row.items() if not isinstance(cell, str)]
    emit(table=output, case_ids=case_ids, columns=columns, failures=extraction.failures)
    for failure in extraction.failures:
        print(f"FAILED  {failure.message}")
    _print_features(rows, len(columns))
    failures_path = output.with_name("failures.csv")
    print(f"wrote {output}, {output.with_suffix('.json')} and {failures_path}. Research use only.")
    if extraction.failures:
        raise typer.Exit(1)


def survival(
    features: Path,
    clinical: list[Path],
    output: Path = Path("survival"),
    fold_table: Path | None = None,
    repeats: int = 3,
    submit: Path | None = None,
) -> None:
    """Predict days of survival, and test the predictions against chance.

    Nested cross-validation: no case is predicted by a model that was trained on it or its patient.
    Days are learnt from deaths. If lifelines is installed (extra `survival`), a Cox model also
    learns from censored cases (alive at the last follow-up), which count in the concordance index.
    """
    with importing():
        from brats_seg.survival.results import study_survival

    found = study_survival(
        features,
        clinical[0],
        output,
        mapping=clinical[1:],
        folds=fold_table,
        n_repeats=repeats,
        submit=submit,
        track=tracked,
    )
    summary = found.summary
    emit(summary, folder=output, conclusion=str(summary.verdict), missing=found.missing)
    _print_study(found)
    print(f"wrote predictions, figures, picture and submission to {output}. Research use only.")
    if found.missing:
        print(f"not in the submission, because they have no features: {', '.join(found.missing)}")
        raise typer.Exit(1)


def _print_features(rows: "Sequence[Row]", n_features: int) -> None:
    from brats_seg.survival.features import REFERENCE
    from brats_seg.survival.table import LABELS_SEEN, LATENT_SEEN

    n_reference = sum(row["labels_from"] == REFERENCE for row in rows)
    print(
        f"{counted(len(rows), 'case')} with {n_features} features; label maps: {n_reference} reference, "
        f"{len(rows) - n_reference} predicted"
    )
    for what, column in (("label maps", LABELS_SEEN), ("latent vectors", LATENT_SEEN)):
        for answer, by in (
            ("yes", "by networks that were trained on the patient"),
            ("unknown", "by networks without a record of the patients they were trained on"),
        ):
            n_such = sum(row.get(column) == answer for row in rows)
            if n_such:
                print(f"note: {n_such} {what} {by}")


def _print_study(found: "SurvivalStudy") -> None:
    from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS

    for remark in found.summary.remarks:
        print(remark)
    short, long = SURVIVAL_CLASS_DAYS
    print(
        f"Accuracy is over short (under {short:.0f} days), mid and long (over {long:.0f} days) "
        "survivors. Intervals of 95 %."
    )
    _print_figures(found)
    times = ", ".join(f"{name} {n}" for name, n in found.predictions.n_chosen.items() if n)
    print(f"selected on the inner folds: {times}")
    print(found.summary.verdict)


def _print_figures(found: "SurvivalStudy") -> None:
    n_censored = int((found.study.outcomes["lived"] & found.predictions.held_out).sum())
    given = {estimate.name for one in found.summary.figures for estimate in one.estimates}
    shown = [figure for figure in _SHOWN if figure[0] in given]
    columns = ["model", *(heading for _, heading, _, _ in shown)]
    rows = []
    for one in found.summary.figures:
        estimates = {estimate.name: estimate for estimate in one.estimates}
        rows.append(
            [one.name, *(_cell(estimates.get(name), unit, n) for name, _, unit, n in shown)]
        )
        if n_censored:
            n = one.n_contradicted
            rows[-1].append("" if n is None else f"{n} of {n_censored}")
    print_table([*columns, "censored too early"] if n_censored else columns, rows)


def _cell(estimate: "Estimate | None", unit: float, digits: int) -> str:
    if estimate is None:
        return ""
    value, low, high = (
        f"{number / unit:.{digits}f}" for number in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} [{low}, {high}]"
