"""Losses of region segmentation, and how each adds up over patches.

N patches, R regions, L levels of deep supervision, X Y Z voxels. Logits come in, never
probabilities; targets are 0 or 1. Coarser logits are compared with the target at their own grid,
and weigh half as much from level to level (nnU-Net; Isensee 2021).
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from brats_seg.config import LossConfig
from brats_seg.labels import REGIONS
from brats_seg.models.output import TrainingOutput, as_output

SMOOTH_VOXELS = 1.0
"""Added to both sides of the Dice ratio, so that it stays defined where a region is empty."""


class DiceBce(nn.Module):
    """Soft Dice plus binary cross-entropy, per region, as one number for each patch.

    `(N, R, X, Y, Z)` logits, or the `TrainingOutput` of a network with deep supervision, and
    `(N, R, X, Y, Z)` targets become `(N,)` losses (soft Dice: Milletari 2016).
    """

    reduces: ClassVar[str] = "patches"
    """The loss of many patches is the mean of their losses."""

    def __init__(self, config: LossConfig | None = None) -> None:
        super().__init__()
        self.config = config or LossConfig()

    def forward(self, output: Tensor | TrainingOutput, target: Tensor) -> Tensor:
        """Return the loss of each patch."""
        output = as_output(output)
        terms = torch.stack([_terms(logits, target) for logits in output.logits])
        losses = _weighted(terms, self.config).mean(-1)
        return losses if output.penalty is None else losses + output.penalty


class BatchDiceBce(nn.Module):
    """Soft Dice of regions pooled over the effective batch, plus binary cross-entropy.

    The Dice is a ratio of sums over all patches, as in nnU-Net and the entries that won BraTS, so
    that a patch without enhancing tumour does not ask for one.
    """

    reduces: ClassVar[str] = "sums"
    """The loss of many patches is a function of sums over them."""

    def __init__(self, config: LossConfig | None = None) -> None:
        super().__init__()
        self.config = config or LossConfig()

    def sums(self, output: Tensor | TrainingOutput, target: Tensor) -> Tensor:
        """Return what adds up over patches, `(L * R * 3 + 1,)`; last comes the penalty."""
        output = as_output(output)
        terms = torch.stack([_terms(logits, target) for logits in output.logits])
        penalty = terms.new_zeros(1) if output.penalty is None else output.penalty.sum().view(1)
        return torch.cat([terms.sum(1).flatten(), penalty.to(terms.dtype)])

    def of_sums(self, sums: Tensor, n_patches: int) -> Tensor:
        """Return the loss of the effective batch."""
        terms = sums[:-1].view(-1, len(REGIONS), 3)
        means = terms * terms.new_tensor([1.0, 1.0, 1.0 / n_patches])
        return _weighted(means, self.config).mean() + sums[-1] / n_patches


def _terms(logits: Tensor, target: Tensor) -> Tensor:
    """Return what the loss of a level is made of: `(N, R, X, Y, Z)` twice -> `(N, R, 3)`.

    Probability inside the target, probability and target together, mean cross-entropy.
    """
    # sums over millions of voxels: half precision would round them away
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    if target.shape[2:] != logits.shape[2:]:
        target = functional.interpolate(target, size=logits.shape[2:], mode="nearest")
    target = target.to(logits.dtype)
    probabilities = torch.sigmoid(logits)
    bce = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    voxels = (2, 3, 4)
    inside = (probabilities * target).sum(voxels)
    return torch.stack(
        [inside, probabilities.sum(voxels) + target.sum(voxels), bce.mean(voxels)], dim=-1
    )


def _weighted(terms: Tensor, config: LossConfig) -> Tensor:
    """Turn terms `(L, ..., 3)` into losses `(...)`: Dice and cross-entropy, then levels."""
    inside, either, bce = terms.unbind(-1)
    dice = (2 * inside + SMOOTH_VOXELS) / (either + SMOOTH_VOXELS)
    losses = config.dice * (1 - dice) + config.bce * bce
    weights = losses.new_tensor([0.5**level for level in range(len(losses))])
    return torch.tensordot(weights / weights.sum(), losses, dims=1)


def build_criterion(config: LossConfig) -> DiceBce | BatchDiceBce:
    """Return the loss of the settings."""
    return BatchDiceBce(config) if config.batch_dice else DiceBce(config)
