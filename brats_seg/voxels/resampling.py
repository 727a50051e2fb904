"""Resample volumes to another voxel spacing and back.

Both grids share the outer borders of the volume. Interpolation is linear: higher orders overshoot
at the border of the brain, and the background must keep its value.
"""

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.ndimage import affine_transform

from brats_seg.voxels.box import Triple
from brats_seg.voxels.orientation import Affine

Spacing: TypeAlias = tuple[float, float, float]
Field: TypeAlias = npt.NDArray[np.float32]

MM3_PER_ML = 1000.0
LARGEST_GRID = 2**29
"""Most voxels of a volume, also after resampling: 2 GiB in float32, sixty times a volume of BraTS."""
SPACING_TOLERANCE = 0.05
"""Largest relative difference between voxel edges that needs no resampling."""


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
        x, y, z = (max(1, round(n * f)) for n, f in zip(shape, factors, strict=True))
        return cls(before=shape, after=(x, y, z))

    def there(self, array: npt.NDArray[Any]) -> Field:
        """Resample an array on the grid of the scan to the other spacing."""
        return _sampled(array, self.after)

    def affine_there(self, affine: Affine) -> Affine:
        """Return the affine of the other grid, given that of the scan."""
        scale = np.divide(self.before, self.after)
        step = np.eye(4)
        step[:3, :3] = np.diag(scale)
        step[:3, 3] = (scale - 1) / 2
        return affine @ step

    def back(self, array: npt.NDArray[Any]) -> Field:
        """Resample an array at the other spacing to the grid of the scan."""
        return _sampled(array, self.before)


def _sampled(array: npt.NDArray[Any], shape: Triple) -> Field:
    scale = np.divide(array.shape, shape)
    # the centre of voxel i of the new grid is at (i + 1/2) * scale voxels of the old one
    return affine_transform(
        array.astype(np.float32, copy=False),
        scale,
        offset=(scale - 1) / 2,
        output_shape=shape,
        order=1,
        mode="nearest",
    )
