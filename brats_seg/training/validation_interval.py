"""Choose the epochs after which a run is validated on whole cases.

A validation computes many overlapping windows of every held-out case, and an epoch of small patches
sees a small part of every case: with 45 patches of 64x64x64 and 11 held-out cases, a validation after
every epoch would cost several times the training. With `validation.every: auto` the number of epochs
between two validations follows from counts of voxels alone, so that it is the same on every machine
and after every interruption.
"""

from math import ceil, prod

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.data.manifest import manifest_of
from brats_seg.models.build import size_multiple
from brats_seg.runtime.sliding_window import window_starts
from brats_seg.training.epoch import patch_shape
from brats_seg.voxels.box import Triple

VALIDATION_SHARE = 0.25
"""Largest cost of the validations of `validation.every: auto`, as a share of that of the training. The
validation after the last epoch, which every run has, comes on top."""
TRAINING_PASSES = 3
"""Cost of a voxel in training, where a voxel of a window in validation costs 1: the backward pass
computes two convolutions for one of the forward pass."""


def validation_interval(data: FoldData, config: Config) -> int:
    """Return the number of epochs from one validation on whole cases to the next.

    Raises:
        CaseError: A case was not prepared.
    """
    every = config.validation.every
    if every != "auto":
        return every
    validation = _validation_voxels(data, config)
    training = TRAINING_PASSES * _training_voxels(data, config)
    return max(1, ceil(validation / (VALIDATION_SHARE * training)))


def _training_voxels(data: FoldData, config: Config) -> int:
    """Return the voxels of all patches of an epoch."""
    if config.patch.size != "whole":
        return len(data.split.train) * config.patch.per_case * prod(config.patch.size)
    crops = (prod(_whole_window(data, config, case_id)) for case_id in data.split.train)
    return config.patch.per_case * sum(crops)


def _validation_voxels(data: FoldData, config: Config) -> int:
    """Return the voxels of all windows of the held-out cases."""
    held_out = data.split.validation
    if config.patch.size == "whole":
        return sum(prod(_whole_window(data, config, case_id)) for case_id in held_out)
    shapes = (manifest_of(data.folder, case_id).box.shape for case_id in held_out)
    return sum(
        prod(map(len, _starts(shape, config.patch.size, config.validation.overlap)))
        * prod(config.patch.size)
        for shape in shapes
    )


def _starts(shape: Triple, window: Triple, overlap: float) -> list[tuple[int, ...]]:
    # a case that is smaller than the window is padded to it
    return [
        window_starts(max(size, length), length, overlap)
        for size, length in zip(shape, window, strict=True)
    ]


def _whole_window(data: FoldData, config: Config, case_id: str) -> list[int]:
    """Return the size of a case in one window."""
    shape = manifest_of(data.folder, case_id).box.shape
    multiple = size_multiple(config.model, patch_shape(config, data))
    return [-(-n // m) * m for n, m in zip(shape, multiple, strict=True)]
