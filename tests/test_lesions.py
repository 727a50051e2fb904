"""The table of lesions."""

import numpy as np
import pytest

from brats_seg.evaluation.lesions import MOST_LISTED, list_lesions

AFFINE = np.array([[-1.0, 0, 0, 90], [0, -2.0, 0, 100], [0, 0, 3.0, -70], [0, 0, 0, 1]])


def regions_with(*boxes: tuple[slice, slice, slice]) -> np.ndarray:
    regions = np.zeros((3, 30, 30, 20), bool)
    for box in boxes:
        regions[(slice(None), *box)] = True
    return regions


def test_lesions_are_listed_by_size_with_their_place_in_the_coordinates_of_the_file() -> None:
    small = (slice(1, 4), slice(1, 4), slice(1, 3))
    large = (slice(10, 21), slice(10, 19), slice(5, 8))

    wt, _, _ = list_lesions(regions_with(small, large), AFFINE)

    first, second = wt.lesions
    assert (first.number, second.number) == (1, 2)
    assert first.ml == pytest.approx(11 * 9 * 3 * 6 / 1000)
    assert first.centre_mm == pytest.approx((90 - 15, 100 - 2 * 14, -70 + 3 * 6))
    assert first.axial.index == 5
    assert first.axial.longest_mm == pytest.approx(np.hypot(18, 10))
    assert (first.is_measurable, second.is_measurable) == (True, False)


def test_a_region_without_voxels_has_no_lesions() -> None:
    (wt, *_) = list_lesions(regions_with(), AFFINE)

    assert (wt.lesions, wt.n_others, wt.others_ml) == ((), 0, 0.0)


@pytest.mark.parametrize(("depth", "n_listed"), [(1, 1), (18, MOST_LISTED)])
def test_small_and_further_islands_are_counted_and_not_measured(depth: int, n_listed: int) -> None:
    n = MOST_LISTED + 3
    boxes = [(slice(2 * i, 2 * i + 1), slice(4, 5), slice(depth)) for i in range(n)]

    wt, _, _ = list_lesions(regions_with(*boxes), AFFINE)

    assert (len(wt.lesions), wt.n_others) == (n_listed, n - n_listed)
    assert wt.others_ml == pytest.approx((n - n_listed) * depth * 0.006)
