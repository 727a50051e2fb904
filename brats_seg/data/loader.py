"""Make patches and whole cases into samples, in worker processes, in the order of their keys."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from monai.transforms import Compose
from torch import Tensor
from torch.utils.data import Dataset

from brats_seg.cases.many import worker_pool
from brats_seg.config import PatchConfig
from brats_seg.data.intensity_transforms import Transform
from brats_seg.data.patches import PatchKey, patch_seed
from brats_seg.data.transforms import (
    apply_transforms,
    seed_patch,
    training_transforms,
    validation_transforms,
)
from brats_seg.errors import EnvironmentalError
from brats_seg.voxels.box import Triple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A patch or a whole case, held on the host as the store has it."""

    image: Tensor
    """(4, X, Y, Z) float16, normalised."""
    target: Tensor
    """(3, X, Y, Z) uint8: 1 inside the region; or the image itself, to be reconstructed."""
    case_id: str


TargetOf: TypeAlias = Callable[[Mapping[str, Any]], Tensor]
"""Returns the target of a network from the dictionary that a pipeline has made."""


def region_target(data: Mapping[str, Any]) -> Tensor:
    """Return the region masks, (3, X, Y, Z) uint8."""
    return data["label"]


def image_target(data: Mapping[str, Any]) -> Tensor:
    """Return the image itself."""
    return data["image"]


class PatchDataset(Dataset[Sample]):
    """Patches of prepared cases, made by a MONAI pipeline; its keys are `PatchKey`s.

    Every transform is seeded from the seed of the run and the key, so that the same key is the same
    patch in any process. The tensors of a sample are the caller's alone.
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
        transforms: Sequence[Transform] = (),
    ) -> None:
        """Take patches from the prepared cases of a folder.

        Args:
            folder: Folder of all prepared cases.
            patch: Size and placement.
            multiple: Multiple that the size of a whole case is rounded up to.
            augment: Name of the list of changes.
            seed: Seed of the run.
            target_of: Returns the target.
            transforms: More dictionary transforms, applied after those of `augment`; see
                `training_transforms`.
        """
        self.transform = training_transforms(
            folder, patch=patch, multiple=multiple, augment=augment, extra=transforms
        )
        self._seed = seed
        self._target_of = target_of

    def __getitem__(self, draw: PatchKey) -> Sample:
        """Make the patch of a key.

        Raises:
            CaseError: The case was not prepared, or has no label map.
        """
        place, augment = (patch_seed(self._seed, draw, purpose) for purpose in ("place", "augment"))
        seed_patch(self.transform, place=place, augment=augment)
        with _one_thread():
            return _sample(self.transform, draw.case_id, self._target_of)


def whole_case(folder: Path, case_id: str, target_of: TargetOf = region_target) -> Sample:
    """Return the brain crop of a prepared case, as it is.

    Raises:
        CaseError: The case was not prepared, or has no label map.
    """
    return _sample(validation_transforms(folder), case_id, target_of)


def _sample(pipeline: Compose, case_id: str, target_of: TargetOf) -> Sample:
    data = apply_transforms(pipeline, {"case_id": case_id})
    return Sample(image=data["image"], target=target_of(data), case_id=case_id)


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
"""Patches made ahead per worker: one in the making, one to hand over while the network learns."""

_LESS_MEMORY = "Set training.n_workers lower, or to 0."
_SHARED_MEMORY = (
    "In a container, /dev/shm, through which patches pass, may be too small: start it with "
    "--shm-size=8g."
)


def patch_loader(
    dataset: PatchDataset, keys: Iterable[PatchKey], n_workers: int
) -> Iterator[Sample]:
    """Yield the patch of every key, in the order of the keys.

    MONAI's and torch's `DataLoader` would do as much, but a worker that the system kills for its
    memory ends them with an error of torch that names neither memory nor shared memory, and one
    that raises ends them with a traceback instead of the error of the case.

    Args:
        dataset: Makes the patches.
        keys: Keys of the patches, known in advance.
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
"""Dataset of a worker process, set when it begins."""


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
