"""Predict many cases into one folder: in this process, in several, or on a cluster of dask.

The next case is read while one is predicted and the previous one is written. An error of a case ends
that case only; an error of the machine or of the command ends the batch. Workers take cases one by
one; when one dies, its case is predicted again. All machines of a cluster must see the same files
under the same paths. A folder that is watched is predicted in one batch after another.
"""

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeAlias

import torch

from brats_seg.cases.case import Case, load_case, read_case_files
from brats_seg.cases.find import find_inputs
from brats_seg.cases.layouts import files_below
from brats_seg.cases.many import Failure, attempt, map_ahead, worker_pool
from brats_seg.cpu_threads import COUNT_VARIABLES, available_cpus, user_value
from brats_seg.errors import BratsError, EnvironmentalError, LayoutError, UsageError
from brats_seg.evaluation.evaluate import recorded
from brats_seg.files import file_state
from brats_seg.inference import fuse, results
from brats_seg.inference.predict import Predictor
from brats_seg.inference.settings import DEFAULT_SETTINGS, PredictionSettings
from brats_seg.presets import TRUSTED, trusting
from brats_seg.progress import Track, untracked
from brats_seg.runtime.machine import check_machine
from brats_seg.wings import find_wing

log = logging.getLogger(__name__)

Submit: TypeAlias = Callable[[Case], "futures.Future[CaseOutcome]"]
Workers: TypeAlias = int | str | None
"""Number of processes of this machine, or address of a dask cluster; None computes in this process."""

MAX_KILLED_WORKERS = 3
"""Workers that may die over one case."""
_WHEN_KILLED = f"its worker died {MAX_KILLED_WORKERS} times, most likely because memory ran out. Predict it alone, or on a machine with more memory."
_WHEN_ENDED = "the dask scheduler has ended. Start the same command again when it runs, which continues with the other cases."
ANSWER_S = 20.0
"""Time in which a scheduler must answer; a busy one takes less than a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseOutcome:
    """Result of one case of a batch."""

    record: results.Record | Failure
    is_new: bool = True
    """False for a case that an earlier batch had finished, or whose scans cannot be opened: its results are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutcome:
    """Result of a batch, or of several one after another."""

    outcomes: tuple[CaseOutcome, ...] = ()
    """Last outcome of each case, and a failure for each page that could not be written."""

    @property
    def predicted(self) -> tuple[str, ...]:
        """Ids of the cases that were predicted now."""
        return tuple(record.case_id for record, is_new in self._records if is_new)

    @property
    def n_skipped(self) -> int:
        """Cases that an earlier call had finished."""
        return sum(not is_new for _, is_new in self._records)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Failures of cases and of pages."""
        return tuple(o.record for o in self.outcomes if isinstance(o.record, Failure))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about label conventions that were not those of the scans."""
        return results.convention_remarks(record for record, _ in self._records)

    @property
    def _records(self) -> list[tuple[results.Record, bool]]:
        return [(o.record, o.is_new) for o in self.outcomes if isinstance(o.record, results.Record)]


