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
    from brats_seg.evaluation.compare import Comparison
    from brats_seg.evaluation.evaluate import Evaluation
    from brats_seg.evaluation.protocols import ScoringProtocol
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
        from brats_seg.evaluation.protocols import protocol_named

    scoring = protocol_named(protocol, task)
    if predictions is not None:
        table = output or Path("scores.csv")
        _score(references, predictions, scoring, table, only_predicted=only_predicted)
    elif compare is not None:
        table = output or Path("comparison.csv")
        _compare(references, compare, scoring, table, only_predicted=only_predicted)


def _score(
    references: Path,
    predictions: Path,
    protocol: "ScoringProtocol",
    output: Path,
    *,
    only_predicted: bool,
) -> None:
    from brats_seg.evaluation.evaluate import score_folders

    scored = score_folders(
        references,
        predictions,
        output,
        protocol,
        only_predicted=only_predicted,
        n_workers=available_cpus(),
        track=tracked,
    )
    evaluation = scored.evaluation
    emit(scored, table=output, evaluations=[evaluation], comparison=None, predicted_comparison=None)
    print_remarks(evaluation, predictions)
    print_summaries(scored.summaries, scored.predicted_summaries)
    if evaluation.missing:
        print("--only-predicted leaves out the references without a prediction.")
    if evaluation.left_out and scored.summaries:
        dices = ", ".join(f"{name} {mean:.3f}" for name, mean in scored.dice_with_left_out.items())
        print(f"Mean Dice if those left out counted as 0: {dices}.")
    print(f"wrote {output} and {output.with_suffix('.json')}. Research use only.")
    if evaluation.missing or evaluation.failures:
        raise typer.Exit(1)


def _compare(
    references: Path,
    predictions: tuple[Path, Path],
    protocol: "ScoringProtocol",
    output: Path,
    *,
    only_predicted: bool,
) -> None:
    from brats_seg.evaluation.compare import compare_folders

    compared = compare_folders(
        references,
        predictions,
        protocol,
        output=output,
        only_predicted=only_predicted,
        n_workers=available_cpus(),
        track=tracked,
    )
    evaluations = (compared.first, compared.second)
    emit(
        compared,
        table=output,
        evaluations=evaluations,
        predicted_comparison=compared.predicted,
        summaries=(),
        predicted_summaries=(),
    )
    for path, evaluation in zip(predictions, evaluations, strict=True):
        print_remarks(evaluation, path, left_out_because="not in both sets")
    print(f"\nfirst: {predictions[0]}\nsecond: {predictions[1]}")
    n_cases = compared.comparison.n_cases
    if compared.predicted is None:
        _print_comparison(compared.comparison, counted(n_cases, "case"))
    else:
        worst = f"{n_cases} references, with the worst scores where a prediction is missing"
        _print_comparison(compared.comparison, worst)
        both = f"the {compared.predicted.n_cases} that both sets predict"
        _print_comparison(compared.predicted, both)
        print("--only-predicted compares the cases that both sets predict.")
    print(f"wrote {output}. Research use only.")


def print_remarks(
    evaluation: "Evaluation", predictions: Path, *, left_out_because: str = "no prediction"
) -> None:
    """Print the number of cases that were scored, and remarks on single cases."""
    labels = ""
    if evaluation.prediction_labels:
        labels = (
            f", labels {', '.join(evaluation.prediction_labels)}, "
            f"against {', '.join(evaluation.reference_labels)} of the references"
        )
    print(f"{predictions}: {_count_text(evaluation)}{labels}")
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
    n_predicted = predicted[0].n_cases if predicted else 0
    if n_predicted == n_cases:
        _print_means(summaries, counted(n_cases, "case"))
        return
    n_missing = n_cases - n_predicted
    worst = f"{n_cases} references, with the worst scores for {n_missing} without a prediction"
    _print_means(summaries, worst)
    if predicted:
        _print_means(predicted, f"the {n_predicted} that have a prediction")


def _print_means(summaries: "Sequence[RegionSummary]", cases: str) -> None:
    from brats_seg.evaluation.scores import title_of
    from brats_seg.evaluation.significance import CONFIDENCE

    n_cases = summaries[0].n_cases
    interval = f" [{100 * CONFIDENCE:g} % interval]" if n_cases > 1 else ""
    print(f"\nmean{interval} over {cases}")
    has_lesions = {spread.column for spread in summaries[0].spreads}.issuperset(_LESIONS)
    for columns in (_WHOLE, _LESIONS) if has_lesions else (_WHOLE,):
        is_whole = columns is _WHOLE
        if not is_whole:
            print()
        print_table(
            ("region", *map(title_of, columns), *["reference empty"] * is_whole),
            [
                (
                    summary.region,
                    *(summary.spread(column).mean_text(n_cases) for column in columns),
                    *[f"{summary.n_reference_empty} of {n_cases}"] * is_whole,
                )
                for summary in summaries
            ],
        )


def _print_comparison(comparison: "Comparison", cases: str) -> None:
    from brats_seg.evaluation.scores import title_of

    print(f"\nmean over {cases}; cases in which the first set is better or worse; Wilcoxon's p")
    print_table(
        ("region", "score", "first", "second", "better", "worse", "p"),
        [
            (
                *(test.region, title_of(test.column)),
                *(f"{test.mean_first:.4f}", f"{test.mean_second:.4f}"),
                *(test.n_first_better, test.n_second_better, f"{test.p_value:.3g}"),
            )
            for test in comparison.tests
        ],
    )
    for standing in comparison.ranking:
        p_value = standing.p_value
        chance = "" if p_value is None else f", p {p_value:.3g} that its lead is chance"
        print(f"{standing.name}: mean rank {standing.mean_rank:.3f}{chance}")
