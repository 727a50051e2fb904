"""Changes of the intensities of a patch as values: drawn in one process, applied on any device.

A change holds its parameters, drawn before, so that it is small, goes to another process, and gives
the same patch wherever it is applied: noise comes from a seed that the change holds. On a GPU the
noise of a seed is another one than on the CPU.

As in nnU-Net v2 (Isensee et al. 2021), the background is reset to 0 after every change, because it is
0 in every case that a network predicts. Means and standard deviations are those of the brain in the
patch, so that a change is as strong at the border of the brain as inside. They are computed from sums
over the patch, whose background is 0.

An image is a tensor (C, X, Y, Z) in float32, which is changed in place, because allocating memory for
a patch takes longer than most changes. A channel is a tensor (X, Y, Z).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

BLUR_RADIUS = 3
"""Radius of the Gaussian in voxels: three standard deviations of the widest."""
Sigmas: TypeAlias = tuple[float, ...]
"""Standard deviation of a Gaussian along each axis, in voxels."""
Parameter = TypeVar("Parameter")
_SLAB = 16
"""Planes that are changed at a time, so that they stay in the cache of a core from one operation to the
next. A multiple of 16 voxels, as torch draws normal numbers in groups of 16: with these slabs the noise
is that of the whole channel."""
_SMALLEST = 1e-7
"""Lower bound of a divisor, for channels without contrast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BrainMask:
    """The brain in a patch."""

    mask: Tensor
    """Mask (X, Y, Z) in float32: 1 inside, 0 in the background."""
    n_voxels: int
    """Voxels inside."""

    @classmethod
    def of(cls, image: Tensor) -> Self:
        """Return the brain of an image (C, X, Y, Z): the voxels where any channel is not 0."""
        if image.device.type == "cpu":
            # numpy compares eight times as fast as torch
            inside = _is_not_0(image.numpy())
            mask, n_voxels = torch.from_numpy(inside), int(np.count_nonzero(inside))
        else:
            mask = (image != 0).any(dim=0)
            n_voxels = int(mask.sum())
        return cls(mask=mask.to(torch.float32), n_voxels=n_voxels)

    def mean_and_std(self, channel: Tensor) -> tuple[float, float]:
        """Return both over the brain, for a channel (X, Y, Z) whose background is 0."""
        n_voxels = max(self.n_voxels, 1)
        mean = float(channel.sum()) / n_voxels
        mean_square = float(torch.linalg.vector_norm(channel)) ** 2 / n_voxels
        return mean, math.sqrt(max(0.0, mean_square - mean**2))


class IntensityChange(Protocol):
    """A change of the intensities of an image, with its parameters."""

    def apply(self, image: Tensor, brain: BrainMask) -> None:
        """Change an image (C, X, Y, Z) in float32 in place."""
        ...


