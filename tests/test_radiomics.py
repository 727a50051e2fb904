"""Test sizes, shapes, positions and intensities of the regions of a tumour."""

from math import isnan
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from brats_seg import find_cases, load_case
from brats_seg.inference.method import prepare_scan
from brats_seg.labels import BRATS2017, MODALITIES
from brats_seg.survival.features import Tumour, measure_intensity, measure_shape, tumour_of
from tests.builders import BRATS_AFFINE, make_label_map, make_volumes, write_nifti

SUFFIXES = ("_t1", "_t1ce", "_t2", "_flair", "_seg")
MM = (1.0, 1.0, 1.0)
SHAPE = (16, 12, 10)


def read_tumour(root: Path) -> Tumour:
    loaded = load_case(find_cases(root).cases[0])
    return tumour_of(prepare_scan(loaded, MM), loaded.label, loaded.convention)


def write_turned(root: Path, affine, labels, turn=lambda array: array) -> None:
    folder = root / "BraTS2021_00000"
    for suffix, image in zip(SUFFIXES, (*make_volumes(), labels), strict=True):
        write_nifti(folder / f"{folder.name}{suffix}.nii.gz", turn(image), affine)


def test_labels_lie_where_the_tissue_is_in_every_orientation(tmp_path):
    labels = make_label_map()
    labels[0, 0, 0] = 2
    write_turned(tmp_path / "a", BRATS_AFFINE, labels)
    swapped = BRATS_AFFINE[:, [1, 0, 2, 3]] * [1, 1, -1, 1]
    write_turned(tmp_path / "b", swapped, labels, lambda one: one.transpose(1, 0, 2)[:, :, ::-1])
    one, other = (read_tumour(tmp_path / name) for name in "ab")
    # enhancing tumour is the brightest in T1 with contrast agent
    bright = one.image[1][one.regions[2]]
    assert bright.min() > one.image[1][one.brain & ~one.regions[0]].max()
    assert one.regions[0].sum() == np.count_nonzero(labels)
    assert not one.brain[0, 0, 0]
    assert measure_shape(one) == pytest.approx(measure_shape(other))


def test_a_resampled_scan_is_measured_in_the_voxels_of_its_files(tmp_path):
    write_turned(tmp_path, BRATS_AFFINE @ np.diag([1, 1, 2, 1.0]), make_label_map())
    tumour = read_tumour(tmp_path)
    assert tumour.spacing_mm == (1, 1, 2)
    assert tumour.label_map.shape == (24, 24, 16)
    wt_ml = np.count_nonzero(make_label_map()) * 0.002
    assert measure_shape(tumour)["wt_ml"] == pytest.approx(wt_ml)


def make_tumour(label_map, image=None, spacing_mm=MM) -> Tumour:
    image = np.ones((4, *label_map.shape)) if image is None else image
    return Tumour(
        image=image.astype(np.float32),
        label_map=label_map.astype(np.uint8),
        convention=BRATS2017,
        spacing_mm=spacing_mm,
    )


def shape_of(label_map, spacing_mm=MM):
    return measure_shape(make_tumour(label_map, spacing_mm=spacing_mm))


def test_volumes_ratios_components_and_the_distance_are_those_of_the_voxels():
    label_map = np.zeros((10, 10, 10))
    label_map[0:4, 0, 0] = 2
    label_map[4:6, 0, 0] = 1
    label_map[6, 0, 0] = label_map[8, 8, 8] = label_map[9, 9, 9] = 4
    found = shape_of(label_map, spacing_mm=(1.0, 1.0, 2.0))
    expected = {"wt_ml": 0.018, "tc_ml": 0.01, "brain_ml": 2, "et_components": 2}
    expected |= {"tc_wt_ratio": 5 / 9, "et_wt_ratio": 3 / 9, "et_tc_ratio": 3 / 5}
    expected["wt_brain_ratio"] = 9 / 1000
    apart = 4.5 - 17 / 9
    expected["wt_centre_distance_mm"] = ((4.5 - 38 / 9) ** 2 + 5 * apart**2) ** 0.5
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_ball_is_rounder_than_a_plate():
    ball = (np.indices([25] * 3) - 12) ** 2
    plate = np.zeros((40, 40, 10))
    plate[2:38, 2:38, 4:6] = 2
    round_, flat = shape_of((ball.sum(axis=0) <= 100) * 2), shape_of(plate)
    assert 0.9 < round_["wt_sphericity"] < 0.95
    assert flat["wt_sphericity"] < 0.5
    assert round_["wt_compactness"] == pytest.approx(round_["wt_sphericity"] ** 3)


