"""Random changes of intensities inside the brain, as MONAI dictionary transforms.

Probabilities and ranges are those of nnU-Net v2 (Isensee et al. 2021). A transform draws the
parameters of a change, which is a value (see `intensities`), and applies it.

The transforms take numpy arrays, tensors and MetaTensors (C, X, Y, Z) and change float32 in place.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import MapTransform, Randomizable, RandomizableTransform
from torch import Tensor

from brats_seg.data.intensities import (
    Blur,
    BrainMask,
    Brightness,
    Contrast,
    Gamma,
    IntensityChange,
    LowResolution,
    Noise,
    apply_changes,
)
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
                apply_changes(image, [self.draw(len(image))])
        return changed

    def draw(self, n_channels: int) -> IntensityChange:
        """Draw the parameters of the change, for an image of so many channels."""
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
        self.leave_changes = False
        """Whether images stay as they are, and `changes` in the dictionary is set to the changes that
        were drawn, a tuple of `IntensityChange`."""
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
        for key in self.key_iterator(data) if drawn else ():
            stored = plain_tensor(data[key])
            changes = tuple(change.draw(len(stored)) for change in drawn)
            if self.leave_changes:
                changed["changes"] = changes
            else:
                changed[key] = image = in_float32(stored, self._buffers)
                apply_changes(image, changes, BrainMask.of(stored))
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

    def draw(self, n_channels: int) -> Noise:
        """Draw the standard deviation, and the seed of the noise."""
        std = self.R.uniform(*self.std)
        return Noise(std=std, seed=int(self.R.randint(2**63 - 1, dtype=np.int64)))


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

    def draw(self, n_channels: int) -> Blur:
        """Draw the channels, and the width of the Gaussian along each of their axes."""
        chosen = _some_channels(n_channels, self.channel_prob, self.R)
        return Blur(
            sigmas=tuple(
                tuple(self.R.uniform(*self.sigma) for _ in range(3)) if is_chosen else None
                for is_chosen in chosen
            )
        )


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

    def draw(self, n_channels: int) -> Brightness:
        """Draw the factors."""
        return Brightness(factors=_each_around_one(n_channels, self.factors, self.R))


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

    def draw(self, n_channels: int) -> Contrast:
        """Draw the factors."""
        return Contrast(factors=_each_around_one(n_channels, self.factors, self.R))


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

    def draw(self, n_channels: int) -> LowResolution:
        """Draw the channels, and the fraction of voxels that each keeps."""
        chosen = _some_channels(n_channels, self.channel_prob, self.R)
        return LowResolution(
            kept=tuple(
                self.R.uniform(*self.zoom_range) if is_chosen else None for is_chosen in chosen
            )
        )


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

    def draw(self, n_channels: int) -> Gamma:
        """Draw the exponents."""
        exponents = _each_around_one(n_channels, self.gamma, self.R)
        return Gamma(exponents=exponents, is_inverted=self.invert_image)


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
    return torch.from_numpy(buffers.take(tuple(image.shape), np.float32)).copy_(image)


def in_float16(image: Tensor, buffers: Buffers) -> Tensor:
    """Return an image in float16: the same tensor, or a copy in memory of the buffers."""
    if image.dtype == torch.float16:
        return image
    return torch.from_numpy(buffers.take(tuple(image.shape), np.float16)).copy_(image)


def plain_tensor(image: Any) -> Tensor:
    """Return an array or a tensor of any kind as a plain tensor in the same memory."""
    return image.as_tensor() if isinstance(image, MetaTensor) else torch.as_tensor(image)


def _some_channels(n_channels: int, prob: float, random: np.random.RandomState) -> list[bool]:
    # all channels are drawn before the parameters of any
    return [random.uniform() < prob for _ in range(n_channels)]


def _each_around_one(
    n_channels: int, bounds: Range, random: np.random.RandomState
) -> tuple[float, ...]:
    return tuple(_around_one(bounds, random) for _ in range(n_channels))


def _around_one(bounds: Range, random: np.random.RandomState) -> float:
    """Draw a factor that is below 1 as often as above, wherever the bounds are."""
    low, high = bounds
    return random.uniform(low, 1) if random.uniform() < 0.5 else random.uniform(1, high)