def predict_folder(
    inputs: Sequence[Path] | Sequence[Case] | Iterator[Sequence[Case]],
    models: Sequence[Path],
    output: Path,
    settings: PredictionSettings = DEFAULT_SETTINGS,
    *,
    workers: Workers = None,
    on_case: Callable[[CaseOutcome], None] = lambda _: None,
    track: Track = untracked,
) -> BatchOutcome:
    """Segment all cases of folders or tables of paths into an output folder.

    Cases that an earlier call finished with the same scans, model and settings are kept. A case
    that fails is listed in failures.csv of the output folder and does not stop the others.

    Args:
        inputs: Folders of scans of any layout or of DICOM files, .csv tables of paths, or cases;
            or batches of cases, such as `watched_scans` yields.
        models: Runs, checkpoints or exported folders; the probabilities of several are averaged. None
            are given for the network that the package carries.
        output: Folder to write to.
        settings: Settings of prediction.
        workers: Number of processes to start on this machine, at most one for each case, or address of
            a running dask cluster; by default, cases are computed in this process. A script that starts
            processes needs `if __name__ == "__main__":`, as any that uses `multiprocessing`.
        on_case: Called with the outcome of each case as it ends.
        track: Shows the progress.

    Raises:
        LayoutError: A folder holds no cases.
        UsageError: The inputs, the models or the output folder cannot be used.
        EnvironmentalError: The device is not available, or the output folder cannot be written to.

    Example:
        predict_folder([Path("scans")], [Path("runs/fold0")], Path("predictions"))
    """
    folder, done = results.OutputFolder(output), BatchOutcome()
    report = find_wing("pages.write") if settings.report else None
    if settings.report and report is None:
        msg = "the pages of --report need brats_seg.pages, which is missing: install it, or leave it out"
        raise UsageError(msg)
    # the cases of batches that arrive are not known yet
    check_apart((), output)
    batches = [find_scans(inputs, output, track=track)] if isinstance(inputs, Sequence) else inputs
    check_machine(output)
    predictor = Predictor.load(models, settings)
    with folder.opened():
        for cases in batches:
            cases = results.with_names_checked(cases, settings.layout, folder.records())
            if workers is None:
                outcomes = local_outcomes(cases, predictor, folder)
            else:
                job = Job(
                    model_paths=tuple(path.absolute() for path in models),
                    fingerprint=predictor.model.fingerprint,
                    settings=settings,
                    output_path=output.absolute(),
                    trusted=TRUSTED.get(),
                )
                outcomes = shared_outcomes(cases, job, workers)
            case_ids = {case.case_id for case in cases}
            earlier = [one for one in done.outcomes if one.record.case_id not in case_ids]
            done = finish_batch(
                outcomes, folder, len(cases), earlier=earlier, on_case=on_case, track=track
            )
            predicted = sorted(case_ids - {failure.case_id for failure in done.failures})
            if report and (unwritten := report.write_missing_pages(output, predicted, track)):
                without_page = [CaseOutcome(record=failure) for failure in unwritten]
                for outcome in without_page:
                    on_case(outcome)
                done = BatchOutcome(outcomes=(*done.outcomes, *without_page))
                folder.write_tables(done.failures)
    return done


def watched_scans(
    root: Path, output: Path, options: Any = None, *, quiet_s: float
) -> Iterator[tuple[Case, ...]]:
    """Yield the cases of a folder as they arrive, for `predict_folder`, without an end.

    A case is taken when none of its files has changed between two looks at the folder, and again when
    one has changed later.

    Args:
        root: Folder that scans of any layout, or DICOM files, are written to.
        output: Folder of the results.
        options: Choices about scans, a `dicom.preprocess.ScanOptions`.
        quiet_s: Seconds between two looks.
    """
    root, scans = root.absolute(), output.absolute() / results.SCANS_NAME
    seen = dict[frozenset[Path], dict[Path, str | None]]()
    looks: list[dict[Path, str]] = [{}, {}, {}]

    def is_ready(paths: Iterable[Path]) -> bool:
        # a file that has arrived after the last look is not in it
        watched = {path: looks[-1].get(path) for path in paths if not path.is_relative_to(scans)}
        is_new = watched.items() <= looks[-2].items() and seen.get(frozenset(watched)) != watched
        if is_new:
            seen[frozenset(watched)] = watched
        # of converted files, the examination was ready
        return is_new or not watched

    log.info("watching %s: cases are taken after %g s without a change; Ctrl-C ends", root, quiet_s)
    while True:
        looks[:] = *looks[1:], {path: file_state(path) for path in files_below(root)}
        # what has changed before the last look may be ready by now
        if looks[0] != looks[1]:
            try:
                if cases := find_scans([root], output, options, is_ready=is_ready):
                    yield cases
            except (LayoutError, UsageError) as error:
                # files that are still arriving need not be a case
                if looks[1] == looks[2]:
                    log.warning("%s", error)
        time.sleep(quiet_s)


