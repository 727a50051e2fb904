"""Gather what a folder of predictions says of its cases, for their common page."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from urllib.parse import quote

import numpy as np
import pandas as pd

from brats_seg.errors import UsageError, counted
from brats_seg.evaluation.evaluate import evaluate_folders
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.evaluation.scores import joined_scores, read_scores, summarise_scores
from brats_seg.inference.output import MANIFEST_NAME, OutputFolder, Record
from brats_seg.inference.result_files import result_files
from brats_seg.labels import REGIONS, convention_named
from brats_seg.pages.case import Fact
from brats_seg.pages.case_pages import page_path
from brats_seg.pages.cohort_page import Cohort, CohortCase, dice_by_case, write_cohort_page
from brats_seg.pages.html import PAGE_SUFFIX
from brats_seg.progress import Track, untracked

COHORT_PAGE = "cohort.html"
"""Page of a folder of predictions, in that folder."""
_MOST_LISTED = 5
"""Values that are listed at most where the cases differ."""


def write_cohort(
    results: Path,
    *,
    output: Path | None = None,
    reference: Path | None = None,
    scores: Path | None = None,
    n_workers: int = 0,
    track: Track = untracked,
) -> Path:
    """Write the page of a folder of predictions, and return its path.

    It links to the pages of the cases that are there.

    Args:
        results: Folder that `predict` wrote.
        output: The page, or its folder; by default `cohort.html` in the folder of the predictions.
        reference: Folder of label maps, or of scans with label maps, to score the predictions with.
        scores: Table of scores of these predictions, instead of a reference.
        n_workers: Processes that score; 0 works in this one.
        track: Shows the progress.

    Raises:
        UsageError: The folder has no record of predictions, or the table is not one of scores.
        LayoutError: No case of the references is in the folder.
        EnvironmentalError: The page cannot be written.
    """
    above = output or results
    page = above if above.suffix.lower() == PAGE_SUFFIX else above / COHORT_PAGE
    scored = joined_scores(())
    remarks: tuple[str, ...] = ()
    if scores is not None:
        scored = read_scores(scores)
    elif reference is not None:
        scored, remarks = _scored(results, reference, n_workers, track)
    found = cohort_of(results, scored)
    cases = tuple(replace(case, page=_link(results, case, page)) for case in found.cases)
    cohort = replace(found, cases=cases, remarks=remarks)
    title = f"Predictions in {results.resolve().name}"
    write_cohort_page(cohort, page, title=title, track=track)
    return page


def cohort_of(results: Path, scores: pd.DataFrame | None = None) -> Cohort:
    """Gather what is known of the cases in a folder of predictions.

    Args:
        results: Folder that `predict` wrote.
        scores: Scores of its cases; those of other cases are left out.

    Raises:
        UsageError: The folder has no record of predictions.
    """
    records = OutputFolder(results).records()
    if not records:
        msg = (
            f"{results} has no record of predictions; expected a folder with {MANIFEST_NAME}, as "
            "`brats-seg predict` writes it"
        )
        raise UsageError(msg)
    done = {name: record for name, record in records.items() if record.status == "done"}
    scored = joined_scores(()) if scores is None else scores
    scored = scored[scored["case_id"].isin(done)]
    dice = dice_by_case(scored)
    return Cohort(
        cases=tuple(_cohort_case(results, one, dice.get(name, ())) for name, one in done.items()),
        failures=tuple(one.failure for one in records.values() if one.status == "failed"),
        summaries=summarise_scores(scored, np.random.default_rng(0)),
        facts=tuple(_facts(done.values())),
    )


def _scored(
    results: Path, reference: Path, n_workers: int, track: Track
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the scores of the predictions, and remarks on those that have none."""
    found = evaluate_folders(
        reference,
        results,
        protocol_named("legacy"),
        only_predicted=True,
        n_workers=n_workers,
        track=track,
    )
    unscored = (f"not scored: {failure.message}" for failure in found.failures)
    return found.scores, (*found.remarks, *unscored)


def _cohort_case(results: Path, record: Record, dice: tuple[float, ...]) -> CohortCase:
    ml = {part.name: part.ml for part in record.volumes}
    convention = convention_named(record.convention)
    preview = result_files(record.settings.layout, record.case_id, convention).preview
    return CohortCase(
        case_id=record.case_id,
        ml=tuple(ml[region] for region in REGIONS),
        warnings=record.warnings,
        dice=dice,
        preview=results / preview if preview in record.outputs else None,
    )


def _facts(records: Iterable[Record]) -> Iterator[Fact]:
    """Yield what the predictions were made with; several values with their numbers of cases."""
    every = list(records)
    values = {
        "Model": (record.model for record in every),
        "Version of brats_seg": (record.version for record in every),
        "Device": (record.device for record in every),
        "Label convention": (record.convention for record in every),
        "Settings": (record.settings.changed_text() for record in every),
    }
    for name, found in values.items():
        counts = Counter(found).most_common()
        words = [f"{value} ({counted(n, 'case')})" for value, n in counts[:_MOST_LISTED]]
        more = [f"{len(counts) - _MOST_LISTED} more"] if len(counts) > _MOST_LISTED else []
        if counts:
            yield Fact(
                name=name, words="; ".join([counts[0][0]] if len(counts) == 1 else [*words, *more])
            )
    if every:
        seconds = median(record.seconds for record in every)
        yield Fact(name="Time of a case", words=f"{seconds:.1f} s (median)")


def _link(results: Path, case: CohortCase, page: Path) -> str:
    """Return the link from the page of a cohort to that of a case; empty if there is none."""
    beside = page.parent / f"{case.case_id}{PAGE_SUFFIX}"
    for target in (page_path(results, case.case_id), beside):
        if target.is_file():
            way = Path(os.path.relpath(target.absolute(), page.absolute().parent))
            return quote(way.as_posix())
    return ""
