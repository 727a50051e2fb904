"""Command `evaluate`: score predictions, or compare two sets of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from brats_seg.cli.options import emit, importing, print_table
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import UsageError, counted, some_of
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.evaluation.compare import ComparedFolders, Comparison
    from brats_seg.evaluation.evaluate import Evaluation
    from brats_seg.evaluation.scores import RegionSummary

_WHOLE = ("dice", "hd95")
"""Scores of whole regions that are printed; the file has all of them."""
_LESIONS = ("lesionwise_dice", "lesionwise_hd95", "lesionwise_nsd_1.0")
"""Lesion-wise scores that are printed, in a table of their own that fits 80 columns."""


def evaluate(
    references: Path,
    predictions: Path | None = None,
    output: Path | None = None,
    protocol: str = "legacy",
    task: str = "GLI",
    compare: tuple[Path, Path] | None = None,
    only_predicted: bool = False,
) -> None:
    """Score predictions as the challenges do, and write a table and a summary.

    Printed are means over cases with their bootstrap intervals. A reference without a prediction gets
    the worst scores, unless --only-predicted leaves it out; where some are missing, the means over the
    predicted cases are printed as well. Exit code 1: predictions are missing, or cases failed.
    """
    if (compare is None) == (predictions is None):
        msg = "give one set of predictions, or two with --compare A B"
        raise UsageError(msg)
    with importing():
        from brats_seg.evaluation.compare import compare_folders
        from brats_seg.evaluation.evaluate import score_folders
        from brats_seg.evaluation.protocols import protocol_named

    rules = protocol_named(protocol, task)
    if predictions is not None:
        table = output or Path("scores.csv")
        scored = score_folders(
            references,
            predictions,
            table,
            rules,
            only_predicted=only_predicted,
            n_workers=available_cpus(),
            track=tracked,
        )
        _show_scores(scored, predictions, table)
    elif compare is not None:
        table = output or Path("comparison.csv")
        compared = compare_folders(
            references,
            compare,
            rules,
            output=table,
            only_predicted=only_predicted,
            n_workers=available_cpus(),
            track=tracked,
        )
        _show_comparisons(compared, compare, table)


def _show_scores(scored: "Evaluation", predictions: Path, table: Path) -> None:
    """Print the scores; exit with 1 if predictions are missing, or cases failed."""
    emit(scored, table=table, evaluations=[scored], comparison=None, predicted_comparison=None)
    print_remarks(scored, predictions)
    print_summaries(scored.summaries, scored.predicted_summaries)
    if scored.missing:
        print("--only-predicted leaves out the references without a prediction.")
    if scored.left_out and scored.summaries:
        dices = ", ".join(f"{name} {mean:.3f}" for name, mean in scored.dice_with_left_out.items())
        print(f"Mean Dice if those left out counted as 0: {dices}.")
    print(f"wrote {table} and {table.with_suffix('.json')}. Research use only.")
    if scored.missing or scored.failures:
        raise typer.Exit(1)


def _show_comparisons(
    compared: "ComparedFolders", predictions: tuple[Path, Path], table: Path
) -> None:
    evaluations = (compared.first, compared.second)
    predicted = compared.predicted
    none = dict.fromkeys(("summaries", "predicted_summaries"), ())
    emit(compared, table=table, evaluations=evaluations, predicted_comparison=predicted, **none)
    for path, evaluation in zip(predictions, evaluations, strict=True):
        print_remarks(evaluation, path, left_out_because="not in both sets")
    print(f"\nfirst: {predictions[0]}\nsecond: {predictions[1]}")
    n_cases = compared.comparison.n_cases
    if predicted is None:
        _print_comparison(compared.comparison, counted(n_cases, "case"))
    else:
        worst = f"{n_cases} references, with the worst scores where a prediction is missing"
        _print_comparison(compared.comparison, worst)
        _print_comparison(predicted, f"the {predicted.n_cases} that both sets predict")
        print("--only-predicted compares the cases that both sets predict.")
    print(f"wrote {table}. Research use only.")


def print_remarks(
    evaluation: "Evaluation", predictions: Path, *, left_out_because: str = "no prediction"
) -> None:
    """Print the number of cases that were scored, and remarks on single cases."""
    labels, reference = map(", ".join, (evaluation.prediction_labels, evaluation.reference_labels))
    conventions = f", labels {labels}, against {reference} of the references" if labels else ""
    print(f"{predictions}: {_count_text(evaluation)}{conventions}")
    for remark in evaluation.remarks:
        print(remark)
    for case_ids, reason in (
        (evaluation.missing, "no prediction, given the worst scores"),
        (evaluation.left_out, f"{left_out_because}, left out"),
        (evaluation.without_reference, "no reference, not scored"),
    ):
        if case_ids:
            print(f"{some_of(case_ids)}: {reason}")
    for failure in evaluation.failures:
        name = "" if failure.case_id in failure.message else f"{failure.case_id}: "
        print(f"not scored: {name}{failure.message}")


def _count_text(evaluation: "Evaluation") -> str:
    n_scored = len(evaluation.case_ids)
    n_references = n_scored + len(evaluation.failures) + len(evaluation.left_out)
    if evaluation.left_out:
        return f"{n_scored} of {n_references} references scored"
    if evaluation.missing:
        n_predicted = n_references - len(evaluation.missing)
        return f"{n_predicted} of {n_references} references with a prediction"
    return counted(n_scored, "case")


def print_summaries(
    summaries: "Sequence[RegionSummary]", predicted: "Sequence[RegionSummary]"
) -> None:
    """Print the means of each region over all cases, and over the predicted ones if they are fewer."""
    if not summaries:
        print("no case could be scored")
        return
    n_cases = summaries[0].n_cases
    n_missing = n_cases - (predicted[0].n_cases if predicted else 0)
    if not n_missing:
        _print_means(summaries, counted(n_cases, "case"))
        return
    worst = f"{n_cases} references, with the worst scores for {n_missing} without a prediction"
    _print_means(summaries, worst)
    if predicted:
        _print_means(predicted, f"the {n_cases - n_missing} that have a prediction")


def _print_means(summaries: "Sequence[RegionSummary]", cases: str) -> None:
    from brats_seg.evaluation.scores import title_of
    from brats_seg.evaluation.significance import CONFIDENCE

    n_cases = summaries[0].n_cases
    interval = f" [{100 * CONFIDENCE:g} % interval]" if n_cases > 1 else ""
    print(f"\nmean{interval} over {cases}")
    has_lesions = {spread.column for spread in summaries[0].spreads}.issuperset(_LESIONS)
    for columns in (_WHOLE, _LESIONS) if has_lesions else (_WHOLE,):
        rows = [
            (one.region, *(one.spread(column).mean_text(n_cases) for column in columns))
            for one in summaries
        ]
        print_table(("region", *map(title_of, columns)), rows)
        print()
    empty = ", ".join(f"{one.region} {one.n_reference_empty}" for one in summaries)
    print(f"references without the region: {empty} (of {n_cases})")


def _print_comparison(comparison: "Comparison", cases: str) -> None:
    from brats_seg.evaluation.scores import title_of

    print(f"\nmean over {cases}; cases in which the first set is better or worse; Wilcoxon's p")
    rows = []
    for test in comparison.tests:
        means = (f"{mean:.4f}" for mean in (test.mean_first, test.mean_second))
        counts = (test.n_first_better, test.n_second_better)
        rows.append((test.region, title_of(test.column), *means, *counts, f"{test.p_value:.3g}"))
    print_table(("region", "score", "first", "second", "better", "worse", "p"), rows)
    for standing in comparison.ranking:
        p_value = standing.p_value
        chance = "" if p_value is None else f", p {p_value:.3g} that its lead is chance"
        print(f"{standing.name}: mean rank {standing.mean_rank:.3f}{chance}")
