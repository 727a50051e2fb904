"""Patches made beside the training, in worker processes, and handed over in order."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial

import torch

from brats_seg.data.dataset import PatchDataset, Sample
from brats_seg.data.patches import Draw
from brats_seg.data.processes import worker_pool
from brats_seg.errors import EnvironmentalError

PATCHES_AHEAD = 2
"""Per worker: one in the making, and one to hand over while the network learns."""

_LESS_MEMORY = "Set training.n_workers lower, or to 0."
_SHARED_MEMORY = (
    "In a container, /dev/shm, through which patches pass, may be too small: start it with "
    "--shm-size=8g."
)


def draw_loader(dataset: PatchDataset, draws: Iterable[Draw], n_workers: int) -> Iterator[Sample]:
    """Yield the patch of every draw, in the order of the draws.

    Args:
        dataset: Makes the patches.
        draws: Which patches.
        n_workers: Processes that make them; 0 makes each in this one when it is asked for.

    Raises:
        CaseError: A case was not prepared, or has no label map.
        EnvironmentalError: A worker was killed, or shared memory is too small.
    """
    if n_workers == 0:
        yield from map(dataset.__getitem__, draws)
        return
    set_up, advice = partial(_set_up, dataset), f"{_LESS_MEMORY} {_SHARED_MEMORY}"
    with worker_pool(n_workers, set_up=set_up, when_killed=advice) as pool:
        waiting: deque[Future[Sample]] = deque()
        for draw in draws:
            waiting.append(pool.submit(_make, draw))
            if len(waiting) > PATCHES_AHEAD * n_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_dataset: PatchDataset
"""Of a worker process, set when it begins."""


def _set_up(dataset: PatchDataset) -> None:
    global _dataset
    _dataset = dataset
    torch.set_num_threads(1)


def _make(draw: Draw) -> Sample:
    sample = _dataset[draw]
    try:
        for tensor in (sample.image, sample.target):
            tensor.share_memory_()
    except RuntimeError as error:
        msg = f"patches find no room in shared memory ({error}). {_LESS_MEMORY} {_SHARED_MEMORY}"
        raise EnvironmentalError(msg) from error
    return sample
