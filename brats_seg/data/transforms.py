"""How a patch is changed before a network learns from it: which changes, how often, how much.

Chances and ranges are those of nnU-Net v2 (Isensee et al. 2021). Its elastic deformation is off by
default and left out.
"""

# DOC data/augment_spatial: Patches that are mirrored, turned and scaled.
#
# Mirroring costs next to nothing: the patch is read into its own mirror image. Turning and scaling
# cost ten times the rest, so they are done only when they are drawn, and then on a box that holds
# just what the turned patch touches; every voxel is interpolated once.
#
# DOC data/augment_intensity: Changes of intensities, in place, with the background left at exactly 0.
#
# nnU-Net too puts the background back to 0 where it normalised inside the brain alone: it is 0 in
# every case a network will meet. Statistics are those of the brain in the patch, so that a change is
# as strong at the border of the brain as inside. Because the background is 0, sums over the patch are
# sums over the brain. A channel is a tensor (X, Y, Z) in float32.
#

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from brats_seg.data.store import Buffers, PreparedCase
from brats_seg.labels import MODALITIES, LabelMap
from brats_seg.voxels.box import Box

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """The chance of every change; what is left out never happens."""

    mirror: float = 0
    """Per axis."""
    rotation: float = 0
    scaling: float = 0
    noise: float = 0
    blur: float = 0
    brightness: float = 0
    contrast: float = 0
    low_resolution: float = 0
    inverted_gamma: float = 0
    gamma: float = 0


NONE = Augmentation()
LIGHT = Augmentation(mirror=0.5, noise=0.1, brightness=0.15, contrast=0.15)
"""What costs little: several times the patches a second of the full list."""
FULL = Augmentation(
    mirror=0.5,
    rotation=0.2,
    scaling=0.2,
    noise=0.1,
    blur=0.2,
    brightness=0.15,
    contrast=0.15,
    low_resolution=0.25,
    inverted_gamma=0.1,
    gamma=0.3,
)
AUGMENTATIONS = {"none": NONE, "light": LIGHT, "full": FULL}
"""By the name in the settings."""


ROTATION_DEGREES = 30.0
"""Largest angle about each axis, to either side."""
SCALING = (0.7, 1.4)
"""Voxels of the case to a voxel of the patch: above 1 the brain becomes smaller."""
_N_MODALITIES = len(MODALITIES)
_SLAB = 8
"""Planes that are interpolated at a time: their coordinates stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpatialTransform:
    """How a patch lies in its case."""

    mirrored: tuple[bool, bool, bool]
    """Whether X, Y and Z of the patch run against those of the case."""
    matrix: npt.NDArray[np.float64] | None
    """(3, 3): offset from the centre, from patch to case, before mirroring; None: equal."""


def draw_spatial_transform(
    augmentation: Augmentation, rng: np.random.Generator
) -> SpatialTransform:
    """PatchKey how a patch is moved."""
    x, y, z = (bool(flip) for flip in rng.random(3) < augmentation.mirror)
    turned, scaled = rng.random(2) < (augmentation.rotation, augmentation.scaling)
    matrix = None
    if turned or scaled:
        angles = rng.uniform(-ROTATION_DEGREES, ROTATION_DEGREES, size=3) if turned else np.zeros(3)
        scale = rng.uniform(*SCALING) if scaled else 1.0
        matrix = scale * rotation_matrix(angles)
    return SpatialTransform(mirrored=(x, y, z), matrix=matrix)


def rotation_matrix(angles_degrees: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rotation (3, 3) about X, then Y, then Z."""
    matrix = np.eye(3)
    for axis, angle in enumerate(np.radians(angles_degrees)):
        i, j = (axis + 1) % 3, (axis + 2) % 3
        about = np.eye(3)
        about[[i, j], [i, j]] = math.cos(angle)
        about[i, j], about[j, i] = -math.sin(angle), math.sin(angle)
        matrix = about @ matrix
    return matrix