def find_scans(
    inputs: Sequence[Path | Case],
    output: Path,
    options: Any = None,
    *,
    is_ready: Callable[[Iterable[Path]], bool] | None = None,
    track: Track = untracked,
) -> tuple[Case, ...]:
    """Return the cases that are given, or those in folders and tables, whose files are ready.

    DICOM files are converted into the output folder, and scans prepared, by options of
    `dicom.preprocess.ScanOptions`.
    """
    wing, scans = find_wing("dicom"), output / results.SCANS_NAME
    options = options or (wing and wing.ScanOptions())

    def convert(folder: Path) -> Any:
        assert wing is not None
        # the next search must not find what an interrupted one has written
        results.mark_as_results(scans)
        return wing.convert_studies(folder, scans, options, is_ready=is_ready, track=track)

    cases = tuple(case for case in inputs if isinstance(case, Case))
    paths = [path for path in inputs if not isinstance(path, Case)]
    cases = cases or find_inputs(paths, convert=convert if wing else None)
    check_apart(cases, output)
    cases = tuple(c for c in cases if not is_ready or is_ready(map(c.path_of, c.images)))
    if wing is None or not options.atlas:
        return cases
    results.mark_as_results(scans)
    return wing.prepare_cases(cases, scans / "prepared", options, track=track)


def check_apart(inputs: Sequence[Case], output: Path) -> None:
    """Raise `UsageError` if scans, or fused label maps, are in the folder of the results.

    Searches of cases pass over a folder of results; scans that were converted into it are its own.
    """
    scans = [case.path_of(scan) for case in inputs if not case.problems for scan in case.images]
    # realpath, because a link to itself is a problem of its case alone
    folders = [Path(os.path.realpath(path)).parents for path in scans]
    folder, converted = output.resolve(), (output / results.SCANS_NAME).resolve()
    is_fused = any(row.keys() == {*fuse.COLUMNS} for row in recorded(output).values())
    if is_fused or any(folder in above and converted not in above for above in folders):
        msg = f"{output} holds {'fused label maps' if is_fused else 'scans'}: give another folder for the results with --output"
        raise UsageError(msg)


def finish_batch(
    outcomes: Generator[CaseOutcome],
    output: results.OutputFolder,
    n_cases: int,
    *,
    earlier: Iterable[CaseOutcome] = (),
    on_case: Callable[[CaseOutcome], None] = lambda _: None,
    track: Track = untracked,
) -> BatchOutcome:
    """Collect the outcomes of a batch as they arrive, and write its tables, also after an error.

    Outcomes of earlier batches stand before them.
    """
    done = [*earlier]
    try:
        # closing finishes the cases that have been started
        with closing(outcomes):
            for outcome in track(outcomes, what="predicting", total=n_cases):
                output.append(outcome.record, is_new=outcome.is_new)
                done.append(outcome)
                on_case(outcome)
    finally:
        result = BatchOutcome(outcomes=tuple(done))
        output.write_tables(result.failures)
    return result


