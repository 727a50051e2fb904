"""Apply a function to many items on several processes or machines, by dask.

Items are shared out one by one. When a worker dies its item goes to another; an item that has
killed three workers is given up. All machines must see the same files under the same paths.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from brats_seg.errors import EnvironmentalError

MAX_KILLED_WORKERS = 3
"""Workers that may die over one item."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def cluster_results(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    n_workers: int | None,
    scheduler: str | None,
) -> Generator[tuple[Item, Result | BaseException]]:
    """Yield each item with its result, or with the error that it ended with, as they are done.

    Args:
        function: Function that can be pickled.
        items: Items that can be pickled.
        n_workers: Processes to start on this machine.
        scheduler: Address of a running scheduler to use instead.

    Raises:
        EnvironmentalError: `distributed` is not installed, or the scheduler does not answer.
    """
    distributed = _distributed()
    with _client(n_workers, scheduler) as client:
        item_of = {client.submit(function, item, pure=False): item for item in items}
        for future in distributed.as_completed(list(item_of)):
            error = future.exception()
            # the future is dropped, so that the cluster can free its result
            yield item_of.pop(future), future.result() if error is None else error


@contextmanager
def _client(n_workers: int | None, scheduler: str | None) -> Iterator[Any]:
    distributed = _distributed()
    if scheduler is not None:
        try:
            client = distributed.Client(scheduler)
        except (OSError, ValueError) as error:
            msg = (
                f"no dask scheduler answers at {scheduler} ({error}). Check the address; it looks "
                "like tcp://host:8786."
            )
            raise EnvironmentalError(msg) from error
        with client:
            yield client
        return
    import dask

    n_threads = max(1, (os.cpu_count() or 1) // (n_workers or 1))
    options = {
        # the scheduler gives an item up after more deaths than this
        "distributed.scheduler.allowed-failures": MAX_KILLED_WORKERS - 1,
        # an item that waits at a worker would be blamed for its death
        "distributed.scheduler.worker-saturation": 1.0,
        "distributed.nanny.pre-spawn-environ.OMP_NUM_THREADS": n_threads,
    }
    with (
        dask.config.set(options),
        distributed.LocalCluster(
            n_workers=n_workers, threads_per_worker=1, memory_limit=0, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        msg = (
            "--workers and --scheduler need dask, which is not installed. Run "
            "`pip install brats_seg[cluster]`, or leave these options out."
        )
        raise EnvironmentalError(msg) from error
    return distributed
