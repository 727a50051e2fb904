"""Number the components of masks, group items that share a key, measure diameters and surfaces of masks.

Diameters end on faces of voxels and are those of the convex hull: the ring of an enhancing tumour is
measured across its necrosis, as RANO asks (Wen et al. 2010, doi:10.1200/JCO.2009.26.3541; Wen et al.
2023, doi:10.1200/JCO.23.01059). The surface is that of the surface distances of Nikolov et al. (2018,
arXiv 1809.04430), which the BraTS challenges use. It follows the voxels and is therefore too large:
by 9 % for a ball of cubic voxels, and by more where voxels are elongated.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import scipy as sp  # imports its modules when they are used

from brats_seg.voxels.box import Mask, Triple, bounding_box

Lesions = npt.NDArray[np.int32]
"""Lesions `(X, Y, Z)`: 0 outside, else the number of the lesion; numbers may be missing."""
Points = npt.NDArray[np.float64]
Item = TypeVar("Item")
_ALL_NEIGHBOURS = sp.ndimage.generate_binary_structure(3, 3)


def number_components(mask: Mask) -> Lesions:
    """Number the connected components of a mask `(X, Y, Z)` from 1; corners connect voxels.

    Example:
        >>> mask = np.zeros((1, 1, 4), dtype=bool)
        >>> mask[..., [0, 2, 3]] = True
        >>> number_components(mask).tolist()
        [[[1, 0, 2, 2]]]
    """
    lesions = np.zeros(mask.shape, dtype=np.int32)
    box = bounding_box(mask)
    if box is not None:
        # a tumour fills little of a brain
        sp.ndimage.label(mask[box.slices], _ALL_NEIGHBOURS, output=lesions[box.slices])
    return lesions


def group_by(items: Iterable[Item], keys: Callable[[Item], Iterable[Hashable]]) -> list[list[Item]]:
    """Group items that share a key, or that a chain of such items connects, in the order of the items.

    Example:
        >>> group_by(["patient 1", "patient 2", "1 of patient 2"], lambda text: [text[-1]])
        [['patient 1'], ['patient 2', '1 of patient 2']]
    """
    listed = list(items)
    groups = sp.cluster.hierarchy.DisjointSet(range(len(listed)))
    first_with: dict[Hashable, int] = {}
    for index, item in enumerate(listed):
        for key in keys(item):
            groups.merge(first_with.setdefault(key, index), index)
    return [[listed[index] for index in sorted(group)] for group in groups.subsets()]


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
    return float(sp.spatial.distance.pdist(_hull(mask[box.slices], spacing_mm)).max())


def section_diameters(mask: Mask, spacing_mm: tuple[float, float, float]) -> SectionDiameters:
    """Return the diameters in the section across Z with their largest product; 0 if the mask is empty.

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
        return SectionDiameters(longest_mm=0.0, perpendicular_mm=0.0, index=0)
    cut = mask[box.slices]
    sections = (
        _diameters(cut[:, :, z], spacing_mm[:2], box.start[2] + z)
        for z in np.flatnonzero(cut.any(axis=(0, 1))).tolist()
    )
    return max(sections, key=lambda section: section.product_mm2)


