"""Random changes of intensities inside the brain, as MONAI dictionary transforms.

Probabilities and ranges are those of nnU-Net v2 (Isensee et al. 2021). As there, the background is
reset to 0 after every change, because it is 0 in every case that a network predicts. Means and
standard deviations are those of the brain in the patch. Each change stands here because MONAI's is
slower or changes something else; `benchmarks/NOTES.md` has the figures.

Images are (C, X, Y, Z) and changed in place in float32: allocating one takes longer than most changes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from monai.data import MetaTensor
from monai.transforms import MapTransform, Randomizable
from numpy.random import RandomState
from torch import Tensor
from torch.nn import functional

from brats_seg.data.store import Buffers
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS

Item: TypeAlias = dict[str, Any]
"""The dictionary that transforms take and return."""
Transform: TypeAlias = Callable[[Any], Any]
"""A dictionary transform, MONAI's or any other callable that takes and returns a dictionary."""

NOISE_STD = (0.0, 0.1)
"""Standard deviation of the noise, in standard deviations of the brain."""
BLUR_SIGMA = (0.5, 1.0)
"""Standard deviation of the Gaussian along each axis, in voxels."""
BLUR_RADIUS = 3
"""Radius of the Gaussian in voxels: three standard deviations of the widest."""
BRIGHTNESS = (0.75, 1.25)
"""Factor by which all intensities are multiplied."""
CONTRAST = (0.75, 1.25)
"""Factor by which the distance from the mean is multiplied."""
RESOLUTION = (0.5, 1.0)
"""Fraction of the voxels along each axis that is kept."""
GAMMA = (0.7, 1.5)
"""Exponent of the intensities, which are rescaled to 0 to 1 before."""
CHANNEL_CHANCE = 0.5
"""Probability of each channel if blur or low resolution is drawn."""
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
        # numpy compares eight times as fast as torch
        inside = _is_not_0(image.numpy())
        mask = torch.from_numpy(inside).to(torch.float32)
        return cls(mask=mask, n_voxels=int(np.count_nonzero(inside)))

    def mean_and_std(self, channel: Tensor) -> tuple[float, float]:
        """Return both over the brain, for a channel (X, Y, Z) whose background is 0."""
        n_voxels = max(self.n_voxels, 1)
        mean = float(channel.sum()) / n_voxels
        mean_square = float(torch.linalg.vector_norm(channel)) ** 2 / n_voxels
        return mean, math.sqrt(max(0.0, mean_square - mean**2))


Change: TypeAlias = Callable[[Tensor, BrainMask, RandomState], None]
"""Function that changes an image (C, X, Y, Z) in float32 in place, as it draws from the random state."""


class RandIntensitiesd(Randomizable, MapTransform):
    """Apply random changes of intensities in their order, each with its own probability.

    An image is converted to float32 and its brain is found once for all changes, and only if any of
    them is drawn. The images may be numpy arrays, tensors or MetaTensors (C, X, Y, Z).
    """

    def __init__(self, keys: str | Sequence[str], changes: Sequence[tuple[Change, float]]) -> None:
        """Apply `changes`, each with its probability."""
        MapTransform.__init__(self, keys)
        self.changes = tuple(changes)
        self.drawn: list[Change] = []
        """The changes that happen, as `randomize` has drawn them."""
        self._buffers = Buffers()
        self.set_random_state()

    def randomize(self, data: Any = None) -> None:
        """Draw which of the changes happen."""
        self.drawn = [change for change, chance in self.changes if self.R.rand() < chance]

    def __call__(self, data: Mapping[str, Any]) -> Item:
        """Change the images."""
        changed = dict(data)
        self.randomize()
        for key in self.key_iterator(data) if self.drawn else ():
            stored = plain_tensor(data[key])
            changed[key] = image = as_type(stored, np.float32, self._buffers)
            brain = BrainMask.of(stored)
            for change in self.drawn:
                change(image, brain, self.R)
        return changed


def add_noise(image: Tensor, brain: BrainMask, random: RandomState) -> None:
    """Add independent Gaussian noise of the same standard deviation to all channels."""
    strength = random.uniform(*NOISE_STD)
    # torch draws twice as fast as numpy
    source = torch.Generator().manual_seed(int(random.randint(2**63 - 1, dtype=np.int64)))
    memory = torch.empty_like(image[0, :_SLAB])
    for channel in image:
        for slab, mask in _slabs(channel, brain):
            noise = memory[: len(slab)].normal_(generator=source)
            slab.add_(noise.mul_(mask), alpha=strength)


def blur(image: Tensor, brain: BrainMask, random: RandomState) -> None:
    """Blur random channels with a Gaussian of a random width along each axis.

    At the border of the patch the weights are normalised over the voxels inside.
    """
    for channel in _some_channels(image, random):
        blurred = channel
        for axis in range(3):
            blurred = blur_along(blurred, axis, random.uniform(*BLUR_SIGMA))
        torch.mul(blurred, brain.mask, out=channel)


def change_brightness(image: Tensor, brain: BrainMask, random: RandomState) -> None:
    """Multiply each channel by a random factor of its own."""
    # the background stays 0 without a mask
    for channel in image:
        channel.mul_(_around_one(BRIGHTNESS, random))


