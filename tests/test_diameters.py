"""Diameters of masks, against a search over all pairs of points."""

from itertools import combinations

import numpy as np
import pytest

from brats_seg.voxels.shapes import (
    NO_DIAMETERS,
    _face_centres,
    longest_diameter_mm,
    section_diameters,
)

CUBES = (1.0, 1.0, 1.0)


def ball(radius: float, shape: tuple[int, int, int]) -> np.ndarray:
    from_centre = np.indices(shape) - np.array(shape).reshape(3, 1, 1, 1) // 2
    distance = np.linalg.norm(from_centre, axis=0)
    return distance <= radius


def longest_of_all_pairs(points: np.ndarray) -> float:
    return max(float(np.linalg.norm(a - b)) for a, b in combinations(points, 2))


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_diameter_is_that_of_all_pairs(seed: int) -> None:
    mask = np.random.default_rng(seed).random((4, 5, 3)) > 0.8
    mask[0, 0, 0] = True

    found = longest_diameter_mm(mask, (1.0, 0.5, 3.0))

    assert found == pytest.approx(longest_of_all_pairs(_face_centres(mask, (1.0, 0.5, 3.0))))


def test_a_voxel_has_the_diameters_of_its_faces() -> None:
    mask = np.zeros((3, 3, 3), bool)
    mask[1, 1, 1] = True

    found = section_diameters(mask, (1.0, 2.0, 5.0))

    assert longest_diameter_mm(mask, (1.0, 2.0, 5.0)) == 5.0
    assert (found.longest_mm, found.perpendicular_mm, found.index) == (2.0, 1.0, 1)


def test_diameters_of_a_ball_are_its_own() -> None:
    mask = ball(10, (25, 25, 25))

    found = section_diameters(mask, CUBES)

    assert longest_diameter_mm(mask, CUBES) == pytest.approx(21, abs=0.5)
    assert found.longest_mm == pytest.approx(21, abs=0.5)
    assert found.perpendicular_mm == pytest.approx(21, abs=0.5)
    assert found.index == 12


def test_a_tilted_box_is_measured_along_its_own_axes() -> None:
    x, y = np.indices((80, 80)) - 40
    along, across = (x + y) / np.sqrt(2), (x - y) / np.sqrt(2)
    mask = ((np.abs(along) <= 25) & (np.abs(across) <= 5))[:, :, None]

    found = section_diameters(mask, CUBES)

    assert found.longest_mm == pytest.approx(np.hypot(50, 10), abs=1.5)
    # the chord perpendicular to the diagonal of a box of 50 x 10
    assert found.perpendicular_mm == pytest.approx(10 / np.cos(np.arctan(0.2)), abs=1.0)


def test_an_ellipse_on_long_voxels_is_measured_in_mm() -> None:
    x, y = np.indices((41, 21)) - np.array([20, 10])[:, None, None]
    mask = ((x / 18) ** 2 + (y * 2 / 16) ** 2 <= 1)[:, :, None]

    found = section_diameters(mask, (1.0, 2.0, 1.0))

    assert found.longest_mm == pytest.approx(37, abs=0.5)
    assert found.perpendicular_mm == pytest.approx(34, abs=0.5)


def test_a_ring_is_measured_across_its_hole() -> None:
    whole = ball(8, (21, 21, 1))
    ring = whole & ~ball(5, (21, 21, 1))

    assert section_diameters(ring, CUBES) == section_diameters(whole, CUBES)


def test_the_section_with_the_largest_product_is_measured() -> None:
    mask = np.zeros((20, 20, 4), bool)
    mask[1:19, 5, 0] = True
    mask[4:16, 4:16, 3] = True

    assert section_diameters(mask, CUBES).index == 3


def test_an_empty_mask_has_no_diameters() -> None:
    mask = np.zeros((3, 3, 3), bool)

    assert longest_diameter_mm(mask, CUBES) == 0.0
    assert section_diameters(mask, CUBES) == NO_DIAMETERS
