"""Statistics of modalities in regions."""

from math import isnan

import numpy as np
import pytest
from scipy import stats

from brats_seg.labels import MODALITIES
from brats_seg.survival.radiomics import N_SLABS, kurtosis, measure_intensity, skewness
from tests.survival_builders import make_tumour

SHAPE = (16, 12, 10)


def measured(image, label_map):
    tumour = make_tumour(label_map, image.astype(np.float32))
    return {one.name: one.value for one in measure_intensity(tumour)}


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
    found = measured(image, label_map)

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

    assert measured(image, label_map)["t1n_wt_diff_skew"] == pytest.approx(stats.skew(steps))


def test_air_does_not_count(image, label_map):
    """The notebook's numbers came from the whole volume, most of which is air."""
    roomy = np.zeros((4, 40, 40, 40))
    roomy[:, 10:26, 10:22, 10:20] = image
    labels = np.zeros((40, 40, 40), np.uint8)
    labels[10:26, 10:22, 10:20] = label_map

    near, far = measured(image, label_map), measured(roomy, labels)

    assert {k: v for k, v in near.items() if "slab" not in k} == pytest.approx(
        {k: v for k, v in far.items() if "slab" not in k}, nan_ok=True
    )


def test_slabs_go_from_right_to_left(label_map):
    image = np.ones((4, *SHAPE)) + np.arange(SHAPE[0])[:, None, None]

    found = measured(image, label_map)

    # sixteen sagittal slices in fifteen slabs: the first holds two
    assert found["t2f_slab00_mean"] == 1.5
    assert found[f"t2f_slab{N_SLABS - 1:02d}_mean"] == 16


def test_a_region_that_is_not_there_is_unknown(image):
    found = measured(image, np.zeros(SHAPE, np.uint8))

    assert isnan(found["t1c_et_mean"])
    assert isnan(found["t1c_et_intensive_share"])
    assert not isnan(found["t1c_brain_skew"])


def test_every_modality_has_the_same_numbers_in_one_order(image, label_map):
    names = list(measured(image, label_map))

    parts = [[n.removeprefix(f"{m}_") for n in names if n.startswith(m)] for m in MODALITIES]
    assert all(part == parts[0] for part in parts)
    assert [n.split("_")[0] for n in names] == sorted(
        (n.split("_")[0] for n in names), key=MODALITIES.index
    )
