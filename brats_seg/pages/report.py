"""Write the pages that `report` is asked for, whatever kind of folder it is given."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.many import MappedCases
from brats_seg.errors import UsageError
from brats_seg.inference.results import MANIFEST_NAME
from brats_seg.pages.case_pages import (
    PageSettings,
    write_case_pages,
)
from brats_seg.pages.cohort import write_cohort
from brats_seg.pages.html import PAGE_SUFFIX
from brats_seg.pages.run import is_run, write_run
from brats_seg.progress import Track, untracked

DEFAULT_PAGES = PageSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSettings:
    """Choices for the pages of one command."""

    pages: PageSettings = DEFAULT_PAGES
    """Choices for the pages of cases, of which the folder and the references are for all pages."""
    with_cases: bool = True
    """Whether a folder of predictions has the pages of its cases written too."""
    scores: Path | None = None
    """Table of scores of the predictions, which saves scoring them."""
    prepared: Path | None = None
    """Folder of the prepared cases that a run was trained on: its held-out cases are predicted,
    unless `tune` or an earlier call has, and scored. None leaves them out."""
    device: str = "auto"
    """Device that predicts them."""
    precision: str = "auto"
    """Precision that predicts them."""


def write_report(
    inputs: Sequence[Path],
    settings: ReportSettings,
    *,
    n_workers: int = 0,
    track: Track = untracked,
) -> MappedCases[Path]:
    """Write the pages of runs, or of cases with a page of each folder.

    Args:
        inputs: Folders of runs; or folders of predictions, or of scans, or tables of paths.
        settings: Choices for the pages.
        n_workers: Processes that write pages of cases, and score them; 0 works in this one.
        track: Shows the progress.

    Returns:
        The files of the pages, and the cases that have none.

    Raises:
        LayoutError: A folder holds no cases.
        UsageError: The inputs or the settings do not fit together.
        CaseError: A case of a run cannot be used.
        EnvironmentalError: A page cannot be written.
    """
    _check(inputs, settings)
    if any(map(is_run, inputs)):
        return MappedCases(results=tuple(_write_runs(inputs, settings, track)), failures=())
    written: MappedCases[Path] = MappedCases(results=(), failures=())
    if settings.with_cases:
        written = write_case_pages(inputs, settings.pages, n_workers=n_workers, track=track)
        if settings.pages.case_ids or _names_a_page(settings.pages):
            return written
    own = (
        write_cohort(
            path,
            output=settings.pages.output,
            reference=settings.pages.reference,
            scores=settings.scores,
            n_workers=n_workers,
            track=track,
        )
        for path in inputs
        if (path / MANIFEST_NAME).is_file()
    )
    return replace(written, results=(*own, *written.results))


def _check(inputs: Sequence[Path], settings: ReportSettings) -> None:
    """Raise `UsageError` if the settings do not fit the inputs."""
    runs = [path for path in inputs if is_run(path)]
    pages = settings.pages
    asked = {
        "--reference": pages.reference,
        "--prediction": pages.prediction,
        "--scores": settings.scores,
        "--case": pages.case_ids,
    }
    useless = [flag for flag, value in asked.items() if value]
    if runs and (len(runs) < len(inputs) or useless):
        msg = (
            f"{runs[0]} is a run, whose page shows no folders of cases; leave out "
            f"{', '.join([*useless, *(str(path) for path in inputs if path not in runs)])}"
        )
        raise UsageError(msg)
    if settings.prepared is not None and not runs:
        msg = f"--data and --prepared are for the page of a run, and {inputs[0]} is none; leave them out"
        raise UsageError(msg)
    if settings.scores is not None and pages.reference is not None:
        msg = f"both --reference {pages.reference} and --scores {settings.scores} are given; expected one"
        raise UsageError(msg)
    if _names_a_page(pages) and len(inputs) > 1:
        msg = f"{pages.output} is one page, for {len(inputs)} folders; expected a folder for the pages"
        raise UsageError(msg)


def _names_a_page(pages: PageSettings) -> bool:
    return pages.output is not None and pages.output.suffix.lower() == PAGE_SUFFIX


def _write_runs(runs: Sequence[Path], settings: ReportSettings, track: Track) -> Iterator[Path]:
    for run in runs:
        yield write_run(
            run,
            output=settings.pages.output,
            prepared=settings.prepared,
            device=settings.device,
            precision=settings.precision,
            track=track,
        )
