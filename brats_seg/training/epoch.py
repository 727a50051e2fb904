"""Read the patches of an epoch, one effective batch after another.

The patches of each optimizer step are a pure function of the settings, the cases and the epoch.
`Batch` holds the patches of one step on the host, as the loader made them, and cuts them into
micro-batches; the device holds one micro-batch at a time.

N patches, C modalities, R targets, X Y Z voxels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil, prod
from typing import Literal

import torch

from brats_seg.config import Config
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.fold import FoldData
from brats_seg.data.intensities import RandIntensitiesd, Transform, drop_modalities
from brats_seg.data.loader import PATCHES_AHEAD, PatchDataset, Sample, patch_loader
from brats_seg.data.patches import PatchKey, epoch_patches
from brats_seg.data.transforms import transforms_named
from brats_seg.models.build import default_window, padded_size, size_multiple
from brats_seg.progress import part
from brats_seg.runtime.device import Device
from brats_seg.runtime.windows import Window
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.tasks import task_of
from brats_seg.voxels.box import rounded_up

MAX_AUTO_WORKERS = 8
"""Largest automatic number of workers: eight make patches faster than one GPU trains on them."""
_LARGEST_CROP = (160, 192, 160)
"""Voxels of a large brain crop, for the memory that patches of whole crops take."""
_BYTES_PER_VOXEL = 11
"""Bytes of a voxel of a patch in shared memory: four modalities in float16, three regions in uint8."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The patches of one effective batch, held on the host in the types in which they were read.

    With a float16 image and uint8 regions a patch of 128x128x128 takes 23 MB.
    """

    samples: tuple[Sample, ...]

    @property
    def case_ids(self) -> tuple[str, ...]:
        """The case of each patch."""
        return tuple(sample.case_id for sample in self.samples)

    def micro_batches(self, size: int) -> Iterator[MicroBatch]:
        """Yield the patches in their order, `size` at a time; the last micro-batch may be smaller.

        A micro-batch of one patch is a view of it; one of several patches is a copy. They are counted
        as a part of the work that is shown.
        """
        starts = range(0, len(self.samples), size)
        with part("micro-batches of the step", len(starts)) as after_micro_batch:
            for start in starts:
                group = self.samples[start : start + size]
                yield MicroBatch(
                    _stacked([sample.image for sample in group]),
                    _stacked([sample.target for sample in group]),
                )
                after_micro_batch()


def epoch_batches(
    config: Config, case_ids: Sequence[str], epoch: int
) -> tuple[tuple[PatchKey, ...], ...]:
    """Return the keys of the patches of each optimizer step of an epoch.

    The last batch may hold fewer patches than the others.
    """
    keys = epoch_patches(case_ids, epoch, config.patch.per_case, config.training.seed)
    size = config.training.effective_batch_at(epoch)
    return tuple(tuple(keys[start : start + size]) for start in range(0, len(keys), size))


def read_batches(
    data: FoldData, config: Config, batches: Sequence[Sequence[PatchKey]], device: Device
) -> Iterator[Batch]:
    """Yield the batch of each group of keys; every patch is read once.

    Raises:
        CaseError: A case was not prepared, or has no label map.
        EnvironmentalError: A worker process was killed, or shared memory is too small.
    """
    transforms = transforms_named(config.training.transforms)
    if config.training.modality_dropout > 0:
        # after all others: noise, or a transform of one's own, would fill the empty channels
        changes = [(drop_modalities, config.training.modality_dropout)]
        transforms += (RandIntensitiesd("image", changes),)
    on_gpu = device.torch_device.type != "cpu"
    dataset = _dataset(data, config, config.training.augment, transforms)
    n_workers = _n_workers(config.training.n_workers, on_gpu=on_gpu)
    samples = patch_loader(dataset, chain.from_iterable(batches), n_workers)
    for keys in batches:
        yield Batch(samples=tuple(islice(samples, len(keys))))


def held_out_patches(
    data: FoldData, config: Config, keys: Iterable[PatchKey], device: Device
) -> Iterator[Sample]:
    """Yield the patches of those keys in their order, without augmentation."""
    n_workers = _n_workers(config.training.n_workers, on_gpu=device.torch_device.type != "cpu")
    return patch_loader(_dataset(data, config, "none"), keys, n_workers=n_workers)


def patch_shape(config: Config, data: FoldData) -> tuple[int, int, int]:
    """Return the size that the network is built for; `whole` means that of the largest case."""
    if config.patch.size != "whole":
        return config.patch.size
    return padded_size(config.model, data.largest_shape)


def validation_window(
    config: Config, patch: tuple[int, int, int], shape: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Return the window in which a case is validated: that of prediction, without tuning.

    A network that is trained on whole brain crops gets the crop, padded as the network needs it; an
    autoencoder of patches gets windows of the patch size.

    Args:
        config: Settings of the run.
        patch: Size from `patch_shape`.
        shape: Voxels of the brain crop of the case.
    """
    multiple = size_multiple(config.model, patch)
    if config.patch.size == "whole":
        return rounded_up(shape, multiple)
    is_segmentation = config.model.task == "segmentation"
    window = default_window(config.model, patch) if is_segmentation else patch
    fitting = Window(size=window, overlap=config.validation.overlap)
    return fitting.fit(shape, patch, multiple)


def n_optimizer_steps(config: Config, n_cases: int) -> int:
    """Return the number of optimizer steps of a whole run."""
    n_patches = n_cases * config.patch.per_case
    epochs = range(config.training.n_epochs)
    return sum(ceil(n_patches / config.training.effective_batch_at(epoch)) for epoch in epochs)


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tuple(tensors))


def _dataset(
    data: FoldData, config: Config, augment: str, transforms: Sequence[Transform] = ()
) -> PatchDataset:
    return PatchDataset(
        data.folder,
        patch=config.patch,
        multiple=size_multiple(config.model, patch_shape(config, data)),
        augment=augment,
        seed=config.training.seed,
        target_of=task_of(config).target_of,
        transforms=transforms,
    )


def shared_memory_needed(config: Config, *, on_gpu: bool) -> int:
    """Return the bytes of shared memory that the patches of the worker processes take at most.

    Args:
        config: Settings; a patch of whole brain crops counts as a patch of 160x192x160 voxels.
        on_gpu: Whether training is on a GPU, where the automatic number of workers is above 0.
    """
    n_workers = _n_workers(config.training.n_workers, on_gpu=on_gpu)
    size = _LARGEST_CROP if config.patch.size == "whole" else config.patch.size
    return n_workers * PATCHES_AHEAD * prod(size) * _BYTES_PER_VOXEL


def _n_workers(setting: int | Literal["auto"], *, on_gpu: bool) -> int:
    if setting != "auto":
        return setting
    # on a machine without a GPU, training itself keeps the processors busy
    return min(MAX_AUTO_WORKERS, available_cpus()) if on_gpu else 0
