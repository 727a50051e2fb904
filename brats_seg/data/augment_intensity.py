"""Changes of intensities, in place, with the background left at exactly 0.

nnU-Net too puts the background back to 0 where it normalised inside the brain alone: it is 0 in
every case a network will meet. Statistics are those of the brain in the patch, so that a change is
as strong at the border of the brain as inside. Because the background is 0, sums over the patch are
sums over the brain. A channel is a tensor (X, Y, Z) in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from brats_seg.data.augment import Augmentation

NOISE_STD = (0.0, 0.1)
"""In standard deviations of the brain."""
BLUR_SIGMA = (0.5, 1.0)
"""Standard deviation along each axis, in voxels."""
BRIGHTNESS = (0.75, 1.25)
"""Factor of all intensities."""
CONTRAST = (0.75, 1.25)
"""Factor of the distance from the mean."""
RESOLUTION = (0.5, 1.0)
"""Share of the voxels along each axis that is kept."""
GAMMA = (0.7, 1.5)
"""Exponent of the intensities, stretched from 0 to 1."""
CHANNEL_CHANCE = 0.5
"""Of each channel, when blur or low resolution is drawn."""

_BLUR_RADIUS = 3
"""In voxels: three standard deviations of the widest blur."""
_SMALLEST = 1e-7
"""Keeps a channel without contrast from dividing by 0."""

Generator: TypeAlias = np.random.Generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Brain:
    """The brain in a patch."""

    mask: Tensor
    """(X, Y, Z) float32: 1 inside, 0 in the background."""
    n_voxels: int

    @classmethod
    def of(cls, image: Tensor) -> Self:
        """Find it in an image (4, X, Y, Z): where any channel is not 0."""
        # numpy compares eight times as fast as torch
        array = image.numpy()
        mask = array[0] != 0
        for channel in array[1:]:
            mask |= channel != 0
        as_float = torch.from_numpy(mask).to(torch.float32)
        return cls(mask=as_float, n_voxels=int(np.count_nonzero(mask)))

    def mean_and_std(self, channel: Tensor) -> tuple[float, float]:
        """Return them over the brain, for a channel (X, Y, Z) whose background is 0."""
        mean = float(channel.sum()) / self.n_voxels
        mean_square = float(torch.linalg.vector_norm(channel)) ** 2 / self.n_voxels
        return mean, math.sqrt(max(0.0, mean_square - mean**2))


def alter_intensities(image: Tensor, augmentation: Augmentation, rng: Generator) -> None:
    """Change an image (4, X, Y, Z) in place, in the order of nnU-Net."""
    steps: tuple[tuple[float, Callable[[Tensor, Brain, Generator], None]], ...] = (
        (augmentation.noise, add_noise),
        (augmentation.blur, blur),
        (augmentation.brightness, alter_brightness),
        (augmentation.contrast, alter_contrast),
        (augmentation.low_resolution, lower_resolution),
        (augmentation.inverted_gamma, alter_inverted_gamma),
        (augmentation.gamma, alter_gamma),
    )
    drawn = [change for chance, change in steps if rng.random() < chance]
    if not drawn:
        return
    brain = Brain.of(image)
    if brain.n_voxels:
        for change in drawn:
            change(image, brain, rng)


def add_noise(image: Tensor, brain: Brain, rng: Generator) -> None:
    """Add Gaussian noise of one strength to all channels, to each its own."""
    std = rng.uniform(*NOISE_STD)
    # torch draws twice as fast as numpy
    source = torch.Generator().manual_seed(int(rng.integers(2**63)))
    noise = torch.empty_like(image[0])
    for channel in image:
        noise.normal_(generator=source).mul_(brain.mask)
        channel.add_(noise, alpha=std)


def blur(image: Tensor, brain: Brain, rng: Generator) -> None:
    """Blur some channels with a Gaussian, as wide along each axis as chance wills."""
    for channel in _some_channels(image, rng):
        blurred = channel
        for axis in range(channel.ndim):
            blurred = _blur_along(blurred, axis, rng.uniform(*BLUR_SIGMA))
        torch.mul(blurred, brain.mask, out=channel)


def alter_brightness(image: Tensor, brain: Brain, rng: Generator) -> None:
    """Multiply each channel by a factor of its own."""
    for channel in image:
        channel.mul_(_around_one(BRIGHTNESS, rng))


def alter_contrast(image: Tensor, brain: Brain, rng: Generator) -> None:
    """Move the intensities of each channel from or to their mean, within the range they had."""
    for channel in image:
        mean, _ = brain.mean_and_std(channel)
        low, high = channel.aminmax()
        factor = _around_one(CONTRAST, rng)
        channel.mul_(factor).add_(mean * (1 - factor)).clamp_(low, high).mul_(brain.mask)


def lower_resolution(image: Tensor, brain: Brain, rng: Generator) -> None:
    """Keep only some voxels of some channels, and interpolate between them."""
    for channel in _some_channels(image, rng):
        kept = rng.uniform(*RESOLUTION)
        size = [max(1, round(n * kept)) for n in channel.shape]
        coarse = functional.interpolate(channel[None, None], size, mode="nearest-exact")
        fine = functional.interpolate(coarse, channel.shape, mode="trilinear")[0, 0]
        torch.mul(fine, brain.mask, out=channel)


def alter_gamma(image: Tensor, brain: Brain, rng: Generator) -> None:
    """Bend the intensities of each channel by a power, and keep their mean and deviation."""
    for channel in image:
        _bend(channel, brain, _around_one(GAMMA, rng))


def alter_inverted_gamma(image: Tensor, brain: Brain, rng: Generator) -> None:
    """Do as `alter_gamma` with the intensities turned round: bright ones move most."""
    for channel in image:
        _bend(channel.neg_(), brain, _around_one(GAMMA, rng))
        channel.neg_()


def _some_channels(image: Tensor, rng: Generator) -> list[Tensor]:
    return [channel for channel in image if rng.random() < CHANNEL_CHANCE]


def _around_one(bounds: tuple[float, float], rng: Generator) -> float:
    """Draw a factor that is as likely below 1 as above, however far the bounds are from it."""
    low, high = bounds
    return rng.uniform(low, 1) if rng.random() < 0.5 else rng.uniform(1, high)


def _bend(channel: Tensor, brain: Brain, exponent: float) -> None:
    mean, std = brain.mean_and_std(channel)
    low, high = channel.aminmax()
    span = (high - low).clamp(min=_SMALLEST)
    channel.sub_(low).div_(span).pow_(exponent).mul_(span).add_(low).mul_(brain.mask)
    bent_mean, bent_std = brain.mean_and_std(channel)
    channel.sub_(bent_mean).mul_(std / max(bent_std, _SMALLEST)).add_(mean).mul_(brain.mask)


def _blur_along(channel: Tensor, axis: int, sigma: float) -> Tensor:
    """Return the channel blurred along one axis; at the border, weights add up over what there is."""
    n = channel.shape[axis]
    blurred = channel.clone()
    weights = torch.ones([n if other == axis else 1 for other in range(channel.ndim)])
    for offset in range(1, min(_BLUR_RADIUS + 1, n)):
        weight = math.exp(-0.5 * (offset / sigma) ** 2)
        for here, there in ((0, offset), (offset, 0)):
            neighbours = channel.narrow(axis, there, n - offset)
            blurred.narrow(axis, here, n - offset).add_(neighbours, alpha=weight)
            weights.narrow(axis, here, n - offset).add_(weight)
    return blurred.div_(weights)
