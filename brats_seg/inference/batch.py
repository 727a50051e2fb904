"""Many cases, one after another: read ahead, written behind, and none of them stops the rest."""

# DOC inference/work: What is done with one case of a batch, in three stages, and what is recorded of it.
#
# Every stage answers with what the next one needs, or with how the case ended. What is wrong with a
# case ends that case; what is wrong with the machine or the command ends the batch.
#

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from brats_seg.cases.case import Case, read_case_files
from brats_seg.errors import CaseError, EnvironmentalError, UsageError
from brats_seg.inference.model import Model
from brats_seg.inference.output import OutputFolder, Record, key_of
from brats_seg.inference.predict import CaseResult, predict_scan
from brats_seg.inference.scan import Scan, read_scan
from brats_seg.inference.settings import InferenceConfig
from brats_seg.progress import Track, untracked

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseOutcome:
    """How one case of a batch ended."""

    record: Record
    is_new: bool = True
    """False for a case that an earlier batch had finished."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadCase:
    """A case that the network can be given."""

    scan: Scan
    inputs: tuple[str, ...]
    """SHA-256 of the files."""
    key: str
    seconds: float
    """Of reading."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PredictedCase:
    """A case whose result is to be written."""

    read: ReadCase
    result: CaseResult


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseWork:
    """Reads, predicts and writes cases of one batch."""

    model: Model
    settings: InferenceConfig
    output: OutputFolder
    earlier: Mapping[str, Record]
    """What earlier batches recorded, by case id."""

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
        """Have the networks segment a case."""
        return self._attempt(
            read.scan.case_id,
            lambda: PredictedCase(
                read=read, result=predict_scan(self.model, read.scan, self.settings)
            ),
        )

    def write(self, predicted: PredictedCase) -> CaseOutcome:
        """Write the files of a case."""
        return self._attempt(predicted.result.case_id, lambda: self._write(predicted))

    def _read(self, case: Case) -> ReadCase | CaseOutcome:
        started_s = time.monotonic()
        if case.problems:
            return self._failed(case.case_id, "CaseError", "; ".join(case.problems))
        try:
            inputs = read_case_files(case, with_label=False).contents
        except OSError as error:
            found = f"that it cannot be read ({error.strerror})"
            next_step = "Check its name, its rights and the disk."
            raise CaseError(
                case.case_id, str(error.filename), found, "a scan", next_step
            ) from error
        key = key_of(inputs, self.model.fingerprint, self.settings)
        earlier = self.earlier.get(case.case_id)
        if earlier is not None and self.output.is_finished(earlier, key):
            return CaseOutcome(record=earlier, is_new=False)
        scan = read_scan(case, self.model.identity.spacing_mm)
        return ReadCase(scan=scan, inputs=inputs, key=key, seconds=time.monotonic() - started_s)

    def _write(self, predicted: PredictedCase) -> CaseOutcome:
        read, result = predicted.read, predicted.result
        record = Record(
            case_id=result.case_id,
            status="done",
            key=read.key,
            inputs=read.inputs,
            model=self.model.fingerprint,
            settings=self.settings,
            outputs=self.output.write_case(read.scan, result, self.settings),
            convention=result.convention.name,
            volumes=result.volumes,
            warnings=result.warnings,
            seconds=round(read.seconds + result.seconds, 3),
            peak_memory_mb=round(result.peak_memory_mb, 1),
            device=result.device,
            version=version("brats_seg"),
        )
        return CaseOutcome(record=record)

    def _attempt(self, case_id: str, stage: Callable[[], Result]) -> Result | CaseOutcome:
        try:
            return stage()
        except (EnvironmentalError, UsageError):
            raise
        except CaseError as error:
            return self._failed(case_id, type(error).__name__, str(error))
        except Exception as error:
            # whatever a scan brings about, the night goes on; the trace tells where it was
            log.exception("case %s", case_id)
            message = (
                f"case {case_id}: {error}. This is a mistake of the program: please report it."
            )
            return self._failed(case_id, type(error).__name__, message)

    def _failed(self, case_id: str, error: str, message: str) -> CaseOutcome:
        return CaseOutcome(
            record=failure(case_id, error, message, self.model.fingerprint, self.settings)
        )


def failure(
    case_id: str, error: str, message: str, model: str, settings: InferenceConfig
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutcome:
    """How a batch ended."""

    n_predicted: int
    n_skipped: int
    """Finished by an earlier batch."""
    failures: tuple[Record, ...]


def finish_batch(
    endings: Generator[CaseOutcome],
    output: OutputFolder,
    n_cases: int,
    *,
    report: Callable[[CaseOutcome], None],
    track: Track = untracked,
) -> BatchOutcome:
    """Go through the endings of a batch as they come, and write the tables whatever happens.

    Args:
        endings: Of `local_endings` or of a cluster; what has begun when an error comes is finished.
        output: Where the tables go.
        n_cases: How many endings there will be.
        report: Called with each.
        track: Shows how far it is.
    """
    n_predicted, n_skipped = 0, 0
    failures: list[Record] = []
    try:
        with closing(endings):
            for ending in track(endings, what="predicting", total=n_cases):
                if ending.record.status == "failed":
                    failures.append(ending.record)
                n_predicted += ending.record.status == "done" and ending.is_new
                n_skipped += not ending.is_new
                report(ending)
    finally:
        output.write_tables(sorted(failures, key=lambda record: record.case_id))
    return BatchOutcome(n_predicted=n_predicted, n_skipped=n_skipped, failures=tuple(failures))


def local_endings(inputs: Sequence[Case], work: CaseWork) -> Generator[CaseOutcome]:
    """Predict cases in this process, yielding how each ended.

    While the networks work on one case, the next is read and the last is written.
    """
    with _one_thread() as reader, _one_thread() as writer:
        writing: Future[CaseOutcome] | None = None
        for read in _read_ahead(inputs, work, reader):
            predicted = read if isinstance(read, CaseOutcome) else work.predict(read)
            if writing is not None:
                yield writing.result()
            writing = writer.submit(_write, work, predicted)
        if writing is not None:
            yield writing.result()


def _read_ahead(
    inputs: Sequence[Case], work: CaseWork, reader: ThreadPoolExecutor
) -> Iterator[ReadCase | CaseOutcome]:
    coming: Future[ReadCase | CaseOutcome] | None = None
    for case in (*inputs, None):
        # asked for before the last one is handed out: it is read while the networks work on that
        ready = coming
        coming = None if case is None else reader.submit(work.read, case)
        if ready is not None:
            yield ready.result()


def _write(work: CaseWork, predicted: PredictedCase | CaseOutcome) -> CaseOutcome:
    ending = predicted if isinstance(predicted, CaseOutcome) else work.write(predicted)
    if ending.is_new:
        work.output.append(ending.record)
    return ending


@contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    """Give a thread that finishes what it has begun, and drops what waits."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def check_apart(inputs: Sequence[Case], output: OutputFolder) -> None:
    """Raise `UsageError` if results would lie among the scans, and perhaps replace one."""
    places = {case.path_of(scan).resolve().parent for case in inputs for scan in case.images}
    if output.path.resolve() in places:
        msg = f"{output.path} holds scans: give another folder for the results with --output"
        raise UsageError(msg)
