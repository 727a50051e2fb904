"""Test sizes, shapes, places and intensities of the regions of a tumour."""

from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from brats_seg.cases.case import load_case
from brats_seg.cases.find import find_cases
from brats_seg.errors import CaseError, LabelError
from brats_seg.inference.method import prepare_scan
from brats_seg.labels import MODALITIES
from brats_seg.survival.radiomics import (
    N_SLABS,
    Tumour,
    kurtosis,
    measure_intensity,
    measure_shape,
    skewness,
    tumour_of,
)
from brats_seg.voxels.shapes import surface_mm2
from tests.builders import BRATS_AFFINE, make_label_map, make_volumes, write_case, write_nifti
from tests.survival_builders import make_tumour

SUFFIXES = ("_t1", "_t1ce", "_t2", "_flair")
MM = (1.0, 1.0, 1.0)


def read_tumour(root: Path, labels: str = "", spacing_mm=MM) -> Tumour:
    loaded = load_case(find_cases(root).cases[0], labels=labels)
    return tumour_of(prepare_scan(loaded, spacing_mm), loaded.label, loaded.convention)


def write_turned(root: Path, affine, turn=lambda array: array, spacing=(1, 1, 1)) -> None:
    """Write the small case as another scanner would store it."""
    folder = root / "BraTS2021_00000"
    affine = affine @ np.diag([*spacing, 1.0])
    for suffix, image in zip(SUFFIXES, make_volumes(), strict=True):
        write_nifti(folder / f"{folder.name}{suffix}.nii.gz", turn(image), affine)
    write_nifti(folder / f"{folder.name}_seg.nii.gz", turn(make_label_map()), affine)


def test_labels_lie_where_the_tissue_is(tmp_path):
    write_case(tmp_path)

    tumour = read_tumour(tmp_path)

    # enhancing tumour is the brightest in T1 with contrast agent
    bright = tumour.image[1][tumour.regions[2]]
    assert bright.min() > tumour.image[1][tumour.brain & ~tumour.regions[0]].max()
    assert np.count_nonzero(tumour.label_map) == np.count_nonzero(make_label_map())


def test_another_orientation_gives_the_same_numbers(tmp_path):
    write_case(tmp_path / "a")
    swapped = BRATS_AFFINE[:, [1, 0, 2, 3]] * [1, 1, -1, 1]
    write_turned(tmp_path / "b", swapped, lambda array: array.transpose(1, 0, 2)[:, :, ::-1])

    one, other = (measure_shape(read_tumour(tmp_path / name)) for name in "ab")

    assert one == pytest.approx(other)


def test_labels_outside_the_brain_are_kept(tmp_path):
    folder = write_case(tmp_path)
    labels = make_label_map()
    labels[0, 0, 0] = 2
    write_nifti(folder / "BraTS2021_00000_seg.nii.gz", labels)

    tumour = read_tumour(tmp_path)

    assert tumour.regions[0].sum() == np.count_nonzero(labels)
    assert not tumour.brain[0, 0, 0]


def test_a_resampled_scan_is_measured_in_the_voxels_of_its_files(tmp_path):
    write_turned(tmp_path, BRATS_AFFINE, spacing=(1, 1, 2))

    tumour = read_tumour(tmp_path)

    assert tumour.spacing_mm == (1, 1, 2)
    assert tumour.label_map.shape == (24, 24, 16)
    assert measure_shape(tumour)["wt_ml"] == pytest.approx(
        np.count_nonzero(make_label_map()) * 0.002
    )


def test_a_label_map_of_another_grid_is_refused(tmp_path):
    folder = write_case(tmp_path)
    write_nifti(folder / f"{folder.name}_seg.nii.gz", make_label_map((20, 24, 16)))

    with pytest.raises(CaseError, match=r"file .*_seg.nii.gz: found 20x24x16.*expected the grid"):
        read_tumour(tmp_path)


def test_values_of_another_convention_are_refused(tmp_path):
    write_case(tmp_path)

    with pytest.raises(
        LabelError, match=r"values \[4\]; expected those of the convention brats2023"
    ):
        read_tumour(tmp_path, "brats2023")


def measured_shape(label_map, **values):
    return measure_shape(make_tumour(label_map, **values))


def ball(radius, spacing=(1.0, 1.0, 1.0)):
    half = [int(radius / mm) + 2 for mm in spacing]
    grid = np.meshgrid(*(np.arange(-n, n + 1) * mm for n, mm in zip(half, spacing, strict=True)))
    return sum(axis**2 for axis in grid).transpose(1, 0, 2) <= radius**2


def test_volumes_and_ratios_are_those_of_the_voxels():
    label_map = np.zeros((10, 10, 10), np.uint8)
    label_map[0:4, 0, 0] = 2
    label_map[4:6, 0, 0] = 1
    label_map[6:7, 0, 0] = 4

    found = measured_shape(label_map, spacing_mm=(1.0, 1.0, 2.0))

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

    assert measured_shape(label_map)["et_components"] == 3


def test_the_distance_is_between_the_middles_in_mm():
    label_map = np.zeros((11, 11, 11), np.uint8)
    label_map[8, 5, 5] = label_map[5, 5, 9] = 2

    found = measured_shape(label_map, spacing_mm=(1.0, 1.0, 3.0))

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

    round_, flat = measured_shape(ball(10).astype(np.uint8) * 2), measured_shape(plate)

    assert 0.9 < round_["wt_sphericity"] < 0.95
    assert flat["wt_sphericity"] < 0.5
    assert round_["wt_compactness"] == pytest.approx(round_["wt_sphericity"] ** 3)


