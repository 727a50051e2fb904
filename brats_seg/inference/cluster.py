"""Apply a function to many items on several processes or machines, by dask.

Items are shared out one by one. When a worker dies its item goes to another; an item that has
killed three workers is given up. All machines must see the same files under the same paths.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from brats_seg.cpu_threads import available_cpus, chosen_by_user
from brats_seg.errors import EnvironmentalError

log = logging.getLogger(__name__)

MAX_KILLED_WORKERS = 3
"""Workers that may die over one item."""

ANSWER_S = 20.0
"""Time in which a scheduler must answer; a busy one takes less than a second."""

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
        EnvironmentalError: `distributed` is not installed, the scheduler does not answer, or the
            processes cannot be started.
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
    with ExitStack() as opened:
        if scheduler is None:
            cluster = opened.enter_context(_local_cluster(n_workers))
        else:
            check_scheduler(scheduler)
            cluster = scheduler
        client = opened.enter_context(distributed.Client(cluster))
        if not client.scheduler_info()["workers"]:
            log.info("the scheduler at %s has no workers yet: waiting for them", scheduler)
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
def _local_cluster(n_workers: int | None) -> Iterator[Any]:
    import dask

    distributed = _distributed()
    _check_loop_back()
    options: dict[str, Any] = {
        # the scheduler gives an item up after more deaths than this
        "distributed.scheduler.allowed-failures": MAX_KILLED_WORKERS - 1,
        # an item that waits at a worker would be blamed for its death
        "distributed.scheduler.worker-saturation": 1.0,
    }
    n_threads = max(1, available_cpus() // (n_workers or 1))
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
