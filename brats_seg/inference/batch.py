"""Many cases, one after another: read ahead, written behind, and none of them stops the rest."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass

from brats_seg.errors import UsageError
from brats_seg.inference.inputs import CaseInput
from brats_seg.inference.output import OutputFolder
from brats_seg.inference.record import Record
from brats_seg.inference.work import CaseWork, Ending, PredictedCase, ReadCase
from brats_seg.progress import Track, untracked


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutcome:
    """How a batch ended."""

    n_predicted: int
    n_skipped: int
    """Finished by an earlier batch."""
    failures: tuple[Record, ...]


def finish_batch(
    endings: Generator[Ending],
    output: OutputFolder,
    n_cases: int,
    *,
    report: Callable[[Ending], None],
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


def local_endings(inputs: Sequence[CaseInput], work: CaseWork) -> Generator[Ending]:
    """Predict cases in this process, yielding how each ended.

    While the networks work on one case, the next is read and the last is written.
    """
    with _one_thread() as reader, _one_thread() as writer:
        writing: Future[Ending] | None = None
        for read in _read_ahead(inputs, work, reader):
            predicted = read if isinstance(read, Ending) else work.predict(read)
            if writing is not None:
                yield writing.result()
            writing = writer.submit(_write, work, predicted)
        if writing is not None:
            yield writing.result()


def _read_ahead(
    inputs: Sequence[CaseInput], work: CaseWork, reader: ThreadPoolExecutor
) -> Iterator[ReadCase | Ending]:
    coming: Future[ReadCase | Ending] | None = None
    for case_input in (*inputs, None):
        # asked for before the last one is handed out: it is read while the networks work on that
        ready = coming
        coming = None if case_input is None else reader.submit(work.read, case_input)
        if ready is not None:
            yield ready.result()


def _write(work: CaseWork, predicted: PredictedCase | Ending) -> Ending:
    ending = predicted if isinstance(predicted, Ending) else work.write(predicted)
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


def check_apart(inputs: Sequence[CaseInput], output: OutputFolder) -> None:
    """Raise `UsageError` if results would lie among the scans, and perhaps replace one."""
    places = {(one.root / scan.path).resolve().parent for one in inputs for scan in one.case.images}
    if output.path.resolve() in places:
        msg = f"{output.path} holds scans: give another folder for the results with --output"
        raise UsageError(msg)
