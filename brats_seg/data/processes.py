"""Processes that share out work, and what is said when one of them dies."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import parent_process

from brats_seg.errors import EnvironmentalError


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
