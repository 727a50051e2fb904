"""Build the networks of nnU-Net v2 from the description in its plans, with its names of weights.

These are the plain U-Net and the U-Net with a residual encoder (Isensee et al. 2021 and 2024). Only
what prediction needs is built: no deep supervision, no dropout. Features are `(N, C, X, Y, Z)`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from torch import Tensor, nn

from brats_seg.config import Width
from brats_seg.models.convolution import Convolution
from brats_seg.voxels.box import Triple, triple

Pair: TypeAlias = tuple[int, int]
Count: TypeAlias = Annotated[int, Field(ge=1, le=100)]
_ONE: Triple = (1, 1, 1)


class LayerArguments(BaseModel):
    """Arguments of the norm and of the activation."""

    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    negative_slope: Annotated[float, Field(ge=0, lt=1)] = 0.01


class Stages(BaseModel):
    """Arguments of a network (`arch_kwargs`); tuples have an entry for each stage, finest first."""

    model_config = ConfigDict(extra="forbid")

    n_stages: int = Field(ge=2, le=12)
    features_per_stage: tuple[Width, ...]
    kernel_sizes: tuple[tuple[Count, Count, Count], ...]
    strides: tuple[tuple[Count, Count, Count], ...]
    """Stride into each stage."""
    n_encoder: tuple[Count, ...] = Field(
        validation_alias=AliasChoices("n_conv_per_stage", "n_blocks_per_stage")
    )
    """Convolutions, or residual blocks, of each stage of the encoder."""
    n_conv_per_stage_decoder: tuple[Count, ...]
    """Convolutions of each stage of the decoder, lowest first: one entry less."""
    conv_op: Annotated[str, Field(pattern=r"\bConv3d$")] = "Conv3d"
    conv_bias: bool = True
    norm_op: Annotated[str, Field(pattern=r"\bInstanceNorm3d$")] = "InstanceNorm3d"
    norm_op_kwargs: LayerArguments = LayerArguments()
    dropout_op: None = None
    dropout_op_kwargs: None = None
    nonlin: Annotated[str, Field(pattern=r"\bLeakyReLU$")] = "LeakyReLU"
    nonlin_kwargs: LayerArguments = LayerArguments()
    deep_supervision: bool = False

    def activation(self) -> nn.LeakyReLU:
        """Return the activation after a layer."""
        return nn.LeakyReLU(self.nonlin_kwargs.negative_slope, inplace=True)


class Architecture(BaseModel):
    """Network of a configuration in `plans.json`."""

    network_class_name: Annotated[str, Field(pattern=r"(^|\.)(PlainConvUNet|ResidualEncoderUNet)$")]
    arch_kwargs: Stages

    @property
    def multiple(self) -> Triple:
        """Numbers that the size of an input is a multiple of."""
        return triple(torch.tensor(self.arch_kwargs.strides).prod(dim=0).tolist())


class NnunetNetwork(nn.Module):
    """Encoder and decoder, named as in nnU-Net so that its weights can be loaded."""

    def __init__(self, architecture: Architecture, n_in: int, n_out: int) -> None:
        super().__init__()
        is_residual = architecture.network_class_name.endswith("ResidualEncoderUNet")
        self.encoder = _encoder(architecture.arch_kwargs, n_in, is_residual=is_residual)
        self.decoder = _decoder(architecture.arch_kwargs, n_out)

    def forward(self, image: Tensor) -> Tensor:
        """`(N, n_in, X, Y, Z)` -> logits `(N, n_out, X, Y, Z)`; other heads are for training alone."""
        encoder: Any = self.encoder
        decoder: Any = self.decoder
        features, skips = encoder["stem"](image), []
        for stage in encoder["stages"]:
            features = stage(features)
            skips.append(features)
        skips.pop()
        for upsample, stage in zip(decoder["transpconvs"], decoder["stages"], strict=True):
            features = stage(torch.cat((upsample(features), skips.pop()), dim=1))
        return decoder["seg_layers"][-1](features)


class MeanNetwork(nn.Module):
    """Several networks whose logits are averaged, as nnU-Net averages folds and mirror images."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, image: Tensor) -> Tensor:
        """`(N, C, X, Y, Z)` -> the mean of the logits `(N, R, X, Y, Z)`."""
        total: Tensor = sum(network(image) for network in self.networks)
        return total / len(self.networks)


