"""One function over many cases: those that fail are listed, and do not stop the others."""

# DOC data/processes: Processes that share out work, and what is said when one of them dies.

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from typing import Generic, Protocol, TypeVar

from brats_seg.errors import CaseError, EnvironmentalError
from brats_seg.progress import Track


@contextmanager
def worker_pool(
    n_workers: int, *, set_up: Callable[[], None] = lambda: None, when_killed: str
) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of processes, and end them afterwards whatever happens.

    Work that has begun is finished first; work that waits is dropped. The processes leave Ctrl-C to
    this one, and end when it is killed.

    Args:
        n_workers: Processes; started as there is work.
        set_up: Called once in each of them; must be picklable where processes are not forked.
        when_killed: What to do if the system ends one, for the message.

    Raises:
        EnvironmentalError: A process died.
    """
    pool = ProcessPoolExecutor(n_workers, initializer=_begin, initargs=(set_up,))
    try:
        yield pool
    except BrokenProcessPool as error:
        msg = f"a worker process was killed, most likely because memory ran out. {when_killed}"
        raise EnvironmentalError(msg) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(set_up: Callable[[], None]) -> None:
    # forked processes inherit handlers, such as a trainer's that take note and go on
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_up()


def _end_with_parent() -> None:
    """End this process when its parent is gone: it would wait for work for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


Result = TypeVar("Result")


class OfCase(Protocol):
    """Anything that belongs to a case."""

    @property
    def case_id(self) -> str:
        """The case."""


Item = TypeVar("Item", bound=OfCase)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A case that could not be dealt with."""

    case_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts(Generic[Result]):
    """What became of every case."""

    results: tuple[Result, ...]
    """In the order of the cases."""
    failures: tuple[Failure, ...]


def attempt_all(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    what: str,
    *,
    n_workers: int,
    track: Track,
) -> Attempts[Result]:
    """Apply a function to every case, in this process if there are no workers.

    Raises:
        EnvironmentalError: A process was killed.
    """
    done = track(
        _outcomes(partial(_attempt, function), items, n_workers), what=what, total=len(items)
    )
    outcomes = list(done)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    results = [outcome for outcome in outcomes if not isinstance(outcome, Failure)]
    return Attempts(results=tuple(results), failures=tuple(failures))


def _outcomes(
    attempt: Callable[[Item], Result | Failure], items: Sequence[Item], n_workers: int
) -> Iterator[Result | Failure]:
    if n_workers == 0:
        yield from map(attempt, items)
        return
    with worker_pool(n_workers, when_killed="Use fewer workers.") as pool:
        yield from pool.map(attempt, items)


def _attempt(function: Callable[[Item], Result], item: Item) -> Result | Failure:
    try:
        return function(item)
    except CaseError as error:
        return Failure(case_id=item.case_id, reason=str(error))
