"""How an image is reconstructed: the loss, and the error of an epoch.

The background is 0 wherever a case is prepared, easy to learn, and often half of a crop. An error
there counts a tenth in the loss, enough to be left with a dark background, and not at all in what
is reported. N patches, C modalities, X Y Z voxels.
"""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from brats_seg.config import LossConfig
from brats_seg.labels import MODALITIES
from brats_seg.models.output import TrainingOutput, as_output
from brats_seg.training.tally import Tally

if TYPE_CHECKING:
    from monai.losses import SSIMLoss

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


def add_squares(output: TrainingOutput | Tensor, target: Tensor) -> Tensor:
    """Return the error per patch: `(N, 2, C)`, sum of squares in the brain, voxels of the brain."""
    difference = _in_float(as_output(output).logits[0]) - target
    brain = brain_of(target)
    voxels = (2, 3, 4)
    squares = (difference.square() * brain).sum(voxels)
    return torch.stack([squares, brain.sum(voxels).to(squares.dtype).expand_as(squares)], 1)


def error_columns(tally: Tally) -> dict[str, float]:
    """Return the loss, and the error as the mean over cases, in the order of their ids.

    In units of the normalised intensity, whose standard deviation in a brain is 1: an image without
    any contrast has an error of 1. A case whose patches held no brain has none.
    """
    errors = [
        rmse_of(tally.counts[case_id])
        for case_id in sorted(tally.counts)
        if tally.counts[case_id][1][0] > 0
    ]
    means = np.mean(errors, axis=0) if errors else np.full(len(MODALITIES), np.nan)
    parts = {
        f"rmse_{modality}": float(mean) for modality, mean in zip(MODALITIES, means, strict=True)
    }
    return {"loss": tally.loss, "rmse": float(means.mean()), **parts}


def rmse_of(counts: list[list[float]]) -> list[float]:
    """Return the root of the mean square of each modality, from the rows of `add_squares`."""
    squares, n_voxels = np.asarray(counts, np.float64)
    return np.sqrt(squares / n_voxels).tolist()


def _in_float(tensor: Tensor) -> Tensor:
    # sums over millions of voxels: half precision would round them away
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _dissimilarity() -> "SSIMLoss":
    from monai.losses import SSIMLoss  # importing MONAI takes seconds

    return SSIMLoss(spatial_dims=3, data_range=SSIM_RANGE, win_size=SSIM_WINDOW, reduction="none")
