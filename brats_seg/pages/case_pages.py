"""Write the pages of cases: of a folder of predictions, or of scans with or without predictions.

Pages lie in `reports/<case>.html` of the folder of predictions. What a page says about the model, the
settings and the warnings is the record of the case in `manifest.jsonl`.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from brats_seg.cases.case import Case, LoadedCase, ScanFile, load_case
from brats_seg.cases.discovery import find_cases
from brats_seg.cases.many import Failure, MappedCases, map_cases
from brats_seg.errors import CaseError, UsageError, counted, some_of
from brats_seg.evaluation.pairs import label_maps_in
from brats_seg.inference.results import (
    MANIFEST_NAME,
    OutputFolder,
    Record,
    ResultFiles,
    result_files,
)
from brats_seg.labels import MODALITIES, convention_named
from brats_seg.progress import Track, untracked

if TYPE_CHECKING:
    from brats_seg.pages.case import CasePage, Fact

log = logging.getLogger(__name__)

PAGES_NAME = "reports"
"""Folder of the pages, in the folder of the predictions."""

_GIVE_SCANS = (
    "Put the files back, or give their folder: brats-seg report SCANS --prediction RESULTS."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSettings:
    """Choices for the pages of cases."""

    output: Path | None = None
    """Folder for the pages, or the file of a single one; None for `reports` beside the results."""
    prediction: Path | None = None
    """Folder of predictions, or a label map, of cases that are given by their scans."""
    reference: Path | None = None
    """Folder of label maps to compare with, or one; None takes those that lie beside the scans."""
    case_ids: tuple[str, ...] = ()
    """Cases to write; empty for all."""
    labels: str = ""
    """Label convention of the references; empty to infer it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSource:
    """The files that the page of one case is made from."""

    case: Case
    page: Path
    """File of the page."""
    prediction: Path | None = None
    uncertainty: Path | None = None
    reference: Path | None = None
    record: Record | None = None
    """Record of the prediction; None if it has none."""
    labels: str = ""
    """Label convention of the reference; empty to infer it."""
    problem: CaseError | None = None
    """Reason why there can be no page."""

    @property
    def case_id(self) -> str:
        """Id of the case."""
        return self.case.case_id


def write_case_pages(
    inputs: Sequence[Path],
    settings: PageSettings,
    *,
    n_workers: int = 0,
    track: Track = untracked,
) -> MappedCases[Path]:
    """Write the page of every case of folders of predictions, or of folders of scans.

    A folder of predictions is one that `predict` wrote; its scans are read from where they were.

    Args:
        inputs: Folders of predictions, folders of scans, or tables of paths.
        settings: Choices for the pages.
        n_workers: Processes that write pages; 0 works in this one.
        track: Shows the progress.

    Returns:
        The files of the pages, and the cases that have none.

    Raises:
        LayoutError: A folder holds no cases.
        UsageError: The inputs or the settings do not fit together.
        EnvironmentalError: A page cannot be written.
    """
    sources = page_sources(inputs, settings)
    workers = min(n_workers, len(sources)) if len(sources) > 1 else 0
    return map_cases(write_page, sources, "pages", n_workers=workers, track=track)


def page_sources(inputs: Sequence[Path], settings: PageSettings) -> list[PageSource]:
    """Find what the pages of the chosen cases are made from.

    The arguments and errors are those of `write_case_pages`.
    """
    found = [source for path in inputs for source in _sources_of(path, settings)]
    return _chosen(found, settings)


def write_page(source: PageSource) -> Path:
    """Write the page of one case, and return its file.

    Raises:
        CaseError: A file of the case cannot be used.
        EnvironmentalError: The page cannot be written.
    """
    # matplotlib takes long to import
    from brats_seg.pages.case import write_case_page

    write_case_page(read_page(source), source.page)
    return source.page


def read_page(source: PageSource) -> "CasePage":
    """Read a case with its label maps and its uncertainty, and what its page says about it.

    Raises:
        CaseError: A file of the case cannot be used.
    """
    from brats_seg.figures.view import (
        view_of,
        with_prediction,
        with_reference,
        with_uncertainty,
    )
    from brats_seg.pages.case import CasePage

    if source.problem is not None:
        raise source.problem
    case, modalities = source.case, tuple[str, ...](MODALITIES)
    if source.record is not None:
        # a case that was predicted without some modalities is shown without them
        case, modalities = replace(case, problems=case.other_problems), source.record.modalities
    loaded = load_case(
        case,
        labels=source.labels,
        with_label=source.reference is None,
        modalities=modalities,
    )
    view = view_of(loaded)
    if source.prediction is not None:
        labels = source.record.convention if source.record else None
        view = with_prediction(view, source.prediction, labels=labels)
    if source.reference is not None:
        view = with_reference(view, source.reference, labels=source.labels)
    if source.uncertainty is not None:
        view = with_uncertainty(view, source.uncertainty)
    return CasePage(
        view=view,
        flags=tuple(_flags(loaded, source.record)),
        facts=tuple(_facts(source, loaded)),
    )


