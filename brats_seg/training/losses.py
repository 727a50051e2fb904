"""A loss, and what it says of how it adds up over patches.

- `reduces = "patches"`: the loss returns one number a patch, and that of the window is their mean.
- `reduces = "sums"`: the loss is a function of sums over all patches (batch Dice); see `SumsLoss`.
- anything else: a function of all outputs and targets at once, about which nothing is assumed.
"""

# DOC training/losses: Losses of region segmentation, and how each adds up over patches.
#
# N patches, R regions, L levels of deep supervision, X Y Z voxels. Logits come in, never
# probabilities; targets are 0 or 1. Coarser logits are compared with the target at their own grid,
# and weigh half as much from level to level (nnU-Net; Isensee 2021).
#
# DOC training/reconstruction: How an image is reconstructed: the loss, and the error of an epoch.
#
# The background is 0 wherever a case is prepared, easy to learn, and often half of a crop. An error
# there counts a tenth in the loss, enough to be left with a dark background, and not at all in what
# is reported. N patches, C modalities, X Y Z voxels.
#

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from brats_seg.config import LossConfig
from brats_seg.labels import REGIONS
from brats_seg.models.output import TrainingOutput, as_output

if TYPE_CHECKING:
    from monai.losses import SSIMLoss

Output: TypeAlias = Tensor | TrainingOutput
Criterion: TypeAlias = Callable[[Output, Tensor], Tensor]
Measure: TypeAlias = Callable[[Output, Tensor], Tensor]
"""Output and target of a micro-batch to a tensor with a row per patch."""


def measure_nothing(output: Output, target: Tensor) -> Tensor:
    """Return a row of no columns for each patch."""
    return target.new_empty((len(target), 0))


@runtime_checkable
class SumsLoss(Protocol):
    """A loss that is a function of sums over all patches, such as batch Dice."""

    def sums(self, output: Output, target: Tensor) -> Tensor:
        """Return what adds up over patches, in any shape."""

    def of_sums(self, sums: Tensor, n_patches: int) -> Tensor:
        """Return the loss, a scalar."""


def whole_loss(criterion: Criterion, output: Output, target: Tensor) -> Tensor:
    """Return the loss of patches that are all in one batch, as a scalar."""
    if (by_sums := as_sums_loss(criterion)) is not None:
        return by_sums.of_sums(by_sums.sums(output, target), len(target))
    # the mean of one number is that number: only a loss of one number a patch has more
    return criterion(output, target).mean()


def is_mean_over_patches(criterion: object) -> bool:
    """Tell whether it says that the loss of many patches is the mean of theirs."""
    return getattr(criterion, "reduces", "") == "patches"


def as_sums_loss(criterion: object) -> SumsLoss | None:
    """Return it as what it says it is, or None if it does not."""
    return criterion if isinstance(criterion, SumsLoss) else None


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


BACKGROUND_WEIGHT = 0.1
"""Of the squared error of a voxel outside the brain; one inside counts 1."""
SSIM_RANGE = 6.0
"""Width of the intensities: three standard deviations of the brain on either side. They are moved
above 0 by half of it, as structural similarity compares means by their ratio."""
SSIM_WINDOW = 7
"""Voxels along each axis that structure is compared in, a patch has at least that many."""


class ReconstructionLoss(nn.Module):
    """Mean squared error, the brain above all, as one number for each patch.

    `(N, C, X, Y, Z)` reconstructions and images become `(N,)` losses. Where the settings say so,
    1 - structural similarity (Wang et al. 2004) is added.
    """

    reduces: ClassVar[str] = "patches"
    """The loss of many patches is the mean of their losses."""

    def __init__(self, config: LossConfig | None = None) -> None:
        super().__init__()
        self.config = config or LossConfig()
        self._dissimilarity = _dissimilarity() if self.config.ssim else None

    def forward(self, output: Tensor | TrainingOutput, target: Tensor) -> Tensor:
        """Return the loss of each patch."""
        reconstruction = _in_float(as_output(output).logits[0])
        target = target.to(reconstruction.dtype)
        brain = brain_of(target).to(reconstruction.dtype)
        weights = BACKGROUND_WEIGHT + (1 - BACKGROUND_WEIGHT) * brain
        voxels = (1, 2, 3, 4)
        squares = (reconstruction - target).square().mean(1, keepdim=True)
        losses = (weights * squares).sum(voxels) / weights.sum(voxels)
        if self._dissimilarity is None:
            return losses
        with torch.autocast(reconstruction.device.type, enabled=False):
            shift = SSIM_RANGE / 2
            unlike = self._dissimilarity(reconstruction + shift, target + shift).flatten()
        return losses + self.config.ssim * unlike


def brain_of(image: Tensor) -> Tensor:
    """Return where an image `(N, C, X, Y, Z)` is not background, `(N, 1, X, Y, Z)`."""
    return (image != 0).any(1, keepdim=True)


def _in_float(tensor: Tensor) -> Tensor:
    # sums over millions of voxels: half precision would round them away
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _dissimilarity() -> "SSIMLoss":
    from monai.losses import SSIMLoss  # importing MONAI takes seconds

    return SSIMLoss(spatial_dims=3, data_range=SSIM_RANGE, win_size=SSIM_WINDOW, reduction="none")
