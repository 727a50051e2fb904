"""Choose the order in which features lie in memory, by measuring which one is faster.

Features `(N, C, X, Y, Z)` lie either with the voxels of a channel side by side (contiguous) or with the
channels of a voxel side by side (channels last). oneDNN convolves channels-last features, and copies
contiguous ones to that order and back; which one is faster depends on device, precision and layers. The
results differ in their last bits, so that a run keeps the format that it began with.
"""

import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from brats_seg.runtime.device import SMALL_PATCH, Device

CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"
MEMORY_FORMATS = {CONTIGUOUS: torch.contiguous_format, CHANNELS_LAST: torch.channels_last_3d}
"""The formats by the names that settings and checkpoints give them."""
LEAST_GAIN = 1.05
"""Smallest ratio of times for which channels last is chosen; a smaller one may be chance."""
_N_ROUNDS = 3
_LONGEST_AXIS = 48
"""Voxels of an axis of the image that a CPU measures with, in about a second."""


@runtime_checkable
class HasMemoryFormat(Protocol):
    """A network that computes in either format: its layers keep that of the image."""

    memory_format: torch.memory_format
    """Format that the network brings an image to."""
    encoder: nn.ModuleList
    """Levels that the image goes through; the first one is the finest."""


def set_memory_format(network: nn.Module, name: str) -> bool:
    """Let a network compute in a format if it supports it, and return whether it does.

    A network that has no choice supports `contiguous`. The format of the weights does not change.
    """
    if not isinstance(network, HasMemoryFormat):
        return name == CONTIGUOUS
    network.memory_format = MEMORY_FORMATS[name]
    return True


def memory_format_of(network: nn.Module) -> str:
    """Return the name of the format in which a network computes."""
    has_choice = isinstance(network, HasMemoryFormat)
    own = network.memory_format if has_choice else torch.contiguous_format
    return next(name for name, known in MEMORY_FORMATS.items() if known is own)


def format_to_predict(device: torch.device, window: Sequence[int]) -> str:
    """Return the name of the format in which windows are computed for prediction.

    It depends on nothing that is measured, so that every computer with the same device gives the same
    label maps. On a CPU with bf16 (AMX), the forward pass of the default U-Net took 0.47 to 0.53 of the
    time with channels last, and in float32 0.67 to 1.01 of it (torch 2.13, one thread, windows of 64^3
    and 96^3). On GPUs it was not measured.

    Args:
        device: Device that computes.
        window: Voxels along X, Y and Z; small ones are computed in contiguous format.
    """
    is_gain = device.type == "cpu" and prod(window) > SMALL_PATCH
    return CHANNELS_LAST if is_gain else CONTIGUOUS


def channels_last_gain(
    network: HasMemoryFormat, n_channels: int, patch: tuple[int, int, int], device: Device
) -> float:
    """Return the time of a training step in contiguous format divided by that in channels last.

    It is 0 where the memory or the kernels for channels last are missing.

    A copy of the finest level computes an image of noise, forward and backward, in both formats in
    turn; the ratio is the median over rounds. The network and the random state of torch stay as they
    are.

    Args:
        network: Network on the device.
        n_channels: Channels of an image.
        patch: Voxels of a training patch; less of it is computed on a CPU.
        device: Device and precision.
    """
    on_cpu = device.torch_device.type == "cpu"
    size = [min(n, _LONGEST_AXIS) for n in patch] if on_cpu else patch
    noise = torch.randn(1, n_channels, *size, generator=torch.Generator().manual_seed(0))
    try:
        level = deepcopy(network.encoder[0]).train()
        images = [
            noise.to(device.torch_device).contiguous(memory_format=known)
            for known in MEMORY_FORMATS.values()
        ]
        rounds = [
            [_seconds(level, image, device) for image in images] for _ in range(_N_ROUNDS + 1)
        ]
    except (RuntimeError, MemoryError):
        return 0.0
    # memory is touched, and kernels are prepared, in the first round
    return statistics.median(contiguous / last for contiguous, last in rounds[1:])


def _seconds(level: nn.Module, image: Tensor, device: Device) -> float:
    """Return the seconds of forward and backward: of CPU time where the CPU computes."""
    on_gpu = device.torch_device.type == "cuda"
    # other processes disturb CPU time less
    clock = time.perf_counter if on_gpu else time.process_time
    began_s = clock()
    with torch.enable_grad():
        with device.autocast():
            features = level(image)
        features.backward(torch.ones_like(features))
    if on_gpu:
        torch.cuda.synchronize(device.torch_device)
    return clock() - began_s
