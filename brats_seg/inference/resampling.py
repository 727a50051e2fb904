"""A volume at another spacing, and the way back.

Both grids share the outer borders of the volume. Between voxels values are interpolated linearly:
higher orders overshoot at the border of the brain, where the background must stay one value.
"""

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.ndimage import affine_transform

from brats_seg.cases.nifti import Geometry, Volume

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
    def needed(cls, geometry: Geometry, spacing_mm: Spacing) -> Self | None:
        """Return the way to that spacing, or None if the scan is near enough to it."""
        factors = np.divide(geometry.spacing_mm, spacing_mm)
        if np.abs(factors - 1).max() <= SPACING_TOLERANCE:
            return None
        x, y, z = (max(1, round(n * f)) for n, f in zip(geometry.shape, factors, strict=True))
        return cls(before=geometry.shape, after=(x, y, z))

    def there(self, volume: Volume) -> Volume:
        """Return the volume at the other spacing."""
        old = volume.geometry
        scale = np.divide(self.before, self.after)
        step = np.eye(4)
        step[:3, :3] = np.diag(scale)
        step[:3, 3] = (scale - 1) / 2
        affine = old.affine @ step
        return Volume(
            array=_sampled(volume.array, self.after),
            geometry=Geometry(
                shape=self.after, affine=affine, qform=affine, qform_code=0, sform_code=1
            ),
            file=volume.file,
        )

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