def test_what_is_not_there_has_no_shape_and_every_case_has_the_same_features():
    label_map = np.zeros((8, 8, 8))
    empty = shape_of(label_map)
    label_map[3:5, 3:5, 3:5] = 2
    oedema = shape_of(label_map)
    assert oedema["et_ml"] == oedema["et_surface_mm2"] == oedema["et_components"] == 0
    assert oedema["et_wt_ratio"] == empty["wt_ml"] == empty["wt_brain_ratio"] == 0
    unknown = {name for name, value in oedema.items() if isnan(value)}
    assert {"et_sphericity", "et_centre_distance_mm", "et_tc_ratio"} < unknown
    assert isnan(empty["tc_wt_ratio"])
    assert list(empty) == list(oedema) == list(shape_of(np.full((8, 8, 8), 4)))


IMAGE = np.random.default_rng(0).gamma(2.0, size=(4, *SHAPE)) + 0.1
LABELS = np.zeros(SHAPE, np.uint8)
LABELS[4:10, 4:10, 2:8] = 2
LABELS[5:9, 5:9, 3:7] = 1
LABELS[6:9, 5:9, 3:7] = 4


def intensity_of(image=IMAGE, label_map=LABELS):
    return measure_intensity(make_tumour(label_map, image))


def test_the_ten_numbers_of_the_notebook_are_taken_inside_each_region():
    """The numbers are the same with more air, which most of the notebook's volumes were."""
    values = IMAGE[1].astype(np.float32)[LABELS == 4].astype(float)
    mean, std, skew = values.mean(), values.std(), stats.skew(values)
    expected = {"skew": skew, "kurtosis": stats.kurtosis(values), "mean": mean, "std": std}
    for name, part in (
        ("intensive", values[values > mean]),
        ("non_intensive", values[values < mean]),
    ):
        expected[f"{name}_share"] = len(part) / len(values)
        expected[f"{name}_skew"] = stats.skew(part)
        expected[f"{name}_skew_difference"] = skew - stats.skew(part)
    expected |= {"more_intensive_share": (values > mean + std).mean(), "p50": np.median(values)}
    padding = [(10, 14), (10, 18), (10, 20)]
    near = intensity_of()
    far = intensity_of(np.pad(IMAGE, [(0, 0), *padding]), np.pad(LABELS, padding))
    assert {name: near[f"t1c_et_{name}"] for name in expected} == pytest.approx(expected)
    names = [name for name in near if "slab" not in name]
    assert [near[name] for name in names] == pytest.approx([far[n] for n in names], nan_ok=True)
    # every modality has the same numbers in one order
    parts = [[n.removeprefix(m) for n in near if n.startswith(m)] for m in MODALITIES]
    assert list(near) == [m + part for m in MODALITIES for part in parts[0]]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2], [0.1] * 7, [1e6 + 0.1] * 1000])
def test_too_few_or_equal_values_have_no_skewness(values):
    image, label_map = np.ones((4, 1, 1, 1100)), np.zeros((1, 1, 1100))
    image[:, 0, 0, : len(values)] = values
    label_map[0, 0, : len(values)] = 4
    features = intensity_of(image, label_map)
    assert isnan(features["t1c_et_skew"])
    assert isnan(features["t1c_et_kurtosis"])
    assert isnan(features["t1c_et_mean"]) == (not values)
    assert isnan(features["t1c_et_intensive_share"]) == (not values)


def test_differences_are_between_neighbours_of_the_region_and_slabs_go_from_right_to_left():
    steps = np.arange(SHAPE[2]) ** 2
    image = np.ones((4, *SHAPE)) + np.arange(SHAPE[0])[:, None, None]
    image[0] = np.where(LABELS == 0, 1000, 1 + steps)
    features = intensity_of(image)
    assert features["t1n_wt_diff_skew"] == pytest.approx(stats.skew(np.diff(steps[2:8])))
    # sixteen sagittal slices in fifteen slabs: the first holds two
    assert (features["t2f_slab00_mean"], features["t2f_slab14_mean"]) == (1.5, 16)
