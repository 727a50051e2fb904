"""Apply a function to many cases, in worker processes; a case that fails does not stop the others."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, pairwise
from multiprocessing import parent_process
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from brats_seg.errors import MORE_MEMORY, BratsError, EnvironmentalError, UsageError, counted
from brats_seg.progress import Track, untracked
from brats_seg.tables import write_table

log = logging.getLogger(__name__)

Given = TypeVar("Given")
Result = TypeVar("Result")
_KILLED = "a worker process was killed, most likely because memory ran out"


class HasCaseId(Protocol):
    """Anything that belongs to a case."""

    @property
    def case_id(self) -> str:
        """Id of the case."""


Item = TypeVar("Item", bound=HasCaseId)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A case that could not be processed; one row of `failures.csv`."""

    case_id: str
    error: str
    """Name of the class of the error."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedCases(Generic[Result]):
    """The results of the cases that could be processed, and the failures of the others."""

    results: tuple[Result, ...]
    """Results in the order of the cases."""
    failures: tuple[Failure, ...]
    """Failures in the order of the cases."""


def map_cases(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    what: str,
    *,
    n_workers: int = 0,
    track: Track = untracked,
) -> MappedCases[Result]:
    """Apply a function to every case and collect the failures.

    Example:
        >>> from brats_seg.cases.case import Case
        >>> cases = [Case(case_id=name, patient_id=name, release="unknown") for name in "ab"]
        >>> map_cases(lambda case: case.case_id.upper(), cases, "upper case").results
        ('A', 'B')
    """
    with closing(map_in_workers(partial(attempt, function), items, n_workers)) as mapped:
        outcomes = list(track(mapped, what=what, total=len(items)))
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    results = [outcome for outcome in outcomes if not isinstance(outcome, Failure)]
    return MappedCases(results=tuple(results), failures=tuple(failures))


def attempt(function: Callable[[Item], Result], item: Item) -> Result | Failure:
    """Return the result of a function for one case, or a failure if it raises an error.

    An exception that is neither a `BratsError` nor a lack of memory is a bug: it is logged with its traceback.
    """
    try:
        return function(item)
    except (EnvironmentalError, UsageError):
        raise
    except Exception as error:
        message = str(error)
        if isinstance(error, MemoryError):
            message = f"case {item.case_id}: memory ran out. {MORE_MEMORY}"
        elif not isinstance(error, BratsError):
            log.exception("case %s", item.case_id)
            message = f"case {item.case_id}: {error}. This is a bug of brats_seg: please report it."
        return Failure(case_id=item.case_id, error=type(error).__name__, message=message)


def map_ahead(function: Callable[[Given], Result], items: Iterable[Given]) -> Generator[Result]:
    """Yield the results of a function in another thread, each after it has been handed the next item."""
    thread = ThreadPoolExecutor(1)
    try:
        started = (thread.submit(function, item) for item in items)
        for future, _next in pairwise(chain(started, [Future[Result]()])):
            yield future.result()
    finally:
        # finishes its task at the end, and drops the waiting ones
        thread.shutdown(cancel_futures=True)


def write_failures(failures: Sequence[Failure], path: Path) -> None:
    """Write a row for each failed case as CSV, or the header alone."""
    write_table(path, ("case_id", "error", "message"), map(astuple, failures))


def map_in_workers(
    function: Callable[[Given], Result], items: Sequence[Given], n_workers: int
) -> Generator[Result]:
    """Yield the results of a function from worker processes, in the order of the items; 0 works in this one.

    If a process is killed, as the system does where memory runs out, half as many do what is left.
    """
    while n_workers and items:
        with worker_pool(n_workers) as pool:
            try:
                for result in pool.map(function, items):
                    yield result
                    items = items[1:]
            except BrokenProcessPool:
                if n_workers == 1:
                    raise
                n_workers //= 2
                log.warning("%s: going on with %s", _KILLED, counted(n_workers, "process"))
    yield from map(function, items)


@contextmanager
def worker_pool(
    n_workers: int,
    *,
    set_up: Callable[[], None] | None = None,
    when_killed: str = MORE_MEMORY,
    context: BaseContext | None = None,
) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool of processes, and end them afterwards, also after an error.

    Tasks in progress are finished first; pending tasks are cancelled. The processes ignore Ctrl-C,
    which this process handles, and end if this process is killed.
    """
    try:
        pool = ProcessPoolExecutor(n_workers, context, _begin, (set_up,))
    except OSError as error:
        msg = f"worker processes could not start ({error}): /dev/shm or `ulimit -f` is too small"
        raise EnvironmentalError(msg) from error
    try:
        yield pool
    except BrokenProcessPool as error:
        msg = f"{_KILLED}. {when_killed}"
        raise EnvironmentalError(msg) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(set_up: Callable[[], None] | None) -> None:
    # forked processes inherit signal handlers, and those of a trainer do not end the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if set_up is not None:
        set_up()


def _end_with_parent() -> None:
    """End this process when its parent has ended; otherwise it would wait for tasks for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
