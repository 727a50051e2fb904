"""Load patches and whole cases as samples for a network, in worker processes.

A worker copies a sample into a block of shared memory, and the process that trains uses it there. The
block is free again as soon as nothing refers to the sample; its first byte says so to the worker. With
the `DataLoader` of torch a patch takes twice the CPU time, because the system fills the pages of new
shared memory with 0 first (`benchmarks/patches.py`); and its errors do not name a killed worker, nor
the case. As many blocks are kept as have been in use at one time.
"""

import hashlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from monai.transforms import Compose
from torch import Tensor
from torch.utils.data import Dataset

from brats_seg.cases.many import worker_pool
from brats_seg.data.store import open_case, verify_case
from brats_seg.data.transforms import apply_transforms, seed_patch
from brats_seg.errors import EnvironmentalError, counted
from brats_seg.labels import regions_of
from brats_seg.voxels.box import Box

log = logging.getLogger(__name__)

PATCHES_AHEAD = 2
"""Patches prepared in advance per worker: one in progress, and one that is finished."""
_ADVICE = (
    "Set training.n_workers lower, or to 0. In a container, /dev/shm, through which patches pass, may "
    "be too small: start it with --shm-size=8g."
)
_HEADER_BYTES = 64
"""Bytes of a block before the image: the first is 1 while it is in use, the others align it. The target of
another type is of single bytes, which need no alignment."""
Layout: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchKey:
    """Key of one patch of an epoch."""

    epoch: int
    case_id: str
    draw: int
    """Number of the patch among those of its case in the epoch, from 0."""


def stable_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on every part, the same in every process."""
    # repr distinguishes 1 from "1", and separates the parts
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def patch_seed(seed: int, key: PatchKey, purpose: str) -> int:
    """Return the seed of a patch for one purpose, such as its position."""
    return stable_seed(seed, key.epoch, key.case_id, key.draw, purpose)


def epoch_patches(
    case_ids: Iterable[str], epoch: int, per_case: int, seed: int
) -> tuple[PatchKey, ...]:
    """Return the patches of an epoch, `per_case` of every case, in random order."""
    keys = [
        PatchKey(epoch=epoch, case_id=case_id, draw=draw)
        for case_id in sorted(case_ids)
        for draw in range(per_case)
    ]
    order = np.random.default_rng(stable_seed(seed, epoch, "order")).permutation(len(keys))
    return tuple(keys[index] for index in order)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A patch or a whole case in the memory of the host, with the stored types."""

    image: Tensor
    """Normalised image (4, X, Y, Z) in float16."""
    target: Tensor
    """Region masks (3, X, Y, Z) in uint8, 1 inside; or the image itself for an autoencoder."""
    case_id: str


class PatchDataset(Dataset[Sample]):
    """Patches of prepared cases, read and augmented by a MONAI pipeline; indexed by `PatchKey`.

    Every transform is seeded from the seed of the run and the key, so that a key gives the same
    patch in any process. Samples share no memory.
    """

    def __init__(self, pipeline: Compose, *, seed: int, target_key: str = "label") -> None:
        """Load patches with a pipeline.

        Args:
            pipeline: Pipeline of `training_transforms`.
            seed: Seed of the run.
            target_key: Key of the target in the result of the pipeline; `label` has the region masks.
        """
        self.transform = pipeline
        self._seed = seed
        self._target_key = target_key

    def __getitem__(self, key: PatchKey) -> Sample:
        """Return the patch of a key.

        Raises:
            CaseError: The case was not prepared, or has no label map.
        """
        position = patch_seed(self._seed, key, "place")
        augment = patch_seed(self._seed, key, "augment")
        seed_patch(self.transform, position=position, augment=augment)
        with _one_thread():
            data = apply_transforms(self.transform, {"case_id": key.case_id})
        return Sample(image=data["image"], target=data[self._target_key], case_id=key.case_id)


def whole_case(folder: Path, case_id: str, target_key: str = "label") -> Sample:
    """Verify a prepared case, and return its whole brain crop.

    Raises:
        CaseError: The case was not prepared, is damaged, or has no label map.
    """
    verify_case(folder, case_id)
    case = open_case(folder, case_id)
    box = Box.at((0, 0, 0), case.shape)
    image, regions = box.read(case.image), regions_of(box.read(case.labels), case.convention)
    data = {"image": torch.from_numpy(image), "label": torch.from_numpy(regions.view(np.uint8))}
    return Sample(image=data["image"], target=data[target_key], case_id=case_id)