def case_stages(
    case: Case, predictor: Predictor, output: results.OutputFolder
) -> Iterator[CaseOutcome | None]:
    """Do a case in three stages: read it, predict it, and write its results.

    None is yielded after a stage, and the outcome as soon as there is one.
    """
    started_s, model = time.monotonic(), predictor.model
    predictor.check(case)
    # no result depends on a label map
    case = replace(case, files={name: case.files[name] for name in case.modalities})
    paths = {name: f"{case.root / str(case.files[name])}" for name in case.modalities}
    files, wing = read_case_files(case), find_wing("dicom")
    source = None if wing is None else wing.read_source(case.root / case.folder)
    hashes = files.hashes if source is None else (*files.hashes, source.key)
    # all that the result depends on, except the device; one file may be given as any modality
    parts = [*hashes, model.fingerprint, model.settings.result_text, *case.modalities]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    earlier = output.entries.get(case.case_id)
    if isinstance(earlier, results.Record) and output.is_finished(earlier, key):
        # the files may have moved
        yield CaseOutcome(record=earlier.model_copy(update={"files": paths}), is_new=False)
        return
    loaded = load_case(case, files=files, modalities=case.modalities)
    scan, inputs, reading_s = predictor.prepare(loaded), files.hashes, time.monotonic() - started_s
    # what is not needed any more takes the memory of the cases between the stages
    del files, loaded
    yield None
    prediction = predictor.predict_scan(scan)
    yield None
    # the label map is written last
    outputs, remark = output.write_case(scan, prediction, model.settings, source)
    warnings = [*prediction.summary.warnings, *filter(None, [remark])]
    old = (*earlier.inputs, *earlier.files.values()) if isinstance(earlier, results.Record) else ()
    if old and not {*old} & {*inputs, *(() if source else paths.values())}:
        # perhaps of another patient: an id may depend on the folders beside, and converted scans have the
        # paths of earlier ones
        warnings.append(f"these results replace those of other scans, such as {old[-1]}")
    entries = {
        **dict(prediction.summary),
        "warnings": tuple(warnings),
        "seconds": round(reading_s + prediction.summary.seconds, 3),
        "key": key,
        "inputs": inputs,
        "files": paths,
        "model": model.fingerprint,
        "settings": model.settings,
        "outputs": outputs,
        "version": version("brats_seg"),
    }
    yield CaseOutcome(record=results.Record.model_validate(entries))


class StartedCase:
    """A case whose stages are done one after another, perhaps in different threads."""

    def __init__(self, case: Case, predictor: Predictor, output: results.OutputFolder) -> None:
        self.case = case
        self.stages = case_stages(case, predictor, output)
        self.outcome: CaseOutcome | None = None

    def advance(self) -> Self:
        """Do the next stage, unless the case has ended; an error of the case ends it."""
        if self.outcome is None:
            result = attempt(lambda _: next(self.stages), self.case)
            if isinstance(result, Failure):
                # nothing is known of scans on a drive that is away
                paths = map(self.case.path_of, self.case.images)
                is_there = all(os.access(path, os.R_OK) for path in paths)
                result = CaseOutcome(record=result, is_new=is_there)
            self.outcome = result
        return self


