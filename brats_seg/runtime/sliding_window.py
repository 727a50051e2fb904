"""Apply a network to a volume that is larger than its window.

Windows overlap, and the logits of a voxel are the mean over the windows that hold it, weighted by a
Gaussian, because a network is least accurate near the border of its window. Logits are averaged and
not probabilities, as in nnU-Net (Isensee et al. 2021).

Windows stand on a grid, so that the weights are products of one vector per axis. The vectors are
normalised beforehand: no volume of weights is held, and nothing is divided at the end.

MONAI's `sliding_window_inference` takes the same time (ratio 0.99 to 1.04) and more memory for the
sum of the windows: 48 against 38 MB for 141x175x137 voxels in windows of 64, 240 against 206 MB for
240x240x155 in windows of 128 (`benchmarks/sliding_window.py`). It places windows at a fixed step
and moves the last one back to the border, whereas windows here are evenly spaced; where both place
the same windows, the results agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn import functional

from brats_seg.voxels.box import Triple, rounded_up

SIGMA_FRACTION = 1 / 8
"""Standard deviation of the Gaussian, as a share of the window, as in nnU-Net and MONAI."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRule:
    """Rule of a program for placing windows along an axis, and for weighting their voxels."""

    starts: Callable[[int, int, float], Sequence[int]]
    """First voxel of each window, for an axis, a window and an overlap."""
    weights: Callable[[int], Tensor]
    """Weight of each voxel of a window, `(length,)` float32; any factor cancels out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisWindow:
    """Part of one axis that a window covers."""

    start: int
    weights: Tensor
    """`(length,)` float32; the weights of all windows that hold a voxel sum to 1."""

    @property
    def slice(self) -> slice:
        """Voxels of the axis."""
        return slice(self.start, self.start + len(self.weights))


@torch.no_grad()
def predict_logits(
    network: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    window: tuple[int, int, int],
    overlap: float,
    rule: WindowRule | None = None,
) -> Tensor:
    """Return the logits `(R, X, Y, Z)` of an image `(C, X, Y, Z)`, in float32.

    The sum is held on the device of the image: for a volume too large for the GPU, give the image on
    the CPU and a function that moves each window. A volume smaller than the window is padded with
    zeros, the value of the background, and the result is cropped.

    Args:
        network: Turns `(1, C, *window)` into `(1, R, *window)`; called once per window.
        image: Normalised modalities.
        window: Voxels along X, Y and Z.
        overlap: Smallest overlap of neighbouring windows, as a share of the window, in [0, 1).
        rule: Rule of another program; by default windows are spaced evenly and weighted by a
            Gaussian around their centre.

    Example:
        >>> image = torch.ones(4, 20, 18, 16)
        >>> predict_logits(lambda window: window[:, :3], image, window=(8, 8, 8), overlap=0.5).shape
        torch.Size([3, 20, 18, 16])
    """
    padded, inner = _padded(image, window)
    axes = [
        axis_windows(size, length, overlap, image.device, rule=rule)
        for size, length in zip(padded.shape[1:], window, strict=True)
    ]
    total = image.new_zeros(0)  # the number of regions is known after the first window
    for x, y, z in product(*axes):
        box = (slice(None), x.slice, y.slice, z.slice)
        logits = network(padded[box][None])[0].to(image.device, torch.float32)
        if not len(total):
            total = logits.new_zeros((len(logits), *padded.shape[1:]))
        plane = x.weights[:, None] * y.weights
        total[box] += logits * (plane[:, :, None] * z.weights)
    return total[inner]


def n_windows(
    shape: Sequence[int], window: Sequence[int], overlap: float, rule: WindowRule | None = None
) -> int:
    """Return the number of windows for an image of `shape` voxels along X, Y and Z.

    Example:
        >>> n_windows((20, 18, 6), (8, 8, 8), overlap=0.5)
        16
    """
    starts = window_starts if rule is None else rule.starts
    return prod(
        len(starts(max(size, length), length, overlap))
        for size, length in zip(shape, window, strict=True)
    )


def axis_windows(
    size: int,
    length: int,
    overlap: float,
    device: torch.device | None = None,
    *,
    rule: WindowRule | None = None,
) -> tuple[AxisWindow, ...]:
    """Cover an axis of `size` voxels with windows of `length`, from border to border."""
    rule = rule or _OWN_RULE
    starts = rule.starts(size, length, overlap)
    weights = rule.weights(length).to(device)
    total = torch.zeros(size, dtype=torch.float32, device=device)
    for start in starts:
        total[start : start + length] += weights
    return tuple(
        AxisWindow(start=start, weights=weights / total[start : start + length]) for start in starts
    )


def window_starts(size: int, length: int, overlap: float) -> tuple[int, ...]:
    """Return the first voxel of each window: the fewest that overlap enough, evenly spaced."""
    step = max(1, round(length * (1 - overlap)))
    n_steps = ceil((size - length) / step)
    return tuple(round(i * (size - length) / max(1, n_steps)) for i in range(n_steps + 1))


def window_within(window: Triple, patch: Triple, multiple: Triple, shape: Triple) -> Triple:
    """Return a window, cut to a volume that is smaller but never below the training patch.

    Zeros around a volume change the statistics of the normalisation layers: with windows of 96^3 on
    crops of about 70^3 the mean Dice was 0.465, with windows of 64^3 0.557 (four real cases at 2 mm).

    Args:
        window: Voxels of the window.
        patch: Voxels of a training patch, in which zeros were seen in training.
        multiple: Numbers that the size of an input must be a multiple of.
        shape: Voxels of the volume.

    Example:
        >>> window_within((96, 96, 96), (64, 64, 64), (16, 16, 16), (140, 70, 30))
        (96, 80, 64)
    """
    x, y, z = map(min, window, window_around(patch, multiple, shape))
    return x, y, z


def window_around(patch: Triple, multiple: Triple, shape: Triple) -> Triple:
    """Return the window that covers a volume in one pass, never below the training patch.

    The arguments are those of `window_within`.

    Example:
        >>> window_around((64, 64, 64), (16, 16, 16), (140, 70, 30))
        (144, 80, 64)
    """
    x, y, z = map(max, patch, rounded_up(shape, multiple))
    return x, y, z


def bell(length: int, centre: float, sigma_fraction: float = SIGMA_FRACTION) -> Tensor:
    """Return a Gaussian `(length,)` around a centre, whose standard deviation is a share of it."""
    distance = torch.arange(length, dtype=torch.float32) - centre
    return torch.exp(-0.5 * (distance / (sigma_fraction * length)) ** 2)


def _centred_bell(length: int) -> Tensor:
    return bell(length, (length - 1) / 2)


_OWN_RULE = WindowRule(starts=window_starts, weights=_centred_bell)


def _padded(
    image: Tensor, window: tuple[int, int, int]
) -> tuple[Tensor, tuple[slice, slice, slice, slice]]:
    """Pad a volume smaller than the window with zeros, and return the box of the volume in it."""
    missing = [max(0, n - m) for n, m in zip(window, image.shape[1:], strict=True)]
    x, y, z = ((n // 2, n - n // 2) for n in missing)
    inner = (
        slice(None),
        slice(x[0], x[0] + image.shape[1]),
        slice(y[0], y[0] + image.shape[2]),
        slice(z[0], z[0] + image.shape[3]),
    )
    if not any(missing):
        return image, inner
    return functional.pad(image, (*z, *y, *x)), inner
