"""Command `evaluate`: score predictions, or compare two sets of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.options import (
    ProtocolOption,
    TaskOption,
    emit,
    importing,
    print_table,
)
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import UsageError, counted, some_of
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.evaluation.compare import Comparison
    from brats_seg.evaluation.evaluate import Evaluation
    from brats_seg.evaluation.protocols import ScoringProtocol
    from brats_seg.evaluation.scores import RegionSummary

_WHOLE = ("dice", "hd95")
"""Scores of whole regions that are printed; the file has all of them."""
_LESIONS = ("lesionwise_dice", "lesionwise_hd95", "lesionwise_nsd_1.0")
"""Lesion-wise scores that are printed, in a table of their own that fits 80 columns."""


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
    only_predicted: Annotated[
        bool,
        typer.Option(
            "--only-predicted",
            help="Leave out references without a prediction, which otherwise get the worst scores.",
        ),
    ] = False,
) -> None:
    """Score predictions as the challenges do, and write a table and a summary.

    Printed are means over cases with their bootstrap intervals. A reference without a prediction gets
    the worst scores, unless --only-predicted leaves it out; where some are missing, the means over the
    predicted cases are printed as well. Exit code 1: predictions are missing, or cases failed.
    """
    from brats_seg.evaluation.protocols import protocol_named

    chosen = protocol_named(protocol, task)
    if compare is not None and prediction is None:
        table = output or Path("comparison.csv")
        _compare(reference, compare, chosen, table, only_predicted=only_predicted)
    elif compare is None and prediction is not None:
        table = output or Path("scores.csv")
        _score(reference, prediction, chosen, table, only_predicted=only_predicted)
    else:
        msg = "give one set of predictions, or two with --compare A B"
        raise UsageError(msg)


def print_remarks(
    evaluation: "Evaluation", prediction: Path, *, left_out_because: str = "no prediction"
) -> None:
    """Print the number of cases that were scored, and remarks on single cases."""
    labels = ""
    if evaluation.prediction_labels:
        labels = (
            f", labels {', '.join(evaluation.prediction_labels)}, "
            f"against {', '.join(evaluation.reference_labels)} of the references"
        )
    print(f"{prediction}: {_found(evaluation)}{labels}")
    for remark in evaluation.remarks:
        print(remark)
    for case_ids, what in (
        (evaluation.missing, "no prediction, given the worst scores"),
        (evaluation.left_out, f"{left_out_because}, left out"),
        (evaluation.without_reference, "no reference, not scored"),
    ):
        if case_ids:
            print(f"{some_of(case_ids)}: {what}")
    for failure in evaluation.failures:
        named = "" if failure.case_id in failure.message else f"{failure.case_id}: "
        print(f"not scored: {named}{failure.message}")


def print_summaries(
    summaries: "Sequence[RegionSummary]", predicted: "Sequence[RegionSummary]"
) -> None:
    """Print the means of each region with their intervals.

    Args:
        summaries: Summaries over all cases.
        predicted: Summaries over the cases that have a prediction; printed if they are fewer.
    """
    if not summaries:
        print("no case could be scored")
        return
    n_cases = summaries[0].n_cases
    n_predicted = predicted[0].n_cases if predicted else 0
    if n_predicted == n_cases:
        _print_means(summaries, counted(n_cases, "case"))
        return
    _print_means(summaries, _with_missing(n_cases, n_cases - n_predicted))
    if predicted:
        _print_means(predicted, f"the {n_predicted} that have a prediction")


def _found(evaluation: "Evaluation") -> str:
    n_scored = len({score.case_id for score in evaluation.scores})
    n_references = n_scored + len(evaluation.failures) + len(evaluation.left_out)
    if evaluation.left_out:
        return f"{n_scored} of {n_references} references scored"
    if evaluation.missing:
        n_predicted = n_references - len(evaluation.missing)
        return f"{n_predicted} of {n_references} references with a prediction"
    return counted(n_scored, "case")


def _with_missing(n_references: int, n_missing: int) -> str:
    return f"{n_references} references, with the worst scores for {n_missing} without a prediction"


def _print_means(summaries: "Sequence[RegionSummary]", cases: str) -> None:
    from brats_seg.evaluation.scores import title_of
    from brats_seg.evaluation.significance import CONFIDENCE

    n_cases = summaries[0].n_cases
    interval = f" [{100 * CONFIDENCE:g} % interval]" if n_cases > 1 else ""
    print(f"\nmean{interval} over {cases}")
    print_table(
        ("region", *map(title_of, _WHOLE), "reference empty"),
        [
            (one.region, *_means(one, _WHOLE), f"{one.n_reference_empty} of {n_cases}")
            for one in summaries
        ],
    )
    if {spread.column for spread in summaries[0].spreads}.issuperset(_LESIONS):
        print()
        print_table(
            ("region", *map(title_of, _LESIONS)),
            [(one.region, *_means(one, _LESIONS)) for one in summaries],
        )


def _means(summary: "RegionSummary", columns: "Sequence[str]") -> list[str]:
    return [summary.spread(column).mean_text(summary.n_cases) for column in columns]


def _score(
    reference: Path,
    prediction: Path,
    protocol: "ScoringProtocol",
    output: Path,
    *,
    only_predicted: bool,
) -> None:
    with importing():
        from brats_seg.evaluation.evaluate import score_folders

    scored = score_folders(
        reference,
        prediction,
        output,
        protocol,
        only_predicted=only_predicted,
        n_workers=available_cpus(),
        track=tracked,
    )
    emit(
        table=output,
        evaluations=[_scored_cases(scored.evaluation)],
        summaries=scored.summaries,
        predicted_summaries=scored.predicted_summaries,
    )
    print_remarks(scored.evaluation, prediction)
    print_summaries(scored.summaries, scored.predicted_summaries)
    if scored.evaluation.missing:
        print("--only-predicted leaves out the references without a prediction.")
    if scored.evaluation.left_out and scored.summaries:
        dices = (f"{name} {mean:.3f}" for name, mean in scored.dice_with_left_out.items())
        print(f"Mean Dice if those left out counted as 0: {', '.join(dices)}.")
    print(f"wrote {output} and {output.with_suffix('.json')}. Research use only.")
    if scored.evaluation.missing or scored.evaluation.failures:
        raise typer.Exit(1)


def _compare(
    reference: Path,
    predictions: tuple[Path, Path],
    protocol: "ScoringProtocol",
    output: Path,
    *,
    only_predicted: bool,
) -> None:
    with importing():
        from brats_seg.evaluation.compare import compare_folders

    compared = compare_folders(
        reference,
        predictions,
        protocol,
        output=output,
        only_predicted=only_predicted,
        n_workers=available_cpus(),
        track=tracked,
    )
    emit(
        table=output,
        evaluations=[_scored_cases(compared.first), _scored_cases(compared.second)],
        comparison=compared.comparison,
        predicted_comparison=compared.predicted,
    )
    for path, evaluation in zip(predictions, (compared.first, compared.second), strict=True):
        print_remarks(evaluation, path, left_out_because="not in both sets")
    print(f"\nfirst: {predictions[0]}\nsecond: {predictions[1]}")
    n_cases = compared.comparison.n_cases
    if compared.predicted is None:
        _print_comparison(compared.comparison, counted(n_cases, "case"))
    else:
        words = f"{n_cases} references, with the worst scores where a prediction is missing"
        _print_comparison(compared.comparison, words)
        words = f"the {compared.predicted.n_cases} that both sets predict"
        _print_comparison(compared.predicted, words)
        print("--only-predicted compares the cases that both sets predict.")
    print(f"wrote {output}. Research use only.")


def _scored_cases(evaluation: "Evaluation") -> dict[str, object]:
    """Return the cases that were scored, and those that were not, for JSON."""
    return {
        "case_ids": list(dict.fromkeys(score.case_id for score in evaluation.scores)),
        "missing": evaluation.missing,
        "left_out": evaluation.left_out,
        "without_reference": evaluation.without_reference,
        "failures": evaluation.failures,
        "remarks": evaluation.remarks,
    }


def _print_comparison(comparison: "Comparison", cases: str) -> None:
    from brats_seg.evaluation.scores import title_of

    print(f"\nmean over {cases}; cases in which the first set is better or worse; Wilcoxon's p")
    print_table(
        ("region", "score", "first", "second", "better", "worse", "p"),
        [
            (
                test.region,
                title_of(test.column),
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
