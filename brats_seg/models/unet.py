"""The default network, a 3D U-Net in the shape that nnU-Net gives it (Isensee et al. 2021), and the notebook's.

Features are `(N, C, X, Y, Z)`. Level 0 is the finest; every lower level halves the axes that
stay long enough.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from brats_seg.models.convolution import Convolution, convolve, convolve_upsampled, fast_format
from brats_seg.models.interface import ActivationCheckpointing, TrainingOutput, run_level
from brats_seg.models.norm import ActivatedNorm
from brats_seg.voxels.box import Triple

Run: TypeAlias = Callable[..., Tensor]
"""Calls its first argument with the others, checkpointed as the mode of the network says."""

SMALLEST_AXIS = 4
"""Fewest voxels of an axis at the lowest level; InstanceNorm cannot be trained on a single one."""
LEAKY_SLOPE = 0.01
FEWEST_DYNUNET_LEVELS = 3
"""Fewest levels of MONAI's `DynUNet`."""
SMALLEST_NOTEBOOK_PATCH = 16
"""Voxels along an axis of the smallest patch of `NotebookUNet`: four poolings leave one of them."""


def level_strides(patch: Triple, n_levels: int) -> tuple[Triple, ...]:
    """Return the stride into each level, the first of them 1, for at most `n_levels` levels.

    An axis that would fall below `SMALLEST_AXIS` voxels is no longer halved, while the others are;
    the lowest level is the one at which no axis is halved any more.
    """
    strides: list[Triple] = [(1, 1, 1)]
    for level in range(1, n_levels):
        x, y, z = (2 if size >= SMALLEST_AXIS * 2**level else 1 for size in patch)
        if x == y == z == 1:
            break
        strides.append((x, y, z))
    return tuple(strides)