def patch_loader(
    dataset: PatchDataset, keys: Iterable[PatchKey], n_workers: int
) -> Iterator[Sample]:
    """Yield the patch of every key, in the order of the keys.

    If a worker is killed, or shared memory is too small, half as many load what is left, and at last none.

    Args:
        dataset: Dataset of the patches.
        keys: Keys of the patches.
        n_workers: Processes that load patches in advance; 0 loads each patch in this process.

    Raises:
        CaseError: A case was not prepared, or has no label map.
    """
    left = deque(keys)
    while n_workers and left:
        try:
            with closing(_load_ahead(dataset, tuple(left), n_workers)) as samples:
                for sample in samples:
                    yield sample
                    left.popleft()
        except EnvironmentalError as error:
            n_workers //= 2
            log.warning("%s Going on with %s.", error, counted(n_workers, "worker"))
    yield from map(dataset.__getitem__, left)


def _load_ahead(
    dataset: PatchDataset, keys: Iterable[PatchKey], n_workers: int
) -> Generator[Sample]:
    """Yield the patch of every key from worker processes; raise `EnvironmentalError` if one is killed."""
    with worker_pool(n_workers, set_up=partial(_set_up, dataset), when_killed=_ADVICE) as pool:
        waiting: deque[Future[_SentSample]] = deque()
        blocks: dict[tuple[int, int], Tensor] = {}
        for key in keys:
            waiting.append(pool.submit(_load, key))
            if len(waiting) > PATCHES_AHEAD * n_workers:
                yield _receive(waiting.popleft().result(), blocks)
        while waiting:
            yield _receive(waiting.popleft().result(), blocks)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: the number of threads changes the last bits of sums."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SentSample:
    """A sample in a block of shared memory, on its way from a worker process."""

    case_id: str
    block: tuple[int, int]
    """Process id of the worker, and number of the block there."""
    memory: Tensor | None
    """The block itself the first time that it is sent; the receiver keeps it."""
    layouts: tuple[Layout, ...]
    """Image and target, or one tensor that is both, which follow each other in the block."""


class _Sender:
    """The dataset and the blocks of a worker process."""

    def __init__(self, dataset: PatchDataset) -> None:
        self._dataset = dataset
        self._blocks: list[Tensor] = []

    def send(self, key: PatchKey) -> _SentSample:
        """Load a patch, and copy it into a free block."""
        sample = self._dataset[key]
        is_one = sample.target is sample.image
        tensors = [sample.image] if is_one else [sample.image, sample.target]
        layouts = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        index, is_new = self._free_block(_starts(layouts)[-1])
        memory = self._blocks[index]
        memory[0] = 1
        for view, tensor in zip(_views(memory, layouts), tensors, strict=True):
            view.copy_(tensor)
        return _SentSample(
            case_id=sample.case_id,
            block=(os.getpid(), index),
            memory=memory if is_new else None,
            layouts=layouts,
        )

    def _free_block(self, n_bytes: int) -> tuple[int, bool]:
        """Return the smallest free block that is large enough, or a new one in place of a free one.

        The second value is whether it is new.
        """
        sizes = {index: len(memory) for index, memory in enumerate(self._blocks) if not memory[0]}
        large = [index for index, size in sizes.items() if size >= n_bytes]
        if large:
            return min(large, key=sizes.__getitem__), False
        # whole cases differ in size: without replacing, small blocks would add up
        index = min(sizes, key=sizes.__getitem__, default=len(self._blocks))
        try:
            memory = torch.empty(n_bytes, dtype=torch.uint8).share_memory_()
        except RuntimeError as error:
            msg = f"shared memory is too small for the patches ({error}). {_ADVICE}"
            raise EnvironmentalError(msg) from error
        self._blocks[index : index + 1] = [memory]
        return index, True


def _receive(sent: _SentSample, blocks: dict[tuple[int, int], Tensor]) -> Sample:
    """Return the sample in its block, one of those of all workers, in use as long as any view of it exists."""
    if sent.memory is not None:
        blocks[sent.block] = sent.memory
    memory = blocks[sent.block].numpy()
    # numpy views refer to the array at the end of their chain of bases: the memoryview ends the
    # chain at `lent`, which therefore lives as long as its views
    lent = np.frombuffer(memory.data, dtype=np.uint8)
    weakref.finalize(lent, memory[:1].fill, 0).atexit = False
    tensors = _views(torch.from_numpy(lent), sent.layouts)
    return Sample(image=tensors[0], target=tensors[-1], case_id=sent.case_id)


_sender: _Sender
"""Sender of a worker process, set when the process starts."""


def _set_up(dataset: PatchDataset) -> None:
    global _sender
    _sender = _Sender(dataset)
    torch.set_num_threads(1)


def _load(key: PatchKey) -> _SentSample:
    return _sender.send(key)


def _views(memory: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    return [
        memory[start : start + dtype.itemsize * prod(shape)].view(dtype).view(shape)
        for start, (dtype, shape) in zip(_starts(layouts), layouts, strict=False)
    ]


def _starts(layouts: Sequence[Layout]) -> list[int]:
    """Return the first byte of each tensor, and the end of the last."""
    sizes = (dtype.itemsize * prod(shape) for dtype, shape in layouts)
    return list(accumulate(sizes, initial=_HEADER_BYTES))