def change_contrast(image: Tensor, brain: BrainMask, random: RandomState) -> None:
    """Scale the distance of each channel from its mean, and clip it to its former range."""
    for channel in image:
        factor = _around_one(CONTRAST, random)
        mean, _ = brain.mean_and_std(channel)
        # clamp with numbers is five times as fast as with tensors
        low, high = (float(value) for value in channel.aminmax())
        for slab, mask in _slabs(channel, brain):
            slab.mul_(factor).add_(mean * (1 - factor)).clamp_(low, high).mul_(mask)


def lower_resolution(image: Tensor, brain: BrainMask, random: RandomState) -> None:
    """Subsample random channels, and interpolate between the voxels that are kept."""
    for channel in _some_channels(image, random):
        kept = random.uniform(*RESOLUTION)
        size = [max(1, round(n * kept)) for n in channel.shape]
        coarse = functional.interpolate(channel[None, None], size, mode="nearest-exact")
        fine = functional.interpolate(coarse, channel.shape, mode="trilinear")[0, 0]
        torch.mul(fine, brain.mask, out=channel)


def change_gamma(image: Tensor, brain: BrainMask, random: RandomState) -> None:
    """Rescale each channel to 0 to 1, raise it to a power, and restore its mean and deviation."""
    for channel in image:
        exponent = _around_one(GAMMA, random)
        mean, std = brain.mean_and_std(channel)
        low, high = channel.aminmax()
        span = (high - low).clamp(min=_SMALLEST)
        for slab, mask in _slabs(channel, brain):
            slab.sub_(low).div_(span).pow_(exponent).mul_(span).add_(low).mul_(mask)
        new_mean, new_std = brain.mean_and_std(channel)
        for slab, mask in _slabs(channel, brain):
            slab.sub_(new_mean).mul_(std / max(new_std, _SMALLEST)).add_(mean).mul_(mask)


def change_inverted_gamma(image: Tensor, brain: BrainMask, random: RandomState) -> None:
    """Change the gamma of the negative of the image."""
    change_gamma(image.neg_(), brain, random)
    image.neg_()


CHANGES: tuple[Change, ...] = (
    *(add_noise, blur, change_brightness, change_contrast),
    *(lower_resolution, change_inverted_gamma, change_gamma),
)
"""The changes of an augmentation, in the order of nnU-Net."""


def drop_modalities(image: Tensor, brain: BrainMask, random: RandomState) -> None:
    """Leave one of `MODALITY_SUBSETS`, and set the channels of the other modalities to 0.

    A scan without these modalities is given to the network in the same way: 0 is the mean of a
    normalised modality inside the brain, and the background around it.
    """
    kept = MODALITY_SUBSETS[random.randint(len(MODALITY_SUBSETS))]
    for modality, channel in zip(MODALITIES, image, strict=True):
        if modality not in kept:
            channel.zero_()


def as_type(image: Tensor, dtype: type[np.floating], buffers: Buffers) -> Tensor:
    """Return an image in a type of numpy: the same tensor, or a copy in memory of the buffers."""
    if image.numpy().dtype == dtype:
        return image
    return torch.from_numpy(buffers.take(tuple(image.shape), dtype)).copy_(image)


def plain_tensor(image: Any) -> Tensor:
    """Return an array or a tensor of any kind as a plain tensor in the same memory."""
    return image.as_tensor() if isinstance(image, MetaTensor) else torch.as_tensor(image)


def blur_along(channel: Tensor, axis: int, sigma: float) -> Tensor:
    """Return a channel (X, Y, Z) blurred along one axis; `sigma` is in voxels."""
    n = channel.shape[axis]
    blurred = channel.clone()
    weights = torch.ones([n if i == axis else 1 for i in range(channel.ndim)])
    for offset in range(1, min(BLUR_RADIUS + 1, n)):
        weight = math.exp(-0.5 * (offset / sigma) ** 2)
        for start, of_neighbours in ((0, offset), (offset, 0)):
            neighbours = channel.narrow(axis, of_neighbours, n - offset)
            blurred.narrow(axis, start, n - offset).add_(neighbours, alpha=weight)
            weights.narrow(axis, start, n - offset).add_(weight)
    return blurred.div_(weights)


def _is_not_0(image: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    if image.dtype != np.float16:
        return reduce(np.logical_or, (channel != 0 for channel in image))
    # numpy compares float16 one by one; shifted by the sign, the bits are 0 for 0 and -0
    bits = image.view(np.uint16)
    shifted = bits[0] << 1
    for channel in bits[1:]:
        shifted |= channel << 1
    return shifted != 0


def _slabs(channel: Tensor, brain: BrainMask) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(channel.split(_SLAB), brain.mask.split(_SLAB), strict=True)


def _some_channels(image: Tensor, random: RandomState) -> list[Tensor]:
    # all channels are drawn before the parameters of any
    return [channel for channel in image if random.uniform() < CHANNEL_CHANCE]


def _around_one(bounds: tuple[float, float], random: RandomState) -> float:
    """Draw a factor that is below 1 as often as above, wherever the bounds are."""
    low, high = bounds
    return random.uniform(low, 1) if random.uniform() < 0.5 else random.uniform(1, high)