class Block(nn.Module):
    """Convolution of 3x3x3, norm of each channel of each patch, and LeakyReLU."""

    def __init__(self, n_in: int, n_out: int, stride: Triple = (1, 1, 1)) -> None:
        super().__init__()
        # the norm would remove a bias, and has its own
        self.convolution = Convolution(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.norm = ActivatedNorm(n_out, LEAKY_SLOPE)

    def forward(self, features: Tensor) -> Tensor:
        """`(N, n_in, X, Y, Z) -> (N, n_out, X / stride, ...)`."""
        return self.norm(self.convolution(features))


class Level(nn.Sequential):
    """Two blocks at one resolution; the first may have a stride, from the level above."""

    def __init__(self, n_in: int, n_out: int, stride: Triple = (1, 1, 1)) -> None:
        super().__init__(Block(n_in, n_out, stride), Block(n_out, n_out))


class Decoder(nn.Module):
    """Upsample the features of the level below, and join them with the skip connection."""

    def __init__(self, n_below: int, n_here: int, stride: Triple) -> None:
        super().__init__()
        self.upsampling = nn.ConvTranspose3d(n_below, n_here, kernel_size=stride, stride=stride)
        self.level = Level(2 * n_here, n_here)

    def join(self, below: Tensor, skip: Tensor) -> Tensor:
        """Upsample, join, and apply the first block of the level; shapes as in `forward`.

        Convolving each half of the channels and adding the results is the same as convolving both
        together, and avoids copying them into one tensor, which would be the largest of all.
        """
        first = cast(Block, self.level[0])
        for_upsampled, for_skip = first.convolution.weight.split(skip.shape[1], dim=1)
        # in the backward pass, the upsampled gradient is used before that of the skip is computed
        joined = convolve(skip, for_skip)
        joined += convolve_upsampled(below, self.upsampling, for_upsampled, skip)
        return first.norm(joined)

    def forward(self, below: Tensor, skip: Tensor, run: Run) -> Tensor:
        """`(N, n_below, X / stride, ...)` and `(N, n_here, X, ...) -> (N, n_here, X, ...)`."""
        return run(self.level[1], run(self.join, below, skip))


class UNet(nn.Module):
    """Encoder, decoder and a head for each level that has a loss.

    `strides` come from `level_strides`, one for each of `widths`. All levels but the two lowest
    have a head (deep supervision), as in nnU-Net; the coarser heads work only in training mode.
    """

    def __init__(
        self, *, n_in: int, n_out: int, widths: tuple[int, ...], strides: tuple[Triple, ...]
    ) -> None:
        super().__init__()
        above = (n_in, *widths[:-1])
        self.encoder = nn.ModuleList(map(Level, above, widths, strides))
        self.decoder = nn.ModuleList(map(Decoder, widths[1:], widths[:-1], strides[1:]))
        with_head = widths[: max(1, len(widths) - 2)]
        self.heads = nn.ModuleList(Convolution(width, n_out, 1) for width in with_head)
        self.checkpointing = ActivationCheckpointing.NONE
        self.apply(initialise)

    def forward(self, image: Tensor) -> Tensor | TrainingOutput:
        """Return logits: a `TrainingOutput` in training mode, else `(N, n_out, X, Y, Z)`."""
        features, skips = image.contiguous(memory_format=fast_format(image)), []
        for level, encode in enumerate(self.encoder):
            features = run_level(self.checkpointing, level, encode, features)
            skips.append(features)
        features = skips.pop()
        coarser: list[Tensor] = []
        for level in reversed(range(len(self.decoder))):
            run = partial(run_level, self.checkpointing, level)
            features = self.decoder[level](features, skips.pop(), run)
            if self.training and 0 < level < len(self.heads):
                coarser.append(self.heads[level](features))
        finest: Tensor = self.heads[0](features)
        if not self.training:
            # windows are added up in contiguous format
            return finest.contiguous()
        return TrainingOutput(logits=(finest, *reversed(coarser)))


def dynunet_arguments(
    n_in: int, n_out: int, widths: Sequence[int], strides: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the arguments of MONAI's `DynUNet` in the shape of `UNet`, as values that JSON has."""
    return {
        "spatial_dims": 3,
        "in_channels": n_in,
        "out_channels": n_out,
        "kernel_size": [3] * len(strides),
        "strides": [list(stride) for stride in strides],
        "upsample_kernel_size": [list(stride) for stride in strides[1:]],
        "filters": list(widths),
        "norm_name": ["instance", {"affine": True}],
        "act_name": ["leakyrelu", {"inplace": True, "negative_slope": LEAKY_SLOPE}],
        "trans_bias": True,
    }


def initialise(module: nn.Module) -> None:
    """Draw the weights of a convolution as He et al. 2015, for the slope in use."""
    if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
        nn.init.kaiming_normal_(module.weight, a=LEAKY_SLOPE)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class NotebookUNet(nn.Module):
    """The U-Net of the Kaggle notebook "BraTS20 3dUnet 3dAutoEncoder": 5,652,507 parameters.

    Inputs may have any size: pooling rounds down, and the decoder pads its features to the size of the
    skip connection. Widths are 24-48-96-192-192 in the encoder, 96-48-24-24 in the decoder.
    """

    def __init__(self, *, n_in: int, n_out: int) -> None:
        super().__init__()
        down, up = [24, 48, 96, 192, 192], [96, 48, 24, 24]
        below, skips = [down[-1], *up[:-1]], down[-2::-1]
        joined = [n + m for n, m in zip(below, skips, strict=True)]
        self.encoder = nn.ModuleList(map(_double_convolution, [n_in, *down[:-1]], down))
        self.decoder = nn.ModuleList(map(_double_convolution, joined, up))
        self.head = nn.Conv3d(up[-1], n_out, 1)
        self.checkpointing = ActivationCheckpointing.NONE

    def forward(self, image: Tensor) -> Tensor | TrainingOutput:
        """Return logits: a `TrainingOutput` in training mode, else `(N, n_out, X, Y, Z)`."""
        run = partial(run_level, self.checkpointing)
        features = run(0, self.encoder[0], image)
        skips = []
        for level, encode in enumerate(self.encoder[1:], start=1):
            skips.append(features)
            features = run(level, partial(_pool_and_encode, encode), features)
        for decode in self.decoder:
            level = len(skips) - 1
            features = run(level, partial(_join_and_decode, decode), features, skips.pop())
        logits: Tensor = self.head(features)
        return TrainingOutput(logits=(logits,)) if self.training else logits


def _double_convolution(n_in: int, n_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_before in (n_in, n_out):
        layers += [
            Convolution(n_before, n_out, 3, padding=1),
            nn.GroupNorm(8, n_out),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


def _pool_and_encode(encode: nn.Module, features: Tensor) -> Tensor:
    return encode(functional.max_pool3d(features, 2))


def _join_and_decode(decode: nn.Module, below: Tensor, skip: Tensor) -> Tensor:
    doubled = functional.interpolate(below, scale_factor=2, mode="trilinear", align_corners=True)
    missing = [wanted - got for wanted, got in zip(skip.shape[2:], doubled.shape[2:], strict=True)]
    x, y, z = ((n // 2, n - n // 2) for n in missing)
    joined = torch.cat((skip, functional.pad(doubled, (*z, *y, *x))), dim=1)
    return decode(joined)