def read_transformed(
    case: PreparedCase, box: Box, transform: SpatialTransform, buffers: Buffers
) -> tuple[Tensor, LabelMap]:
    """Return the image (4, ...) in float32 and the labels of a patch, both on the same grid.

    Args:
        case: With a label map.
        box: The patch before it is moved about its centre.
        transform: How it is moved.
        buffers: Where the image lies.
    """
    if transform.matrix is None:
        return _read_mirrored(case, box, transform.mirrored, buffers)
    matrix = transform.matrix @ np.diag(np.where(transform.mirrored, -1.0, 1.0))
    return _read_turned(case, box, matrix, buffers)


def touched_box(box: Box, matrix: npt.NDArray[np.float64]) -> Box:
    """Return the smallest box of all voxels between which a turned patch is interpolated."""
    reach = np.abs(matrix) @ (np.array(box.shape) - 1) / 2
    x, y, z = (math.floor(n) for n in _centre(box) - reach)
    right, front, top = (math.ceil(n) + 1 for n in _centre(box) + reach)
    return Box(start=(x, y, z), stop=(right, front, top))


def _centre(box: Box) -> npt.NDArray[np.float64]:
    return np.array(box.start) + (np.array(box.shape) - 1) / 2


def _read_mirrored(
    case: PreparedCase, box: Box, mirrored: tuple[bool, bool, bool], buffers: Buffers
) -> tuple[Tensor, LabelMap]:
    turned_round = tuple(slice(None, None, -1 if flip else 1) for flip in mirrored)
    half = buffers.take((_N_MODALITIES, *box.shape), np.float16)
    labels = np.empty(box.shape, dtype=np.uint8)
    case.read_image(box, half[(slice(None), *turned_round)])
    case.read_labels(box, labels[turned_round])
    return _in_single_precision(half, buffers), labels


def _read_turned(
    case: PreparedCase, box: Box, matrix: npt.NDArray[np.float64], buffers: Buffers
) -> tuple[Tensor, LabelMap]:
    touched = touched_box(box, matrix).within(case.shape)
    half = buffers.take((_N_MODALITIES, *touched.shape), np.float16)
    source = _in_single_precision(case.read_image(touched, half), buffers)
    source_labels = torch.from_numpy(case.read_labels(touched)).to(torch.float32)[None]
    image = torch.from_numpy(buffers.take((_N_MODALITIES, *box.shape), np.float32))
    labels = np.empty(box.shape, dtype=np.uint8)
    for start, places in _places(box, matrix, touched):
        slab = slice(start, start + len(places))
        image[:, slab] = _sample(source, places, "bilinear")
        labels[slab] = _sample(source_labels, places, "nearest")[0]
    return image, labels


def _in_single_precision(half: npt.NDArray[np.float16], buffers: Buffers) -> Tensor:
    # torch converts six times as fast as numpy
    single = torch.from_numpy(buffers.take(half.shape, np.float32))
    return single.copy_(torch.from_numpy(half))


def _places(
    box: Box, matrix: npt.NDArray[np.float64], touched: Box
) -> Iterator[tuple[int, Tensor]]:
    """Yield where the voxels of the patch lie in the touched box, planes (n, Y, Z, 3) at a time.

    Last axis Z, Y, X, from -1 to 1 between the outer faces of the box, as `grid_sample` counts.
    """
    offset = _centre(box) - touched.start - matrix @ (np.array(box.shape) - 1) / 2
    per_voxel = 2 / np.array(touched.shape)
    first = torch.from_numpy((offset + 0.5) * per_voxel - 1).flip(0)
    steps = torch.from_numpy(matrix * per_voxel[:, None]).flip(0)
    x, y, z = (torch.arange(n, dtype=torch.float64)[:, None] for n in box.shape)
    plane = (first + y[:, None] * steps[:, 1] + z * steps[:, 2]).to(torch.float32)
    along_x = (x * steps[:, 0]).to(torch.float32)[:, None, None]
    for start in range(0, len(x), _SLAB):
        yield start, plane + along_x[start : start + _SLAB]


