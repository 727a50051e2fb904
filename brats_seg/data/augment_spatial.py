"""Patches that are mirrored, turned and scaled.

Mirroring costs next to nothing: the patch is read into its own mirror image. Turning and scaling
cost ten times the rest, so they are done only when they are drawn, and then on a box that holds
just what the turned patch touches; every voxel is interpolated once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from brats_seg.data.augment import Augmentation
from brats_seg.data.box import Box
from brats_seg.data.buffers import Buffers
from brats_seg.data.store import PreparedCase
from brats_seg.labels import MODALITIES, LabelMap

ROTATION_DEGREES = 30.0
"""Largest angle about each axis, to either side."""
SCALING = (0.7, 1.4)
"""Voxels of the case to a voxel of the patch: above 1 the brain becomes smaller."""
_N_MODALITIES = len(MODALITIES)
_SLAB = 8
"""Planes that are interpolated at a time: their coordinates stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Motion:
    """How a patch lies in its case."""

    mirrored: tuple[bool, bool, bool]
    """Whether X, Y and Z of the patch run against those of the case."""
    matrix: npt.NDArray[np.float64] | None
    """(3, 3): offset from the centre, from patch to case, before mirroring; None: equal."""


def draw_motion(augmentation: Augmentation, rng: np.random.Generator) -> Motion:
    """Draw how a patch is moved."""
    x, y, z = (bool(flip) for flip in rng.random(3) < augmentation.mirror)
    turned, scaled = rng.random(2) < (augmentation.rotation, augmentation.scaling)
    matrix = None
    if turned or scaled:
        angles = rng.uniform(-ROTATION_DEGREES, ROTATION_DEGREES, size=3) if turned else np.zeros(3)
        scale = rng.uniform(*SCALING) if scaled else 1.0
        matrix = scale * rotation_matrix(angles)
    return Motion(mirrored=(x, y, z), matrix=matrix)


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


def read_moved(
    case: PreparedCase, box: Box, motion: Motion, buffers: Buffers
) -> tuple[Tensor, LabelMap]:
    """Return the image (4, ...) in float32 and the labels of a patch, both on the same grid.

    Args:
        case: With a label map.
        box: The patch before it is moved about its centre.
        motion: How it is moved.
        buffers: Where the image lies.
    """
    if motion.matrix is None:
        return _read_mirrored(case, box, motion.mirrored, buffers)
    matrix = motion.matrix @ np.diag(np.where(motion.mirrored, -1.0, 1.0))
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
