"""The command that scores predictions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.options import ProtocolOption, TaskOption, print_table
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import UsageError
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.evaluation.compare import Comparison
    from brats_seg.evaluation.evaluate import Evaluation
    from brats_seg.evaluation.protocols import ScoringProtocol
    from brats_seg.evaluation.scores import RegionSummary

_SHOWN = ("dice", "hd95", "lesionwise_dice", "lesionwise_hd95", "lesionwise_nsd_1.0")
"""Scores that are printed; the table has all of them."""


def evaluate(
    reference: Annotated[
        Path,
        typer.Argument(
            help="References: a folder of CASE.nii.gz or of case folders, or one label map."
        ),
    ],
    prediction: Annotated[
        Path | None, typer.Argument(help="Predictions in the same form, in any label convention.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Table to write. (default: scores.csv, with --compare comparison.csv)",
        ),
    ] = None,
    protocol: ProtocolOption = "legacy",
    task: TaskOption = "GLI",
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Compare two sets of predictions, case by case."),
    ] = None,
) -> None:
    """Score predictions as the challenges do, and write a table and a summary."""
    from brats_seg.evaluation.protocols import protocol_named

    chosen = protocol_named(protocol, task)
    if compare is not None and prediction is None:
        _compare(reference, compare, chosen, output or Path("comparison.csv"))
    elif compare is None and prediction is not None:
        _score(reference, prediction, chosen, output or Path("scores.csv"))
    else:
        msg = "give one set of predictions, or two with --compare A B"
        raise UsageError(msg)


def print_remarks(evaluation: "Evaluation", prediction: Path) -> None:
    """Print the number of cases that were scored, and remarks on single cases."""
    n_cases = len({score.case_id for score in evaluation.scores})
    print(
        f"{prediction}: {n_cases} cases, labels {', '.join(evaluation.prediction_labels)}, "
        f"against {', '.join(evaluation.reference_labels)} of the references"
    )
    for remark in evaluation.remarks:
        print(remark)
    for case_id in evaluation.missing:
        print(f"{case_id}: no prediction, given the worst scores")
    for failure in evaluation.failures:
        print(f"{failure.case_id}: not scored: {failure.message}")
    for case_id in evaluation.without_reference:
        print(f"{case_id}: no reference, not scored")


def print_summaries(summaries: "Sequence[RegionSummary]") -> None:
    """Print the means of each region with their intervals."""
    columns = {spread.column for summary in summaries for spread in summary.spreads}
    shown = [column for column in _SHOWN if column in columns]
    rows = []
    for summary in summaries:
        means = {
            spread.column: f"{spread.mean:.4f} [{spread.mean_low:.4f}, {spread.mean_high:.4f}]"
            for spread in summary.spreads
        }
        empty = f"{summary.n_reference_empty} of {summary.n_cases}"
        rows.append((summary.region, *(means[column] for column in shown), empty))
    print_table(("region", *shown, "empty"), rows)


def _score(reference: Path, prediction: Path, protocol: "ScoringProtocol", output: Path) -> None:
    from brats_seg.evaluation.evaluate import score_folders

    n_workers = available_cpus()
    scored = score_folders(
        reference, prediction, output, protocol, n_workers=n_workers, track=tracked
    )
    print_remarks(scored.evaluation, prediction)
    print_summaries(scored.summaries)
    print(f"wrote {output} and {output.with_suffix('.json')}. Research use only.")
    if scored.evaluation.missing or scored.evaluation.failures:
        raise typer.Exit(1)


def _compare(
    reference: Path, predictions: tuple[Path, Path], protocol: "ScoringProtocol", output: Path
) -> None:
    from brats_seg.evaluation.compare import compare_folders

    compared = compare_folders(
        reference,
        predictions,
        protocol,
        output=output,
        n_workers=available_cpus(),
        track=tracked,
    )
    for path, evaluation in zip(predictions, (compared.first, compared.second), strict=True):
        print_remarks(evaluation, path)
    _print_comparison(compared.comparison)
    print(f"wrote {output}. Research use only.")


def _print_comparison(comparison: "Comparison") -> None:
    first, second = "better in the first", "better in the second"
    print_table(
        ("region", "score", "mean of the first", "mean of the second", first, second, "Wilcoxon p"),
        [
            (
                test.region,
                test.column,
                f"{test.mean_first:.4f}",
                f"{test.mean_second:.4f}",
                test.n_first_better,
                test.n_second_better,
                f"{test.p_value:.3g}",
            )
            for test in comparison.tests
        ],
    )
    for standing in comparison.ranking:
        chance = (
            ""
            if standing.p_value is None
            else f", p {standing.p_value:.3g} that its lead is chance"
        )
        print(f"{standing.name}: mean rank {standing.mean_rank:.3f}{chance}")
