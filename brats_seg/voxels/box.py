"""Boxes of voxels, which may extend beyond the volume, and the voxels of the brain."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Triple: TypeAlias = tuple[int, int, int]
Array: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = npt.NDArray[np.bool_]
"""Boolean voxels `(X, Y, Z)`."""
Voxel = TypeVar("Voxel", bound=np.generic)
Value = TypeVar("Value")


def triple(values: Iterable[Value]) -> tuple[Value, Value, Value]:
    """Return the three values of X, Y and Z as a tuple."""
    x, y, z = values
    return x, y, z


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape as `128x128x128`."""
    return "x".join(map(str, shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Voxels from `start` up to but not including `stop`."""

    start: Triple
    stop: Triple

    @classmethod
    def at(cls, start: Triple, shape: Triple) -> Self:
        """Return the box of a given shape that begins at `start`."""
        return cls(start=start, stop=_add(start, shape))

    @property
    def shape(self) -> Triple:
        """Voxels along X, Y and Z."""
        return triple(last - first for first, last in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """Index of the box in an array `(X, Y, Z)` that contains all of it."""
        return triple(map(slice, self.start, self.stop))

    def within(self, shape: Triple) -> Self:
        """Return the part of the box inside a volume of a given shape; it may be empty."""
        return type(self)(start=_clip(self.start, shape), stop=_clip(self.stop, shape))

    def grown(self, by: int) -> Self:
        """Return the box with a margin on every side; it may extend beyond a volume."""
        start, stop = _add(self.start, (-by, -by, -by)), _add(self.stop, (by, by, by))
        return type(self)(start=start, stop=stop)

    def seen_from(self, origin: Triple) -> Self:
        """Return the same voxels with indices relative to `origin`."""
        shift = (-origin[0], -origin[1], -origin[2])
        return type(self)(start=_add(self.start, shift), stop=_add(self.stop, shift))

    def joined(self, other: Self) -> Self:
        """Return the smallest box that contains both."""
        start, stop = map(min, self.start, other.start), map(max, self.stop, other.stop)
        return type(self)(start=triple(start), stop=triple(stop))

    def read(
        self, array: npt.NDArray[Voxel], out: npt.NDArray[Voxel] | None = None
    ) -> npt.NDArray[Voxel]:
        """Return what an array `(..., X, Y, Z)` has in the box, with 0 where the box extends beyond it.

        Args:
            array: Array in memory or on disk, with any axes before X.
            out: Array to write to; it may be any view, such as one with a reversed axis. Reusing an
                array saves most of the time, because a new one takes longer to allocate than to fill.
        """
        if out is None:
            out = np.empty((*array.shape[:-3], *self.shape), dtype=array.dtype)
        inside = self.within(triple(array.shape[-3:]))
        if inside != self:
            out[...] = 0
        out[..., *inside.seen_from(self.start).slices] = array[..., *inside.slices]
        return out

    def placed(self, array: npt.NDArray[Voxel], shape: Triple) -> npt.NDArray[Voxel]:
        """Return a volume of a given shape with `array` in this box and 0 outside."""
        volume = np.zeros(shape, dtype=array.dtype)
        volume[self.slices] = array
        return volume


def rounded_up(shape: Triple, multiple: Triple) -> Triple:
    """Return the smallest multiples that are not below a shape.

    Example:
        >>> rounded_up((140, 64, 1), (16, 16, 8))
        (144, 64, 8)
    """
    return triple(-(-n // m) * m for n, m in zip(shape, multiple, strict=True))


def bounding_box(mask: Mask) -> Box | None:
    """Return the smallest box that contains the true voxels of `(X, Y, Z)`, or None without any.

    Example:
        >>> mask = np.zeros((4, 4, 4), dtype=bool)
        >>> mask[1:3, 2, 0] = True
        >>> bounding_box(mask)
        Box(start=(1, 2, 0), stop=(3, 3, 1))
    """
    indices = [np.flatnonzero(mask.any(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1))]
    if not all(map(len, indices)):
        return None
    start = triple(int(axis[0]) for axis in indices)
    return Box(start=start, stop=triple(int(axis[-1]) + 1 for axis in indices))


def brain_mask(arrays: Sequence[Array], every: tuple[slice, ...] = ()) -> Mask:
    """Return the voxels that differ from the background in any of some skull-stripped images (X, Y, Z).

    All images are stripped alike, but each has a few zeros inside. `every` selects voxels, as an index.
    """
    return reduce(np.logical_or, (array[every] != background_of(array) for array in arrays))


def edge_voxels(array: Array) -> Array:
    """Return the voxels on the twelve edges of a volume (X, Y, Z)."""
    corners = ([0, 0, -1, -1], [0, -1, 0, -1])
    return np.concatenate([np.moveaxis(array, axis, -1)[corners].ravel() for axis in range(3)])


def background_of(array: Array) -> Array:
    """Return the value around the brain in an image (X, Y, Z), as an array without axes.

    BraTS writes 0 around the brain; scans from other sources may have another constant there, and
    lower values inside. The background is therefore the most frequent value on the twelve edges of the
    volume, where even a tight crop has no brain. If that value fills less than half of the edges, the
    skull was not removed, and the background is 0.
    """
    values, counts = np.unique(edge_voxels(array), return_counts=True)
    most = counts.argmax()
    return values[most] if 2 * counts[most] >= counts.sum() else np.zeros_like(values[most])


def normalised(values: Array) -> tuple[Array, float, float]:
    """Return values with mean 0 and standard deviation 1, and both as they were.

    Values that are all the same have a standard deviation of 0, and are returned as zeros.
    """
    # float32 holds the 16-bit integers of scanners exactly; wider types go to float64
    values = values.astype(np.result_type(values.dtype, np.float32))
    mean = values.mean(dtype=np.float64)
    values -= mean.astype(values.dtype)
    std = np.sqrt(np.einsum("i,i->", values, values, dtype=np.float64) / values.size)
    if std > 0:
        values /= std.astype(values.dtype)
    return values, float(mean), float(std)


def _add(point: Triple, shift: Triple) -> Triple:
    return point[0] + shift[0], point[1] + shift[1], point[2] + shift[2]


def _clip(point: Triple, shape: Triple) -> Triple:
    return triple(min(max(0, index), n) for index, n in zip(point, shape, strict=True))
