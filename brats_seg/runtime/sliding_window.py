"""A network over a volume that is larger than its window.

Windows overlap, and each voxel's logits are the mean over the windows that hold it, weighted by a
Gaussian, because a network knows least at a window's border. Logits are averaged, not
probabilities, as nnU-Net does (Isensee et al. 2021): the mean is taken once, and whoever wants
probabilities takes the sigmoid of the result.

Windows stand on a grid, so the weights are products of one vector per axis. The vectors are
normalised beforehand: no volume of weights is kept, and nothing is divided at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

SIGMA_FRACTION = 1 / 8
"""Standard deviation of the Gaussian, as a share of the window (nnU-Net, MONAI)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisWindow:
    """What one window covers of one axis."""

    start: int
    weights: Tensor
    """`(length,)` float32; those of all axis_windows that hold a voxel sum to 1."""

    @property
    def slice(self) -> slice:
        """The voxels of the axis."""
        return slice(self.start, self.start + len(self.weights))


@torch.no_grad()
def predict_logits(
    network: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    window: tuple[int, int, int],
    overlap: float,
) -> Tensor:
    """Return the logits `(R, X, Y, Z)` of an image `(C, X, Y, Z)`, in float32.

    `network` maps `(1, C, *window)` to `(1, R, *window)`. The sum is kept where the image is:
    for a volume too large for the GPU, pass it on the CPU and a function that moves each window.
    A volume smaller than the window is surrounded by zeros, the value of background, and cut back.

    Args:
        network: Called once per window.
        image: Normalised modalities.
        window: Voxels along X, Y and Z.
        overlap: Least share that neighbouring windows have in common, from 0 to below 1.
    """
    padded, inner = _padded(image, window)
    axes = [
        axis_windows(size, length, overlap, image.device)
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


def axis_windows(
    size: int, length: int, overlap: float, device: torch.device | None = None
) -> tuple[AxisWindow, ...]:
    """Cut an axis of `size` voxels into windows of `length`, evenly, from border to border."""
    starts = window_starts(size, length, overlap)
    bell = _bell(length).to(device)
    total = torch.zeros(size, dtype=torch.float32, device=device)
    for start in starts:
        total[start : start + length] += bell
    return tuple(
        AxisWindow(start=start, weights=bell / total[start : start + length]) for start in starts
    )


def window_starts(size: int, length: int, overlap: float) -> tuple[int, ...]:
    """Return where windows begin: the fewest that overlap enough, at even distances."""
    step = max(1, round(length * (1 - overlap)))
    n_steps = ceil((size - length) / step)
    return tuple(round(i * (size - length) / max(1, n_steps)) for i in range(n_steps + 1))


def _bell(length: int) -> Tensor:
    distance = torch.arange(length, dtype=torch.float32) - (length - 1) / 2
    return torch.exp(-0.5 * (distance / (SIGMA_FRACTION * length)) ** 2)


def _padded(
    image: Tensor, window: tuple[int, int, int]
) -> tuple[Tensor, tuple[slice, slice, slice, slice]]:
    """Surround a volume smaller than the window with zeros, and say where the volume lies."""
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