def test_what_is_not_there_has_no_shape():
    label_map = np.zeros((8, 8, 8), np.uint8)
    label_map[3:5, 3:5, 3:5] = 2

    found = measured_shape(label_map)

    assert found["et_ml"] == found["et_surface_mm2"] == found["et_components"] == 0
    assert isnan(found["et_sphericity"])
    assert isnan(found["et_centre_distance_mm"])
    assert isnan(found["et_tc_ratio"])
    assert found["et_wt_ratio"] == 0


def test_without_any_tumour_volumes_are_zero_and_ratios_unknown():
    found = measured_shape(np.zeros((8, 8, 8), np.uint8))

    assert found["wt_ml"] == 0
    assert found["wt_brain_ratio"] == 0
    assert found["tc_wt_ratio"] == pytest.approx(nan, nan_ok=True)


def test_every_case_has_the_same_features():
    empty, full = np.zeros((8, 8, 8), np.uint8), np.full((8, 8, 8), 4, np.uint8)

    assert list(measured_shape(empty)) == list(measured_shape(full))


SHAPE = (16, 12, 10)


def measured_intensity(image, label_map):
    return measure_intensity(make_tumour(label_map, image.astype(np.float32)))


@pytest.fixture
def image(rng):
    return rng.gamma(2.0, size=(4, *SHAPE)) + 0.1


@pytest.fixture
def label_map():
    labels = np.zeros(SHAPE, np.uint8)
    labels[4:10, 4:10, 2:8] = 2
    labels[5:9, 5:9, 3:7] = 1
    labels[6:9, 5:9, 3:7] = 4
    return labels


@pytest.mark.parametrize("values", [[1.0, 2, 3, 10], [0.0, 0, 0, 1, 5], [-3.0, 1, 1]])
def test_skewness_and_kurtosis_are_those_of_scipy(values):
    assert skewness(np.array(values)) == pytest.approx(stats.skew(values))
    assert kurtosis(np.array(values)) == pytest.approx(stats.kurtosis(values))


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2], [0.1] * 7, [1e6 + 0.1] * 1000])
def test_too_few_or_equal_values_have_no_skewness(values):
    assert isnan(skewness(np.array(values)))


def test_the_ten_numbers_of_the_notebook_are_taken_inside_each_region(image, label_map):
    found = measured_intensity(image, label_map)

    inside = label_map == 4
    values = image[1].astype(np.float32)[inside].astype(float)
    mean, std = values.mean(), values.std()
    above, below = values[values > mean], values[values < mean]
    expected = {
        "skew": stats.skew(values),
        "kurtosis": stats.kurtosis(values),
        "intensive_share": len(above) / len(values),
        "intensive_skew": stats.skew(above),
        "non_intensive_share": len(below) / len(values),
        "non_intensive_skew": stats.skew(below),
        "intensive_skew_difference": stats.skew(values) - stats.skew(above),
        "non_intensive_skew_difference": stats.skew(values) - stats.skew(below),
        "more_intensive_share": (values > mean + std).mean(),
        "mean": mean,
        "std": std,
        "p50": np.median(values),
    }
    assert {name: found[f"t1c_et_{name}"] for name in expected} == pytest.approx(expected)


def test_differences_are_between_neighbours_of_the_region_only(label_map):
    image = np.ones((4, *SHAPE))
    image[0] = 1 + np.arange(SHAPE[2]) ** 2
    image[0][label_map == 0] = 1000

    steps = np.diff(1 + np.arange(2, 8) ** 2)

    assert measured_intensity(image, label_map)["t1n_wt_diff_skew"] == pytest.approx(
        stats.skew(steps)
    )


def test_air_does_not_count(image, label_map):
    """The notebook's numbers came from the whole volume, most of which is air."""
    roomy = np.zeros((4, 40, 40, 40))
    roomy[:, 10:26, 10:22, 10:20] = image
    labels = np.zeros((40, 40, 40), np.uint8)
    labels[10:26, 10:22, 10:20] = label_map

    near, far = measured_intensity(image, label_map), measured_intensity(roomy, labels)

    assert {k: v for k, v in near.items() if "slab" not in k} == pytest.approx(
        {k: v for k, v in far.items() if "slab" not in k}, nan_ok=True
    )


def test_slabs_go_from_right_to_left(label_map):
    image = np.ones((4, *SHAPE)) + np.arange(SHAPE[0])[:, None, None]

    found = measured_intensity(image, label_map)

    # sixteen sagittal slices in fifteen slabs: the first holds two
    assert found["t2f_slab00_mean"] == 1.5
    assert found[f"t2f_slab{N_SLABS - 1:02d}_mean"] == 16


def test_a_region_that_is_not_there_is_unknown(image):
    found = measured_intensity(image, np.zeros(SHAPE, np.uint8))

    assert isnan(found["t1c_et_mean"])
    assert isnan(found["t1c_et_intensive_share"])
    assert not isnan(found["t1c_brain_skew"])


def test_every_modality_has_the_same_numbers_in_one_order(image, label_map):
    names = list(measured_intensity(image, label_map))

    parts = [[n.removeprefix(f"{m}_") for n in names if n.startswith(m)] for m in MODALITIES]
    assert all(part == parts[0] for part in parts)
    assert [n.split("_")[0] for n in names] == sorted(
        (n.split("_")[0] for n in names), key=MODALITIES.index
    )
