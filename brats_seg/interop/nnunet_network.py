"""Build the networks of nnU-Net v2 from the description in its plans, with its names of weights.

These are the plain U-Net and the U-Net with a residual encoder (Isensee et al. 2021 and 2024). Only
what prediction needs is built: no deep supervision, no dropout. Features are `(N, C, X, Y, Z)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from brats_seg.models.convolution import Convolution
from brats_seg.voxels.box import Triple

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class NnunetShape:
    """Architecture of a network of nnU-Net; each tuple has an entry for each stage, finest first."""

    n_in: int
    n_out: int
    widths: tuple[int, ...]
    kernels: tuple[Triple, ...]
    strides: tuple[Triple, ...]
    """Stride into each stage."""
    n_encoder: tuple[int, ...]
    """Convolutions, or residual blocks, of each stage of the encoder."""
    n_decoder: tuple[int, ...]
    """Convolutions of each stage of the decoder, lowest first: one entry less."""
    is_residual: bool
    bias: bool
    eps: float
    slope: float
    """Slope of LeakyReLU."""

    @property
    def multiple(self) -> Triple:
        """Numbers that the size of an input is a multiple of."""
        x, y, z = torch.tensor(self.strides).prod(dim=0).tolist()
        return x, y, z


class NnunetNetwork(nn.Module):
    """Encoder and decoder, named as in nnU-Net so that its weights can be loaded."""

    def __init__(self, shape: NnunetShape) -> None:
        super().__init__()
        self.encoder = _Encoder(shape)
        self.decoder = _Decoder(shape)

    def forward(self, image: Tensor) -> Tensor:
        """`(N, n_in, X, Y, Z)` -> logits `(N, n_out, X, Y, Z)`."""
        logits: Tensor = self.decoder(self.encoder(image))
        return logits


class MeanNetwork(nn.Module):
    """Several networks whose logits are averaged, as nnU-Net averages folds and mirror images."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, image: Tensor) -> Tensor:
        """`(N, C, X, Y, Z)` -> the mean of the logits `(N, R, X, Y, Z)`."""
        total: Tensor = self.networks[0](image)
        for network in self.networks[1:]:
            total = total + network(image)
        return total / len(self.networks)


class _Convolution(nn.Module):
    """Convolution, instance norm, and LeakyReLU unless the block adds something first."""

    def __init__(
        self,
        channels: Pair,
        kernel: Triple,
        stride: Triple,
        shape: NnunetShape,
        *,
        is_activated: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        x, y, z = ((n - 1) // 2 for n in kernel)
        self.conv = Convolution(
            *channels, kernel, stride, padding=(x, y, z), bias=shape.bias and bias
        )
        self.norm = nn.InstanceNorm3d(channels[1], eps=shape.eps, affine=True)
        self.nonlin = nn.LeakyReLU(shape.slope, inplace=True) if is_activated else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        activated: Tensor = self.nonlin(self.norm(self.conv(features)))
        return activated


class _ResidualBlock(nn.Module):
    """Two convolutions beside a skip, which is pooled and projected where the shapes differ."""

    def __init__(self, channels: Pair, kernel: Triple, stride: Triple, shape: NnunetShape) -> None:
        super().__init__()
        n_in, n_out = channels
        self.conv1 = _Convolution(channels, kernel, stride, shape)
        self.conv2 = _Convolution((n_out, n_out), kernel, (1, 1, 1), shape, is_activated=False)
        self.nonlin2 = nn.LeakyReLU(shape.slope, inplace=True)
        skip: list[nn.Module] = []
        if stride != (1, 1, 1):
            skip.append(nn.AvgPool3d(stride, stride))
        if n_in != n_out:
            one = (1, 1, 1)
            skip.append(_Convolution(channels, one, one, shape, is_activated=False, bias=False))
        self.skip = nn.Sequential(*skip)

    def forward(self, features: Tensor) -> Tensor:
        changed: Tensor = self.conv2(self.conv1(features))
        added: Tensor = self.nonlin2(changed + self.skip(features))
        return added


class _Stage(nn.Module):
    """Layers one after the other, the first of which may have a stride.

    `kind` is what nnU-Net names them: `convs`, plain convolutions, or `blocks`, residual ones.
    """

    def __init__(
        self, kind: str, channels: Pair, n: int, kernel: Triple, stride: Triple, shape: NnunetShape
    ) -> None:
        super().__init__()
        make = _ResidualBlock if kind == "blocks" else _Convolution
        same = (channels[1], channels[1])
        rest = (make(same, kernel, (1, 1, 1), shape) for _ in range(n - 1))
        self.kind = kind
        self.add_module(kind, nn.Sequential(make(channels, kernel, stride, shape), *rest))

    def forward(self, features: Tensor) -> Tensor:
        changed: Tensor = getattr(self, self.kind)(features)
        return changed


class _Encoder(nn.Module):
    def __init__(self, shape: NnunetShape) -> None:
        super().__init__()
        n_in, kind = shape.n_in, "blocks" if shape.is_residual else "convs"
        self.stem: nn.Module = nn.Identity()
        if shape.is_residual:
            n_in = shape.widths[0]
            self.stem = _Stage("convs", (shape.n_in, n_in), 1, shape.kernels[0], (1, 1, 1), shape)
        pairs = zip((n_in, *shape.widths[:-1]), shape.widths, strict=True)
        stages = [
            _Stage(kind, pair, n, kernel, stride, shape)
            for pair, n, kernel, stride in zip(
                pairs, shape.n_encoder, shape.kernels, shape.strides, strict=True
            )
        ]
        self.stages = nn.ModuleList(
            stages if shape.is_residual else [nn.Sequential(stage) for stage in stages]
        )

    def forward(self, image: Tensor) -> list[Tensor]:
        """Return the features of each stage."""
        features, skips = self.stem(image), []
        for stage in self.stages:
            features = stage(features)
            skips.append(features)
        return skips


class _Decoder(nn.Module):
    def __init__(self, shape: NnunetShape) -> None:
        super().__init__()
        # the lowest stage first, as in nnU-Net
        widths = shape.widths[-2::-1]
        steps = list(zip(shape.widths[:0:-1], widths, shape.strides[:0:-1], strict=True))
        self.transpconvs = nn.ModuleList(
            nn.ConvTranspose3d(below, width, stride, stride, bias=shape.bias)
            for below, width, stride in steps
        )
        self.stages = nn.ModuleList(
            _Stage("convs", (2 * width, width), n, kernel, (1, 1, 1), shape)
            for width, n, kernel in zip(widths, shape.n_decoder, shape.kernels[-2::-1], strict=True)
        )
        self.seg_layers = nn.ModuleList(nn.Conv3d(width, shape.n_out, 1) for width in widths)

    def forward(self, skips: list[Tensor]) -> Tensor:
        """Return the logits of the finest stage; the other heads are for training alone."""
        features = skips.pop()
        for upsample, stage in zip(self.transpconvs, self.stages, strict=True):
            features = stage(torch.cat((upsample(features), skips.pop()), dim=1))
        logits: Tensor = self.seg_layers[-1](features)
        return logits
