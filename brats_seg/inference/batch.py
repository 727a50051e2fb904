"""Predict many cases into one folder.

The next case is read while one is predicted and the previous one is written. Each stage returns the
input of the next, or the outcome of a case that has ended. An error of a case ends that case only;
an error of the machine or of the command ends the batch.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from brats_seg import wings
from brats_seg.cases.case import Case, read_case_files
from brats_seg.cases.find import find_inputs
from brats_seg.cases.many import Failure, attempt_case
from brats_seg.dicom.convert import (
    DEFAULT_OPTIONS,
    DicomOptions,
    DicomSource,
    cases_of_dicom,
    read_source,
)
from brats_seg.errors import BratsError, UsageError
from brats_seg.inference.cluster import MAX_KILLED_WORKERS, cluster_results
from brats_seg.inference.method import Scan
from brats_seg.inference.output import SCANS_NAME, OutputFolder, Record, convention_remarks, key_of
from brats_seg.inference.predict import Prediction, Predictor
from brats_seg.inference.result_files import check_names
from brats_seg.inference.settings import DEFAULT_SETTINGS, PredictionSettings
from brats_seg.progress import Track, untracked
from brats_seg.runtime.machine import check_machine

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseOutcome:
    """Result of one case of a batch."""

    record: Record
    is_new: bool = True
    """False for a case that an earlier batch had finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutcome:
    """Result of a batch."""

    n_predicted: int
    n_skipped: int
    """Cases that an earlier batch had finished."""
    failures: tuple[Record, ...]
    remarks: tuple[str, ...] = ()
    """Sentences about label conventions that were not those of the scans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executor:
    """Place where the cases of a batch are computed: this process if no field is set."""

    n_workers: int | None = None
    """Processes of this machine, started by dask."""
    scheduler: str | None = None
    """Address of a dask cluster."""

    def __post_init__(self) -> None:
        if self.n_workers is not None and self.scheduler is not None:
            msg = "n_workers starts processes here, scheduler uses a running cluster: give one of them"
            raise UsageError(msg)

    @property
    def is_local(self) -> bool:
        """Whether the cases are computed in this process."""
        return self.n_workers is None and self.scheduler is None


LOCAL = Executor()


def _ignore(outcome: CaseOutcome) -> None:
    pass


def predict_folder(  # noqa: PLR0913 - each is a choice of its own
    inputs: Sequence[Path],
    models: Sequence[Path],
    output: Path,
    settings: PredictionSettings = DEFAULT_SETTINGS,
    *,
    n_workers: int | None = None,
    scheduler: str | None = None,
    dicom: DicomOptions = DEFAULT_OPTIONS,
    on_case: Callable[[CaseOutcome], None] = _ignore,
    track: Track = untracked,
) -> BatchOutcome:
    """Segment all cases of folders or tables of paths into an output folder.

    Cases that an earlier call finished with the same scans, model and settings are kept. A case
    that fails is listed in failures.csv of the output folder and does not stop the others.

    Args:
        inputs: Folders of scans of any layout or of DICOM files, or .csv or .json tables of paths.
        models: Runs, checkpoints or exported folders; the probabilities of several are averaged.
        output: Folder to write to.
        settings: Settings of prediction.
        n_workers: Processes to start on this machine with dask, which share the cases.
        scheduler: Address of a running dask cluster to use instead.
        dicom: Choices about DICOM examinations.
        on_case: Called with the outcome of each case as it ends.
        track: Shows the progress.

    Raises:
        LayoutError: A folder holds no cases.
        UsageError: The inputs, the models or the output folder cannot be used.
        EnvironmentalError: The device is not available, or the output folder cannot be written to.

    Example:
        predict_folder([Path("scans")], [Path("runs/fold0")], Path("predictions"))
    """
    return predict_cases(
        find_scans(inputs, output, dicom, track=track),
        models,
        output,
        settings,
        executor=Executor(n_workers=n_workers, scheduler=scheduler),
        on_case=on_case,
        track=track,
    )


def find_scans(
    inputs: Sequence[Path],
    output: Path,
    dicom: DicomOptions = DEFAULT_OPTIONS,
    *,
    track: Track = untracked,
) -> tuple[Case, ...]:
    """Return the cases in folders and tables; DICOM files are converted into the output folder.

    The arguments and errors are those of `predict_folder`.
    """
    scans = output / SCANS_NAME
    convert = partial(cases_of_dicom, scans=scans, options=dicom, track=track)
    return find_inputs(inputs, of_dicom=convert)


def predict_cases(
    cases: Sequence[Case],
    models: Sequence[Path],
    output: Path,
    settings: PredictionSettings = DEFAULT_SETTINGS,
    *,
    executor: Executor = LOCAL,
    on_case: Callable[[CaseOutcome], None] = _ignore,
    track: Track = untracked,
) -> BatchOutcome:
    """Segment cases into an output folder; see `predict_folder`."""
    folder = OutputFolder(output)
    check_apart(cases, folder)
    check_names(settings.layout, [case.case_id for case in cases])
    check_machine(output)
    predictor = Predictor.load(models, settings)
    with folder.opened():
        if executor.is_local:
            work = CaseWork(predictor=predictor, output=folder, earlier=folder.records())
            outcomes = local_outcomes(cases, work)
        else:
            job = Job(
                model_paths=tuple(path.absolute() for path in models),
                fingerprint=predictor.model.fingerprint,
                settings=settings,
                output_path=output.absolute(),
            )
            outcomes = cluster_outcomes(cases, job, executor)
        return finish_batch(outcomes, folder, len(cases), on_case=on_case, track=track)


def check_apart(inputs: Sequence[Case], output: OutputFolder) -> None:
    """Raise `UsageError` if results would be written among the scans, and perhaps over one."""
    # realpath, because a link to itself is a problem of its case alone
    places = {
        Path(os.path.realpath(case.path_of(scan))).parent
        for case in inputs
        if not case.problems
        for scan in case.images
    }
    if output.path.resolve() in places:
        msg = f"{output.path} holds scans: give another folder for the results with --output"
        raise UsageError(msg)


def finish_batch(
    outcomes: Generator[CaseOutcome],
    output: OutputFolder,
    n_cases: int,
    *,
    on_case: Callable[[CaseOutcome], None] = _ignore,
    track: Track = untracked,
) -> BatchOutcome:
    """Count the outcomes of a batch as they arrive, and write its tables, also after an error.

    Args:
        outcomes: Generator from `local_outcomes` or `cluster_outcomes`; after an error, cases that
            have been started are finished.
        output: Folder of the tables.
        n_cases: Number of the outcomes.
        on_case: Called with each outcome.
        track: Shows the progress.
    """
    n_predicted, n_skipped = 0, 0
    failures: list[Record] = []
    done: list[Record] = []
    try:
        with closing(outcomes):
            for outcome in track(outcomes, what="predicting", total=n_cases):
                if outcome.record.status == "failed":
                    failures.append(outcome.record)
                else:
                    done.append(outcome.record)
                n_predicted += outcome.record.status == "done" and outcome.is_new
                n_skipped += not outcome.is_new
                on_case(outcome)
    finally:
        output.write_tables(sorted(failures, key=lambda record: record.case_id))
    return BatchOutcome(
        n_predicted=n_predicted,
        n_skipped=n_skipped,
        failures=tuple(failures),
        remarks=convention_remarks(done),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadCase:
    """A case that has been read."""

    case: Case
    scan: Scan
    inputs: tuple[str, ...]
    """SHA-256 of the files."""
    files: dict[str, str]
    """File that was read as each modality."""
    key: str
    seconds: float
    """Time of reading."""
    source: DicomSource | None = None
    """DICOM files that the case was converted from."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PredictedCase:
    """A case whose result is to be written."""

    read: ReadCase
    result: Prediction


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseWork:
    """Reads, predicts and writes the cases of one batch."""

    predictor: Predictor
    output: OutputFolder
    earlier: Mapping[str, Record]
    """Records of earlier batches, by case id."""

    def run(self, case: Case) -> CaseOutcome:
        """Do all three stages."""
        read = self.read(case)
        if isinstance(read, CaseOutcome):
            return read
        predicted = self.predict(read)
        return predicted if isinstance(predicted, CaseOutcome) else self.write(predicted)

    def read(self, case: Case) -> ReadCase | CaseOutcome:
        """Read and check a case, unless it is finished."""
        return self._attempt(case.case_id, lambda: self._read(case))

    def predict(self, read: ReadCase) -> PredictedCase | CaseOutcome:
        """Segment a case."""
        return self._attempt(
            read.scan.case_id,
            lambda: PredictedCase(read=read, result=self.predictor.predict_scan(read.scan)),
        )

    def write(self, predicted: PredictedCase) -> CaseOutcome:
        """Write the files of a case."""
        return self._attempt(predicted.result.summary.case_id, lambda: self._write(predicted))

    def _read(self, case: Case) -> ReadCase | CaseOutcome:
        started_s = time.monotonic()
        case = self.predictor.accept(case)
        files = read_case_files(case, with_label=False)
        source = _source_of(case)
        key = key_of(
            (*files.hashes, source.key) if source else files.hashes,
            self.predictor.model.fingerprint,
            self.predictor.settings,
            case.modalities,
        )
        earlier = self.earlier.get(case.case_id)
        if earlier and self.output.is_finished(earlier, key):
            self._write_page(case, earlier, is_new=False)
            return CaseOutcome(record=earlier, is_new=False)
        scan = self.predictor.prepare(self.predictor.read(case, files))
        seconds = time.monotonic() - started_s
        return ReadCase(
            case=case,
            scan=scan,
            inputs=files.hashes,
            files=case.read_as,
            key=key,
            seconds=seconds,
            source=source,
        )

    def _write(self, predicted: PredictedCase) -> CaseOutcome:
        read, result = predicted.read, predicted.result
        settings, summary = self.predictor.settings, predicted.result.summary
        made, remarks = self.output.write_segmentation(
            read.scan, result, settings.layout, read.source
        )
        record = Record(
            **summary.model_dump(),
            status="done",
            key=read.key,
            inputs=read.inputs,
            files=read.files,
            model=self.predictor.model.fingerprint,
            settings=settings,
            outputs=(*made, *self.output.write_case(read.scan, result, settings)),
            version=version("brats_seg"),
        )
        record = record.model_copy(
            update={
                "warnings": (*summary.warnings, *remarks),
                "seconds": round(read.seconds + summary.seconds, 3),
                "peak_memory_mb": round(summary.peak_memory_mb, 1),
            }
        )
        self._write_page(read.case, record)
        return CaseOutcome(record=record)

    def _write_page(self, case: Case, record: Record, *, is_new: bool = True) -> None:
        pages = wings.pages() if self.predictor.settings.report else None
        if pages is None:
            return
        # from the files again: the network was given resampled and normalised scans
        files = pages.files_of_result(case, record, self.output.path)
        if is_new or not files.page.exists():
            pages.write_page_of(files)

    def _attempt(self, case_id: str, stage: Callable[[], Result]) -> Result | CaseOutcome:
        result = attempt_case(case_id, stage)
        if isinstance(result, Failure):
            return self._failed(case_id, result.error, result.message)
        return result

    def _failed(self, case_id: str, error: str, message: str) -> CaseOutcome:
        fingerprint = self.predictor.model.fingerprint
        record = _failure(case_id, error, message, fingerprint, self.predictor.settings)
        return CaseOutcome(record=record)