def apply_changes(
    image: Tensor, changes: Iterable[IntensityChange], brain: BrainMask | None = None
) -> None:
    """Apply changes to an image (C, X, Y, Z) in float32 in place, one after the other.

    Args:
        image: Image with 0 around the brain, on any device.
        changes: Changes in their order.
        brain: The brain of the image; None finds it.
    """
    brain = BrainMask.of(image) if brain is None else brain
    for change in changes:
        change.apply(image, brain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Independent Gaussian noise of the same standard deviation in all channels."""

    std: float
    """Standard deviation, in the units of the image."""
    seed: int

    def apply(self, image: Tensor, brain: BrainMask) -> None:
        """Add the noise."""
        # torch draws twice as fast as numpy
        source = torch.Generator(image.device).manual_seed(self.seed)
        memory = torch.empty_like(image[0, :_SLAB])
        for channel in image:
            for slab, mask in _slabs(channel, brain.mask):
                noise = memory[: len(slab)].normal_(generator=source)
                slab.add_(noise.mul_(mask), alpha=self.std)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blur:
    """Smoothing with a Gaussian whose weights are normalised over the voxels inside the patch."""

    sigmas: tuple[Sigmas | None, ...]
    """Width of the Gaussian for each channel; None for a channel that stays."""

    def apply(self, image: Tensor, brain: BrainMask) -> None:
        """Smooth the channels."""
        for channel, sigmas in _chosen(image, self.sigmas):
            smoothed = channel
            for axis, sigma in enumerate(sigmas):
                smoothed = smoothed_along(smoothed, axis, sigma)
            torch.mul(smoothed, brain.mask, out=channel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Brightness:
    """Multiplication of each channel by a factor of its own."""

    factors: tuple[float, ...]

    def apply(self, image: Tensor, brain: BrainMask) -> None:
        """Multiply the channels."""
        # the background stays 0 without a mask
        for channel, factor in zip(image, self.factors, strict=True):
            channel.mul_(factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """Scaling of the distance of each channel from its mean, clipped to its former range."""

    factors: tuple[float, ...]

    def apply(self, image: Tensor, brain: BrainMask) -> None:
        """Change the contrast of the channels."""
        for channel, factor in zip(image, self.factors, strict=True):
            mean, _ = brain.mean_and_std(channel)
            # clamp with numbers is five times as fast as with tensors
            low, high = (float(value) for value in channel.aminmax())
            for slab, mask in _slabs(channel, brain.mask):
                slab.mul_(factor).add_(mean * (1 - factor)).clamp_(low, high).mul_(mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowResolution:
    """Subsampling, and interpolation between the voxels that are kept."""

    kept: tuple[float | None, ...]
    """Fraction of voxels kept along an axis, for each channel; None for a channel that stays."""

    def apply(self, image: Tensor, brain: BrainMask) -> None:
        """Lower the resolution of the channels."""
        for channel, kept in _chosen(image, self.kept):
            size = [max(1, round(n * kept)) for n in channel.shape]
            coarse = functional.interpolate(channel[None, None], size, mode="nearest-exact")
            fine = functional.interpolate(coarse, channel.shape, mode="trilinear")[0, 0]
            torch.mul(fine, brain.mask, out=channel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gamma:
    """A power of each channel, rescaled to 0 to 1 before, and to its mean and deviation after."""

    exponents: tuple[float, ...]
    is_inverted: bool
    """Whether the negative of the image is changed."""

    def apply(self, image: Tensor, brain: BrainMask) -> None:
        """Change the intensities of the channels."""
        for channel, exponent in zip(image, self.exponents, strict=True):
            if self.is_inverted:
                channel.neg_()
            adjust_gamma(channel, brain, exponent)
            if self.is_inverted:
                channel.neg_()


def adjust_gamma(channel: Tensor, brain: BrainMask, exponent: float) -> None:
    """Rescale a channel (X, Y, Z) to 0 to 1, and raise it to a power, in place.

    Its mean and standard deviation over the brain are restored.
    """
    mean, std = brain.mean_and_std(channel)
    low, high = channel.aminmax()
    span = (high - low).clamp(min=_SMALLEST)
    for slab, mask in _slabs(channel, brain.mask):
        slab.sub_(low).div_(span).pow_(exponent).mul_(span).add_(low).mul_(mask)
    new_mean, new_std = brain.mean_and_std(channel)
    for slab, mask in _slabs(channel, brain.mask):
        slab.sub_(new_mean).mul_(std / max(new_std, _SMALLEST)).add_(mean).mul_(mask)


def smoothed_along(channel: Tensor, axis: int, sigma: float) -> Tensor:
    """Return a channel smoothed along one axis; `sigma` is in voxels."""
    n = channel.shape[axis]
    smoothed = channel.clone()
    shape = [n if other == axis else 1 for other in range(channel.ndim)]
    weights = torch.ones(shape, device=channel.device)
    for offset in range(1, min(BLUR_RADIUS + 1, n)):
        weight = math.exp(-0.5 * (offset / sigma) ** 2)
        for here, there in ((0, offset), (offset, 0)):
            neighbours = channel.narrow(axis, there, n - offset)
            smoothed.narrow(axis, here, n - offset).add_(neighbours, alpha=weight)
            weights.narrow(axis, here, n - offset).add_(weight)
    return smoothed.div_(weights)


def _is_not_0(image: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    if image.dtype == np.float16:
        # numpy compares float16 one by one; shifted by the sign, the bits are 0 for 0 and -0
        bits = image.view(np.uint16)
        found = bits[0] << 1
        for channel in bits[1:]:
            found |= channel << 1
        return found != 0
    inside = image[0] != 0
    for channel in image[1:]:
        inside |= channel != 0
    return inside


def _slabs(channel: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(channel.split(_SLAB), mask.split(_SLAB), strict=True)


def _chosen(
    image: Tensor, parameters: Sequence[Parameter | None]
) -> Iterator[tuple[Tensor, Parameter]]:
    """Yield the channels that have a parameter."""
    for channel, parameter in zip(image, parameters, strict=True):
        if parameter is not None:
            yield channel, parameter
