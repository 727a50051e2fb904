"""Size, shape and place of regions."""

from math import isnan, nan

import numpy as np
import pytest

from brats_seg.survival.radiomics import measure_shape
from brats_seg.voxels.surface import surface_mm2
from tests.survival_builders import make_tumour


def measured(label_map, **values):
    return {one.name: one.value for one in measure_shape(make_tumour(label_map, **values))}


def ball(radius, spacing=(1.0, 1.0, 1.0)):
    half = [int(radius / mm) + 2 for mm in spacing]
    grid = np.meshgrid(*(np.arange(-n, n + 1) * mm for n, mm in zip(half, spacing, strict=True)))
    return sum(axis**2 for axis in grid).transpose(1, 0, 2) <= radius**2


def test_volumes_and_ratios_are_those_of_the_voxels():
    label_map = np.zeros((10, 10, 10), np.uint8)
    label_map[0:4, 0, 0] = 2
    label_map[4:6, 0, 0] = 1
    label_map[6:7, 0, 0] = 4

    found = measured(label_map, spacing_mm=(1.0, 1.0, 2.0))

    assert found["wt_ml"] == pytest.approx(7 * 2 / 1000)
    assert found["tc_ml"] == pytest.approx(3 * 2 / 1000)
    assert found["brain_ml"] == pytest.approx(2.0)
    assert found["tc_wt_ratio"] == pytest.approx(3 / 7)
    assert found["et_wt_ratio"] == pytest.approx(1 / 7)
    assert found["et_tc_ratio"] == pytest.approx(1 / 3)
    assert found["wt_brain_ratio"] == pytest.approx(7 / 1000)


def test_parts_that_do_not_touch_are_counted():
    label_map = np.zeros((10, 10, 10), np.uint8)
    label_map[0, 0, 0] = label_map[5, 5, 5] = label_map[6, 6, 6] = label_map[9, 0, 0] = 4

    assert measured(label_map)["et_components"] == 3


def test_the_distance_is_between_the_middles_in_mm():
    label_map = np.zeros((11, 11, 11), np.uint8)
    label_map[8, 5, 5] = label_map[5, 5, 9] = 2

    found = measured(label_map, spacing_mm=(1.0, 1.0, 3.0))

    # the middle of the two is 1.5 voxels of 1 mm and 2 voxels of 3 mm from the centre
    assert found["wt_centre_distance_mm"] == pytest.approx((1.5**2 + 6**2) ** 0.5)


@pytest.mark.parametrize(
    ("spacing", "most"), [((1.0, 1.0, 1.0), 1.1), ((1.0, 1.0, 2.0), 1.2), ((0.5, 1.0, 1.5), 1.2)]
)
def test_the_surface_of_a_ball_is_a_little_too_large(spacing, most):
    assert 1.0 < surface_mm2(ball(20, spacing), spacing) / (4 * np.pi * 20**2) < most


def test_the_surface_of_a_large_cube_is_nearly_its_faces():
    cube = np.zeros((50, 50, 50), bool)
    cube[5:45, 5:45, 5:45] = True

    assert surface_mm2(cube, (1.0, 1.0, 1.0)) == pytest.approx(6 * 40**2, rel=0.05)


def test_a_ball_is_rounder_than_a_plate():
    plate = np.zeros((40, 40, 10), np.uint8)
    plate[2:38, 2:38, 4:6] = 2

    round_, flat = measured(ball(10).astype(np.uint8) * 2), measured(plate)

    assert 0.9 < round_["wt_sphericity"] < 0.95
    assert flat["wt_sphericity"] < 0.5
    assert round_["wt_compactness"] == pytest.approx(round_["wt_sphericity"] ** 3)


def test_what_is_not_there_has_no_shape():
    label_map = np.zeros((8, 8, 8), np.uint8)
    label_map[3:5, 3:5, 3:5] = 2

    found = measured(label_map)

    assert found["et_ml"] == found["et_surface_mm2"] == found["et_components"] == 0
    assert isnan(found["et_sphericity"])
    assert isnan(found["et_centre_distance_mm"])
    assert isnan(found["et_tc_ratio"])
    assert found["et_wt_ratio"] == 0


def test_without_any_tumour_volumes_are_zero_and_ratios_unknown():
    found = measured(np.zeros((8, 8, 8), np.uint8))

    assert found["wt_ml"] == 0
    assert found["wt_brain_ratio"] == 0
    assert found["tc_wt_ratio"] == pytest.approx(nan, nan_ok=True)


def test_every_case_has_the_same_features():
    empty, full = np.zeros((8, 8, 8), np.uint8), np.full((8, 8, 8), 4, np.uint8)

    assert list(measured(empty)) == list(measured(full))
