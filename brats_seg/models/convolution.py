"""Convolve on a CPU where torch chooses a slow kernel, and choose the memory format of features.

torch sends a float32 convolution of one small image to a kernel (`slow_conv3d`) that takes two to ten
times as long as oneDNN's. The same image as a batch of two overlapping slabs goes to oneDNN, with
equal results up to rounding. A convolution of single voxels goes to that kernel at any size: with
channels last it is a matrix product, which takes a third to a tenth of the time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

SLOW_LIMIT = 20_480
"""Largest `N * C * X * Y` that torch convolves with its slow kernel, if N is 1 and nothing else
selects oneDNN (groups, or a kernel above 3): `use_mkldnn` in aten/src/ATen/native/Convolution.cpp, torch 2.6 to 2.13."""
_CONTIGUOUS_VOXELS = 40**3
"""Voxels of the largest image whose features stay contiguous on a CPU."""
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
    if isinstance(padding, str) or not is_slow(image, weight):
        return functional.conv3d(image, weight, bias, stride, padding)
    border, kernel, step = padding[0], weight.shape[2], stride[0]
    n_out = (image.shape[2] + 2 * border - kernel) // step + 1
    # of an odd number of outputs, both slabs compute the middle one
    half = (n_out + 1) // 2
    length = (half - 1) * step + kernel
    padded = functional.pad(image, (0, 0, 0, 0, border, border))
    slabs = torch.cat((padded[:, :, :length], padded[:, :, (n_out - half) * step :][:, :, :length]))
    first, second = functional.conv3d(slabs, weight, bias, stride, (0, *padding[1:])).split(1)
    return torch.cat((first, second[:, :, 2 * half - n_out :]), dim=2)


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


def _is_plain(layer: nn.Conv3d) -> bool:
    return layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
