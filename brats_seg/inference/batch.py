"""Predict many cases into one folder, in this process or by dask.

The next case is read while one is predicted and the previous one is written. An error of a case ends
that case only; an error of the machine or of the command ends the batch. With dask, cases are shared
out one by one; when a worker dies its case goes to another. All machines must see the same files
under the same paths.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from brats_seg.cases.case import Case, read_case_files
from brats_seg.cases.find import find_inputs
from brats_seg.cases.many import Failure, attempt_case
from brats_seg.cpu_threads import available_cpus, chosen_by_user
from brats_seg.errors import BratsError, EnvironmentalError, UsageError
from brats_seg.inference.method import Scan
from brats_seg.inference.predict import Prediction, Predictor
from brats_seg.inference.results import (
    SCANS_NAME,
    OutputFolder,
    Record,
    check_names,
    convention_remarks,
    key_of,
    result_files,
)
from brats_seg.inference.settings import DEFAULT_SETTINGS, PredictionSettings
from brats_seg.progress import Track, untracked
from brats_seg.runtime.machine import check_machine
from brats_seg.wings import dicom, pages

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Workers: TypeAlias = int | str | None
"""Number of processes of this machine, or address of a dask cluster; None computes in this process."""

MAX_KILLED_WORKERS = 3
"""Workers that may die over one case."""
ANSWER_S = 20.0
"""Time in which a scheduler must answer; a busy one takes less than a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseOutcome:
    """Result of one case of a batch."""

    record: Record | Failure
    is_new: bool = True
    """False for a case that an earlier batch had finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutcome:
    """Result of a batch."""

    predicted: tuple[str, ...]
    """Ids of the cases that were predicted now."""
    n_skipped: int
    """Cases that an earlier batch had finished."""
    failures: tuple[Failure, ...]
    remarks: tuple[str, ...] = ()
    """Sentences about label conventions that were not those of the scans."""

    @property
    def n_predicted(self) -> int:
        """Number of the cases that were predicted now."""
        return len(self.predicted)


def _ignore(outcome: CaseOutcome) -> None:
    pass


def predict_folder(
    inputs: Sequence[Path],
    models: Sequence[Path],
    output: Path,
    settings: PredictionSettings = DEFAULT_SETTINGS,
    *,
    workers: Workers = None,
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
        workers: Number of processes to start on this machine with dask, or address of a running dask
            cluster; by default, cases are computed in this process.
        on_case: Called with the outcome of each case as it ends.
        track: Shows the progress.

    Raises:
        LayoutError: A folder holds no cases.
        UsageError: The inputs, the models or the output folder cannot be used.
        EnvironmentalError: The device is not available, or the output folder cannot be written to.

    Example:
        predict_folder([Path("scans")], [Path("runs/fold0")], Path("predictions"))
    """
    cases = find_scans(inputs, output, track=track)
    return predict_cases(
        cases, models, output, settings, workers=workers, on_case=on_case, track=track
    )


def find_scans(
    inputs: Sequence[Path], output: Path, options: Any = None, *, track: Track = untracked
) -> tuple[Case, ...]:
    """Return the cases in folders and tables; DICOM files are converted into the output folder.

    Args:
        inputs: As of `predict_folder`.
        output: As of `predict_folder`.
        options: `dicom.convert.DicomOptions`: choices about DICOM examinations.
        track: Shows the progress.
    """
    convert, wing = None, dicom()
    if wing is not None:
        options = options or wing.DEFAULT_OPTIONS
        scans = output / SCANS_NAME
        convert = partial(wing.cases_of_dicom, scans=scans, options=options, track=track)
    return find_inputs(inputs, of_dicom=convert)


