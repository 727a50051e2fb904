"""Instance norm and LeakyReLU as one layer that keeps one tensor for the backward pass.

The stock layers keep two: the input of the norm and the output of the activation. Both layers can
be inverted, so the first is recomputed from the second, which the next layer keeps anyway (the idea
of Rota Bulo et al. 2018, there for batch norm). For the voxels of a channel of a patch,

    normalised = (features - mean) / deviation
    scaled = weight * normalised + bias
    output = scaled where it is positive, slope * scaled elsewhere

so that scaled is output or output / slope, and normalised is (scaled - bias) / weight.

Features are `(N, C, X, Y, Z)`. `by_output`, `by_weight` and so on are derivatives of the loss.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from brats_seg.errors import ConfigError
from brats_seg.models.convolution import has_channels_last, is_on_cpu

log = logging.getLogger(__name__)

Affine: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Weight, bias, and reciprocal of the deviation of the features, of each channel."""

SMALLEST_WEIGHT = 1e-3
"""Smallest absolute weight: a smaller one is replaced by it, because zero cannot be inverted.

The gradient is that of the replacement, so that a weight can cross zero. Weights start at 1.
"""
_VOXELS_AT_A_TIME = 2**25
"""Voxels of the channels of contiguous features that are inverted together: few enough for small temporaries,
and enough to keep a GPU busy. On a CPU only small features are contiguous."""
_NUMBERS_AT_A_TIME = 2**18
"""Numbers of channels-last features that a CPU computes together: they stay in its cache."""
_NUMBERS_TO_SPLIT = 2**25
"""Numbers of channels-last features up to which the backward pass computes them all at once, which takes
fewer steps and more temporary memory."""


class ActivatedNorm(nn.Module):
    """Normalise each channel of each patch, scale and shift it, and apply LeakyReLU.

    It computes the same as `nn.InstanceNorm3d(affine=True)` followed by `nn.LeakyReLU`, and has the
    state dict of the former. It overwrites its input, which must come from a layer that does not
    keep its output, such as a convolution. It has no second derivative.
    """

    def __init__(self, n_channels: int, slope: float, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_channels))
        self.bias = nn.Parameter(torch.zeros(n_channels))
        self.slope = slope
        self.eps = eps
        self.in_place = True
        """Whether the input is overwritten; False on devices that cannot, see `check_in_place`."""

    def forward(self, features: Tensor) -> Tensor:
        """`(N, C, X, Y, Z)` of any floating type -> the same tensor, overwritten.

        Statistics of half precision are computed in float32.

        Raises:
            ConfigError: The features have a single voxel.
        """
        if features.shape[2:].numel() == 1:
            msg = f"instance norm of shape {tuple(features.shape)}; expected two voxels at least. Give a larger input."
            raise ConfigError(msg)
        if not self.in_place:
            return self.stock(features)
        return _overwrite(features, self.weight, self.bias, self.slope, self.eps)

    def stock(self, features: Tensor) -> Tensor:
        """Compute the same with the stock layers, which keep two tensors and leave their input."""
        normalised = functional.instance_norm(
            features, weight=self.weight, bias=self.bias, eps=self.eps
        )
        return functional.leaky_relu(normalised, self.slope)


def check_in_place(network: nn.Module) -> None:
    """Switch a network to the stock layers if its device does not compute correctly in place.

    The kernels write their output over their input, which not every backend may support, so a small
    example is computed both ways on the device of the network.
    """
    layers = [module for module in network.modules() if isinstance(module, ActivatedNorm)]
    if layers and not _agrees_with_stock(layers[0].weight.device):
        log.warning("%s: norms take more memory, as in stock torch", layers[0].weight.device)
        for layer in layers:
            layer.in_place = False


