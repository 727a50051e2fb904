"""Read the patches of an epoch, one effective batch after another.

`Batch` holds the patches of one step on the host, as the loader made them, and cuts them into
micro-batches; the device holds one micro-batch at a time.

N patches, C modalities, R targets, X Y Z voxels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod

import torch

from brats_seg.config import Config
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.intensities import RandIntensitiesd, Transform, drop_modalities
from brats_seg.data.loader import PATCHES_AHEAD, PatchDataset, PatchKey, Sample, patch_loader
from brats_seg.data.transforms import transforms_named
from brats_seg.progress import part
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.run_plan import RunPlan

MAX_AUTO_WORKERS = 8
"""Largest automatic number of workers: eight make patches faster than one GPU trains on them."""
_LARGEST_CROP = (160, 192, 160)
"""Voxels of a large brain crop, for the memory of patches that are whole crops."""
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


def read_batches(plan: RunPlan, batches: Sequence[Sequence[PatchKey]]) -> Iterator[Batch]:
    """Yield the batch of each group of keys; every patch is read once."""
    training = plan.config.training
    transforms = transforms_named(training.transforms)
    if training.modality_dropout > 0:
        # after all others: noise, or a transform of one's own, would fill the empty channels
        changes = [(drop_modalities, training.modality_dropout)]
        transforms += (RandIntensitiesd("image", changes),)
    keys = chain.from_iterable(batches)
    samples = _patches(plan, keys, training.augment, transforms)
    for batch in batches:
        yield Batch(samples=tuple(islice(samples, len(batch))))


def held_out_patches(plan: RunPlan, keys: Iterable[PatchKey]) -> Iterator[Sample]:
    """Yield the patches of those keys in their order, without augmentation."""
    return _patches(plan, keys, "none", ())


def shared_memory_needed(config: Config, *, on_gpu: bool) -> int:
    """Return the bytes of shared memory that the patches of the worker processes take at most."""
    size = _LARGEST_CROP if config.patch.size == "whole" else config.patch.size
    return _n_workers(config, on_gpu=on_gpu) * PATCHES_AHEAD * prod(size) * _BYTES_PER_VOXEL


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tuple(tensors))


def _patches(
    plan: RunPlan, keys: Iterable[PatchKey], augment: str, transforms: Sequence[Transform]
) -> Iterator[Sample]:
    dataset = PatchDataset(
        plan.data.folder,
        patch=plan.config.patch,
        multiple=plan.multiple,
        augment=augment,
        seed=plan.config.training.seed,
        target_of=plan.task.target_of,
        transforms=transforms,
    )
    on_gpu = plan.device.torch_device.type != "cpu"
    return patch_loader(dataset, keys, _n_workers(plan.config, on_gpu=on_gpu))


def _n_workers(config: Config, *, on_gpu: bool) -> int:
    if config.training.n_workers != "auto":
        return config.training.n_workers
    # on a machine without a GPU, training itself keeps the processors busy
    return min(MAX_AUTO_WORKERS, available_cpus()) if on_gpu else 0
