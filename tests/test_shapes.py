"""Components, diameters and surfaces of masks."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brats_seg.voxels import shapes


@given(keys=st.lists(st.sets(st.integers(0, 30), max_size=4), max_size=25))
def test_groups_equal_those_of_repeated_merging(keys):
    groups = [{item} for item in range(len(keys))]
    for one, other in itertools.product(range(len(keys)), repeat=2):
        if keys[one] & keys[other] and groups[one] is not groups[other]:
            merged = groups[one] | groups[other]
            for item in merged:
                groups[item] = merged
    expected = [sorted(group) for item, group in enumerate(groups) if item == min(group)]
    assert shapes.group_by(range(len(keys)), keys.__getitem__) == expected


CUBES = (1.0, 1.0, 1.0)


def ball(radius: float, shape: tuple[int, int, int]) -> np.ndarray:
    distance = np.linalg.norm(np.indices(shape).T - np.array(shape) // 2, axis=-1).T
    return distance <= radius


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_diameter_is_that_of_all_pairs(seed: int) -> None:
    mask = np.random.default_rng(seed).random((4, 5, 3)) > 0.8
    mask[0, 0, 0] = True
    pairs = itertools.combinations(shapes._face_centres(mask, (1.0, 0.5, 3.0)), 2)
    expected = max(np.linalg.norm(a - b) for a, b in pairs)
    assert shapes.longest_diameter_mm(mask, (1.0, 0.5, 3.0)) == pytest.approx(expected)


def test_a_voxel_has_the_diameters_of_its_faces() -> None:
    mask = np.zeros((3, 3, 3), bool)
    assert shapes.section_diameters(mask, CUBES).product_mm2 == 0
    assert shapes.longest_diameter_mm(mask, CUBES) == 0
    mask[1, 1, 1] = True
    found = shapes.section_diameters(mask, (1.0, 2.0, 5.0))
    assert shapes.longest_diameter_mm(mask, (1.0, 2.0, 5.0)) == 5.0
    assert (found.longest_mm, found.perpendicular_mm, found.index) == (2.0, 1.0, 1)


def test_diameters_of_a_ball_are_its_own_and_of_a_ring_go_across_its_hole() -> None:
    mask = ball(10, (25, 25, 25))
    found = shapes.section_diameters(mask, CUBES)
    of_all = (shapes.longest_diameter_mm(mask, CUBES), found.longest_mm, found.perpendicular_mm)
    assert of_all == pytest.approx((21, 21, 21), abs=0.5)
    assert found.index == 12
    assert shapes.section_diameters(mask & ~ball(5, mask.shape), CUBES) == found


def test_a_tilted_box_is_measured_along_its_own_axes() -> None:
    x, y = np.indices((80, 80)) - 40
    along, across = (x + y) / np.sqrt(2), (x - y) / np.sqrt(2)
    mask = ((np.abs(along) <= 25) & (np.abs(across) <= 5))[:, :, None]
    found = shapes.section_diameters(mask, CUBES)
    assert found.longest_mm == pytest.approx(np.hypot(50, 10), abs=1.5)
    # the chord perpendicular to the diagonal of a box of 50 x 10
    assert found.perpendicular_mm == pytest.approx(10 / np.cos(np.arctan(0.2)), abs=1.0)


def test_the_section_with_the_largest_product_is_measured() -> None:
    mask = np.zeros((20, 20, 4), bool)
    mask[1:19, 5, 0] = True
    mask[4:16, 4:16, 3] = True
    assert shapes.section_diameters(mask, CUBES).index == 3


def code_of(*corners: tuple[int, int, int]) -> int:
    block = np.zeros((2, 2, 2), dtype=bool)
    for corner in corners:
        block[corner] = True
    return int(shapes.cell_codes(block)[1, 1, 1])


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
    assert shapes.cell_areas(CUBES)[code_of(*corners)] == pytest.approx(area)


def test_inside_and_outside_have_one_surface() -> None:
    areas = shapes.cell_areas((1.0, 1.5, 3.0))
    face = code_of((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1))
    # the face of a voxel in mm2
    assert areas[face] == pytest.approx(1.5 * 3)
    assert areas == pytest.approx(areas[::-1])
    assert (areas[1:-1] > 0).all()


def test_turned_and_mirrored_cells_have_the_same_area() -> None:
    areas = shapes.cell_areas(CUBES)
    turns = itertools.product(itertools.permutations(range(3)), ([], [0], [1, 2], [0, 1, 2]))
    for code, (axes, flips) in itertools.product(range(256), turns):
        block = np.array([code >> bit & 1 for bit in range(8)], dtype=bool).reshape(2, 2, 2)
        turned = np.flip(block.transpose(axes), flips)
        assert areas[shapes.cell_codes(turned)[1, 1, 1]] == pytest.approx(areas[code])


def test_the_surface_of_a_ball_is_that_of_a_sphere() -> None:
    area = shapes.cell_areas(CUBES)[shapes.cell_codes(ball(11.99, (27, 27, 27)))].sum()
    # planes through the middles of edges follow a sphere with steps
    assert area == pytest.approx(4 * math.pi * 12**2, rel=0.1)
