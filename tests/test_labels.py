"""Label conventions and regions, against tables worked out by hand and a slow loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from brats_seg import labels
from brats_seg.cases.releases import check_values
from brats_seg.errors import ConfigError, LabelError


def test_modalities_and_regions_keep_their_order() -> None:
    """Checkpoints and stored images depend on it."""
    assert labels.MODALITIES == ("t1n", "t1c", "t2w", "t2f")
    assert labels.REGIONS == ("wt", "tc", "et")


@pytest.mark.parametrize(
    ("convention", "label_map", "wt", "tc", "et"),
    [
        (labels.BRATS2017, [0, 1, 2, 4], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]),
        (labels.BRATS2023, [0, 1, 2, 3], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]),
        # the resection cavity, 4, is no part of the tumour
        (labels.BRATS2024, [1, 2, 3, 4], [1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 1, 0]),
        # the children's task numbers its tissues in an order of its own
        (labels.BRATS2024_PED, [1, 2, 3, 4], [1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]),
        (labels.MSD, [0, 1, 2, 3], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]),
    ],
    ids=lambda value: value.name if isinstance(value, labels.LabelConvention) else "",
)
def test_regions_are_those_of_the_release(convention, label_map, wt, tc, et):
    regions = labels.regions_of(np.array(label_map, dtype=np.uint8).reshape(4, 1, 1), convention)
    assert regions.dtype == np.bool_
    assert regions.reshape(3, 4).astype(int).tolist() == [wt, tc, et]


@given(st.data(), st.sampled_from(labels.CONVENTIONS))
def test_regions_equal_a_slow_loop(data: st.DataObject, convention: labels.LabelConvention) -> None:
    values = st.sampled_from(sorted(convention.values))
    label_map = data.draw(arrays(np.uint8, (3, 2, 2), elements=values))
    wt, tc, et = regions = labels.regions_of(label_map, convention)
    for region, members in zip(regions, convention.regions, strict=True):
        for voxel in np.ndindex(*label_map.shape):
            assert region[voxel] == (label_map[voxel] in members)
    assert not (et & ~tc).any()
    assert not (tc & ~wt).any()
    written = labels.label_map_of(regions, convention)
    assert written.dtype == np.uint8
    # the label map has the given regions, even where tissues are merged
    np.testing.assert_array_equal(labels.regions_of(written, convention), regions)
    if convention in (labels.BRATS2017, labels.BRATS2023, labels.MSD):
        np.testing.assert_array_equal(written, label_map)


def test_tissues_have_the_names_of_brats_since_2023() -> None:
    names = ("non-enhancing tumor core", "surrounding non-enhancing FLAIR hyperintensity (SNFH)")
    assert [*map(labels.tissue_named, names)] == ["ncr", "ed"]
    assert str(labels.BRATS2017) == "brats2017 (1 NCR/NET, 2 ED, 4 ET)"
    # every tissue is in the regions of its name; the cavity is no tumour, and a cyst is in its core
    n_regions = {"ed": 1, "ncr": 2, "et": 3, "RC": 0, "CC": 2}
    for convention in labels.CONVENTIONS:
        for value, tissue in convention.meanings:
            n = sum(value in region for region in convention.regions)
            assert n == n_regions[labels.tissue_named(tissue) or tissue]


def test_a_convention_is_found_by_its_name_and_has_its_values() -> None:
    for convention in labels.CONVENTIONS:
        assert labels.convention_named(convention.name) is convention
        check_values(convention.values, convention, "case A")
    with pytest.raises(ConfigError, match=r"'brats2016' is unknown; there are brats2017, .*msd"):
        labels.convention_named("brats2016")
    match = r"case A, .*: found label values \[3, 9\]; expected .* brats2017, \[0, 1, 2, 4\]"
    with pytest.raises(LabelError, match=match):
        check_values({0, 9, 3, 1}, labels.BRATS2017, "A")
