"""The command that scores predictions."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.errors import UsageError
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.evaluation.evaluate import Evaluation
    from brats_seg.evaluation.protocols import Protocol
    from brats_seg.evaluation.scores import RegionSummary

_MEASURES = ("dice", "hd95", "lesionwise_dice", "lesionwise_hd95", "lesionwise_nsd_1.0")
"""Columns that are shown on screen; the table has all."""


def evaluate(
    reference: Annotated[
        Path, typer.Argument(help="Folder of <case>.nii.gz or of case folders, or one label map.")
    ],
    prediction: Annotated[
        Path | None, typer.Argument(help="The same, of predictions; in any label convention.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The table.")] = Path("scores.csv"),
    protocol: Annotated[
        str, typer.Option(help="legacy, lesionwise2023 or lesionwise2024.")
    ] = "legacy",
    task: Annotated[
        str,
        typer.Option(help="GLI, SSA, MEN, MET or PED: the parameters of a lesion-wise protocol."),
    ] = "GLI",
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Two sets of predictions, case by case, instead of one."),
    ] = None,
) -> None:
    """Score predictions as the challenges do, with a summary beside the table."""
    from brats_seg.evaluation.protocols import protocol_named

    chosen = protocol_named(protocol, task)
    if compare is not None and prediction is None:
        _compare(reference, compare, chosen)
    elif compare is None and prediction is not None:
        _evaluate(reference, prediction, chosen, output)
    else:
        msg = "give one set of predictions, or two with --compare A B"
        raise UsageError(msg)


def _evaluate(reference: Path, prediction: Path, protocol: "Protocol", output: Path) -> None:
    import numpy as np

    from brats_seg.evaluation.scores import summarise_scores, write_scores, write_summary

    evaluation = _scored(reference, prediction, protocol)
    write_scores(evaluation.scores, output)
    summaries = summarise_scores(evaluation.scores, np.random.default_rng(0))
    write_summary(summaries, output.with_suffix(".json"))
    print_summaries(summaries)
    print(f"wrote {output} and {output.with_suffix('.json')}. Research use only.")
    if evaluation.missing or evaluation.failures:
        raise typer.Exit(1)


def print_summaries(summaries: "Sequence[RegionSummary]") -> None:
    """Print a line for each region, with the means that people ask for first."""
    for summary in summaries:
        shown = ", ".join(
            f"{spread.column} {spread.mean:.4f} [{spread.mean_low:.4f}, {spread.mean_high:.4f}]"
            for spread in summary.spreads
            if spread.column in _MEASURES
        )
        print(f"{summary.region}: {shown}; {summary.n_reference_empty} of {summary.n_cases} empty")


def _scored(reference: Path, prediction: Path, protocol: "Protocol") -> "Evaluation":
    """Score one set, and say what was unusual about it."""
    from brats_seg.evaluation.evaluate import evaluate_folders

    n_workers = os.cpu_count() or 1
    evaluation = evaluate_folders(
        reference, prediction, protocol, n_workers=n_workers, track=tracked
    )
    print_remarks(evaluation, prediction)
    return evaluation


def print_remarks(evaluation: "Evaluation", prediction: Path) -> None:
    """Tell what was scored, and what was unusual about it."""
    n_cases = len({score.case_id for score in evaluation.scores})
    print(
        f"{prediction}: {n_cases} cases, labels {', '.join(evaluation.prediction_labels)}, "
        f"against {', '.join(evaluation.reference_labels)} of the references"
    )
    for remark in evaluation.remarks:
        print(remark)
    for case_id in evaluation.missing:
        print(f"{case_id}: no prediction, scored as the worst there is")
    for failure in evaluation.failures:
        print(f"{failure.case_id}: not scored: {failure.message}")
    for case_id in evaluation.without_reference:
        print(f"{case_id}: no reference, passed over")


def _compare(reference: Path, sets: tuple[Path, Path], protocol: "Protocol") -> None:
    import numpy as np

    from brats_seg.evaluation.compare import NamedScores, compare_scores

    first, second = (
        NamedScores(name=str(path), scores=_scored(reference, path, protocol).scores)
        for path in sets
    )
    comparison = compare_scores(first, second, np.random.default_rng(0))
    for test in comparison.tests:
        print(
            f"{test.region} {test.column}: {test.mean_first:.4f} against {test.mean_second:.4f}, "
            f"better in {test.n_first_better} and {test.n_second_better} cases, "
            f"Wilcoxon p {test.p_value:.3g}"
        )
    for standing in comparison.ranking:
        chance = "" if standing.p_value is None else f", lead by chance p {standing.p_value:.3g}"
        print(f"{standing.name}: mean rank {standing.mean_rank:.3f}{chance}")
