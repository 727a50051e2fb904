"""Commands `evaluate`, `figure`, `report` and `reconstruct`, which show and score results."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from brats_seg.cli.options import emit, importing, prepared_path, print_failures, print_table
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import UsageError, counted, some_of
from brats_seg.progress import Track, tracked

if TYPE_CHECKING:
    from brats_seg.evaluation.compare import ComparedFolders
    from brats_seg.evaluation.evaluate import Evaluation
    from brats_seg.evaluation.scores import RegionSummary

_WHOLE = ("dice", "hd95")
"""Scores of whole regions that are printed; the file has all of them."""
_LESIONS = ("lesionwise_dice", "lesionwise_hd95", "lesionwise_nsd_1.0")
"""Lesion-wise scores that are printed, in a table of their own that fits 80 columns."""
_MATCHED = ("lesionwise_dice", "lesionwise_nsd", "f1")
_BY_SIZE = ("large_f1", "small_f1")


class _ScoringOptions(TypedDict):
    only_predicted: bool
    n_workers: int
    track: Track


def evaluate(
    reference: Path,
    prediction: Path | None = None,
    output: Path | None = None,
    protocol: str = "legacy",
    task: str = "GLI",
    compare: tuple[Path, Path] | None = None,
    only_predicted: bool = False,
) -> int:
    """Score predictions as the challenges do, and write a table and a summary.

    The table is scores.csv, of --compare comparison.csv, unless --output names it. Means over cases are printed
    with their bootstrap intervals. A reference without a prediction gets the worst scores, unless
    --only-predicted leaves it out. Patients that the model was trained on are marked, and the mean without them
    comes first. Exit code 1: predictions are missing, or cases failed.

    Examples:
        brats-seg evaluate data predictions --protocol lesionwise2023
        brats-seg evaluate data predictions --only-predicted
        brats-seg evaluate data --compare predictions/first predictions/second -o tests.csv
    """
    if (compare is None) == (prediction is None):
        msg = "give one set of predictions, or two with --compare A B"
        raise UsageError(msg)
    with importing():
        from brats_seg.evaluation.compare import compare_folders
        from brats_seg.evaluation.evaluate import score_folders
        from brats_seg.evaluation.protocols import protocol_named

    rules = protocol_named(protocol, task)
    if not rules.task and task.upper() != "GLI":
        print(f"--task {task} changes nothing: {protocol} scores all tasks alike")
    table = output or Path("scores.csv" if prediction else "comparison.csv")
    options = _ScoringOptions(
        only_predicted=only_predicted, n_workers=available_cpus(), track=tracked
    )
    if prediction is not None:
        scored = score_folders(reference, prediction, table, rules, **options)
        emit(scored, table=table, evaluations=[scored])
        print_remarks(scored, prediction)
        print_summaries(scored)
        if scored.case_ids:
            print(f"wrote {table} and {table.with_suffix('.json')}. Research use only.")
        evaluations = [scored]
    elif compare is not None:
        compared = compare_folders(reference, compare, rules, output=table, **options)
        evaluations = [compared.first, compared.second]
        emit(compared, table=table, evaluations=evaluations)
        _print_comparisons(compared, compare, table)
    return int(any(one.missing or one.failures for one in evaluations))


def _print_comparisons(
    compared: "ComparedFolders", predictions: tuple[Path, Path], table: Path
) -> None:
    from brats_seg.evaluation.scores import score_title

    for path, evaluation in zip(predictions, (compared.first, compared.second), strict=True):
        print_remarks(evaluation, path)
    print(f"\nfirst: {predictions[0]}\nsecond: {predictions[1]}")
    comparison = compared.comparison
    cases = counted(comparison.n_cases, "case")
    print(f"\nmean over {cases}; cases in which the first set is better or worse; Wilcoxon's p")
    rows = []
    for test in comparison.tests:
        means = (f"{mean:.4f}" for mean in (test.mean_first, test.mean_second))
        counts = (test.n_first_better, test.n_second_better)
        rows.append((test.region, score_title(test.column), *means, *counts, f"{test.p_value:.3g}"))
    print_table(("region", "score", "first", "second", "better", "worse", "p"), rows)
    for standing in comparison.ranking:
        p_value = standing.p_value
        chance = "" if p_value is None else f", p {p_value:.3g} that its lead is chance"
        print(f"{standing.name}: mean rank {standing.mean_rank:.3f}{chance}")
    print(f"wrote {table}. Research use only.")


def print_remarks(evaluation: "Evaluation", predictions: Path) -> None:
    """Print the number of cases that were scored, and remarks on single cases."""
    count = counted(len(evaluation.case_ids), "case")
    labels, reference = map(", ".join, (evaluation.prediction_labels, evaluation.reference_labels))
    conventions = f", labels {labels}, against {reference} of the references" if labels else ""
    print(f"{predictions}: {count}{conventions}")
    for remark in evaluation.remarks:
        print(remark)
    for case_ids, reason in (
        (evaluation.missing, "no prediction, given the worst scores (--only-predicted omits them)"),
        (evaluation.left_out, "no prediction to score or compare, left out"),
        (evaluation.without_reference, "no reference, not scored"),
        (evaluation.in_training, "the model was trained on them: their scores are too good"),
    ):
        if case_ids:
            print(f"{some_of(case_ids)}: {reason}")
    for failure in evaluation.failures:
        name = "" if failure.case_id in failure.message else f"{failure.case_id}: "
        print(f"not scored: {name}{failure.message}")


def print_summaries(scored: "Evaluation") -> None:
    """Print the means of each region over all cases.

    The first are those without the cases that the model is known to have been trained on, if there are any.
    """
    summaries, missing, in_training = scored.summaries, {*scored.missing}, {*scored.in_training}
    if not summaries:
        print("no case could be scored")
        return
    n_cases, n_trained = summaries[0].n_cases, len(in_training)
    trained = f"{counted(n_trained, 'case')} that the model was trained on"
    if 0 < n_trained < n_cases:
        held_out = f"{counted(n_cases - n_trained, 'case')}, without {trained}"
        _print_means(scored.held_out_summaries, held_out, n_missing=len(missing - in_training))
    every = f"{counted(n_cases, 'case')}, with {trained}" if n_trained else counted(n_cases, "case")
    _print_means(summaries, every, n_missing=len(missing))


def _print_means(summaries: "Sequence[RegionSummary]", cases: str, *, n_missing: int) -> None:
    from brats_seg.evaluation.scores import score_title
    from brats_seg.evaluation.significance import CONFIDENCE

    n_cases = summaries[0].n_cases
    interval = f" [{100 * CONFIDENCE:g} % interval]" if n_cases > 1 else ""
    worst = f"; {n_missing} without a prediction, with the worst scores" if n_missing else ""
    print(f"\nmean{interval} over {cases}{worst}")
    scored = {spread.column for spread in summaries[0].spreads}
    for columns in (_WHOLE, _LESIONS, _MATCHED, _BY_SIZE):
        if not scored.issuperset(columns):
            continue
        rows = [
            (summary.region, *(summary.spread(column).mean_text(n_cases) for column in columns))
            for summary in summaries
        ]
        print_table(("region", *map(score_title, columns)), rows)
        print()
    empty = ", ".join(f"{summary.region} {summary.n_reference_empty}" for summary in summaries)
    print(f"references without the region: {empty} (of {n_cases})")


def figure(
    kind: str,
    source: Path,
    output: Path,
    prediction: Path | None = None,
    case: str | None = None,
    column: str | None = None,
    modality: str | None = None,
    convention: str | None = None,
    clinical: list[Path] | None = None,
) -> None:
    """Draw a case, scores, the distributions of a cohort, or the history of a run.

    sample: the modalities and the label map of a case. montage, preview: the outlines of reference
    and prediction in sections, in three planes. uncertainty: where a prediction is uncertain. scores:
    those of every case. distributions: age, survival and tumour volume. history: loss and scores of every epoch.

    Examples:
        brats-seg figure preview data --prediction predictions -o preview.png
        brats-seg figure scores scores.csv -o scores.png
    """
    from brats_seg.figures.draw import draw

    draw(
        kind,
        source,
        output,
        prediction=prediction,
        case=case,
        column=column,
        modality=modality,
        convention=convention,
        clinical=clinical or None,
    )
    emit(path=output)
    print(f"wrote {output}. Research use only.")


def report(
    results: list[Path],
    output: Path | None = None,
    prediction: Path | None = None,
    reference: Path | None = None,
    case: list[str] | None = None,
    no_case_pages: bool = False,
    scores: Path | None = None,
    data: Path | None = None,
    prepared: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> int:
    """Write pages for a browser: of each case, of all predictions, or of a run.

    The page of a case has viewer, volumes, lesions, warnings and origin; that of a folder of
    predictions a table of its cases, the worst first; that of a run its history and its held-out
    cases. A page is one self-contained HTML file. Exit code 1: some cases have no page.

    Examples:
        brats-seg report predictions --reference data
        brats-seg report data --prediction predictions --case BraTS2021_00000
        brats-seg report runs/fold0 --data data
    """
    with importing():
        from brats_seg.pages.html import PageOptions
        from brats_seg.pages.write import write_report

    options = PageOptions(
        output=output,
        prediction=prediction,
        reference=reference,
        case_ids=tuple(case or ()),
        with_cases=not no_case_pages,
        scores=scores,
        prepared=prepared_path(data, prepared) if data or prepared else None,
        device=device,
        precision=precision,
    )
    written = write_report(results, options, n_workers=available_cpus(), track=tracked)
    emit(pages=written.results, failures=written.failures)
    code = print_failures([failure.message for failure in written.failures])
    for folder, pages in groupby(written.results, attrgetter("parent")):
        first, *rest = pages
        print(f"wrote {len(rest) + 1} pages to {folder}" if rest else f"wrote {first}")
    print("Research use only.")
    return code


def reconstruct(
    autoencoder: Path,
    data: Path,
    output: Path = Path("reconstructions"),
    device: str = "auto",
    precision: str = "auto",
) -> int:
    """Draw a case beside its reconstruction, and print the error of each modality.

    The error is the root mean square inside the brain, in units of the normalised intensity: an
    image without any contrast has an error of 1. Exit code 1: some cases failed.

    Examples:
        brats-seg reconstruct runs/autoencoder data -o reconstructions
    """
    with importing():
        from brats_seg.inference.reconstruct import reconstruct_cases
        from brats_seg.inference.settings import prediction_settings
        from brats_seg.labels import MODALITIES

    settings = prediction_settings({"device": device, "precision": precision})
    done = reconstruct_cases([data], autoencoder, output, settings, track=tracked)
    for drawn in done.results:
        errors = dict(zip(MODALITIES, drawn.rmse, strict=True))
        emit(drawn, rmse=errors)
        parts = ", ".join(f"{modality} {error:.3f}" for modality, error in errors.items())
        print(
            f"{drawn.case_id}: error {drawn.mean_rmse:.3f} in the brain ({parts}), {drawn.picture}",
            *(f"    note: {warning}" for warning in drawn.warnings),
            sep="\n",
        )
    code = print_failures([failure.message for failure in done.failures])
    print("1 is the error of an image without contrast. Research use only.")
    return code