def page_of_result(case: Case, record: Record, folder: Path) -> PageSource:
    """Return what the page of a case is made from that was predicted into a folder."""
    files = _files_of(record)
    has_uncertainty = files.uncertainty in record.outputs
    return PageSource(
        case=case,
        page=page_path(folder, record.case_id),
        prediction=folder / files.label_map,
        uncertainty=folder / files.uncertainty if has_uncertainty else None,
        record=record,
    )


def page_path(folder: Path, case_id: str) -> Path:
    """Return the file of the page of a case in a folder of predictions."""
    return folder / PAGES_NAME / f"{case_id}.html"


def _sources_of(path: Path, settings: PageSettings) -> Iterator[PageSource]:
    if not (path / MANIFEST_NAME).is_file():
        yield from _of_scans(path, settings)
    elif settings.prediction is not None:
        msg = f"{path} holds predictions itself; --prediction is for scans: leave it out"
        raise UsageError(msg)
    else:
        yield from _of_results(path, settings)


def _of_results(folder: Path, settings: PageSettings) -> Iterator[PageSource]:
    entries = [entry for _, entry in sorted(OutputFolder(folder).entries().items())]
    done = [entry for entry in entries if isinstance(entry, Record)]
    failed = [entry.case_id for entry in entries if isinstance(entry, Failure)]
    if failed:
        n_failed = counted(len(failed), "case")
        log.warning("%s: no page for %s that failed: %s", folder, n_failed, some_of(failed))
    references = _label_maps(settings.reference, [record.case_id for record in done])
    for record in done:
        source = page_of_result(_case_of(record), record, folder)
        yield replace(
            source,
            reference=references.get(record.case_id),
            labels=settings.labels,
            problem=_gone(source, record),
        )


def _of_scans(path: Path, settings: PageSettings) -> Iterator[PageSource]:
    cases, folder = find_cases(path).cases, settings.prediction
    wanted = [
        case.case_id for case in cases if case.case_id in settings.case_ids or not settings.case_ids
    ]
    references = _label_maps(settings.reference, wanted)
    records = OutputFolder(folder).records() if folder is not None and folder.is_dir() else {}
    predictions = {} if records else _label_maps(folder, wanted)
    for case in cases:
        record = records.get(case.case_id)
        if folder is not None and record is not None:
            source = page_of_result(case, record, folder)
        else:
            source = PageSource(
                case=case,
                page=page_path(_folder_of(folder), case.case_id),
                prediction=predictions.get(case.case_id),
            )
        if folder is not None and source.prediction is None:
            source = replace(source, problem=_unpredicted(case.case_id, folder))
        yield replace(source, reference=references.get(case.case_id), labels=settings.labels)


def _label_maps(path: Path | None, case_ids: Sequence[str]) -> Mapping[str, Path]:
    """Return label maps by case id: those of a folder, or one for the only case."""
    if path is None:
        return {}
    if path.is_dir():
        return label_maps_in(path)
    if not path.exists():
        msg = f"{path} does not exist; expected a label map, or a folder of label maps"
        raise UsageError(msg)
    if len(case_ids) != 1:
        msg = (
            f"{path} is one label map, for {counted(len(case_ids), 'case')}; choose one with --case"
        )
        raise UsageError(msg)
    return {case_ids[0]: path}


def _folder_of(prediction: Path | None) -> Path:
    """Return the folder beside whose files pages lie: that of the predictions, or the current one."""
    if prediction is None:
        return Path()
    return prediction if prediction.is_dir() else prediction.parent