def local_outcomes(
    cases: Iterable[Case], predictor: Predictor, output: results.OutputFolder
) -> Generator[CaseOutcome]:
    """Predict cases in this process: one is predicted while the next is read and the last written."""

    def write(case: StartedCase) -> CaseOutcome:
        outcome = case.advance().outcome
        assert outcome is not None
        # before the next case has been predicted
        output.append(outcome.record, is_new=outcome.is_new)
        return outcome

    started = (StartedCase(case, predictor, output) for case in cases)
    with closing(map_ahead(StartedCase.advance, started)) as read:
        yield from map_ahead(write, map(StartedCase.advance, read))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Description of a batch for a worker, which loads the model itself."""

    model_paths: tuple[Path, ...]
    fingerprint: str
    """Fingerprint of the model."""
    settings: PredictionSettings
    output_path: Path
    trusted: tuple[str, ...] = ()
    """Names of code that the person has typed, see `presets.trusting`."""


def shared_outcomes(cases: Sequence[Case], job: Job, workers: int | str) -> Generator[CaseOutcome]:
    """Predict cases by several processes, in the order in which they are finished."""
    with (
        _cluster(workers, job) if isinstance(workers, str) else _processes(workers, job, cases)
    ) as submit:
        case_of = {submit(case): case for case in cases}
        for future in futures.as_completed(list(case_of)):
            # dask cancels what it has not done: no failures, which would lose their earlier results
            error = EnvironmentalError(_WHEN_ENDED) if future.cancelled() else future.exception()
            yield _lost_outcome(case_of[future].case_id, error) if error else future.result()


def run_case(case: Case, job: Job) -> CaseOutcome:
    """Do one case in a worker."""
    # a worker of a cluster outlives the batch, and a later one replaces records
    started = StartedCase(case, _predictor(job), results.OutputFolder(job.output_path))
    while started.outcome is None:
        started.advance()
    return started.outcome


@lru_cache(maxsize=1)
def _predictor(job: Job) -> Predictor:
    with trusting(*job.trusted):
        predictor = Predictor.load(job.model_paths, job.settings)
    if predictor.model.fingerprint != job.fingerprint:
        msg = "the model changed while the batch was running. Start the same command again."
        raise UsageError(msg)
    return predictor


def _lost_outcome(case_id: str, error: BaseException) -> CaseOutcome:
    """Return the outcome of a case that came back from its worker as an error."""
    if isinstance(error, BratsError):
        raise error
    name, message = type(error).__name__, f"case {case_id}: {error}"
    if name in {"KilledWorker", "BrokenProcessPool"}:
        name, message = "KilledWorker", f"case {case_id}: {_WHEN_KILLED}"
    return CaseOutcome(record=Failure(case_id=case_id, error=name, message=message))


@contextmanager
def _processes(most: int, job: Job, cases: Sequence[Case]) -> Iterator[Submit]:
    """Start processes of this machine, at most one a case, and yield the function that hands them cases.

    They are reached through pipes, no port is opened. Each has one case at a time, so that no other
    is blamed for its death; the case is tried again in a new process.
    """
    n_workers = max(1, min(most, len(cases)))
    is_chosen = any(map(user_value, COUNT_VARIABLES))
    n_threads = max(1, available_cpus() // n_workers)
    set_up = None if is_chosen else partial(torch.set_num_threads, n_threads)
    context, when_killed = get_context("spawn"), "Use fewer --workers, or none."
    idle = SimpleQueue[futures.ProcessPoolExecutor]()

    def start(_: int = 0) -> futures.ProcessPoolExecutor:
        pool = worker_pool(1, set_up=set_up, when_killed=when_killed, context=context)
        process = pools.enter_context(pool)
        # raises if it cannot start, which is not the fault of a case
        process.submit(os.getpid).result()
        return process

    def predict(case: Case) -> CaseOutcome:
        process = idle.get()
        try:
            for _ in range(MAX_KILLED_WORKERS):
                try:
                    return process.submit(run_case, case, job).result()
                except BrokenProcessPool:
                    process = start()
            raise BrokenProcessPool
        finally:
            idle.put(process)

    with ExitStack() as pools, futures.ThreadPoolExecutor(n_workers) as threads:
        try:
            for process in threads.map(start, range(n_workers)):
                idle.put(process)
            yield lambda case: threads.submit(predict, case)
        finally:
            # finishes the cases in progress
            threads.shutdown(cancel_futures=True)


@contextmanager
def _cluster(address: str, job: Job) -> Iterator[Submit]:
    """Connect to a dask scheduler by TLS, and yield the function that hands its workers cases.

    Without TLS, whoever reaches the scheduler can run code here and on its workers: that takes dask's
    own setting `require-encryption: false`.
    """
    try:
        import dask
        import distributed
    except ImportError as error:
        msg = "--workers with an address needs dask: run `pip install brats_seg[cluster]`"
        raise EnvironmentalError(msg) from error
    is_waived = dask.config.get("distributed.comm.require-encryption") is False
    security = distributed.Security(require_encryption=not is_waived)

    async def identify() -> str:
        arguments = security.get_connection_args("client")
        async with (
            asyncio.timeout(ANSWER_S),
            distributed.rpc(address, connection_args=arguments) as server,
        ):
            return f"a dask {(await server.identity())['type']}"

    # the client waits without end for an address that accepts connections and is silent
    try:
        # in another thread, because a notebook has an event loop already
        with futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(asyncio.run, identify()).result()
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        answer = f"{error}" or f"no answer in {ANSWER_S:.0f} s"
    if answer != "a dask Scheduler":
        msg = f"no dask scheduler answers at {address} ({answer}); expected tls://HOST:8786, see docs/several-devices.md"
        raise EnvironmentalError(msg)
    with distributed.Client(address, security=security) as client:
        if not client.scheduler_info()["workers"]:
            log.info("the scheduler at %s has no workers yet: waiting for them", address)
        executor = client.get_executor(pure=False)
        yield lambda case: executor.submit(run_case, case, job)