def local_outcomes(inputs: Sequence[Case], work: CaseWork) -> Generator[CaseOutcome]:
    """Predict cases in this process: one is predicted while the next is read and the last written."""
    with _one_thread() as reader, _one_thread() as writer:
        writing: Future[CaseOutcome] | None = None
        for read in _read_ahead(inputs, work, reader):
            predicted = read if isinstance(read, CaseOutcome) else work.predict(read)
            if writing is not None:
                yield writing.result()
            writing = writer.submit(_write, work, predicted)
        if writing is not None:
            yield writing.result()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Description of a batch for a worker, which loads the model itself."""

    model_paths: tuple[Path, ...]
    fingerprint: str
    """Fingerprint of the model."""
    settings: PredictionSettings
    output_path: Path


def cluster_outcomes(
    inputs: Sequence[Case], job: Job, executor: Executor
) -> Generator[CaseOutcome]:
    """Predict cases on a cluster, in the order in which they are finished.

    Raises:
        EnvironmentalError: `distributed` is not installed, or the scheduler does not answer.
    """
    output = OutputFolder(job.output_path)
    results = cluster_results(
        partial(run_case, job=job),
        inputs,
        n_workers=executor.n_workers,
        scheduler=executor.scheduler,
    )
    with closing(results):
        for case, result in results:
            outcome = result
            if isinstance(outcome, BaseException):
                outcome = _lost(case.case_id, outcome, job)
            if outcome.is_new:
                output.append(outcome.record)
            yield outcome


def run_case(case: Case, job: Job) -> CaseOutcome:
    """Do one case in a worker."""
    return _work(job).run(case)


@lru_cache(maxsize=1)
def _work(job: Job) -> CaseWork:
    predictor = Predictor.load(job.model_paths, job.settings)
    if predictor.model.fingerprint != job.fingerprint:
        msg = "the model changed while the batch was running. Start the same command again."
        raise UsageError(msg)
    output = OutputFolder(job.output_path)
    return CaseWork(predictor=predictor, output=output, earlier=output.records())


def _source_of(case: Case) -> DicomSource | None:
    """Return the DICOM files that a case was converted from, if it was."""
    return read_source(case.path_of(case.files["t1c"]).parent) if "t1c" in case.files else None


def _lost(case_id: str, error: BaseException, job: Job) -> CaseOutcome:
    """Return the outcome of a case that came back from its worker as an error."""
    if isinstance(error, BratsError):
        raise error
    message = (
        f"case {case_id}: its worker died {MAX_KILLED_WORKERS} times, most likely because memory "
        "ran out. Predict it alone, or on a machine with more memory."
    )
    if type(error).__name__ != "KilledWorker":
        message = f"case {case_id}: {error}"
    record = _failure(case_id, type(error).__name__, message, job.fingerprint, job.settings)
    return CaseOutcome(record=record)


def _read_ahead(
    inputs: Sequence[Case], work: CaseWork, reader: ThreadPoolExecutor
) -> Iterator[ReadCase | CaseOutcome]:
    coming: Future[ReadCase | CaseOutcome] | None = None
    for case in (*inputs, None):
        # submitted before the previous one is yielded, to be read while that one is predicted
        ready = coming
        coming = None if case is None else reader.submit(work.read, case)
        if ready is not None:
            yield ready.result()


def _write(work: CaseWork, predicted: PredictedCase | CaseOutcome) -> CaseOutcome:
    outcome = predicted if isinstance(predicted, CaseOutcome) else work.write(predicted)
    if outcome.is_new:
        work.output.append(outcome.record)
    return outcome


@contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of one thread, which finishes its task at the end and drops the waiting ones."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _failure(
    case_id: str, error: str, message: str, model: str, settings: PredictionSettings
) -> Record:
    """Return the record of a case that could not be predicted."""
    return Record(
        case_id=case_id,
        status="failed",
        model=model,
        settings=settings,
        error=error,
        message=message,
        version=version("brats_seg"),
    )