def _chosen(sources: list[PageSource], settings: PageSettings) -> list[PageSource]:
    """Return the sources that are asked for, with the files of their pages."""
    known = [source.case_id for source in sources]
    unknown = [case_id for case_id in settings.case_ids if case_id not in known]
    if unknown:
        msg = f"there is no case {', '.join(unknown)}; there are {some_of(known) or 'none'}"
        raise UsageError(msg)
    if settings.case_ids:
        sources = [source for source in sources if source.case_id in settings.case_ids]
    output = settings.output
    if output is None:
        return sources
    if output.suffix.lower() != ".html":
        return [replace(source, page=output / source.page.name) for source in sources]
    if len(sources) != 1:
        msg = (
            f"{output} is one page, for {counted(len(sources), 'case')}; expected a folder, or one "
            "case: choose it with --case"
        )
        raise UsageError(msg)
    return [replace(sources[0], page=output)]


def _case_of(record: Record) -> Case:
    """Return the case that a record names the files of."""
    # the paths are absolute, or relative to the folder that the prediction was started in
    return Case.named(
        record.case_id, {name: ScanFile.parse(text) for name, text in record.files.items()}
    )


def _gone(source: PageSource, record: Record) -> CaseError | None:
    """Return the error for files of a result, or of its scans, that are not where they were."""
    results = [path for path in (source.prediction, source.uncertainty) if path is not None]
    if missing := [path for path in results if not path.exists()]:
        found, expected = "no such file", "what predict wrote"
        next_step = "Predict the case again."
    elif not record.files:
        missing = [Path(MANIFEST_NAME)]
        found = "a record of an earlier version, which does not name the scans"
        expected, next_step = "the scans", _GIVE_SCANS
    else:
        paths = [ScanFile.parse(text).path for text in record.files.values()]
        missing = [path for path in paths if not path.exists()]
        found = "no file at the place that it was predicted from"
        expected, next_step = "the scans", _GIVE_SCANS
    if not missing:
        return None
    names = ", ".join(path.name for path in missing)
    return CaseError(record.case_id, names, found, expected, next_step)


def _unpredicted(case_id: str, folder: Path) -> CaseError:
    return CaseError(
        case_id,
        file=str(folder),
        found="no prediction of this case",
        expected="a label map named after the case",
        next_step="Predict it, or leave --prediction out for a page of the scans alone.",
    )


def _files_of(record: Record) -> ResultFiles:
    convention = convention_named(record.convention)
    return result_files(record.settings.layout, record.case_id, convention)


def _flags(loaded: LoadedCase, record: Record | None) -> Iterator[str]:
    """Yield what speaks against the scans and the prediction, each sentence once."""
    warnings = record.warnings if record else ()
    yield from dict.fromkeys((*warnings, *loaded.remarks))
    if record is None:
        return
    pairs = zip(loaded.modalities, loaded.contents, record.inputs, strict=False)
    changed = [name for name, now, then in pairs if now != then]
    if changed:
        yield (
            f"the file of {', '.join(changed)} is not the one that was predicted: its content has "
            "changed. Predict the case again."
        )


def _facts(source: PageSource, loaded: LoadedCase) -> "Iterator[Fact]":
    """Yield where the prediction and the scans came from."""
    from brats_seg.pages.case import Fact

    if source.record is not None:
        yield from _facts_of(source.record)
    elif source.prediction is not None:
        yield Fact(
            name="Prediction", words=f"{source.prediction.name}, without a record of its model"
        )
    if source.reference is not None or loaded.label is not None:
        name = (
            source.reference.name if source.reference else str(loaded.label and loaded.label.file)
        )
        yield Fact(name="Reference", words=name)
    yield Fact(name="Release of the scans", words=loaded.release)
    for modality, volume, content in zip(
        loaded.modalities, loaded.volumes, loaded.contents, strict=False
    ):
        sha256, _, index = content.partition("#")
        words = f"{volume.file}{'' if index == 'None' else f', volume {index}'}, SHA-256 {sha256}"
        yield Fact(name=f"File of {modality}", words=words, is_code=True)


def _facts_of(record: Record) -> "Iterator[Fact]":
    from brats_seg.pages.case import Fact

    reason = f" ({record.convention_reason})" if record.convention_reason else ""
    yield Fact(name="Model", words=record.model, is_code=True)
    yield Fact(name="Settings", words=record.settings.changed_text())
    if record.predicted_dice:
        yield Fact(name="Predicted Dice", words=", ".join(map(str, record.predicted_dice)))
    yield Fact(name="Label convention", words=f"{convention_named(record.convention)}{reason}")
    yield Fact(name="Predicted by", words=f"brats_seg {record.version} on {record.device}")
    memory = f", at most {record.peak_memory_mb:.0f} MB" if record.peak_memory_mb else ""
    yield Fact(name="Computing", words=f"{record.seconds:.1f} s{memory}")
