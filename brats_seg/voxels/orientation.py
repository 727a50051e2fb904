"""The order and direction of a volume's axes.

BraTS stores volumes with X to the patient's left, Y to the back and Z to the head. Scans stored in
another way are turned for the network, and what it gives is turned back. Only whole axes are
swapped and reversed: no voxel changes its value.
"""

from typing import Any, TypeAlias, TypeVar

import nibabel as nib
import numpy as np
import numpy.typing as npt

Affine: TypeAlias = npt.NDArray[np.float64]
"""(4, 4): voxel indices to millimetres."""
AXES = ("L", "P", "S")
"""Left, posterior, superior: where X, Y and Z of every BraTS release run to."""

Voxel = TypeVar("Voxel", bound=np.generic)
Turn: TypeAlias = npt.NDArray[np.float64]
"""(3, 2), as in nibabel: the axis that each axis becomes, and 1 or -1 for its direction."""


def turn_of(affine: Affine) -> Turn:
    """Return how the axes of a volume become those of BraTS, each the nearest one."""
    stored = nib.orientations.io_orientation(affine)
    return nib.orientations.ornt_transform(stored, nib.orientations.axcodes2ornt(AXES))


def turned(array: npt.NDArray[Voxel], turn: Turn) -> npt.NDArray[Voxel]:
    """Swap and reverse the axes of `(X, Y, Z)`."""
    return nib.orientations.apply_orientation(array, turn)


def turned_back(array: npt.NDArray[Voxel], turn: Turn) -> npt.NDArray[Voxel]:
    """Undo `turned`."""
    reverse = nib.orientations.ornt_transform(_UNTURNED, turn)
    return nib.orientations.apply_orientation(array, reverse)


_UNTURNED: npt.NDArray[Any] = np.array([[0, 1], [1, 1], [2, 1]])
