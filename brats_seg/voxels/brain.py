"""Find the brain in skull-stripped images `(X, Y, Z)` of one grid.

A voxel belongs to the brain if any modality differs from its background there: all four are
skull-stripped alike, but each has a few zeros inside. BraTS writes 0 around the brain; scans from
other sources may have another constant there, and lower values inside. The background is therefore
the most frequent value on the twelve edges of the volume, where even a tight crop has no brain. If
that value fills less than half of the edges, the skull was not removed, and the background is 0.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from brats_seg.voxels.box import Mask

Array: TypeAlias = npt.NDArray[Any]


def brain_mask(arrays: Sequence[Array], every: tuple[slice, ...] = ()) -> Mask:
    """Return the voxels (X, Y, Z) that are not background in at least one of the images.

    Args:
        arrays: Images (X, Y, Z).
        every: Which voxels are asked for; all without it.
    """
    first, *others = arrays
    mask: Mask = first[every] != background_of(first)
    for array in others:
        mask |= array[every] != background_of(array)
    return mask


def background_of(array: Array) -> Array:
    """Return the value around the brain in an image (X, Y, Z), as an array without axes."""
    corners = ([0, 0, -1, -1], [0, -1, 0, -1])
    edges = [np.moveaxis(array, axis, -1)[corners].ravel() for axis in range(3)]
    values, counts = np.unique(np.concatenate(edges), return_counts=True)
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