def predict_cases(
    cases: Sequence[Case],
    models: Sequence[Path],
    output: Path,
    settings: PredictionSettings = DEFAULT_SETTINGS,
    *,
    workers: Workers = None,
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
        if workers is None:
            work = CaseWork(predictor=predictor, output=folder, earlier=folder.records())
            outcomes = local_outcomes(cases, work)
        else:
            job = Job(
                model_paths=tuple(path.absolute() for path in models),
                fingerprint=predictor.model.fingerprint,
                settings=settings,
                output_path=output.absolute(),
            )
            outcomes = cluster_outcomes(cases, job, workers)
        done = finish_batch(outcomes, folder, len(cases), on_case=on_case, track=track)
        return write_pages(done, cases, folder, track) if settings.report else done


def check_apart(inputs: Sequence[Case], output: OutputFolder) -> None:
    """Raise `UsageError` if results would be written among the scans, and perhaps over one."""
    # realpath, because a link to itself is a problem of its case alone
    folders = {
        Path(os.path.realpath(case.path_of(scan))).parent
        for case in inputs
        if not case.problems
        for scan in case.images
    }
    if output.path.resolve() in folders:
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
    """Count the outcomes of a batch as they arrive, and write its tables, also after an error."""
    ended: list[CaseOutcome] = []
    failures: list[Failure] = []
    try:
        # closing finishes the cases that have been started
        with closing(outcomes):
            for outcome in track(outcomes, what="predicting", total=n_cases):
                ended.append(outcome)
                if isinstance(outcome.record, Failure):
                    failures.append(outcome.record)
                on_case(outcome)
    finally:
        output.write_tables(sorted(failures, key=lambda failure: failure.case_id))
    done = [outcome for outcome in ended if isinstance(outcome.record, Record)]
    return BatchOutcome(
        predicted=tuple(outcome.record.case_id for outcome in done if outcome.is_new),
        n_skipped=sum(not outcome.is_new for outcome in done),
        failures=tuple(failures),
        remarks=convention_remarks(one.record for one in done if isinstance(one.record, Record)),
    )


def write_pages(
    outcome: BatchOutcome, cases: Sequence[Case], output: OutputFolder, track: Track
) -> BatchOutcome:
    """Write the pages of the cases that have been predicted, by several processes.

    Raises:
        UsageError: The part of the package that writes pages is missing.
    """
    wing, records = pages(), output.records()
    if wing is None:
        msg = "the pages of --report need brats_seg.pages, which is missing: install it, or leave it out"
        raise UsageError(msg)
    case_ids = tuple(
        case.case_id
        for case in cases
        if case.case_id in outcome.predicted
        or (case.case_id in records and not wing.page_path(output.path, case.case_id).exists())
    )
    if not case_ids:
        return outcome
    options = wing.PageOptions(case_ids=case_ids)
    made = wing.write_report([output.path], options, n_workers=available_cpus(), track=track)
    failures = (*outcome.failures, *made.failures)
    if made.failures:
        output.write_tables(failures)
    return replace(outcome, failures=failures)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadCase:
    """A case that has been read, and its prediction as soon as there is one."""

    case: Case
    scan: Scan
    inputs: tuple[str, ...]
    """SHA-256 of the files."""
    key: str
    seconds: float
    """Time of reading."""
    source: Any
    """DICOM files that the case was converted from; None if it was not."""
    prediction: Prediction | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseWork:
    """Reads, predicts and writes the cases of one batch.

    Each stage returns the input of the next, or the outcome of a case that has ended.
    """

    predictor: Predictor
    output: OutputFolder
    earlier: Mapping[str, Record]
    """Records of earlier batches, by case id."""

    def run(self, case: Case) -> CaseOutcome:
        """Do all three stages."""
        return self.write(self.predict(self.read(case)))

    def read(self, case: Case) -> ReadCase | CaseOutcome:
        """Read and check a case, unless it is finished."""
        return _attempt(case.case_id, lambda: self._read(case))

    def predict(self, read: ReadCase | CaseOutcome) -> ReadCase | CaseOutcome:
        """Segment a case."""
        if isinstance(read, CaseOutcome):
            return read
        predict = partial(self.predictor.predict_scan, read.scan)
        return _attempt(read.case.case_id, lambda: replace(read, prediction=predict()))

    def write(self, predicted: ReadCase | CaseOutcome) -> CaseOutcome:
        """Write the files of a case."""
        if isinstance(predicted, CaseOutcome):
            return predicted
        return _attempt(predicted.case.case_id, lambda: self._write(predicted))

    def write_and_record(self, predicted: ReadCase | CaseOutcome) -> CaseOutcome:
        """Write the files of a case, and then its line of the manifest."""
        outcome = self.write(predicted)
        if outcome.is_new:
            self.output.append(outcome.record)
        return outcome

    def _read(self, case: Case) -> ReadCase | CaseOutcome:
        started_s = time.monotonic()
        case = self.predictor.accept(case)
        files = read_case_files(case, with_label=False)
        inputs, source = files.hashes, _source_of(case)
        model, settings = self.predictor.model, self.predictor.settings
        hashes = inputs if source is None else (*inputs, source.key)
        key = key_of(hashes, model.fingerprint, settings, case.modalities)
        earlier = self.earlier.get(case.case_id)
        if earlier and self.output.is_finished(earlier, key):
            return CaseOutcome(record=earlier, is_new=False)
        scan = self.predictor.prepare(self.predictor.read(case, files))
        seconds = time.monotonic() - started_s
        return ReadCase(
            case=case, scan=scan, inputs=inputs, key=key, seconds=seconds, source=source
        )

    def _write(self, read: ReadCase) -> CaseOutcome:
        prediction, settings = read.prediction, self.predictor.settings
        assert prediction is not None
        summary = prediction.summary
        segmentation, remarks = self._write_segmentation(read, prediction)
        outputs = self.output.write_case(read.scan, prediction, settings)
        provenance = {
            "key": read.key,
            "inputs": read.inputs,
            "files": read.case.read_as,
            "model": self.predictor.model.fingerprint,
            "settings": settings,
            "outputs": (*segmentation, *outputs),
            "version": version("brats_seg"),
            "warnings": (*summary.warnings, *remarks),
            "seconds": round(read.seconds + summary.seconds, 3),
            "peak_memory_mb": round(summary.peak_memory_mb, 1),
        }
        return CaseOutcome(record=Record.model_validate({**dict(summary), **provenance}))

    def _write_segmentation(
        self, read: ReadCase, prediction: Prediction
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Write the DICOM segmentation of a case that was converted from DICOM.

        Returns:
            The name of the file, and a remark if there is none although there should be.
        """
        wing = dicom()
        if wing is None or read.source is None:
            return (), ()
        convention, geometry = prediction.convention, read.scan.geometry
        files = result_files(self.predictor.settings.layout, read.case.case_id, convention)
        path = self.output.path / files.segmentation
        labels = prediction.label_map
        remark = wing.write_segmentation(path, labels, geometry, convention, read.source)
        return ((), (remark,)) if remark else ((files.segmentation,), ())


def local_outcomes(cases: Sequence[Case], work: CaseWork) -> Generator[CaseOutcome]:
    """Predict cases in this process: one is predicted while the next is read and the last written."""
    with _one_thread() as reader, _one_thread() as writer:
        predicted = map(work.predict, _ahead(reader, work.read, cases))
        yield from _ahead(writer, work.write_and_record, predicted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Description of a batch for a worker, which loads the model itself."""

    model_paths: tuple[Path, ...]
    fingerprint: str
    """Fingerprint of the model."""
    settings: PredictionSettings
    output_path: Path


def cluster_outcomes(cases: Sequence[Case], job: Job, workers: int | str) -> Generator[CaseOutcome]:
    """Predict cases by dask, in the order in which they are finished.

    Raises:
        EnvironmentalError: `distributed` is not installed, the scheduler does not answer, or the
            processes cannot be started.
    """
    output = OutputFolder(job.output_path)
    with closing(cluster_results(partial(run_case, job=job), cases, workers)) as results:
        for case, result in results:
            if isinstance(result, BaseException):
                result = _lost(case.case_id, result)
            if result.is_new:
                output.append(result.record)
            yield result


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


def _source_of(case: Case) -> Any:
    """Return the DICOM files that a case was converted from, if it was."""
    wing = dicom()
    if wing is None or "t1c" not in case.files:
        return None
    return wing.read_source(case.path_of(case.files["t1c"]).parent)


def _attempt(case_id: str, stage: Callable[[], Result]) -> Result | CaseOutcome:
    result = attempt_case(case_id, stage)
    return CaseOutcome(record=result) if isinstance(result, Failure) else result


def _lost(case_id: str, error: BaseException) -> CaseOutcome:
    """Return the outcome of a case that came back from its worker as an error."""
    if isinstance(error, BratsError):
        raise error
    message = f"case {case_id}: {error}"
    if type(error).__name__ == "KilledWorker":
        message = (
            f"case {case_id}: its worker died {MAX_KILLED_WORKERS} times, most likely because memory "
            "ran out. Predict it alone, or on a machine with more memory."
        )
    failure = Failure(case_id=case_id, error=type(error).__name__, message=message)
    return CaseOutcome(record=failure)


def _ahead(
    pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield the results of a function, each after the next item has been handed to the pool."""
    running: Future[Result] | None = None
    for item in items:
        coming = pool.submit(function, item)
        if running is not None:
            yield running.result()
        running = coming
    if running is not None:
        yield running.result()


@contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of one thread, which finishes its task at the end and drops the waiting ones."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def cluster_results(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int | str
) -> Generator[tuple[Item, Result | BaseException]]:
    """Yield each item with its result, or with the error that it ended with, as they are done."""
    distributed = _distributed()
    with _client(workers) as client:
        item_of = {client.submit(function, item, pure=False): item for item in items}
        for future in distributed.as_completed(list(item_of)):
            error = future.exception()
            # the future is dropped, so that the cluster can free its result
            yield item_of.pop(future), future.result() if error is None else error


@contextmanager
def _client(workers: int | str) -> Iterator[Any]:
    distributed = _distributed()
    with ExitStack() as opened:
        if isinstance(workers, int):
            cluster = opened.enter_context(_local_cluster(workers))
        else:
            check_scheduler(workers)
            cluster = workers
        client = opened.enter_context(distributed.Client(cluster))
        if not client.scheduler_info()["workers"]:
            log.info("the scheduler at %s has no workers yet: waiting for them", workers)
        yield client


def check_scheduler(address: str) -> None:
    """Raise `EnvironmentalError` unless a dask scheduler answers at an address.

    `distributed.Client` waits without end for an address that accepts connections and is silent.
    """
    try:
        # in a thread of its own, because a notebook has an event loop already
        with ThreadPoolExecutor(1) as pool:
            kind = pool.submit(asyncio.run, _kind_at(address)).result()
    except (OSError, ValueError, TimeoutError) as error:
        found = f"{error}" or f"no answer in {ANSWER_S:.0f} s"
    else:
        if kind == "Scheduler":
            return
        found = f"a dask {kind}"
    msg = (
        f"no dask scheduler answers at {address} ({found}). Check the address; it looks like "
        "tcp://host:8786."
    )
    raise EnvironmentalError(msg)


async def _kind_at(address: str) -> str:
    """Return what answers at an address: `Scheduler`, `Worker` or `Nanny`."""
    distributed = _distributed()
    arguments = distributed.Security().get_connection_args("client")
    async with (
        asyncio.timeout(ANSWER_S),
        distributed.rpc(address, connection_args=arguments) as server,
    ):
        identity: dict[str, Any] = await server.identity()
    return str(identity["type"])


@contextmanager
def _local_cluster(n_workers: int) -> Iterator[Any]:
    import dask

    distributed = _distributed()
    _check_loop_back()
    options: dict[str, Any] = {
        # the scheduler gives a case up after more deaths than this
        "distributed.scheduler.allowed-failures": MAX_KILLED_WORKERS - 1,
        # a case that waits at a worker would be blamed for its death
        "distributed.scheduler.worker-saturation": 1.0,
    }
    n_threads = max(1, available_cpus() // n_workers)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # dask sets both to 1, and torch takes the lower
        value = chosen_by_user(name) or str(n_threads)
        options[f"distributed.nanny.pre-spawn-environ.{name}"] = value
    with ExitStack() as opened:
        opened.enter_context(dask.config.set(options))
        try:
            cluster = distributed.LocalCluster(
                n_workers=n_workers, threads_per_worker=1, memory_limit=0, dashboard_address=None
            )
        except (OSError, RuntimeError, TimeoutError) as error:
            msg = (
                f"the {n_workers} processes of --workers could not be started ({error}). Use "
                "fewer, or leave --workers out."
            )
            raise EnvironmentalError(msg) from error
        yield opened.enter_context(cluster)


def _check_loop_back() -> None:
    """Raise `EnvironmentalError` unless processes of this machine can connect to each other."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=ANSWER_S),
        ):
            return
    except OSError as error:
        msg = (
            f"--workers needs connections between processes of this machine, and 127.0.0.1 cannot "
            f"be reached ({error.strerror or error}). Leave --workers out, or give the container a "
            "loop-back network interface."
        )
        raise EnvironmentalError(msg) from error


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        msg = (
            "--workers needs dask, which is not installed. Run "
            "`pip install brats_seg[cluster]`, or leave these options out."
        )
        raise EnvironmentalError(msg) from error
    return distributed
