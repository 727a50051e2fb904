"""A volume at another spacing, and the way back.

Both grids share the outer borders of the volume. Between voxels values are interpolated linearly:
higher orders overshoot at the border of the brain, where the background must stay one value.
"""

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.ndimage import affine_transform

from brats_seg.voxels.orientation import Affine

Triple: TypeAlias = tuple[int, int, int]
Spacing: TypeAlias = tuple[float, float, float]
Field: TypeAlias = npt.NDArray[np.float32]

SPACING_TOLERANCE = 0.05
"""Share by which an edge of a voxel may differ from that of training without being resampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampling:
    """Two grids over one volume."""

    before: Triple
    """Voxels of the scan."""
    after: Triple
    """Voxels at the other spacing."""

    @classmethod
    def needed(cls, shape: Triple, spacing_mm: Spacing, wanted_mm: Spacing) -> Self | None:
        """Return the way to that spacing, or None if the scan is near enough to it."""
        factors = np.divide(spacing_mm, wanted_mm)
        if np.abs(factors - 1).max() <= SPACING_TOLERANCE:
            return None
        x, y, z = (max(1, round(n * f)) for n, f in zip(shape, factors, strict=True))
        return cls(before=shape, after=(x, y, z))

    def there(self, array: npt.NDArray[Any]) -> Field:
        """Return an array of the scan at the other spacing."""
        return _sampled(array, self.after)

    def affine_there(self, affine: Affine) -> Affine:
        """Return the affine of the grid of the other spacing."""
        scale = np.divide(self.before, self.after)
        step = np.eye(4)
        step[:3, :3] = np.diag(scale)
        step[:3, 3] = (scale - 1) / 2
        return affine @ step

    def back(self, array: npt.NDArray[Any]) -> Field:
        """Return an array of the other spacing on the grid of the scan."""
        return _sampled(array, self.before)


def _sampled(array: npt.NDArray[Any], shape: Triple) -> Field:
    scale = np.divide(array.shape, shape)
    # voxel i of the new grid has its middle at (i + 1/2) * scale of the old one, in voxels
    return affine_transform(
        array.astype(np.float32, copy=False),
        scale,
        offset=(scale - 1) / 2,
        output_shape=shape,
        order=1,
        mode="nearest",
    )