def _sample(source: Tensor, places: Tensor, mode: str) -> Tensor:
    """Return the values of a source (C, ...) at places (n, Y, Z, 3); beyond it lies background."""
    return functional.grid_sample(
        source[None], places[None], mode=mode, padding_mode="zeros", align_corners=False
    )[0]


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
class BrainMask:
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
    steps: tuple[tuple[float, Callable[[Tensor, BrainMask, Generator], None]], ...] = (
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
    brain = BrainMask.of(image)
    if brain.n_voxels:
        for change in drawn:
            change(image, brain, rng)


def add_noise(image: Tensor, brain: BrainMask, rng: Generator) -> None:
    """Add Gaussian noise of one strength to all channels, to each its own."""
    std = rng.uniform(*NOISE_STD)
    # torch keys twice as fast as numpy
    source = torch.Generator().manual_seed(int(rng.integers(2**63)))
    noise = torch.empty_like(image[0])
    for channel in image:
        noise.normal_(generator=source).mul_(brain.mask)
        channel.add_(noise, alpha=std)


def blur(image: Tensor, brain: BrainMask, rng: Generator) -> None:
    """Blur some channels with a Gaussian, as wide along each axis as chance wills."""
    for channel in _some_channels(image, rng):
        blurred = channel
        for axis in range(channel.ndim):
            blurred = _blur_along(blurred, axis, rng.uniform(*BLUR_SIGMA))
        torch.mul(blurred, brain.mask, out=channel)


def alter_brightness(image: Tensor, brain: BrainMask, rng: Generator) -> None:
    """Multiply each channel by a factor of its own."""
    for channel in image:
        channel.mul_(_around_one(BRIGHTNESS, rng))


def alter_contrast(image: Tensor, brain: BrainMask, rng: Generator) -> None:
    """Move the intensities of each channel from or to their mean, within the range they had."""
    for channel in image:
        mean, _ = brain.mean_and_std(channel)
        low, high = channel.aminmax()
        factor = _around_one(CONTRAST, rng)
        channel.mul_(factor).add_(mean * (1 - factor)).clamp_(low, high).mul_(brain.mask)


def lower_resolution(image: Tensor, brain: BrainMask, rng: Generator) -> None:
    """Keep only some voxels of some channels, and interpolate between them."""
    for channel in _some_channels(image, rng):
        kept = rng.uniform(*RESOLUTION)
        size = [max(1, round(n * kept)) for n in channel.shape]
        coarse = functional.interpolate(channel[None, None], size, mode="nearest-exact")
        fine = functional.interpolate(coarse, channel.shape, mode="trilinear")[0, 0]
        torch.mul(fine, brain.mask, out=channel)


def alter_gamma(image: Tensor, brain: BrainMask, rng: Generator) -> None:
    """Bend the intensities of each channel by a power, and keep their mean and deviation."""
    for channel in image:
        _bend(channel, brain, _around_one(GAMMA, rng))


def alter_inverted_gamma(image: Tensor, brain: BrainMask, rng: Generator) -> None:
    """Do as `alter_gamma` with the intensities turned round: bright ones move most."""
    for channel in image:
        _bend(channel.neg_(), brain, _around_one(GAMMA, rng))
        channel.neg_()


def _some_channels(image: Tensor, rng: Generator) -> list[Tensor]:
    return [channel for channel in image if rng.random() < CHANNEL_CHANCE]


def _around_one(bounds: tuple[float, float], rng: Generator) -> float:
    """PatchKey a factor that is as likely below 1 as above, however far the bounds are from it."""
    low, high = bounds
    return rng.uniform(low, 1) if rng.random() < 0.5 else rng.uniform(1, high)


def _bend(channel: Tensor, brain: BrainMask, exponent: float) -> None:
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
