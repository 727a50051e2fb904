"""Choose the epochs after which a run is validated on whole cases, and tell what that costs.

A validation computes overlapping windows of every held-out case, and an epoch of small patches
sees a small part of every case: with 45 patches of 64x64x64 and 11 held-out cases, a validation after
every epoch would cost several times the training. With `validation.every: auto` the number of epochs
between two validations follows from counts of voxels alone, so that it is the same on every machine
and after every interruption.
"""

from math import ceil, prod

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.data.manifest import manifest_of
from brats_seg.runtime.windows import n_windows
from brats_seg.training.epoch import patch_shape, validation_window

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
    return max(1, ceil(validation_cost(data, config) / VALIDATION_SHARE))


def interval_line(every: int, n_epochs: int) -> str:
    """Return the line that is logged about the epochs that `validation.every: auto` validates after.

    Example:
        >>> interval_line(12, 100)
        'validation.every auto: whole cases are validated every 12 epochs, and after the last one'
    """
    if every >= n_epochs:
        when = "after the last epoch"
    elif every == 1:
        when = "after every epoch"
    else:
        when = f"every {every} epochs, and after the last one"
    return f"validation.every auto: whole cases are validated {when}"


def is_validated_whole(config: Config, every: int, epoch: int) -> bool:
    """Return whether an epoch ends with a validation on whole cases.

    Args:
        config: Settings; the last epoch is always validated.
        every: Number from `validation_interval`.
        epoch: Index of the epoch.
    """
    return (epoch + 1) % every == 0 or epoch + 1 == config.training.n_epochs


def validation_cost(data: FoldData, config: Config) -> float:
    """Return the cost of a validation on all held-out cases, in epochs of training.

    It is a ratio of numbers of voxels, the same on every machine.

    Raises:
        CaseError: A case was not prepared.
    """
    patch, overlap = patch_shape(config, data), config.validation.overlap

    def n_voxels(case_id: str, *, windows: bool) -> int:
        shape = manifest_of(data.folder, case_id).box.shape
        window = validation_window(config, patch, shape)
        if config.patch.size == "whole":
            return prod(window)
        return prod(window) * n_windows(shape, window, overlap) if windows else prod(patch)

    trained = config.patch.per_case * sum(n_voxels(one, windows=False) for one in data.split.train)
    validated = sum(n_voxels(one, windows=True) for one in data.split.validation)
    return validated / (TRAINING_PASSES * trained)
