"""Reorient volumes to the axes of BraTS and resample them to another spacing, and back.

BraTS stores volumes with X towards the patient's left, Y towards the back and Z towards the head.
Axes are permuted and reversed without interpolation. Both grids of a resampling share the outer
borders of the volume. Interpolation is linear: higher orders overshoot at the border of the brain,
and the background must keep its value.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeAlias

import nibabel as nib
import numpy as np
import numpy.typing as npt
from pydantic import PlainValidator

from brats_seg.voxels.box import Box, Triple, Voxel, triple

Affine: TypeAlias = Annotated[npt.NDArray[np.float64], PlainValidator(np.array)]
"""Matrix (4, 4) from voxel indices to millimetres; files of JSON hold it as lists."""
Spacing: TypeAlias = tuple[float, float, float]
"""Edges of a voxel along X, Y and Z in millimetres."""
Field: TypeAlias = npt.NDArray[np.float32]
Orientation: TypeAlias = npt.NDArray[np.float64]
"""Array (3, 2) as in nibabel: for each stored axis its index in the axes of BraTS, and 1 or -1 if it is reversed."""

AXES = ("L", "P", "S")
"""Left, posterior, superior: directions of X, Y and Z in every BraTS release."""
MM3_PER_ML = 1000.0
LARGEST_GRID = 2**29
"""Most voxels of a volume, also after resampling: 2 GiB in float32, sixty times a volume of BraTS."""
SPACING_TOLERANCE = 0.05
"""Largest relative difference between voxel edges that needs no resampling."""
_AS_STORED: Orientation = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
"""Orientation of a volume whose axes are those of BraTS already."""


def find_orientation(affine: Affine) -> Orientation:
    """Return the transform from the axes of a volume to the nearest axes of BraTS."""
    stored = nib.orientations.io_orientation(affine)
    return nib.orientations.ornt_transform(stored, nib.orientations.axcodes2ornt(AXES))


def reorient(array: npt.NDArray[Voxel], orientation: Orientation) -> npt.NDArray[Voxel]:
    """Return an array `(X, Y, Z)` with its axes permuted and reversed; it is a view."""
    return nib.orientations.apply_orientation(array, orientation)


def reorient_back(array: npt.NDArray[Voxel], orientation: Orientation) -> npt.NDArray[Voxel]:
    """Return the array that `reorient` was given; it is a view."""
    reverse = nib.orientations.ornt_transform(_AS_STORED, orientation)
    return nib.orientations.apply_orientation(array, reverse)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampling:
    """Shapes of a scan before and after resampling to another spacing."""

    before: Triple
    """Shape of the scan."""
    after: Triple
    """Shape at the other spacing."""

    @classmethod
    def needed(cls, shape: Triple, spacing_mm: Spacing, wanted_mm: Spacing) -> Self | None:
        """Return the resampling of a scan to the wanted spacing, or None if its own is close enough."""
        factors = np.divide(spacing_mm, wanted_mm)
        if np.abs(factors - 1).max() <= SPACING_TOLERANCE:
            return None
        after = triple(max(1, round(n * f)) for n, f in zip(shape, factors, strict=True))
        return cls(before=shape, after=after)

    def forward(self, array: npt.NDArray[Any]) -> Field:
        """Resample an array on the grid of the scan to the other spacing."""
        return _sample(array, self.after, Box.at((0, 0, 0), self.after))

    def forward_affine(self, affine: Affine) -> Affine:
        """Return the affine of the other grid, given that of the scan."""
        scale = np.divide(self.before, self.after)
        return affine @ nib.affines.from_matvec(np.diag(scale), (scale - 1) / 2)

    def back(self, array: npt.NDArray[Any], box: Box) -> Field:
        """Resample what is in a box at the other spacing, 0 around it, to `box_before` in the scan."""
        return _sample(box.placed(array, self.after), self.before, self.box_before(box))

    def box_before(self, box: Box) -> Box:
        """Return the voxels of the scan that take a share of those in a box at the other spacing."""
        scale = np.divide(self.after, self.before)
        # from behind the centre of the last voxel before the box to the centre of the first one after it
        start = np.floor((np.array(box.start) - 0.5) / scale + 0.5)
        stop = np.ceil((np.array(box.stop) + 0.5) / scale - 0.5)
        return Box(start=triple(map(int, start)), stop=triple(map(int, stop))).within(self.before)


def _sample(array: npt.NDArray[Any], shape: Triple, part: Box) -> Field:
    """Return a part of an array that is resampled to a shape.

    It is interpolated along each axis in turn, plane by plane, so that only the result takes new memory.
    """
    values, sampled = np.ascontiguousarray(array, np.float32), np.empty(part.shape, np.float32)
    axes = zip(map(_neighbours, array.shape, shape), part.slices, strict=True)
    along_x, along_y, along_z = ([of_voxel[inside] for of_voxel in axis] for axis, inside in axes)
    (y, next_y, y_shares), (z, next_z, z_shares) = along_y, along_z
    for plane, x, next_x, x_share in zip(sampled, *along_x, strict=True):
        # `a + share * (b - a)` is exactly `a` where both are equal: the background keeps its value
        mixed = values[x] + x_share * (values[next_x] - values[x])
        mixed = mixed[y] + y_shares[:, None] * (mixed[next_y] - mixed[y])
        plane[:] = mixed[:, z] + z_shares * (mixed[:, next_z] - mixed[:, z])
    return sampled


def _neighbours(n_before: int, n_after: int) -> tuple[npt.NDArray[Any], ...]:
    """Return the voxel before and behind each new voxel of an axis, and the share of the latter."""
    # the centre of voxel i of the new grid is at (i + 1/2) * scale - 1/2 voxels of the old one
    positions = ((np.arange(n_after) + 0.5) * n_before / n_after - 0.5).clip(0, n_before - 1)
    before = positions.astype(np.intp)
    return before, np.minimum(before + 1, n_before - 1), (positions - before).astype(np.float32)
