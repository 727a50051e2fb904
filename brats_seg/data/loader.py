"""Load patches and whole cases as samples for a network, in worker processes."""

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
from brats_seg.data.intensities import IntensityChange
from brats_seg.data.intensity_transforms import RandIntensitiesd, Transform
from brats_seg.data.patches import PatchKey, patch_seed
from brats_seg.data.shared_memory import Receiver, Sender, SentTensors
from brats_seg.data.transforms import (
    apply_transforms,
    seed_patch,
    training_transforms,
    validation_transforms,
)
from brats_seg.errors import EnvironmentalError
from brats_seg.voxels.box import Triple

PATCHES_AHEAD = 2
"""Patches prepared in advance per worker: one in progress, and one that is finished."""
_LESS_MEMORY = "Set training.n_workers lower, or to 0."
_SHARED_MEMORY = (
    "In a container, /dev/shm, through which patches pass, may be too small: start it with "
    "--shm-size=8g."
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """A patch or a whole case in the memory of the host, with the stored types."""

    image: Tensor
    """Normalised image (4, X, Y, Z) in float16."""
    target: Tensor
    """Region masks (3, X, Y, Z) in uint8, 1 inside; or the image itself for an autoencoder."""
    case_id: str
    changes: tuple[IntensityChange, ...] = ()
    """Changes of the intensities that were drawn and are still to be applied to the image."""


TargetOf: TypeAlias = Callable[[Mapping[str, Any]], Tensor]
"""Function that returns the target of a network from the result of a pipeline."""


def region_target(data: Mapping[str, Any]) -> Tensor:
    """Return the region masks (3, X, Y, Z) in uint8."""
    return data["label"]


def image_target(data: Mapping[str, Any]) -> Tensor:
    """Return the image itself."""
    return data["image"]


class PatchDataset(Dataset[Sample]):
    """Patches of prepared cases, read and augmented by a MONAI pipeline; indexed by `PatchKey`.

    Every transform is seeded from the seed of the run and the key, so that a key gives the same
    patch in any process. Samples share no memory.
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
        """Use the prepared cases of a folder.

        Args:
            folder: Folder of all prepared cases.
            patch: Size and placement.
            multiple: Multiple that the size of a whole case is rounded up to.
            augment: A name in `transforms.AUGMENTATIONS`.
            seed: Seed of the run.
            target_of: Returns the target.
            transforms: Transforms to apply after those of `augment`; see `training_transforms`.
        """
        self.transform = training_transforms(
            folder, patch=patch, multiple=multiple, augment=augment, extra=transforms
        )
        self._seed = seed
        self._target_of = target_of

    def leave_changes(self) -> None:
        """Return the changes of intensities with each sample from now on, instead of applying them."""
        for transform in self.transform.transforms:
            if isinstance(transform, RandIntensitiesd):
                transform.leave_changes = True

    def __getitem__(self, key: PatchKey) -> Sample:
        """Return the patch of a key.

        Raises:
            CaseError: The case was not prepared, or has no label map.
        """
        place, augment = (patch_seed(self._seed, key, purpose) for purpose in ("place", "augment"))
        seed_patch(self.transform, place=place, augment=augment)
        with _one_thread():
            return _sample(self.transform, key.case_id, self._target_of)


def whole_case(folder: Path, case_id: str, target_of: TargetOf = region_target) -> Sample:
    """Return the whole brain crop of a prepared case.

    Raises:
        CaseError: The case was not prepared, or has no label map.
    """
    return _sample(validation_transforms(folder), case_id, target_of)


def patch_loader(
    dataset: PatchDataset, keys: Iterable[PatchKey], n_workers: int
) -> Iterator[Sample]:
    """Yield the patch of every key, in the order of the keys.

    The `DataLoader` of torch and MONAI is not used because its errors do not help: if the system
    kills a worker, the message mentions neither memory nor shared memory, and an error of a case
    arrives as a traceback of the worker.

    Args:
        dataset: Dataset of the patches.
        keys: Keys of the patches.
        n_workers: Processes that load patches in advance; 0 loads each patch in this process.

    Raises:
        CaseError: A case was not prepared, or has no label map.
        EnvironmentalError: A worker was killed, or shared memory is too small.
    """
    if n_workers == 0:
        yield from map(dataset.__getitem__, keys)
        return
    set_up, advice = partial(_set_up, dataset), f"{_LESS_MEMORY} {_SHARED_MEMORY}"
    with worker_pool(n_workers, set_up=set_up, when_killed=advice) as pool:
        waiting: deque[Future[_SentSample]] = deque()
        receiver = Receiver()
        for key in keys:
            waiting.append(pool.submit(_load, key))
            if len(waiting) > PATCHES_AHEAD * n_workers:
                yield _received(waiting.popleft().result(), receiver)
        while waiting:
            yield _received(waiting.popleft().result(), receiver)


def _sample(pipeline: Compose, case_id: str, target_of: TargetOf) -> Sample:
    data = apply_transforms(pipeline, {"case_id": case_id})
    return Sample(
        image=data["image"],
        target=target_of(data),
        case_id=case_id,
        changes=data.get("changes", ()),
    )


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
    """A sample on its way from a worker process."""

    case_id: str
    tensors: SentTensors
    """Image and target, or one tensor that is both."""
    changes: tuple[IntensityChange, ...]


_dataset: PatchDataset
"""Dataset of a worker process, set when the process starts."""
_sender: Sender
"""Shared memory of a worker process."""


def _set_up(dataset: PatchDataset) -> None:
    global _dataset, _sender
    _dataset, _sender = dataset, Sender()
    torch.set_num_threads(1)


def _load(key: PatchKey) -> _SentSample:
    sample = _dataset[key]
    is_one = sample.target is sample.image
    try:
        tensors = _sender.send([sample.image] if is_one else [sample.image, sample.target])
    except RuntimeError as error:
        msg = (
            f"shared memory is too small for the patches ({error}). {_LESS_MEMORY} {_SHARED_MEMORY}"
        )
        raise EnvironmentalError(msg) from error
    return _SentSample(case_id=sample.case_id, tensors=tensors, changes=sample.changes)


def _received(sent: _SentSample, receiver: Receiver) -> Sample:
    tensors = receiver.receive(sent.tensors)
    return Sample(image=tensors[0], target=tensors[-1], case_id=sent.case_id, changes=sent.changes)