def _diameters(section: Mask, spacing_mm: tuple[float, float], index: int) -> SectionDiameters:
    """Return the diameters of a section (X, Y) that is not empty."""
    corners = _hull(section, spacing_mm)
    distances = sp.spatial.distance.squareform(sp.spatial.distance.pdist(corners))
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
        along: Positions (n,) of the corners in the direction of the diameter, in order around.
        across: Their positions (n,) perpendicular to it.
        first: Corner where the diameter begins.
        second: Corner where it ends.
    """
    order = np.roll(np.arange(len(along)), -first)
    middle = (second - first) % len(along)
    sides = order[: middle + 1], np.append(order[middle:], first)[::-1]
    left, right = (np.interp(along, along[side], across[side]) for side in sides)
    return float(np.abs(left - right).max())


def _hull(mask: npt.NDArray[np.bool_], spacing_mm: tuple[float, ...]) -> Points:
    """Return the corners (n, d) in mm of the convex hull of a mask, in two dimensions in order around."""
    points = _face_centres(mask, spacing_mm)
    return points[sp.spatial.ConvexHull(points).vertices]


def _face_centres(mask: npt.NDArray[np.bool_], spacing_mm: tuple[float, ...]) -> Points:
    """Return the centres (n, d) in mm of the faces between voxels of a mask and those outside."""
    padded, centres = np.pad(mask, 1), []
    for axis in range(mask.ndim):
        # the face between voxel i and voxel i + 1 of the padded mask
        index = np.argwhere(np.diff(padded.view(np.int8), axis=axis)).astype(float)
        index[:, axis] += 0.5
        centres.append(index)
    return np.concatenate(centres) * spacing_mm


_SQUARE = np.array([(0, 0), (0, 1), (1, 1), (1, 0)])
"""Corners of a face of a cell, in order around it."""


def cell_codes(mask: Mask) -> npt.NDArray[np.uint8]:
    """Return the codes of the cells (X+1, Y+1, Z+1) of a mask (X, Y, Z), empty outside.

    Bit `4x + 2y + z` of a code is set if the voxel at offset (x, y, z) in the cell is in the mask.
    """
    codes = np.pad(mask, 1).view(np.uint8)
    codes = codes[:, :, :-1] | codes[:, :, 1:] << np.uint8(1)
    codes = codes[:, :-1] | codes[:, 1:] << np.uint8(2)
    return codes[:-1] | codes[1:] << np.uint8(4)


@cache
def cell_areas(spacing_mm: tuple[float, float, float]) -> npt.NDArray[np.float64]:
    """Return the surface area in mm2 of a cell, (256,) by code."""
    areas = np.array(
        [sum(_fan_area(polygon * spacing_mm) for polygon in _polygons(code)) for code in range(256)]
    )
    areas.flags.writeable = False
    return areas


def surface_mm2(mask: Mask, spacing_mm: tuple[float, float, float]) -> float:
    """Return the area of the surface of a mask (x, y, z); 0 if it is empty."""
    box = bounding_box(mask)
    if box is None:
        return 0.0
    counts = np.bincount(cell_codes(mask[box.slices]).ravel(), minlength=256)
    return float(counts @ cell_areas(spacing_mm))


@cache
def _polygons(code: int) -> tuple[Points, ...]:
    """Return the polygons (n, 3) of a cell of unit size.

    Each is divided into a fan of triangles from the corner that gives the larger area on cubic voxels,
    which comes first.
    """
    if code.bit_count() > 4:
        return _polygons(255 - code)
    polygons = (np.array(points) / 2 for points in _close_polygons(_segments(code)))
    return tuple(
        max((np.roll(polygon, turn, axis=0) for turn in range(len(polygon))), key=_fan_area)
        for polygon in polygons
    )


def _segments(code: int) -> list[tuple[Triple, Triple]]:
    """Connect the cut edges of each face, given by their midpoints in half edges.

    A cell has the centres of 2x2x2 voxels as corners. Where one of its edges connects a voxel of the
    mask to one outside, the surface passes through the midpoint. On a face with four cut edges the
    voxels of the minority are cut off one by one.
    """
    segments = []
    for axis, side in product(range(3), (0, 1)):
        face = np.insert(_SQUARE, axis, side, axis=1)
        inside = [bool(code >> int(corner @ (4, 2, 1)) & 1) for corner in face]
        # midpoint k is on the edge from corner k-1 to corner k
        midpoints = [(x, y, z) for x, y, z in (face + np.roll(face, 1, axis=0)).tolist()]
        cut = [k for k in range(4) if inside[k] != inside[k - 1]]
        if len(cut) == 2:
            segments.append((midpoints[cut[0]], midpoints[cut[1]]))
        elif len(cut) == 4:
            segments += [(midpoints[k], midpoints[(k + 1) % 4]) for k in range(4) if inside[k]]
    return segments


def _close_polygons(segments: list[tuple[Triple, Triple]]) -> list[list[Triple]]:
    """Chain segments into polygons: every point is an end of two segments."""
    remaining = list(segments)
    polygons = []
    while remaining:
        first, last = remaining.pop()
        points = [first]
        while last != first:
            points.append(last)
            following = next(segment for segment in remaining if last in segment)
            remaining.remove(following)
            last = following[1] if following[0] == last else following[0]
        polygons.append(points)
    return polygons


def _fan_area(polygon: Points) -> float:
    spokes = polygon[1:] - polygon[0]
    return float(np.linalg.norm(np.cross(spokes[:-1], spokes[1:]), axis=1).sum() / 2)
