"""Test overlap, HD95 and surface Dice against slow oracles, MONAI and values worked out by hand."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from monai.metrics import compute_dice, compute_iou
from scipy.spatial.distance import cdist

from brats_seg.evaluation import metrics
from brats_seg.labels import RegionMasks
from brats_seg.voxels.shapes import cell_areas, cell_codes

MM: metrics.Spacing = (1.0, 1.0, 1.0)
EMPTY = np.zeros((6, 5, 4), dtype=bool)
REGION_MASKS = arrays(bool, (3, 4, 3, 2))
MASKS = arrays(bool, (6, 5, 4))
SPACINGS = st.sampled_from([MM, (1.0, 1.5, 3.0)])


def row_masks(*rows: str) -> RegionMasks:
    return np.array([[letter == "#" for letter in row] for row in rows])[:, :, None, None]


def test_counts_of_a_row_worked_out_by_hand() -> None:
    prediction = row_masks("###...", "##....", "#.....")
    reference = row_masks("..##..", "##....", ".....#")
    counts = metrics.count_regions(prediction, reference, "a")
    assert counts.case_id == "a"
    assert metrics.dice(counts) == pytest.approx([2 / 5, 1, 0])
    assert metrics.jaccard(counts) == pytest.approx([1 / 4, 1, 0])
    assert metrics.sensitivity(counts) == pytest.approx([1 / 2, 1, 0])
    assert metrics.specificity(counts) == pytest.approx([2 / 4, 1, 4 / 5])


@given(REGION_MASKS, REGION_MASKS)
def test_overlap_equals_a_loop_and_monai(prediction: RegionMasks, reference: RegionMasks) -> None:
    expected = np.zeros((3, 2, 2), dtype=int)
    for index in np.ndindex(prediction.shape):
        expected[index[0], int(prediction[index]), int(reference[index])] += 1
    counts = metrics.count_regions(prediction, reference, "a")
    assert counts.true_positive.tolist() == expected[:, 1, 1].tolist()
    assert counts.false_positive.tolist() == expected[:, 1, 0].tolist()
    assert counts.false_negative.tolist() == expected[:, 0, 1].tolist()
    assert counts.true_negative.tolist() == expected[:, 0, 0].tolist()
    tensors = [torch.from_numpy(masks[None]).float() for masks in (prediction, reference)]
    for metric, of_monai in ((metrics.dice, compute_dice), (metrics.jaccard, compute_iou)):
        monai = of_monai(*tensors, include_background=True, ignore_empty=False)
        assert metric(counts) == pytest.approx(monai[0].numpy())
        assert (
            metric(metrics.count_regions(reference, prediction, "a")).tolist()
            == metric(counts).tolist()
        )


@pytest.mark.parametrize("metric", [metrics.dice, metrics.jaccard, metrics.sensitivity])
def test_an_empty_region_scores_one_on_both_sides_and_zero_on_one(metric) -> None:
    prediction, reference = row_masks("..", "#.", ".."), row_masks("..", "..", "#.")
    assert metric(metrics.count_regions(prediction, reference, "a")).tolist() == [1, 0, 0]


def test_counts_do_not_overflow() -> None:
    assert metrics.dice(metrics.region_counts("a", [[2**40] * 3] * 4)).tolist() == [0.5] * 3
    assert metrics.dice_of_counts(0, 0, 0) == 1


def boxes(seed: int, side: int) -> metrics.Mask:
    """A mask with holes, corners and parts at the edge of the volume."""
    rng = np.random.default_rng([seed, side])
    mask = np.zeros((14, 12, 10), dtype=bool)
    for _ in range(8):
        origin, size = rng.integers(0, 9, 3), rng.integers(1, 5, 3)
        mask[tuple(slice(o, o + s) for o, s in zip(origin, size, strict=True))] ^= True
    return mask


def rod(*voxels: int) -> metrics.Mask:
    mask = np.zeros((20, 3, 3), dtype=bool)
    mask[list(voxels), 1, 1] = True
    return mask


def slow_hausdorff95(one: metrics.Mask, other: metrics.Mask, spacing_mm: metrics.Spacing) -> float:
    codes = [cell_codes(mask) for mask in (one, other)]
    points = [np.argwhere((code > 0) & (code < 255)) for code in codes]
    areas = [cell_areas(spacing_mm)[code[(code > 0) & (code < 255)]] for code in codes]
    distances = cdist(points[0] * spacing_mm, points[1] * spacing_mm)
    reached = []
    for nearest, area in ((distances.min(1), areas[0]), (distances.min(0), areas[1])):
        order = np.argsort(nearest)
        reached.append(nearest[order][np.cumsum(area[order]) / area.sum() >= 0.95][0])
    return float(max(reached))


def slow_surface(mask: metrics.Mask) -> np.ndarray:
    padded = np.pad(mask, 1)
    steps = [step for step in itertools.product((-1, 0, 1), repeat=3) if np.abs(step).sum() == 1]
    inner = np.all([np.roll(padded, step, (0, 1, 2))[1:-1, 1:-1, 1:-1] for step in steps], axis=0)
    return np.argwhere(mask & ~inner)


@given(MASKS, MASKS, SPACINGS)
def test_distances_equal_pairwise_ones(one, other, spacing_mm):
    one[2, 2, 2] = other[3, 1, 0] = True  # neither is empty
    tolerances = (0.5, 1.0, 2.0)
    distances = cdist(slow_surface(one) * spacing_mm, slow_surface(other) * spacing_mm)
    expected = slow_hausdorff95(one, other, spacing_mm)
    assert metrics.hausdorff95(one, other, spacing_mm) == pytest.approx(expected)
    assert metrics.hausdorff95(one, other, spacing_mm) == metrics.hausdorff95(
        other, one, spacing_mm
    )
    sides = metrics.surface_distances(one, other, spacing_mm)
    assert [metrics.surface_dice(sides, tolerance) for tolerance in tolerances] == pytest.approx(
        [((distances.min(1) <= t).mean() + (distances.min(0) <= t).mean()) / 2 for t in tolerances]
    )


@pytest.mark.parametrize(
    ("seed", "cubic", "flat"), [(0, 4.358899, 6.708204), (1, 4.123106, 6.78233), (5, 4.582576, 9)]
)
def test_hd95_equals_that_of_surface_distance(seed: int, cubic: float, flat: float) -> None:
    """Values of Surface-Distance-Based-Measures 0.1 on the same masks."""
    one, other = boxes(seed, 0), boxes(seed, 1)
    assert metrics.hausdorff95(one, other, MM) == pytest.approx(cubic, abs=1e-6)
    assert metrics.hausdorff95(one, other, (1.0, 1.5, 3.0)) == pytest.approx(flat, abs=1e-6)


def test_empty_masks() -> None:
    full = ~EMPTY
    assert metrics.hausdorff95(EMPTY, EMPTY, MM) == 0
    assert metrics.hausdorff95(EMPTY, full, MM) == metrics.hausdorff95(full, EMPTY, MM) == np.inf


def test_distances_are_in_mm_and_surface_dice_averages_the_shares_of_the_two_sides() -> None:
    # two voxels seven steps of 2.5 mm apart
    assert metrics.hausdorff95(rod(2), rod(9), (2.5, 1.0, 1.0)) == pytest.approx(17.5)
    # 19 of 20 equal pieces are 95 %
    assert metrics._area_percentile(np.arange(20.0), np.ones(20)) == 18
    # one of one voxel is within 1 mm of three, and two of three are within 1 mm of one
    sides = metrics.surface_distances(rod(5), rod(5, 6, 9), MM)
    assert [metrics.surface_dice(sides, tolerance) for tolerance in (0.5, 1.0)] == pytest.approx(
        [(1 + 1 / 3) / 2, (1 + 2 / 3) / 2]
    )
