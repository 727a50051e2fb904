"""Which patches an epoch holds, how they fall into windows of accumulation, and how they come."""

import os
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Literal

import torch

from brats_seg.config import Config
from brats_seg.data.dataset import PatchDataset, Sample
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import draw_loader
from brats_seg.data.patches import Draw, epoch_draws
from brats_seg.models.build import size_multiple
from brats_seg.models.device import Device
from brats_seg.training.gradient import MicroBatch


def epoch_windows(
    config: Config, case_ids: Sequence[str], epoch: int
) -> tuple[tuple[Draw, ...], ...]:
    """Return the draws behind each optimizer step of an epoch; the last window may be short.

    A pure function of the settings, the cases and the epoch.
    """
    draws = epoch_draws(case_ids, epoch, config.patch.per_case, config.training.seed)
    size = config.training.effective_batch_at(epoch)
    return tuple(tuple(draws[start : start + size]) for start in range(0, len(draws), size))


def patch_samples(
    data: FoldData, config: Config, draws: Iterable[Draw], *, augment: str, device: Device
) -> Iterator[Sample]:
    """Yield the patch of each draw, in their order, made by worker processes if there are any."""
    dataset = PatchDataset(
        data.folder,
        patch=config.patch,
        multiple=size_multiple(config.model, patch_shape(config, data)),
        augment=augment,
        seed=config.training.seed,
    )
    return draw_loader(dataset, draws, n_workers=_n_workers(config.training.n_workers, device))


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


def micro_batches(samples: Sequence[Sample], size: int) -> tuple[MicroBatch, ...]:
    """Stack samples by `size`; what is left over makes a smaller micro-batch.

    Targets become float32, which is what losses of torch and MONAI take.
    """
    groups = (samples[start : start + size] for start in range(0, len(samples), size))
    return tuple(
        MicroBatch(
            torch.stack([sample.image for sample in group]),
            torch.stack([sample.target for sample in group]).float(),
        )
        for group in groups
    )
