"""Convolve on a CPU where torch chooses a slow kernel, and choose the memory format of features.

torch sends a float32 convolution of one small image to a kernel (`slow_conv3d`) that takes two to ten
times as long as oneDNN's. The same image as a batch of two overlapping slabs goes to oneDNN, with
equal results up to rounding. A convolution of single voxels goes to that kernel at any size: with
channels last it is a matrix product, which takes a third to a tenth of the time. On AVX2 the gradient
of weights takes four fifths of the time if the zeros around the image along X are voxels of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

SLOW_LIMIT = 20_480
"""Largest `N * C * X * Y` that torch convolves with its slow kernel, if N is 1 and nothing else
selects oneDNN (groups, or a kernel above 3): `use_mkldnn` in aten/src/ATen/native/Convolution.cpp, torch 2.6 to 2.13."""
_CONTIGUOUS_VOXELS = 40**3
"""Voxels of the largest image whose features stay contiguous on a CPU."""
_VOXELS_PER_CHANNEL = 512
"""Voxels for each channel from which `convolve_upsampled` makes a kernel: by products, with all gradients, about
twice what it takes to be no loss."""
_stands_for_gpu: ContextVar[bool] = ContextVar("stands_for_gpu", default=False)


class Convolution(nn.Conv3d):
    """`torch.nn.Conv3d` with weights of the same names, for kernels of any size without dilation."""

    def forward(self, image: Tensor) -> Tensor:
        """`(N, C, X, Y, Z)` -> `(N, n_out, X / stride, ...)`."""
        return convolve(image, self.weight, self.bias, self.stride, self.padding)


def use_slabs(network: nn.Module) -> None:
    """Replace the convolutions of a network built elsewhere by those of this module, in place."""
    for module in network.modules():
        if type(module) is nn.Conv3d and _is_plain(module):
            module.__class__ = Convolution


def convolve(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, ...] | str = (1, 1, 1),
) -> Tensor:
    """Return `torch.nn.functional.conv3d` of an image `(N, C, X, Y, Z)`.

    An image that torch would convolve slowly is cut along X into two slabs of equal size, each with
    the voxels that its outputs depend on.
    """
    is_point = weight[0, 0].numel() == 1 and set(stride) == {1} and not any(padding)
    if is_point and _is_float32_on_cpu(image) and has_channels_last(image):
        return functional.linear(image.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
    if isinstance(padding, str):
        return functional.conv3d(image, weight, bias, stride, padding)
    if not is_slow(image, weight):
        function = _Convolve.apply if _needs_zeros(image) else functional.conv3d
        output: Tensor = function(image, weight, bias, stride, padding)
        return output
    border, kernel, step = padding[0], weight.shape[2], stride[0]
    n_out = (image.shape[2] + 2 * border - kernel) // step + 1
    # of an odd number of outputs, both slabs compute the middle one
    half = (n_out + 1) // 2
    length = (half - 1) * step + kernel
    padded = functional.pad(image, (0, 0, 0, 0, border, border))
    slabs = torch.cat((padded[:, :, :length], padded[:, :, (n_out - half) * step :][:, :, :length]))
    first, second = functional.conv3d(slabs, weight, bias, stride, (0, *padding[1:])).split(1)
    return torch.cat((first, second[:, :, 2 * half - n_out :]), dim=2)


def convolve_upsampled(
    below: Tensor, upsampling: nn.ConvTranspose3d, weight: Tensor, other: Tensor
) -> Tensor:
    """Return what features `(N, C, X, Y, Z)` are convolved to after upsampling, in the format of others.

    Upsampling by two and a convolution of 3x3x3 are one transposed convolution of 4x4x4, whose kernel is
    what both make of a single voxel. It takes half of the products; making the kernel takes more with every
    channel. The bias is the weight of a channel of ones, which end where the upsampled features do.
    """
    is_fast = _is_float32_on_cpu(below) and has_channels_last(other)
    is_large = prod(other.shape[2:]) >= _VOXELS_PER_CHANNEL * len(weight)
    if not is_fast or not is_large or set(upsampling.stride) != {2} or upsampling.bias is None:
        return convolve(in_format_of(other, upsampling(below)), weight)
    ones = below.new_ones(len(below), 1, *below.shape[2:])
    bias = upsampling.bias[None, :, None, None, None].expand(1, -1, 2, 2, 2)
    voxels = functional.pad(torch.cat((upsampling.weight, bias)), (2,) * 6)
    image = in_format_of(other, torch.cat((below, ones), dim=1))
    kernel = functional.conv3d(voxels, weight)
    return functional.conv_transpose3d(image, kernel, stride=2, padding=1)


class _Convolve(torch.autograd.Function):
    """Convolve as torch does, and compute the gradients from the image with zeros before and after it along X.

    For images that oneDNN surrounds with zeros along X itself, its kernel for AVX2 copies the neighbours
    of each voxel first (`im2col`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
    ) -> Tensor:
        ctx.save_for_backward(image, weight)
        ctx.stride, ctx.padding = stride, padding
        return functional.conv3d(image, weight, bias, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, ...]:
        image, weight = ctx.saved_tensors
        border, *along_yz = ctx.padding
        padded = functional.pad(image, (0, 0, 0, 0, border, border))
        geometry = ctx.stride, (0, *along_yz), (1, 1, 1), False, (0, 0, 0), 1
        by_padded, *by_parameters = torch.ops.aten.convolution_backward(
            by_output, padded, weight, [len(weight)], *geometry, ctx.needs_input_grad[:3]
        )
        if by_padded is not None:
            by_padded = in_format_of(image, by_padded.narrow(2, border, image.shape[2]))
        return by_padded, *by_parameters, None, None


