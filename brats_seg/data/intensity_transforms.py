"""Random changes of intensities inside the brain, as MONAI dictionary transforms.

Probabilities and ranges are those of nnU-Net v2 (Isensee et al. 2021). As there, the background is
reset to 0 after every change, because it is 0 in every case that a network predicts. Means and
standard deviations are those of the brain in the patch, so that a change is as strong at the border
of the brain as inside. They are computed from sums over the patch, whose background is 0.

The transforms take numpy arrays, tensors and MetaTensors (C, X, Y, Z) and change float32 in place,
because allocating memory for a patch takes longer than most changes. A channel is a tensor (X, Y, Z)
in float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import MapTransform, Randomizable, RandomizableTransform
from torch import Tensor
from torch.nn import functional

from brats_seg.data.store import Buffers
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS

Range: TypeAlias = tuple[float, float]
Item: TypeAlias = dict[str, Any]
"""The dictionary that transforms take and return."""
Transform: TypeAlias = Callable[[Any], Any]
"""A dictionary transform, MONAI's or any other callable that takes and returns a dictionary."""

NOISE_STD = (0.0, 0.1)
"""Standard deviation of the noise, in standard deviations of the brain."""
BLUR_SIGMA = (0.5, 1.0)
"""Standard deviation of the Gaussian along each axis, in voxels."""
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

_BLUR_RADIUS = 3
"""Radius of the Gaussian in voxels: three standard deviations of the widest."""
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
        """Return the brain of an image (4, X, Y, Z): the voxels where any channel is not 0."""
        # numpy compares eight times as fast as torch
        array = image.numpy()
        mask = array[0] != 0
        for channel in array[1:]:
            mask |= channel != 0
        as_float = torch.from_numpy(mask).to(torch.float32)
        return cls(mask=as_float, n_voxels=int(np.count_nonzero(mask)))

    def mean_and_std(self, channel: Tensor) -> tuple[float, float]:
        """Return both over the brain, for a channel (X, Y, Z) whose background is 0."""
        n_voxels = max(self.n_voxels, 1)
        mean = float(channel.sum()) / n_voxels
        mean_square = float(torch.linalg.vector_norm(channel)) ** 2 / n_voxels
        return mean, math.sqrt(max(0.0, mean_square - mean**2))


class RandIntensityd(RandomizableTransform, MapTransform):
    """Base of the random changes of intensities, which change the image in place."""

    def __init__(self, keys: str | Sequence[str], prob: float) -> None:
        MapTransform.__init__(self, keys)
        RandomizableTransform.__init__(self, prob)

    @property
    def is_drawn(self) -> bool:
        """Whether `randomize` has drawn that the change happens."""
        return self._do_transform

    def __call__(self, data: Mapping[str, Any]) -> Item:
        """Change the images (C, X, Y, Z) with the probability `prob`."""
        changed = dict(data)
        self.randomize(None)
        if self.is_drawn:
            for key in self.key_iterator(data):
                changed[key] = image = plain_tensor(data[key]).to(torch.float32)
                self.change(image, BrainMask.of(image))
        return changed

    def change(self, image: Tensor, brain: BrainMask) -> None:
        """Change an image in place."""
        raise NotImplementedError


class RandIntensitiesd(Randomizable, MapTransform):
    """Apply several random changes, each with its own probability.

    An image is converted to float32 and its brain is found once for all changes, and only if any of
    them is drawn.
    """

    def __init__(
        self,
        keys: str | Sequence[str],
        changes: Sequence[RandIntensityd],
        *,
        buffers: Buffers | None = None,
    ) -> None:
        """Apply `changes`; `buffers` is memory for images, which other transforms may share."""
        MapTransform.__init__(self, keys)
        self.changes = tuple(changes)
        self._buffers = buffers or Buffers()
        self.set_random_state()

    def set_random_state(
        self, seed: int | None = None, state: np.random.RandomState | None = None
    ) -> Self:
        """Seed all changes, which draw from one random state."""
        super().set_random_state(seed, state)
        for change in self.changes:
            change.set_random_state(state=self.R)
        return self

    def randomize(self, data: Any = None) -> None:
        """Draw which of the changes happen."""
        for change in self.changes:
            change.randomize(None)

    def __call__(self, data: Mapping[str, Any]) -> Item:
        """Change the images (C, X, Y, Z)."""
        changed = dict(data)
        self.randomize()
        drawn = [change for change in self.changes if change.is_drawn]
        if drawn:
            for key in self.key_iterator(data):
                changed[key] = image = in_float32(plain_tensor(data[key]), self._buffers)
                brain = BrainMask.of(image)
                for change in drawn:
                    change.change(image, brain)
        return changed


