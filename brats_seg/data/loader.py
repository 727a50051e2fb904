"""Patches and whole cases as tensors: what networks learn from and are scored on."""

# DOC data/loader: Patches made beside the training, in worker processes, and handed over in order.

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from brats_seg.cases.many import worker_pool
from brats_seg.config import PatchConfig
from brats_seg.data.patches import ORIGIN, PatchKey, choose_box, patch_generator, whole_box
from brats_seg.data.store import Buffers, PreparedCase, open_case
from brats_seg.data.transforms import (
    AUGMENTATIONS,
    alter_intensities,
    draw_spatial_transform,
    read_transformed,
)
from brats_seg.errors import EnvironmentalError
from brats_seg.labels import LabelMap
from brats_seg.voxels.box import Box, Triple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A patch, or a whole case."""

    image: Tensor
    """(4, X, Y, Z) float32, normalised."""
    target: Tensor
    """(3, X, Y, Z) uint8: 1 inside the region; or the image itself, to be reconstructed."""
    case_id: str


TargetOf: TypeAlias = Callable[[PreparedCase, Tensor, LabelMap], Tensor]
"""What a network is to make of an image (4, X, Y, Z) of a case with labels (X, Y, Z)."""


def region_target(case: PreparedCase, image: Tensor, labels: LabelMap) -> Tensor:
    """Return the regions, (3, X, Y, Z) uint8."""
    return torch.from_numpy(case.regions_of(labels).view(np.uint8))


def image_target(case: PreparedCase, image: Tensor, labels: LabelMap) -> Tensor:
    """Return the image itself."""
    return image


class PatchDataset(Dataset[Sample]):
    """The patches of prepared cases; its keys are `PatchKey`s.

    The same draw is the same patch, in any process. What is handed out is the caller's alone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        patch: PatchConfig,
        multiple: Triple,
        augment: str,
        seed: int,
        target_of: TargetOf = region_target,
    ) -> None:
        """Take patches from the prepared cases of a folder.

        Args:
            folder: Of all prepared cases.
            patch: Size and placement.
            multiple: What the size of a whole case is rounded up to.
            augment: Name of the list of changes.
            seed: Of the run.
            target_of: Makes the targets.
        """
        self._folder = folder
        self._patch = patch
        self._multiple = multiple
        self._augmentation = AUGMENTATIONS[augment]
        self._seed = seed
        self._target_of = target_of
        self._buffers = Buffers()

    def __getitem__(self, draw: PatchKey) -> Sample:
        """Make the patch of a draw.

        Raises:
            CaseError: The case was not prepared, or has no label map.
        """
        with _one_thread():
            case = open_case(self._folder, draw.case_id)
            rng = patch_generator(self._seed, draw, "augment")
            transform = draw_spatial_transform(self._augmentation, rng)
            image, labels = read_transformed(
                case, self._place(case, draw), transform, self._buffers
            )
            alter_intensities(image, self._augmentation, rng)
        target = self._target_of(case, image, labels)
        return Sample(image=image, target=target, case_id=case.case_id)

    def _place(self, case: PreparedCase, draw: PatchKey) -> Box:
        if self._patch.size == "whole":
            return whole_box(case.shape, self._multiple)
        return choose_box(
            patch_generator(self._seed, draw, "place"),
            shape=case.shape,
            size=self._patch.size,
            foreground_fraction=self._patch.foreground,
            foreground=case.foreground,
        )


def whole_case(folder: Path, case_id: str, target_of: TargetOf = region_target) -> Sample:
    """Return the brain crop of a prepared case, as it is.

    Raises:
        CaseError: The case was not prepared, or has no label map.
    """
    case = open_case(folder, case_id)
    box = Box.at(ORIGIN, case.shape)
    image = torch.from_numpy(case.read_image(box)).to(torch.float32)
    target = target_of(case, image, case.read_labels(box))
    return Sample(image=image, target=target, case_id=case.case_id)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch compute with one thread: several share out a sum, which changes its last bits."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


PATCHES_AHEAD = 2
"""Per worker: one in the making, and one to hand over while the network learns."""

_LESS_MEMORY = "Set training.n_workers lower, or to 0."
_SHARED_MEMORY = (
    "In a container, /dev/shm, through which patches pass, may be too small: start it with "
    "--shm-size=8g."
)


def patch_loader(
    dataset: PatchDataset, keys: Iterable[PatchKey], n_workers: int
) -> Iterator[Sample]:
    """Yield the patch of every draw, in the order of the keys.

    Args:
        dataset: Makes the patches.
        keys: Which patches.
        n_workers: Processes that make them; 0 makes each in this one when it is asked for.

    Raises:
        CaseError: A case was not prepared, or has no label map.
        EnvironmentalError: A worker was killed, or shared memory is too small.
    """
    if n_workers == 0:
        yield from map(dataset.__getitem__, keys)
        return
    set_up, advice = partial(_set_up, dataset), f"{_LESS_MEMORY} {_SHARED_MEMORY}"
    with worker_pool(n_workers, set_up=set_up, when_killed=advice) as pool:
        waiting: deque[Future[Sample]] = deque()
        for draw in keys:
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


def _make(draw: PatchKey) -> Sample:
    sample = _dataset[draw]
    try:
        for tensor in (sample.image, sample.target):
            tensor.share_memory_()
    except RuntimeError as error:
        msg = f"patches find no room in shared memory ({error}). {_LESS_MEMORY} {_SHARED_MEMORY}"
        raise EnvironmentalError(msg) from error
    return sample
