"""The area of a surface, from cells of eight voxels."""

import itertools
import math

import numpy as np
import pytest

from brats_seg.voxels.shapes import cell_areas, cell_codes

MM = (1.0, 1.0, 1.0)


def code_of(*corners: tuple[int, int, int]) -> int:
    """The code of a cell with these voxels in the mask."""
    block = np.zeros((2, 2, 2), dtype=bool)
    for corner in corners:
        block[corner] = True
    return int(cell_codes(block)[1, 1, 1])


def block_of(code: int) -> np.ndarray:
    return np.array([code >> bit & 1 for bit in range(8)], dtype=bool).reshape(2, 2, 2)


def test_a_voxel_is_seen_by_the_eight_cells_around_it() -> None:
    codes = cell_codes(np.ones((1, 1, 1), dtype=bool))

    # the voxel is the last corner of the first cell and the first corner of the last
    assert codes.shape == (2, 2, 2)
    assert codes[0, 0, 0] == 128
    assert codes[1, 1, 1] == 1
    assert codes[0, 1, 1] == 16
    assert sorted(codes.ravel().tolist()) == [1 << bit for bit in range(8)]


@pytest.mark.parametrize(
    ("corners", "area"),
    [
        ([], 0.0),
        # an equilateral triangle with sides of half a face diagonal
        ([(0, 0, 0)], math.sqrt(3) / 8),
        # a rectangle of an edge by half a face diagonal
        ([(0, 0, 0), (0, 0, 1)], math.sqrt(2) / 2),
        # corners across a face or across the cell are cut off one by one
        ([(0, 0, 0), (0, 1, 1)], math.sqrt(3) / 4),
        ([(0, 0, 0), (1, 1, 1)], math.sqrt(3) / 4),
        # three corners of a face: a pentagon, in the triangles with the larger area
        ([(0, 0, 0), (0, 0, 1), (0, 1, 0)], (3 * math.sqrt(3) / 4 + 1) / 2),
        # half a cell: a face of a voxel
        ([(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)], 1.0),
        # every other corner
        ([(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)], math.sqrt(3) / 2),
        # a corner and its three neighbours: a regular hexagon
        ([(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)], 3 * math.sqrt(3) / 4),
    ],
)
def test_areas_worked_out_by_hand(corners: list[tuple[int, int, int]], area: float) -> None:
    assert cell_areas(MM)[code_of(*corners)] == pytest.approx(area)


def test_a_face_has_the_area_of_its_voxel_in_mm2() -> None:
    flat = code_of((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1))

    assert cell_areas((2.0, 3.0, 5.0))[flat] == pytest.approx(15.0)


def test_inside_and_outside_have_one_surface() -> None:
    areas = cell_areas((1.0, 1.5, 3.0))

    assert areas == pytest.approx(areas[::-1])
    assert (areas[1:-1] > 0).all()


def test_turned_and_mirrored_cells_have_the_same_area() -> None:
    areas = cell_areas(MM)

    for code, axes, flips in itertools.product(
        range(256), itertools.permutations(range(3)), ([], [0], [1, 2], [0, 1, 2])
    ):
        turned = np.flip(block_of(code).transpose(axes), flips)
        assert areas[cell_codes(turned)[1, 1, 1]] == pytest.approx(areas[code])


def test_the_surface_of_a_ball_is_that_of_a_sphere() -> None:
    radius = 12.0
    inside = ((np.indices((27, 27, 27)) - 13) ** 2).sum(axis=0) < radius**2

    area = cell_areas(MM)[cell_codes(inside)].sum()

    # planes through the middles of edges follow a sphere with steps
    assert area == pytest.approx(4 * math.pi * radius**2, rel=0.1)
