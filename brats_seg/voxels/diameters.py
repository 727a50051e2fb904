"""Measure the diameters of a mask: the longest one in space, and two perpendicular ones in a section.

A diameter ends on faces of voxels, so that a row of n voxels of 1 mm has a length of n mm. Diameters
are those of the convex hull: the ring of an enhancing tumour is measured across its necrosis, as RANO
asks (Wen et al. 2010, doi:10.1200/JCO.2009.26.3541; Wen et al. 2023, doi:10.1200/JCO.23.01059).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.spatial import ConvexHull
from scipy.spatial.distance import pdist, squareform

from brats_seg.voxels.box import Mask, bounding_box

Points = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionDiameters:
    """The two perpendicular diameters of a mask in one section across its last axis."""

    longest_mm: float
    """Longest diameter in the section."""
    perpendicular_mm: float
    """Longest diameter perpendicular to it in the same section."""
    index: int
    """Section, in voxels along the last axis."""

    @property
    def product_mm2(self) -> float:
        """Product of the two diameters, which RANO adds up over lesions."""
        return self.longest_mm * self.perpendicular_mm


NO_DIAMETERS = SectionDiameters(longest_mm=0.0, perpendicular_mm=0.0, index=0)
"""Diameters of an empty mask."""


def longest_diameter_mm(mask: Mask, spacing_mm: tuple[float, float, float]) -> float:
    """Return the longest diameter of a mask (X, Y, Z); 0 if it is empty.

    Example:
        >>> mask = np.zeros((5, 5, 5), bool)
        >>> mask[1:4, 2, 2] = True
        >>> longest_diameter_mm(mask, (1.0, 1.0, 2.0))
        3.0
    """
    box = bounding_box(mask)
    if box is None:
        return 0.0
    corners = _hull(_face_centres(mask[box.slices], spacing_mm))
    return float(pdist(corners).max())


def section_diameters(mask: Mask, spacing_mm: tuple[float, float, float]) -> SectionDiameters:
    """Return the diameters in the section across Z in which their product is largest.

    Args:
        mask: (X, Y, Z), whose Z runs to the patient's head for axial sections.
        spacing_mm: Edges of a voxel.

    Example:
        >>> mask = np.zeros((9, 9, 3), bool)
        >>> mask[1:8, 4, 1] = True
        >>> mask[4, 3:6, 1] = True
        >>> found = section_diameters(mask, (1.0, 1.0, 1.0))
        >>> found.longest_mm, found.perpendicular_mm, found.index
        (7.0, 3.0, 1)
    """
    box = bounding_box(mask)
    if box is None:
        return NO_DIAMETERS
    cut = mask[box.slices]
    sections = (
        _diameters_of(cut[:, :, z], spacing_mm[:2], box.start[2] + z)
        for z in np.flatnonzero(cut.any(axis=(0, 1))).tolist()
    )
    return max(sections, key=lambda found: found.product_mm2)


def _diameters_of(section: Mask, spacing_mm: tuple[float, float], index: int) -> SectionDiameters:
    """Return the diameters of a section (X, Y) that is not empty."""
    corners = _hull(_face_centres(section, spacing_mm))
    distances = squareform(pdist(corners))
    first, second = np.unravel_index(distances.argmax(), distances.shape)
    along = (corners[second] - corners[first]) / distances[first, second]
    across = np.array([-along[1], along[0]])
    return SectionDiameters(
        longest_mm=float(distances[first, second]),
        perpendicular_mm=_widest_mm(corners @ along, corners @ across, int(first), int(second)),
        index=index,
    )


def _widest_mm(along: Points, across: Points, first: int, second: int) -> float:
    """Return the longest chord of a convex polygon perpendicular to its longest diameter.

    The diameter divides the polygon into two sides, whose distances from it are piecewise linear.
    The longest chord therefore begins or ends at a corner.

    Args:
        along: Place (n,) of each corner in the direction of the diameter, in order around.
        across: Place (n,) of each corner perpendicular to it.
        first: Corner where the diameter begins.
        second: Corner where it ends.
    """
    order = np.roll(np.arange(len(along)), -first)
    middle = (second - first) % len(along)
    one, other = order[: middle + 1], np.append(order[middle:], first)[::-1]
    of_one = np.interp(along, along[one], across[one])
    of_other = np.interp(along, along[other], across[other])
    return float(np.abs(of_one - of_other).max())


def _hull(points: Points) -> Points:
    """Return the corners (n, 2 or 3) of the convex hull of points, in two dimensions in order around."""
    corners: Points = points[ConvexHull(points).vertices]
    return corners


def _face_centres(mask: npt.NDArray[np.bool_], spacing_mm: tuple[float, ...]) -> Points:
    """Return the centres (n, d) in mm of the faces between voxels of a mask and those outside."""
    padded = np.pad(mask, 1)
    found = []
    for axis in range(mask.ndim):
        # the face between voxel i and voxel i + 1 of the padded mask
        index = np.argwhere(np.diff(padded.view(np.int8), axis=axis)).astype(float)
        index[:, axis] += 0.5
        found.append(index)
    points: Points = np.concatenate(found) * spacing_mm
    return points