def is_slow(image: Tensor, weight: Tensor) -> bool:
    """Return whether torch convolves an image `(N, C, X, Y, Z)` with its slow kernel.

    A kernel of one voxel is a matrix product for either, and a traced network has to be one for
    images of all sizes.
    """
    n, *axes, _ = image.shape
    return (
        n == 1
        and _is_float32_on_cpu(image)
        and prod(weight.shape[2:]) > 1
        and min(weight.shape[3:]) <= 3
        and prod(axes) <= SLOW_LIMIT
    )


def has_channels_last(image: Tensor) -> bool:
    """Return whether an image `(N, C, X, Y, Z)` holds the channels of a voxel side by side."""
    channels_last = image.is_contiguous(memory_format=torch.channels_last_3d)
    return channels_last and not image.is_contiguous()


def in_format_of(other: Tensor, features: Tensor) -> Tensor:
    """Return features `(N, C, X, Y, Z)` in the memory format of others."""
    is_last = has_channels_last(other)
    return features.contiguous(
        memory_format=torch.channels_last_3d if is_last else torch.contiguous_format
    )


def fast_format(image: Tensor) -> torch.memory_format:
    """Return the memory format in which the features of an image `(N, C, X, Y, Z)` are computed.

    oneDNN convolves features whose channels lie side by side (channels last), and copies others to
    that order and back. Small images are not worth the change of the format; GPUs were not measured.
    """
    is_gain = is_on_cpu(image) and prod(image.shape[2:]) > _CONTIGUOUS_VOXELS
    return torch.channels_last_3d if is_gain else torch.contiguous_format


def is_on_cpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU, and does not stand for one on a GPU."""
    return tensor.device.type == "cpu" and not _stands_for_gpu.get()


@contextmanager
def cpu_as_gpu(*, is_needed: bool = True) -> Iterator[None]:
    """Let networks on the CPU compute as on a GPU, so that the memory which they take there is counted."""
    token = _stands_for_gpu.set(is_needed)
    try:
        yield
    finally:
        _stands_for_gpu.reset(token)


def _is_float32_on_cpu(image: Tensor) -> bool:
    """Return whether an image is computed in float32 on a CPU, and not traced for files of ONNX."""
    is_other = torch.is_autocast_enabled("cpu") or torch.onnx.is_in_onnx_export()
    return is_on_cpu(image) and image.dtype is torch.float32 and not is_other


def _needs_zeros(image: Tensor) -> bool:
    """Return whether gradients are computed from an image with zeros along X, see `_Convolve`."""
    is_avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return is_avx2 and torch.is_grad_enabled() and _is_float32_on_cpu(image)


def _is_plain(layer: nn.Conv3d) -> bool:
    return layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
