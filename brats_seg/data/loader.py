"""Patches made beside the training, in worker processes, and handed over in order."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import overload

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """The patches of a window of accumulation, and how they will be asked for."""

    draws: tuple[Draw, ...]
    n_again: int = 0
    """How many of them, from the first on, will be asked for a second time."""

    @property
    def order(self) -> tuple[Draw, ...]:
        """The draws as they will be asked for."""
        return self.draws + self.draws[: self.n_again]


class PatchStream:
    """The patches of windows, none of them held: made ahead as foreseen, and at once if not.

    A window that is computed twice, or again because memory ran out, asks twice, and gets the same
    patch. So the memory that patches take does not depend on how many a window has.
    """

    def __init__(
        self, dataset: PatchDataset, windows: Sequence[Foreseen], *, n_workers: int
    ) -> None:
        self._dataset = dataset
        self._windows = windows
        # in this process nothing is made ahead, and so nothing need be foreseen
        self._is_ahead = n_workers > 0
        orders = chain.from_iterable(window.order for window in windows)
        self._made = draw_loader(dataset, orders, n_workers)
        self._next: deque[Draw] = deque()

    def __iter__(self) -> Iterator["WindowPatches"]:
        """Yield the patches of each window; those of the one before are then out of reach."""
        for window in self._windows:
            self._next = deque(window.order if self._is_ahead else ())
            yield WindowPatches(self, window.draws)
            while self._next:
                self.take(self._next[0])

    def take(self, draw: Draw) -> Sample:
        """Return the patch of a draw of this window; raises as `draw_loader` does."""
        if self._next and self._next[0] == draw:
            self._next.popleft()
            return next(self._made)
        return self._dataset[draw]


class WindowPatches(Sequence[Sample]):
    """The patches of one window, each made when it is asked for."""

    def __init__(self, stream: PatchStream, draws: tuple[Draw, ...]) -> None:
        self._stream = stream
        self.draws = draws

    def __len__(self) -> int:
        return len(self.draws)

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...

    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        if isinstance(place, slice):
            return [self._stream.take(draw) for draw in self.draws[place]]
        return self._stream.take(self.draws[place])


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
