"""Apply a network to a volume that is larger than its window.

Windows overlap, and the logits of a voxel are the mean over the windows that hold it, weighted by a
Gaussian, because a network is least accurate near the border of its window. Logits are averaged and
not probabilities, as in nnU-Net (Isensee et al. 2021). Windows stand on a grid, so that the weights
are products of one vector per axis: no volume of weights is held, and nothing is divided at the end.

MONAI's `sliding_window_inference` takes the same time and more memory (`benchmarks/RESULTS.md`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn import functional

from brats_seg.runtime.device import Device
from brats_seg.voxels.box import Triple, rounded_up, shape_text, triple

_SIGMA_SHARE = 1 / 8
"""Standard deviation of the Gaussian, as a share of the window, as in nnU-Net and MONAI."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The box that a network sees at inference.

    Example:
        >>> str(Window(size=(96, 96, 96), overlap=0.5)), str(Window(size=None, overlap=0.5))
        ('96x96x96 voxels, overlap 0.5', 'the whole brain in one pass')
    """

    size: Triple | None
    """Voxels along X, Y and Z; None is the whole brain crop in one pass."""
    overlap: float
    """Share that neighbouring windows have in common, in [0, 1)."""

    def fit(self, shape: Triple, patch: Triple, multiple: Triple) -> Triple:
        """Return its voxels for a volume: cut to a smaller one, but never below a training patch.

        Zeros around a volume change the statistics of the normalisation layers, and a network has
        seen them in patches only.

        Args:
            shape: Voxels of the volume.
            patch: Voxels of a training patch.
            multiple: Numbers that the size of an input must be a multiple of.

        Example:
            >>> Window(size=(96, 96, 96), overlap=0.5).fit((140, 70, 30), (64, 64, 64), (16, 16, 16))
            (96, 80, 64)
        """
        whole = rounded_up(shape, multiple)
        if self.size is None:
            return whole
        return triple(map(min, self.size, map(max, patch, whole)))

    def __str__(self) -> str:
        if self.size is None:
            return "the whole brain in one pass"
        return f"{shape_text(self.size)} voxels, overlap {self.overlap:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRule:
    """Rule of a program for placing windows along an axis, and for weighting their voxels."""

    starts: Callable[[int, int, float], Sequence[int]]
    """First voxel of each window, for an axis, a window and an overlap."""
    weights: Callable[[int], Tensor]
    """Weight of each voxel of a window, `(length,)` float32; any factor cancels out."""


def window_starts(size: int, length: int, overlap: float) -> tuple[int, ...]:
    """Return the first voxel of each window: the fewest that overlap enough, evenly spaced."""
    step = max(1, length * (1 - overlap))
    n_steps = ceil((size - length) / step)
    return tuple(round(i * (size - length) / max(1, n_steps)) for i in range(n_steps + 1))


def gaussian(length: int, centre: float) -> Tensor:
    """Return the Gaussian weights `(length,)` of a window around a centre."""
    distance = torch.arange(length, dtype=torch.float32) - centre
    return torch.exp(-0.5 * (distance / (_SIGMA_SHARE * length)) ** 2)


EVENLY_SPACED = WindowRule(
    starts=window_starts, weights=lambda length: gaussian(length, (length - 1) / 2)
)
"""Windows are spaced evenly and weighted by a Gaussian around their centre."""


@torch.no_grad()
def predict_logits(
    network: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    window: Triple,
    overlap: float,
    device: Device,
    rule: WindowRule = EVENLY_SPACED,
    after_window: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the logits `(R, X, Y, Z)` of an image `(C, X, Y, Z)`, in float32.

    The sum is held on the device of the image: for a volume too large for the GPU, give the image on
    the CPU. A volume smaller than the window is padded with zeros, the value of the background.

    Args:
        network: Turns `(1, C, *window)` into `(1, R, *window)`; called once per window.
        image: Normalised modalities.
        window: Voxels along X, Y and Z.
        overlap: Smallest overlap of neighbouring windows, as a share of the window, in [0, 1).
        device: Device and precision that each window is computed with.
        rule: Where windows are placed, and how their voxels are weighted.
        after_window: Called after each window.

    Example:
        >>> image = torch.ones(4, 20, 18, 16)
        >>> device = Device(torch_device=image.device)
        >>> logits = predict_logits(
        ...     lambda window: window[:, :3], image, window=(8, 8, 8), overlap=0.5, device=device
        ... )
        >>> logits.shape
        torch.Size([3, 20, 18, 16])
    """
    padded, inner = _pad(image, window)
    axes = [
        axis_windows(size, length, overlap, rule, image.device)
        for size, length in zip(padded.shape[1:], window, strict=True)
    ]
    total = image.new_zeros(0)  # the number of regions is known after the first window
    for (x, x_weights), (y, y_weights), (z, z_weights) in product(*axes):
        box = (slice(None), x, y, z)
        voxels = padded[box][None].to(device.torch_device)
        with device.autocast():
            logits = network(voxels)[0].to(image.device, torch.float32)
        if not len(total):
            total = logits.new_zeros((len(logits), *padded.shape[1:]))
        plane = x_weights[:, None] * y_weights
        total[box] += logits * (plane[:, :, None] * z_weights)
        after_window()
    return total[inner]


def n_windows(
    shape: Sequence[int], window: Sequence[int], overlap: float, rule: WindowRule = EVENLY_SPACED
) -> int:
    """Return the number of windows for an image of `shape` voxels along X, Y and Z.

    Example:
        >>> n_windows((20, 18, 6), (8, 8, 8), overlap=0.5)
        16
    """
    return prod(
        len(rule.starts(max(size, length), length, overlap))
        for size, length in zip(shape, window, strict=True)
    )


def axis_windows(
    size: int, length: int, overlap: float, rule: WindowRule, device: torch.device
) -> list[tuple[slice, Tensor]]:
    """Return the windows of an axis, with weights `(length,)` that sum to 1 in every voxel."""
    weights = rule.weights(length).to(device)
    total = torch.zeros(size, dtype=torch.float32, device=device)
    windows = [slice(start, start + length) for start in rule.starts(size, length, overlap)]
    for window in windows:
        total[window] += weights
    return [(window, weights / total[window]) for window in windows]


def _pad(image: Tensor, window: Triple) -> tuple[Tensor, tuple[slice, ...]]:
    """Pad a volume smaller than the window with zeros, and return the box of the volume in it."""
    sizes = image.shape[1:]
    missing = [max(0, length - size) for length, size in zip(window, sizes, strict=True)]
    before = [n // 2 for n in missing]
    boxes = (slice(start, start + size) for start, size in zip(before, sizes, strict=True))
    inner = (slice(None), *boxes)
    if not any(missing):
        return image, inner
    # torch takes the last axis first
    pairs = [(start, n - start) for start, n in zip(before, missing, strict=True)]
    return functional.pad(image, [n for pair in reversed(pairs) for n in pair]), inner
