"""Find what pages are made from, and write them: of runs, of predictions, of scans.

The page of a case has what its record in `manifest.jsonl` says about the model, the settings and the
warnings. Pages of cases lie in `reports/<case>.html` of the folder of predictions.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.case import Case, LoadedCase, ScanFile, load_case
from brats_seg.cases.find import find_cases, with_id_checked
from brats_seg.cases.layouts import STEPS_NAME
from brats_seg.cases.many import Failure, MappedCases, map_cases
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import CaseError, UsageError, counted, some_of
from brats_seg.evaluation.evaluate import LabelFile, label_maps_in
from brats_seg.figures.cases import make_view, read_labelled, with_uncertainty
from brats_seg.inference.results import MANIFEST_NAME, OutputFolder, Record, result_files
from brats_seg.labels import MODALITIES, convention_named
from brats_seg.pages.case import write_case_page
from brats_seg.pages.cohort import COHORT_PAGE, cohort_scores, page_path, write_cohort_page
from brats_seg.pages.html import DEFAULT_OPTIONS, PAGE_SUFFIX, Fact, PageOptions
from brats_seg.pages.run import RUN_PAGE, is_run, write_run_page
from brats_seg.progress import Track, untracked


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFiles:
    """The files that the page of one case is made from."""

    case: Case
    page: Path
    prediction: LabelFile | None = None
    uncertainty: Path | None = None
    reference: LabelFile | None = None
    record: Record | None = None
    """Record of the prediction; None if it has none."""

    @property
    def case_id(self) -> str:
        """Id of the case."""
        return self.case.case_id


def write_report(
    inputs: Sequence[Path],
    options: PageOptions = DEFAULT_OPTIONS,
    *,
    n_workers: int = 0,
    track: Track = untracked,
) -> MappedCases[Path]:
    """Write the pages of runs, or of cases with a page of each folder of predictions.

    Args:
        inputs: Folders of runs; or folders of predictions, or of scans, or tables of paths.
        options: Choices for the pages.
        n_workers: Processes that write pages of cases, and score them; 0 works in this one.
        track: Shows the progress.

    Returns:
        The files of the pages, and the cases that have none.

    Raises:
        LayoutError: A folder holds no cases.
        UsageError: The inputs or the options do not fit together.
        CaseError: A case of a run cannot be used.
        EnvironmentalError: A page cannot be written.
    """
    is_one = options.output is not None and options.output.suffix.lower() == PAGE_SUFFIX
    cohorts = [path for path in inputs if (path / MANIFEST_NAME).is_file()]
    _check(inputs, cohorts, options)
    if any(map(is_run, inputs)):
        pages = _pages(inputs, RUN_PAGE, options.output)
        for run, page in zip(inputs, pages, strict=True):
            write_run_page(run, page, options, track=track)
        return MappedCases(results=tuple(pages), failures=())
    pages, files = _pages(cohorts, COHORT_PAGE, options.output), list[PageFiles]()
    if options.with_cases:
        of_inputs = [_find_results(p) if p in cohorts else _find_scans(p, options) for p in inputs]
        files = _choose([item for items in of_inputs for item in items], options)
        if options.case_ids or is_one:
            cohorts, pages = [], []
    elif options.case_ids or not cohorts:
        msg = "--no-case-pages leaves no page to write: give a folder of predictions, and no --case"
        raise UsageError(msg)
    # what is wrong with the scores is said before pages are written
    scores = [cohort_scores(path, options, n_workers, track) for path in cohorts]
    workers = min(n_workers, len(files)) if len(files) > 1 else 0
    written = map_cases(write_page_of, files, "pages", n_workers=workers, track=track)
    for path, page, scored in zip(cohorts, pages, scores, strict=True):
        # it links to the pages of its cases
        write_cohort_page(path, page, *scored, track=track)
    return replace(written, results=(*pages, *written.results))


def write_missing_pages(folder: Path, case_ids: Iterable[str], track: Track) -> tuple[Failure, ...]:
    """Write the pages of predicted cases that have none, by several processes; return those that fail."""
    missing = [name for name in case_ids if not page_path(folder, name).exists()]
    if not missing:
        return ()
    options = PageOptions(case_ids=tuple(missing))
    return write_report([folder], options, n_workers=available_cpus(), track=track).failures


def files_of_result(case: Case, record: Record, folder: Path) -> PageFiles:
    """Return what the page of a case is made from that was predicted into a folder."""
    files = result_files(record.settings.layout, record.case_id, record.convention)
    return PageFiles(
        case=case,
        page=page_path(folder, record.case_id),
        prediction=LabelFile(path=folder / files.label_map, convention=record.convention),
        uncertainty=folder / files.uncertainty if files.uncertainty in record.outputs else None,
        record=record,
    )


def write_page_of(files: PageFiles) -> Path:
    """Write the page of one case, and return its file."""
    _check_files(files)
    case, record = files.case, files.record
    # a case that was predicted without some modalities is shown without them
    modalities = record.modalities if record else MODALITIES
    loaded = load_case(case, with_label=files.reference is None, modalities=modalities)
    view = make_view(loaded)
    if files.prediction is not None:
        view = replace(view, prediction=read_labelled(view, files.prediction))
    if files.reference is not None:
        view = replace(view, reference=read_labelled(view, files.reference))
    if files.uncertainty is not None:
        view = with_uncertainty(view, files.uncertainty)
    warnings, facts = tuple(_warnings(loaded, record)), tuple(_facts(files, loaded))
    steps = case.path_of(case.images[0]).with_name(STEPS_NAME)
    write_case_page(view, files.page, warnings=warnings, facts=facts, steps=steps)
    return files.page


def _check(inputs: Sequence[Path], cohorts: Sequence[Path], options: PageOptions) -> None:
    """Raise `UsageError` if the options do not fit the inputs."""
    runs = [path for path in inputs if is_run(path)]
    flags = ("reference", "prediction", "scores", "case_ids")
    useless = [f"--{flag.removesuffix('_ids')}" for flag in flags if getattr(options, flag)]
    useless += [str(path) for path in inputs if path not in runs]
    if runs and useless:
        msg = f"{runs[0]} is a run, whose page shows its own cases only; leave out {', '.join(useless)}"
        raise UsageError(msg)
    if options.prepared and not runs:
        msg = f"--data and --prepared are for a run, and {inputs[0]} is no run; leave them out"
        raise UsageError(msg)
    if options.prediction and cohorts:
        msg = f"{cohorts[0]} holds predictions itself; --prediction is for scans: leave it out"
        raise UsageError(msg)
    if options.scores and options.reference:
        msg = "both --reference and --scores are given; expected one"
        raise UsageError(msg)
    if options.scores and len(cohorts) != 1:
        msg = f"--scores are those of one folder of predictions, and {len(cohorts)} are given"
        raise UsageError(msg)


def _page(folder: Path, name: str) -> Path:
    """Return a page in a folder, or the file that is given instead of a folder."""
    return folder if folder.suffix.lower() == PAGE_SUFFIX else folder / name


def _pages(folders: Sequence[Path], name: str, output: Path | None) -> list[Path]:
    """Return the page of each folder; raise `UsageError` if several would be one file."""
    if output is not None and len(folders) > 1:
        msg = f"{output} would get {len(folders)} pages called {name}; expected one: leave --output out"
        raise UsageError(msg)
    return [_page(output or folder, name) for folder in folders]


def _find_results(folder: Path) -> Iterator[PageFiles]:
    for case_id, record in sorted(OutputFolder(folder).records().items()):
        # the paths are absolute, or relative to the folder that the prediction was started in
        scans = {name: ScanFile.parse(text) for name, text in record.files.items()}
        case = with_id_checked(Case.named(case_id, scans), is_file_name=True)
        yield files_of_result(case, record, folder)


def _find_scans(path: Path, options: PageOptions) -> Iterator[PageFiles]:
    cases, folder = find_cases(path).cases, options.prediction
    above = folder if folder is None or folder.is_dir() else folder.parent
    records = OutputFolder(folder).records() if folder else {}
    case_ids = [c.case_id for c in cases if c.case_id in (options.case_ids or (c.case_id,))]
    predictions = label_maps_in(folder, case_ids) if folder and case_ids and not records else {}
    for case in cases:
        if folder is not None and case.case_id in records:
            yield files_of_result(case, records[case.case_id], folder)
            continue
        absent = LabelFile(path=folder / f"{case.case_id}.nii.gz") if folder else None
        prediction = predictions.get(case.case_id, absent)
        page = page_path(above or Path(), case.case_id)
        yield PageFiles(case=case, page=page, prediction=prediction)


def _choose(pages: list[PageFiles], options: PageOptions) -> list[PageFiles]:
    """Return the files of the cases that are asked for, with their pages and references."""
    known = [files.case_id for files in pages]
    if unknown := [case_id for case_id in options.case_ids if case_id not in known]:
        msg = f"there is no case {', '.join(unknown)}; there are {some_of(known) or 'none'}"
        raise UsageError(msg)
    if options.case_ids:
        pages = [files for files in pages if files.case_id in options.case_ids]
    output = options.output
    if output and output.suffix.lower() == PAGE_SUFFIX and len(pages) != 1:
        msg = f"{output} is one page, for {counted(len(pages), 'case')}; give a folder, or choose one with --case"
        raise UsageError(msg)
    if output:
        pages = [replace(files, page=_page(output, files.page.name)) for files in pages]
    n_pages = Counter(files.page for files in pages)
    if twice := [str(page) for page, n_cases in n_pages.items() if n_cases > 1]:
        msg = f"several cases would have the page {some_of(twice)}; give one folder at a time"
        raise UsageError(msg)
    if options.reference:
        references = label_maps_in(options.reference, [files.case_id for files in pages])
        if known and references.keys().isdisjoint(known):
            msg = f"{options.reference} has no label map of {some_of(known)}; it has {some_of(references)}. Name each as its case."
            raise UsageError(msg)
        pages = [replace(files, reference=references.get(files.case_id)) for files in pages]
    return pages


def _check_files(files: PageFiles) -> None:
    """Raise `CaseError` if scans or results are not where they were, or a case is not predicted."""
    prediction = files.prediction and files.prediction.path
    paths = (prediction, files.uncertainty, *map(files.case.path_of, files.case.images))
    if missing := [path.name for path in paths if path and not path.exists()]:
        expected = "the scans, and what predict wrote"
        advice = "Predict the case, or say where its scans are: report SCANS --prediction RESULTS."
        raise CaseError(files.case_id, ", ".join(missing), "no such file", expected, advice)


def _warnings(loaded: LoadedCase, record: Record | None) -> Iterator[str]:
    """Yield what speaks against the scans and the prediction, each sentence once."""
    if record and record.in_training == "yes":
        yield "the model was trained on this patient: expect worse results of new ones"
    remarks = (record.remark, *record.warnings) if record else ()
    yield from dict.fromkeys(filter(None, (*remarks, *loaded.case.remarks)))
    inputs = record.inputs if record else ()
    pairs = zip(loaded.case.modalities, loaded.hashes, inputs, strict=False)
    if changed := [name for name, now, before in pairs if now != before]:
        yield f"the file of {', '.join(changed)} is not the one that was predicted: its content has changed. Predict the case again."


def _facts(files: PageFiles, loaded: LoadedCase) -> Iterator[Fact]:
    """Yield where the prediction and the scans came from."""
    record = files.record
    if record is not None:
        reason = f" ({record.convention_reason})" if record.convention_reason else ""
        yield Fact("Model", record.model, is_code=True)
        yield Fact("Settings", record.settings.changed_text())
        if record.predicted_dice:
            yield Fact("Predicted Dice", ", ".join(map(str, record.predicted_dice)))
        yield Fact("Label convention", f"{convention_named(record.convention)}{reason}")
        yield Fact("Predicted by", f"brats_seg {record.version} on {record.device}")
    elif files.prediction is not None:
        yield Fact("Prediction", f"{files.prediction.path.name}, without a record of its model")
    if files.reference is not None:
        yield Fact("Reference", files.reference.path.name)
    elif loaded.label is not None:
        yield Fact("Reference", loaded.label.file)
    yield Fact("Release of the scans", loaded.case.release)
    scans = zip(loaded.case.modalities, loaded.volumes, loaded.hashes, strict=False)
    for modality, volume, content in scans:
        sha256, _, index = content.partition("#")
        text = f"{volume.file}{'' if index == 'None' else f', volume {index}'}, SHA-256 {sha256}"
        yield Fact(f"File of {modality}", text, is_code=True)