def _encoder(stages: Stages, n_in: int, *, is_residual: bool) -> nn.ModuleDict:
    widths, stem = stages.features_per_stage, nn.Sequential()
    if is_residual:
        stem = _stage("convs", (n_in, widths[0]), 1, stages.kernel_sizes[0], _ONE, stages)
        n_in = widths[0]
    kind = "blocks" if is_residual else "convs"
    pairs = zip((n_in, *widths)[: stages.n_stages], widths, strict=True)
    rows = zip(pairs, stages.n_encoder, stages.kernel_sizes, stages.strides, strict=True)
    made = (_stage(kind, *row, stages) for row in rows)
    layers = [layer if is_residual else nn.Sequential(layer) for layer in made]
    return nn.ModuleDict({"stem": stem, "stages": nn.ModuleList(layers)})


def _decoder(stages: Stages, n_out: int) -> nn.ModuleDict:
    # the lowest stage first, as in nnU-Net
    lowest, *widths = reversed(stages.features_per_stage)
    below, kernels = (lowest, *widths[:-1]), stages.kernel_sizes[-2::-1]
    columns = below, widths, stages.strides[:0:-1], kernels, stages.n_conv_per_stage_decoder
    layers: Any = {name: nn.ModuleList() for name in ("transpconvs", "stages", "seg_layers")}
    for n_below, width, stride, kernel, n in zip(*columns, strict=True):
        upsampling = nn.ConvTranspose3d(n_below, width, stride, stride, bias=stages.conv_bias)
        layers["transpconvs"].append(upsampling)
        layers["stages"].append(_stage("convs", (2 * width, width), n, kernel, _ONE, stages))
        layers["seg_layers"].append(Convolution(width, n_out, 1))
    return nn.ModuleDict(layers)


def _stage(
    kind: str, channels: Pair, n: int, kernel: Triple, stride: Triple, stages: Stages
) -> nn.Sequential:
    """Return layers one after the other, the first of which may have a stride.

    `kind` is what nnU-Net names them: `convs`, plain convolutions, or `blocks`, residual ones.
    """
    make: Callable[..., nn.Module] = _ResidualBlock if kind == "blocks" else _convolution
    same = (channels[1], channels[1])
    rest = (make(same, kernel, _ONE, stages) for _ in range(n - 1))
    layers = nn.Sequential(make(channels, kernel, stride, stages), *rest)
    return nn.Sequential(OrderedDict([(kind, layers)]))


def _convolution(
    channels: Pair, kernel: Triple, stride: Triple, stages: Stages, *, has_bias: bool = True
) -> nn.Sequential:
    """Return convolution, instance norm and LeakyReLU; a block that adds something first takes `[:2]`."""
    padding, bias = triple((n - 1) // 2 for n in kernel), has_bias and stages.conv_bias
    layers: dict[str, nn.Module] = {
        "conv": Convolution(*channels, kernel, stride, padding=padding, bias=bias),
        "norm": nn.InstanceNorm3d(channels[1], eps=stages.norm_op_kwargs.eps, affine=True),
        "nonlin": stages.activation(),
    }
    return nn.Sequential(OrderedDict(layers))


class _ResidualBlock(nn.Module):
    """Two convolutions parallel to a skip, which is pooled and projected where the shapes differ."""

    def __init__(self, channels: Pair, kernel: Triple, stride: Triple, stages: Stages) -> None:
        super().__init__()
        n_in, n_out = channels
        self.conv1 = _convolution(channels, kernel, stride, stages)
        self.conv2 = _convolution((n_out, n_out), kernel, _ONE, stages)[:2]
        self.nonlin2 = stages.activation()
        skip: list[nn.Module] = []
        if stride != _ONE:
            skip.append(nn.AvgPool3d(stride, stride))
        if n_in != n_out:
            skip.append(_convolution(channels, _ONE, _ONE, stages, has_bias=False)[:2])
        self.skip = nn.Sequential(*skip)

    def forward(self, features: Tensor) -> Tensor:
        return self.nonlin2(self.conv2(self.conv1(features)) + self.skip(features))
