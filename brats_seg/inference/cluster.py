"""The same batch on many machines, or on several processes of this one, by dask.

Cases are shared out one by one. A worker loads the model once. When a worker dies its case goes to
another; a case that has killed three is given up. All machines must see scans, models and the
output folder under the same paths.
"""

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from brats_seg.cases.inputs import CaseInput
from brats_seg.errors import BratsError, EnvironmentalError, UsageError
from brats_seg.inference.batch import CaseOutcome, CaseWork, failure
from brats_seg.inference.model import load_model
from brats_seg.inference.output import OutputFolder
from brats_seg.inference.settings import PredictionSettings
from brats_seg.runtime.device import choose_device

MAX_KILLED_WORKERS = 3
"""Workers that may die over one case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker needs to know."""

    model_paths: tuple[Path, ...]
    fingerprint: str
    """Of the model."""
    settings: PredictionSettings
    output_path: Path


def cluster_endings(
    inputs: Sequence[CaseInput], job: Job, *, n_workers: int | None, scheduler: str | None
) -> Generator[CaseOutcome]:
    """Predict cases on a cluster, yielding how each ended, in the order in which they are done.

    Args:
        inputs: The cases.
        job: What to do with them.
        n_workers: Processes to start on this machine.
        scheduler: Address of a scheduler that is running, instead.

    Raises:
        EnvironmentalError: `distributed` is not installed, or the scheduler does not answer.
    """
    distributed = _distributed()
    output = OutputFolder(job.output_path)
    case_of = {}
    with _client(n_workers, scheduler) as client:
        for case_input in inputs:
            future = client.submit(run_case, case_input, job, pure=False)
            case_of[future] = case_input.case.case_id
        for future in distributed.as_completed(list(case_of)):
            ending = _ending(future, case_of.pop(future), job)
            if ending.is_new:
                output.append(ending.record)
            yield ending


def run_case(case_input: CaseInput, job: Job) -> CaseOutcome:
    """Do one case in a worker."""
    return _work(job).run(case_input)


@lru_cache(maxsize=1)
def _work(job: Job) -> CaseWork:
    device = choose_device(job.settings.device, job.settings.precision)
    output = OutputFolder(job.output_path)
    model = load_model(job.model_paths, device)
    if model.fingerprint != job.fingerprint:
        msg = "the model changed while the batch was running. Start the same command again."
        raise UsageError(msg)
    return CaseWork(model=model, settings=job.settings, output=output, earlier=output.records())


def _ending(future: Any, case_id: str, job: Job) -> CaseOutcome:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, BratsError):
        raise error
    message = (
        f"case {case_id}: its worker died {MAX_KILLED_WORKERS} times, most likely because memory "
        "ran out. Predict it alone, or on a machine with more memory."
    )
    if type(error).__name__ != "KilledWorker":
        message = f"case {case_id}: {error}"
    record = failure(case_id, type(error).__name__, message, job.fingerprint, job.settings)
    return CaseOutcome(record=record)


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
        # the scheduler gives up when there were more deaths than are allowed
        "distributed.scheduler.allowed-failures": MAX_KILLED_WORKERS - 1,
        # a case that waits at a worker would be blamed for its death
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
            "`pip install brats_seg[cluster]`, or leave them out."
        )
        raise EnvironmentalError(msg) from error
    return distributed