class RandBrainNoised(RandIntensityd):
    """Add independent Gaussian noise of the same standard deviation to all channels.

    With MONAI's `RandGaussianNoised` a light patch takes 1.4 times as long and a full one 1.1 times
    (167 ms instead of 42 ms if it is drawn).
    """

    def __init__(
        self, keys: str | Sequence[str], prob: float = 0.1, std: Range = NOISE_STD
    ) -> None:
        """Set the range of the standard deviation, in the units of the image."""
        super().__init__(keys, prob)
        self.std = std

    def change(self, image: Tensor, brain: BrainMask) -> None:
        """Add noise in place."""
        std = self.R.uniform(*self.std)
        # torch draws twice as fast as numpy
        seed = int(self.R.randint(2**63 - 1, dtype=np.int64))
        source = torch.Generator().manual_seed(seed)
        noise = torch.empty_like(image[0])
        for channel in image:
            noise.normal_(generator=source).mul_(brain.mask)
            channel.add_(noise, alpha=std)


class RandBrainSmoothd(RandIntensityd):
    """Smooth random channels with a Gaussian of a random width along each axis.

    At the border of the patch the weights are normalised over the voxels inside.

    MONAI's `RandGaussianSmoothd` changes all channels or none; with it a full patch takes 1.25 times
    as long (440 ms for all channels instead of 45 ms for half of them).
    """

    def __init__(
        self,
        keys: str | Sequence[str],
        prob: float = 0.1,
        sigma: Range = BLUR_SIGMA,
        channel_prob: float = CHANNEL_CHANCE,
    ) -> None:
        """Set the range of the standard deviation in voxels, and the probability of each channel."""
        super().__init__(keys, prob)
        self.sigma = sigma
        self.channel_prob = channel_prob

    def change(self, image: Tensor, brain: BrainMask) -> None:
        """Smooth in place."""
        for channel in _some_channels(image, self.channel_prob, self.R):
            smoothed = channel
            for axis in range(channel.ndim):
                smoothed = _smoothed_along(smoothed, axis, self.R.uniform(*self.sigma))
            torch.mul(smoothed, brain.mask, out=channel)


class RandBrightnessd(RandIntensityd):
    """Multiply each channel by a random factor of its own.

    MONAI's `RandScaleIntensityd` with `channel_wise` gives the same; with it a light patch takes 1.1
    times as long and a full one 1.02 times (29 ms instead of 8 ms if it is drawn).
    """

    def __init__(
        self, keys: str | Sequence[str], prob: float = 0.1, factors: Range = BRIGHTNESS
    ) -> None:
        """Set the range of the factor."""
        super().__init__(keys, prob)
        self.factors = factors

    def change(self, image: Tensor, brain: BrainMask) -> None:
        """Multiply in place."""
        # the background stays 0 without a mask
        for channel in image:
            channel.mul_(_around_one(self.factors, self.R))


class RandBrainContrastd(RandIntensityd):
    """Scale the distance of each channel from its mean, and clip it to its former range.

    MONAI's `RandScaleIntensityFixedMeand` uses the mean of the whole patch; with it a light patch takes
    1.2 times as long and a full one 1.05 times (72 ms instead of 27 ms).
    """

    def __init__(
        self, keys: str | Sequence[str], prob: float = 0.1, factors: Range = CONTRAST
    ) -> None:
        """Set the range of the factor."""
        super().__init__(keys, prob)
        self.factors = factors

    def change(self, image: Tensor, brain: BrainMask) -> None:
        """Change the contrast in place."""
        for channel in image:
            mean, _ = brain.mean_and_std(channel)
            low, high = channel.aminmax()
            factor = _around_one(self.factors, self.R)
            channel.mul_(factor).add_(mean * (1 - factor)).clamp_(low, high).mul_(brain.mask)


class RandBrainLowResolutiond(RandIntensityd):
    """Subsample random channels, and interpolate between the voxels that are kept.

    MONAI's `RandSimulateLowResolutiond` changes all channels or none, by the same factor; it is as
    fast (50 ms for all channels, drawn half as often, instead of 34 ms).
    """

    def __init__(
        self,
        keys: str | Sequence[str],
        prob: float = 0.1,
        zoom_range: Range = RESOLUTION,
        channel_prob: float = CHANNEL_CHANCE,
    ) -> None:
        """Set the range of the fraction of voxels kept along an axis, and the probability of a channel."""
        super().__init__(keys, prob)
        self.zoom_range = zoom_range
        self.channel_prob = channel_prob

    def change(self, image: Tensor, brain: BrainMask) -> None:
        """Lower the resolution in place."""
        for channel in _some_channels(image, self.channel_prob, self.R):
            kept = self.R.uniform(*self.zoom_range)
            size = [max(1, round(n * kept)) for n in channel.shape]
            coarse = functional.interpolate(channel[None, None], size, mode="nearest-exact")
            fine = functional.interpolate(coarse, channel.shape, mode="trilinear")[0, 0]
            torch.mul(fine, brain.mask, out=channel)


