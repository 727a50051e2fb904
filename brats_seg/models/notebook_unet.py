"""The U-Net of the Kaggle notebook "BraTS20 3dUnet 3dAutoEncoder".

Features are `(N, C, X, Y, Z)`. Inputs may have any size: pooling rounds down, and the decoder pads
its features to the size of the skip connection.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from brats_seg.models.convolution import Convolution
from brats_seg.models.interface import ActivationCheckpointing, TrainingOutput, run_level

WIDTH = 24
N_NORM_GROUPS = 8
SMALLEST_PATCH = 16
"""Voxels of the smallest patch along an axis, of which four poolings leave one."""


class NotebookUNet(nn.Module):
    """Encoder of widths 24-48-96-192-192, decoder of 96-48-24-24: 5,652,507 parameters."""

    def __init__(self, *, n_in: int, n_out: int) -> None:
        super().__init__()
        down = [WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH, 8 * WIDTH]
        up = [4 * WIDTH, 2 * WIDTH, WIDTH, WIDTH]
        below, skips = [down[-1], *up[:-1]], down[-2::-1]
        joined = [n + m for n, m in zip(below, skips, strict=True)]
        self.encoder = nn.ModuleList(map(_double_convolution, [n_in, *down[:-1]], down))
        self.decoder = nn.ModuleList(map(_double_convolution, joined, up))
        self.head = nn.Conv3d(WIDTH, n_out, 1)
        self.checkpointing = ActivationCheckpointing.NONE

    def forward(self, image: Tensor) -> Tensor | TrainingOutput:
        """Return logits: a `TrainingOutput` in training mode, else `(N, n_out, X, Y, Z)`."""
        run = partial(run_level, self.checkpointing)
        features = run(0, self.encoder[0], image)
        skips = []
        for level, encode in enumerate(self.encoder[1:], start=1):
            skips.append(features)
            features = run(level, partial(_below, encode), features)
        for decode in self.decoder:
            level = len(skips) - 1
            features = run(level, partial(_beside, decode), features, skips.pop())
        logits: Tensor = self.head(features)
        return TrainingOutput(logits=(logits,)) if self.training else logits


def _double_convolution(n_in: int, n_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_before in (n_in, n_out):
        layers += [
            Convolution(n_before, n_out, 3, padding=1),
            nn.GroupNorm(N_NORM_GROUPS, n_out),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


def _below(encode: nn.Module, features: Tensor) -> Tensor:
    encoded: Tensor = encode(functional.max_pool3d(features, 2))
    return encoded


def _beside(decode: nn.Module, below: Tensor, skip: Tensor) -> Tensor:
    decoded: Tensor = decode(_joined(below, skip))
    return decoded


def _joined(below: Tensor, skip: Tensor) -> Tensor:
    doubled = functional.interpolate(below, scale_factor=2, mode="trilinear", align_corners=True)
    missing = [wanted - got for wanted, got in zip(skip.shape[2:], doubled.shape[2:], strict=True)]
    x, y, z = ((n // 2, n - n // 2) for n in missing)
    return torch.cat((skip, functional.pad(doubled, (*z, *y, *x))), dim=1)
