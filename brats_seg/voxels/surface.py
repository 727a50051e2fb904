"""The surface of a voxel mask, cell by cell: a cell has the centres of 2x2x2 voxels as corners.

Where an edge of a cell joins a voxel of the mask to one outside, the surface passes through its
middle. On every face the cut edges are joined in pairs; on a face with four of them the voxels of
the lesser kind are cut off one by one. The segments close into polygons, which are fanned out into
triangles from the corner that gives the larger area on cubic voxels. These areas are the weights
of the surface distances of Nikolov et al. (2018, arXiv 1809.04430), which the BraTS challenges use.
"""

# DOC survival/shape: Size, shape and place of the regions of a tumour.
#
# Surfaces are measured as for the surface distances of the challenges (Nikolov et al. 2018, see
# `evaluation.cells`): the surface passes half way between a voxel inside and one outside. Steps of
# voxels make it too large, by 9 % for a ball of cubic voxels, whose sphericity so is 0.92, and by more
# where voxels are long.
#

from functools import cache

import numpy as np
import numpy.typing as npt

from brats_seg.voxels.box import Mask, bounding_box

Point = tuple[int, int, int]
Polygon = npt.NDArray[np.float64]

_CORNERS = tuple((x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1))
"""Corner `i` is bit `i` of a cell's code."""

_SQUARE = ((0, 0), (0, 1), (1, 1), (1, 0))


def cell_codes(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Turn a mask (X, Y, Z) into the codes of its cells (X+1, Y+1, Z+1), outside counted as empty.

    Bit `4x + 2y + z` of a code says whether the cell's voxel at offset (x, y, z) is in the mask.
    """
    codes = np.pad(mask, 1).view(np.uint8)
    codes = codes[:, :, :-1] | codes[:, :, 1:] << np.uint8(1)
    codes = codes[:, :-1] | codes[:, 1:] << np.uint8(2)
    return codes[:-1] | codes[1:] << np.uint8(4)


@cache
def cell_areas(spacing_mm: tuple[float, float, float]) -> npt.NDArray[np.float64]:
    """Return the area in mm2 of the surface in a cell, (256,) by its code."""
    areas = np.array(
        [sum(_fan_area(polygon * spacing_mm) for polygon in _polygons(code)) for code in range(256)]
    )
    areas.flags.writeable = False
    return areas


@cache
def _polygons(code: int) -> tuple[Polygon, ...]:
    """Return the polygons (n, 3) of a cell of unit size, each beginning where its fan begins."""
    if code.bit_count() > len(_CORNERS) // 2:
        return _polygons(255 - code)
    polygons = (np.array(points) / 2 for points in _closed(_segments(code)))
    return tuple(
        max((np.roll(polygon, turn, axis=0) for turn in range(len(polygon))), key=_fan_area)
        for polygon in polygons
    )


def _segments(code: int) -> list[tuple[Point, Point]]:
    """Join the cut edges of each face, given by their middles in half edges."""
    inside = {corner: bool(code >> bit & 1) for bit, corner in enumerate(_CORNERS)}
    segments = []
    for face in _faces():
        held = [inside[corner] for corner in face]
        # middle k is that of the edge from corner k-1 to corner k
        middles = [_sum(face[k - 1], face[k]) for k in range(4)]
        cut = [k for k in range(4) if held[k] != held[k - 1]]
        if len(cut) == 2:
            segments.append((middles[cut[0]], middles[cut[1]]))
        elif len(cut) == 4:
            segments += [(middles[k], middles[(k + 1) % 4]) for k in range(4) if held[k]]
    return segments


def _faces() -> list[list[Point]]:
    faces = []
    for axis in range(3):
        for side in (0, 1):
            corners = [np.insert(corner, axis, side).tolist() for corner in _SQUARE]
            faces.append([(x, y, z) for x, y, z in corners])
    return faces


def _sum(one: Point, other: Point) -> Point:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2])


def _closed(segments: list[tuple[Point, Point]]) -> list[list[Point]]:
    """Chain segments into polygons: every point ends two of them."""
    left = list(segments)
    polygons = []
    while left:
        first, here = left.pop()
        points = [first]
        while here != first:
            points.append(here)
            following = next(segment for segment in left if here in segment)
            left.remove(following)
            here = following[1] if following[0] == here else following[0]
        polygons.append(points)
    return polygons


def _fan_area(polygon: Polygon) -> float:
    spokes = polygon[1:] - polygon[0]
    return float(np.linalg.norm(np.cross(spokes[:-1], spokes[1:]), axis=1).sum() / 2)


def surface_mm2(mask: Mask, spacing_mm: tuple[float, float, float]) -> float:
    """Return the area of the surface of a mask (x, y, z); 0 if it is empty."""
    box = bounding_box(mask)
    if box is None:
        return 0.0
    counts = np.bincount(cell_codes(mask[box.slices]).ravel(), minlength=256)
    return float(counts @ cell_areas(spacing_mm))
