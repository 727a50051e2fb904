"""Reorient volumes to the axes of BraTS and back.

BraTS stores volumes with X towards the patient's left, Y towards the back and Z towards the head.
Scans in another orientation are reoriented for the network, and its output is reoriented back. Axes
are only permuted and reversed, without interpolation.
"""

from typing import TypeAlias, TypeVar

import nibabel as nib
import numpy as np
import numpy.typing as npt

Affine: TypeAlias = npt.NDArray[np.float64]
"""Matrix (4, 4) from voxel indices to millimetres."""
AXES = ("L", "P", "S")
"""Left, posterior, superior: directions of X, Y and Z in every BraTS release."""

Voxel = TypeVar("Voxel", bound=np.generic)
Turn: TypeAlias = npt.NDArray[np.float64]
"""Orientation (3, 2) as in nibabel: new place of each axis, and 1 or -1 for its direction."""
_UNTURNED: Turn = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])


def turn_of(affine: Affine) -> Turn:
    """Return the transform from the axes of a volume to the nearest axes of BraTS."""
    stored = nib.orientations.io_orientation(affine)
    return nib.orientations.ornt_transform(stored, nib.orientations.axcodes2ornt(AXES))


def turned(array: npt.NDArray[Voxel], turn: Turn) -> npt.NDArray[Voxel]:
    """Return an array `(X, Y, Z)` with its axes permuted and reversed; it is a view."""
    return nib.orientations.apply_orientation(array, turn)


def turned_back(array: npt.NDArray[Voxel], turn: Turn) -> npt.NDArray[Voxel]:
    """Return the array that `turned` was given; it is a view."""
    reverse = nib.orientations.ornt_transform(_UNTURNED, turn)
    return nib.orientations.apply_orientation(array, reverse)
