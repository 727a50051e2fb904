"""Label conventions and regions, against tables worked out by hand and a slow loop."""

import numpy as np
import pytest

from brats_seg.cases.layouts import check_values
from brats_seg.errors import ConfigError, LabelError
from brats_seg.labels import (
    BRATS2017,
    BRATS2023,
    BRATS2024,
    BRATS2024_PED,
    CONVENTIONS,
    MODALITIES,
    MSD,
    REGIONS,
    LabelConvention,
    convention_named,
    label_map_of,
    regions_of,
)
from tests.builders import make_label_map

by_convention = pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)


def random_label_map(convention: LabelConvention, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.choice(np.array(sorted(convention.values), dtype=np.uint8), size=(5, 4, 3))


def test_modalities_and_regions_keep_their_order():
    """Checkpoints and stored images depend on it."""
    assert MODALITIES == ("t1n", "t1c", "t2w", "t2f")
    assert REGIONS == ("wt", "tc", "et")


@pytest.mark.parametrize(
    ("convention", "label_map", "wt", "tc", "et"),
    [
        (BRATS2017, [0, 1, 2, 4], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]),
        (BRATS2023, [0, 1, 2, 3], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]),
        # the resection cavity, 4, is no part of the tumour
        (BRATS2024, [1, 2, 3, 4], [1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 1, 0]),
        # the children's task numbers its tissues in an order of its own
        (BRATS2024_PED, [1, 2, 3, 4], [1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]),
        (MSD, [0, 1, 2, 3], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]),
    ],
    ids=lambda value: value.name if isinstance(value, LabelConvention) else "",
)
def test_regions_are_those_of_the_release(convention, label_map, wt, tc, et):
    labels = np.array(label_map, dtype=np.uint8).reshape(4, 1, 1)
    regions = regions_of(labels, convention)
    assert regions.dtype == np.bool_
    assert regions.reshape(3, 4).astype(int).tolist() == [wt, tc, et]


@by_convention
@pytest.mark.parametrize("seed", range(3))
def test_regions_equal_a_voxel_by_voxel_loop_and_give_the_label_map_back(convention, seed):
    label_map = random_label_map(convention, seed)
    expected = np.zeros((3, *label_map.shape), dtype=bool)
    for region, values in enumerate(convention.regions):
        for voxel in np.ndindex(*label_map.shape):
            expected[(region, *voxel)] = label_map[voxel] in values

    wt, tc, et = regions = regions_of(label_map, convention)

    np.testing.assert_array_equal(regions, expected)
    assert et.any()
    assert not (et & ~tc).any()
    assert not (tc & ~wt).any()
    written = label_map_of(regions, convention)
    assert written.dtype == np.uint8
    # the label map has the given regions, even where tissues are merged
    np.testing.assert_array_equal(regions_of(written, convention), regions)
    if convention in (BRATS2017, BRATS2023, MSD):
        np.testing.assert_array_equal(written, label_map)


def test_a_label_map_without_et_has_none():
    regions = regions_of(make_label_map(with_et=False), BRATS2017)
    assert regions.any(axis=(1, 2, 3)).tolist() == [True, True, False]


def test_an_unknown_convention_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=r"'brats2016' is unknown; there are brats2017, .*msd"):
        convention_named("brats2016")


@by_convention
def test_a_convention_is_found_by_its_name_and_has_its_values(convention):
    assert convention_named(convention.name) is convention
    check_values(convention.values, convention, "case A")


def test_an_unknown_value_is_refused_with_case_value_and_convention():
    match = r"case A, .*: found label values \[3, 9\]; expected .* brats2017, \[0, 1, 2, 4\]"
    with pytest.raises(LabelError, match=match):
        check_values({0, 9, 3, 1}, BRATS2017, "A")