class RandBrainGammad(RandIntensityd):
    """Rescale each channel to 0 to 1, raise it to a power, and restore its mean and deviation.

    MONAI's `RandAdjustContrastd` uses one exponent for all channels, and the mean and deviation of the
    whole patch; with it a full patch takes 1.4 times as long, and 1.15 times for the inverted one
    (237 ms instead of 57 ms if it is drawn).
    """

    def __init__(
        self,
        keys: str | Sequence[str],
        prob: float = 0.1,
        gamma: Range = GAMMA,
        *,
        invert_image: bool = False,
    ) -> None:
        """Set the range of the exponent, and whether the negative of the image is changed."""
        super().__init__(keys, prob)
        self.gamma = gamma
        self.invert_image = invert_image

    def change(self, image: Tensor, brain: BrainMask) -> None:
        """Change the intensities in place."""
        for channel in image:
            if self.invert_image:
                channel.neg_()
            adjust_gamma(channel, brain, _around_one(self.gamma, self.R))
            if self.invert_image:
                channel.neg_()


class RandModalityDropoutd(RandomizableTransform, MapTransform):
    """Leave a random subset of one to three modalities, and set the channels of the others to 0.

    A scan without these modalities is given to the network in the same way: 0 is the mean of a
    normalised modality inside the brain, and the background around it.
    """

    def __init__(self, keys: str | Sequence[str], prob: float = 0.5) -> None:
        """Set the probability that a patch loses modalities."""
        MapTransform.__init__(self, keys)
        RandomizableTransform.__init__(self, prob)
        self.kept: tuple[str, ...] = MODALITIES

    def randomize(self, data: Any = None) -> None:
        """Draw the modalities that are kept: all of them, or one of `MODALITY_SUBSETS`."""
        super().randomize(None)
        self.kept = MODALITIES
        if self._do_transform:
            self.kept = MODALITY_SUBSETS[self.R.randint(len(MODALITY_SUBSETS))]

    def __call__(self, data: Mapping[str, Any]) -> Item:
        """Change the images (4, X, Y, Z), in the order of `MODALITIES`, in place."""
        changed = dict(data)
        self.randomize()
        for key in self.key_iterator(data):
            changed[key] = image = plain_tensor(data[key])
            for modality, channel in zip(MODALITIES, image, strict=True):
                if modality not in self.kept:
                    channel.zero_()
        return changed


def in_float32(image: Tensor, buffers: Buffers) -> Tensor:
    """Return an image in float32: the same tensor, or a copy in memory of the buffers."""
    if image.dtype == torch.float32:
        return image
    single = torch.from_numpy(buffers.take(tuple(image.shape), np.float32))
    return single.copy_(image)


def plain_tensor(image: Any) -> Tensor:
    """Return an array or a tensor of any kind as a plain tensor in the same memory."""
    return image.as_tensor() if isinstance(image, MetaTensor) else torch.as_tensor(image)


def adjust_gamma(channel: Tensor, brain: BrainMask, exponent: float) -> None:
    """Rescale a channel (X, Y, Z) to 0 to 1, and raise it to a power, in place.

    Its mean and standard deviation over the brain are restored.
    """
    mean, std = brain.mean_and_std(channel)
    low, high = channel.aminmax()
    span = (high - low).clamp(min=_SMALLEST)
    channel.sub_(low).div_(span).pow_(exponent).mul_(span).add_(low).mul_(brain.mask)
    new_mean, new_std = brain.mean_and_std(channel)
    channel.sub_(new_mean).mul_(std / max(new_std, _SMALLEST)).add_(mean).mul_(brain.mask)


def _some_channels(image: Tensor, prob: float, random: np.random.RandomState) -> list[Tensor]:
    return [channel for channel in image if random.uniform() < prob]


def _around_one(bounds: Range, random: np.random.RandomState) -> float:
    """Draw a factor that is below 1 as often as above, wherever the bounds are."""
    low, high = bounds
    return random.uniform(low, 1) if random.uniform() < 0.5 else random.uniform(1, high)


def _smoothed_along(channel: Tensor, axis: int, sigma: float) -> Tensor:
    """Return a channel smoothed along one axis."""
    n = channel.shape[axis]
    smoothed = channel.clone()
    weights = torch.ones([n if other == axis else 1 for other in range(channel.ndim)])
    for offset in range(1, min(_BLUR_RADIUS + 1, n)):
        weight = math.exp(-0.5 * (offset / sigma) ** 2)
        for here, there in ((0, offset), (offset, 0)):
            neighbours = channel.narrow(axis, there, n - offset)
            smoothed.narrow(axis, here, n - offset).add_(neighbours, alpha=weight)
            weights.narrow(axis, here, n - offset).add_(weight)
    return smoothed.div_(weights)