def _agrees_with_stock(device: torch.device) -> bool:
    layer = ActivatedNorm(3, slope=0.1).to(device)
    generator = torch.Generator().manual_seed(0)
    features, by_output = torch.randn(2, 2, 3, 4, 5, 6, generator=generator).to(device)
    results = []
    try:
        with torch.enable_grad():
            for compute in (layer, layer.stock):
                leaf = features.clone().requires_grad_()
                output = compute(leaf * 1)
                inputs = (leaf, layer.weight, layer.bias)
                # of a scalar, because torch imports SymPy where it is given gradients of outputs
                results.append((output, *torch.autograd.grad((output * by_output).sum(), inputs)))
        pairs = zip(*results, strict=True)
        return all(torch.allclose(ours, stock, rtol=1e-3, atol=1e-4) for ours, stock in pairs)
    except RuntimeError:  # the device lacks a kernel
        return False


class _InPlace(torch.autograd.Function):
    """The layer as one function of autograd.

    A single patch of moderate size is computed at once. Otherwise patches are computed one by one, their
    channels in groups, or their rows in parts if a voxel holds its channels side by side.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, slope: float, eps: float
    ) -> Tensor:
        dtype = torch.promote_types(features.dtype, torch.float32)
        weight, bias = _away_from_zero(weight).to(dtype), bias.to(dtype)
        mean, inverse_deviation = weight.new_empty(2, *features.shape[:2])
        for patch, *statistics in zip(features.split(1), mean, inverse_deviation, strict=True):
            if _is_in_rows(patch):
                statistics[1].copy_(_overwrite_rows(_as_rows(patch), weight, bias, slope, eps))
                continue
            # the statistics are complete before the first voxel is written
            torch.native_batch_norm(
                patch, weight, bias, None, None, True, 0.0, eps, out=(patch, *statistics)
            )
            functional.leaky_relu_(patch, slope)
        ctx.mark_dirty(features)
        ctx.save_for_backward(features, weight, bias, inverse_deviation)
        ctx.slope = slope
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, ...]:
        output, weight, bias, inverse_deviation = ctx.saved_tensors
        groups, is_split = _groups_of_channels(output), _is_split(output[:1])
        if len(output) == len(groups) == 1 and not is_split:
            affine = weight, bias, inverse_deviation[0]
            return *_backward(by_output, output, affine, ctx.slope), None, None
        by_features = torch.empty_like(output)
        by_weight, by_bias = weight.new_empty(2, *inverse_deviation.shape)
        for index, channels in product(range(len(output)), groups):
            part, entries = (slice(index, index + 1), channels), (index, channels)
            affine = weight[channels], bias[channels], inverse_deviation[entries]
            tensors = by_output[part], output[part]
            if is_split:
                by_weight[entries], by_bias[entries] = _backward_by_rows(
                    *tensors, by_features[part], affine, ctx.slope
                )
            else:
                by_features[part], by_weight[entries], by_bias[entries] = _backward(
                    *tensors, affine, ctx.slope
                )
        return by_features, by_weight.sum(0), by_bias.sum(0), None, None


_overwrite: Callable[[Tensor, Tensor, Tensor, float, float], Tensor] = _InPlace.apply


def _away_from_zero(weight: Tensor) -> Tensor:
    size = weight.abs().clamp(min=SMALLEST_WEIGHT)
    return torch.where(weight < 0, -size, size)


def _groups_of_channels(output: Tensor) -> list[slice]:
    """Return the channels that the backward pass computes together."""
    n_channels, n_voxels = output.shape[1], output.shape[2:].numel()
    if not output.is_contiguous():  # with channels last, splitting them would copy
        return [slice(None)]
    size = max(1, _VOXELS_AT_A_TIME // n_voxels)
    return [slice(start, start + size) for start in range(0, n_channels, size)]


def _is_split(patch: Tensor) -> bool:
    """Return whether the backward pass of channels-last features is computed a part at a time."""
    return _is_in_rows(patch) and patch.numel() > _NUMBERS_TO_SPLIT


def _is_in_rows(patch: Tensor) -> bool:
    """Return whether a patch `(1, C, X, Y, Z)` on the CPU holds the channels of a voxel side by side."""
    return is_on_cpu(patch) and has_channels_last(patch)


def _as_rows(patch: Tensor) -> Tensor:
    """`(1, C, X, Y, Z) -> (X * Y * Z, C)`, without a copy if the channels are last."""
    return patch.movedim(1, -1).flatten(0, 3)


def _iterate_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of several tensors, as many at a time as the cache of a CPU holds."""
    size = max(1, _NUMBERS_AT_A_TIME // tensors[0].shape[1])
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _overwrite_rows(rows: Tensor, weight: Tensor, bias: Tensor, slope: float, eps: float) -> Tensor:
    """Normalise and activate rows; return the reciprocal of the deviation of each channel."""
    # torch computes statistics of half precision in float32 only if running statistics are float32
    unused = torch.zeros_like(weight)
    mean, variance = torch.batch_norm_update_stats(rows, unused, unused, 0.0)
    for (part,) in _iterate_rows(rows):
        _normalise(part, weight, bias, mean, variance, eps)
        functional.leaky_relu_(part, slope)
    return (variance + eps).rsqrt()


def _normalise(
    rows: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> None:
    """Overwrite rows with weight * (rows - mean) / sqrt(variance + eps) + bias."""
    unused = weight.new_empty(0)
    torch.native_batch_norm(
        rows, weight, bias, mean, variance, False, 0.0, eps, out=(rows, unused, unused)
    )


def _backward_by_rows(
    by_output: Tensor, output: Tensor, by_features: Tensor, affine: Affine, slope: float
) -> tuple[Tensor, Tensor]:
    """Write the derivative of a patch by its features, channels last; return those by weight and bias.

    The derivative by the features needs sums over all voxels, so that there are two passes: the first
    leaves the derivative by the scaled features in `by_features`, and the second replaces it by
    `factor * by_scaled + scaled_factor * scaled + shift`.
    """
    weight, bias, inverse_deviation = affine
    rows = [_as_rows(tensor) for tensor in (by_output, output, by_features)]
    by_weight, by_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    for by_part, part, by_scaled in _iterate_rows(*rows):
        torch.ops.aten.leaky_relu_backward(by_part, part, slope, True, grad_input=by_scaled)
        _, more_by_weight, more_by_bias = _norm_backward(
            by_scaled, functional.leaky_relu(part, 1 / slope), affine, only_sums=True
        )
        by_weight += more_by_weight
        by_bias += more_by_bias
    n_voxels = len(rows[0])
    factor = weight * inverse_deviation
    scaled_factor = -inverse_deviation * by_weight / n_voxels
    shift = -factor * by_bias / n_voxels - scaled_factor * bias
    zeros, ones = torch.zeros_like(weight), torch.ones_like(weight)
    for _, part, by_scaled in _iterate_rows(*rows):
        scaled = functional.leaky_relu(part, 1 / slope)
        # with mean 0 and variance 1, which leaves a product and a sum in place
        _normalise(scaled, scaled_factor, shift, zeros, ones, 0.0)
        _normalise(by_scaled, factor, zeros, zeros, ones, 0.0)
        by_scaled += scaled
    return by_weight, by_bias


def _backward(
    by_output: Tensor, output: Tensor, affine: Affine, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives by features, weight and bias."""
    by_scaled = torch.ops.aten.leaky_relu_backward(by_output, output, slope, True)
    return _norm_backward(by_scaled, functional.leaky_relu(output, 1 / slope), affine)


def _norm_backward(
    by_scaled: Tensor, scaled: Tensor, affine: Affine, *, only_sums: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives by features, weight and bias; without the first, if only sums are asked for.

    The kernel of batch norm divides its input by a deviation and multiplies its result by
    weight / deviation. Its input here is already scaled, so the bias is passed as the mean and the
    weight as the deviation; the missing factor is then weight / deviation of the features.
    """
    weight, bias, inverse_deviation = affine
    return torch.ops.aten.native_batch_norm_backward(
        by_scaled,
        scaled,
        weight.square() * inverse_deviation,
        None,
        None,
        bias,
        weight.reciprocal(),
        True,
        0.0,  # eps is in the deviation already
        [not only_sums, True, True],
    )
