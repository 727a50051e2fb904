"""Which patches an epoch holds, how they fall into windows of accumulation, and how they come."""

import os
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Literal, overload

import torch

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import Foreseen, PatchDataset, PatchStream, Sample, patch_loader
from brats_seg.data.patches import PatchKey, epoch_patches
from brats_seg.models.build import size_multiple
from brats_seg.runtime.device import Device
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.tasks import task_of


def epoch_batches(
    config: Config, case_ids: Sequence[str], epoch: int
) -> tuple[tuple[PatchKey, ...], ...]:
    """Return the keys behind each optimizer step of an epoch; the last window may be short.

    A pure function of the settings, the cases and the epoch.
    """
    keys = epoch_patches(case_ids, epoch, config.patch.per_case, config.training.seed)
    size = config.training.effective_batch_at(epoch)
    return tuple(tuple(keys[start : start + size]) for start in range(0, len(keys), size))


def patch_stream(
    data: FoldData,
    config: Config,
    windows: Sequence[Sequence[PatchKey]],
    *,
    n_passes: int,
    micro_batch: int,
    device: Device,
) -> PatchStream:
    """Return the patches of windows that are computed in one pass or two, cut into micro-batches."""
    foreseen = [
        Foreseen(
            keys=tuple(keys),
            # the graph of the last micro-batch is kept for the second pass
            n_again=(n_passes - 1) * (max(len(keys) - 1, 0) // micro_batch * micro_batch),
        )
        for keys in windows
    ]
    dataset = _dataset(data, config, config.training.augment)
    n_workers = _n_workers(config.training.n_workers, device)
    return PatchStream(dataset, foreseen, n_workers=n_workers)


def held_out_patches(
    data: FoldData, config: Config, keys: Iterable[PatchKey], device: Device
) -> Iterator[Sample]:
    """Yield the patch of each draw as it is, in their order."""
    n_workers = _n_workers(config.training.n_workers, device)
    return patch_loader(_dataset(data, config, "none"), keys, n_workers=n_workers)


def _dataset(data: FoldData, config: Config, augment: str) -> PatchDataset:
    return PatchDataset(
        data.folder,
        patch=config.patch,
        multiple=size_multiple(config.model, patch_shape(config, data)),
        augment=augment,
        seed=config.training.seed,
        target_of=task_of(config).target_of,
    )


def _n_workers(setting: int | Literal["auto"], device: Device) -> int:
    if setting != "auto":
        return setting
    # beside a GPU the processors are free; without one they are the device
    on_cpu = device.torch_device.type == "cpu"
    return 0 if on_cpu else min(MAX_AUTO_WORKERS, os.cpu_count() or 1)


MAX_AUTO_WORKERS = 8
"""More only takes memory: eight make light patches faster than one GPU learns from them."""


def patch_shape(config: Config, data: FoldData) -> tuple[int, int, int]:
    """Return the voxels that a network is built for: the patch, or what holds the largest case."""
    if config.patch.size != "whole":
        return config.patch.size
    multiple = size_multiple(config.model, data.largest_shape)
    x, y, z = (-(-n // m) * m for n, m in zip(data.largest_shape, multiple, strict=True))
    return x, y, z


def n_optimizer_steps(config: Config, n_cases: int) -> int:
    """Return the steps of a whole run."""
    n_patches = n_cases * config.patch.per_case
    epochs = range(config.training.n_epochs)
    return sum(ceil(n_patches / config.training.effective_batch_at(epoch)) for epoch in epochs)


class MicroBatches(Sequence[MicroBatch]):
    """Samples stacked by `size`, each stack made when it is asked for; the last may be smaller.

    Targets become float32, which is what losses of torch and MONAI take.
    """

    def __init__(self, samples: Sequence[Sample], size: int) -> None:
        self._samples = samples
        self._starts = range(0, len(samples), size)
        self._size = size

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, place: slice) -> list[MicroBatch]: ...

    def __getitem__(self, place: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        start = self._starts[place]
        group = self._samples[start : start + self._size]
        return MicroBatch(
            _stacked([sample.image for sample in group]),
            _stacked([sample.target for sample in group]).float(),
        )


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    # one patch is a batch of one as it is
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tuple(tensors))
