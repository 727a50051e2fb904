"""Gather what the pages of many cases show, from the folders that other commands have written.

The pages themselves are made in `report`, from values; this module reads the folders of `predict`
and `train`, which `report` knows nothing of.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from urllib.parse import quote

from brats_seg.cases.many import Failure
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import UsageError, counted
from brats_seg.evaluation.evaluate import evaluate_folders
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.evaluation.scores import Score, read_scores
from brats_seg.inference.output import MANIFEST_NAME, OutputFolder, Record
from brats_seg.inference.result_files import result_files
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import REGIONS, convention_named
from brats_seg.progress import Track, untracked
from brats_seg.report.cohort_page import Cohort, CohortCase, dice_by_case, write_cohort_page

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
    pages: Mapping[str, Path] | None = None,
    track: Track = untracked,
) -> Path:
    """Write the page of a folder of predictions, and return its path.

    Args:
        results: Folder that `predict` wrote.
        output: The page; by default `cohort.html` in that folder.
        reference: Folder of label maps, or of scans with label maps, to score the predictions against.
        scores: Table of scores of these predictions, which saves scoring them.
        pages: Page of each case that has one, to link to.
        track: Shows the progress.

    Raises:
        UsageError: The folder has no record of predictions, a table is not one of scores, or both
            references and scores are given.
        LayoutError: No case of the references is in the folder.
        EnvironmentalError: The page cannot be written.
    """
    page = output or results / COHORT_PAGE
    found = cohort_of(results, reference=reference, scores=scores, track=track)
    linked = _linked(found, pages or {}, page)
    write_cohort_page(linked, page, title=f"Predictions in {results.resolve().name}", track=track)
    return page


def cohort_of(
    results: Path,
    *,
    reference: Path | None = None,
    scores: Path | None = None,
    track: Track = untracked,
) -> Cohort:
    """Gather what is known of the cases in a folder of predictions.

    The arguments and errors are those of `write_cohort`.
    """
    records = OutputFolder(results).records()
    if not records:
        msg = (
            f"{results} has no record of predictions; expected a folder with {MANIFEST_NAME}, as "
            "`brats-seg predict` writes it"
        )
        raise UsageError(msg)
    done = {name: record for name, record in records.items() if record.status == "done"}
    scored, remarks = _scores(results, reference, scores, track)
    scored = tuple(score for score in scored if score.case_id in done)
    dice = dice_by_case(scored)
    return Cohort(
        cases=tuple(_cohort_case(results, one, dice.get(name, ())) for name, one in done.items()),
        failures=tuple(
            Failure(case_id=one.case_id, error=one.error, message=one.message)
            for one in records.values()
            if one.status == "failed"
        ),
        scores=scored,
        facts=tuple(_facts(done.values())),
        remarks=remarks,
    )


def _scores(
    results: Path, reference: Path | None, table: Path | None, track: Track
) -> tuple[tuple[Score, ...], tuple[str, ...]]:
    """Return the scores of the predictions, and remarks on those that have none."""
    if reference is not None and table is not None:
        msg = f"both references ({reference}) and scores ({table}) are given; expected one of them"
        raise UsageError(msg)
    if table is not None:
        return read_scores(table), ()
    if reference is None:
        return (), ()
    found = evaluate_folders(
        reference,
        results,
        protocol_named("legacy"),
        only_predicted=True,
        n_workers=available_cpus(),
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


def _facts(records: Iterable[Record]) -> Iterator[tuple[str, str]]:
    """Yield what the predictions were made with; several values with their numbers of cases."""
    every = list(records)
    values = {
        "model": (record.model for record in every),
        "version of brats_seg": (record.version for record in every),
        "device": (record.device for record in every),
        "label convention": (record.convention for record in every),
        "settings": (_settings_text(record) for record in every),
    }
    for name, found in values.items():
        counts = Counter(found).most_common()
        words = [f"{value} ({counted(n, 'case')})" for value, n in counts[:_MOST_LISTED]]
        more = [f"{len(counts) - _MOST_LISTED} more"] if len(counts) > _MOST_LISTED else []
        yield name, "; ".join([counts[0][0]] if len(counts) == 1 else [*words, *more])
    if every:
        yield "seconds for a case, median", f"{median(record.seconds for record in every):.1f}"


def _settings_text(record: Record) -> str:
    """Return the settings that are not the defaults."""
    usual = PredictionSettings().model_dump()
    given = record.settings.model_dump().items()
    return ", ".join(f"{key} {value}" for key, value in given if value != usual[key]) or "defaults"


def _linked(cohort: Cohort, pages: Mapping[str, Path], output: Path) -> Cohort:
    """Return a cohort whose cases have the links to their pages, relative to that of the cohort."""
    folder = output.absolute().parent
    links = {
        case_id: quote(Path(os.path.relpath(page.absolute(), folder)).as_posix())
        for case_id, page in pages.items()
    }
    cases = tuple(replace(case, page=links.get(case.case_id, "")) for case in cohort.cases)
    return replace(cohort, cases=cases)
