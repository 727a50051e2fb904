"""Test counts, Dice and Jaccard of region masks."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import nibabel as nib
import numpy as np
import pytest

from brats_seg.errors import CaseError
from brats_seg.evaluation.metrics import RegionCounts, count_regions, dice, jaccard
from brats_seg.labels import BRATS2017, BRATS2023, RegionMasks, regions_of
from tests.builders import make_label_map

Metric: TypeAlias = Callable[[RegionCounts], np.ndarray]

# Dice of WT, TC and ET, computed independently of this package
REAL_DICE = {
    "Brats18_TCIA01_201_1": (0.977008, 0.949677, 0.895188),
    "Brats18_TCIA01_378_1": (0.892821, 0.960771, 0.937013),
    "Brats18_TCIA01_499_1": (0.950898, 0.963540, 0.946385),
    "Brats18_TCIA02_135_1": (0.949080, 0.936475, 0.892750),
    "Brats18_TCIA02_606_1": (0.933685, 0.923957, 0.858478),
    "Brats18_TCIA03_265_1": (0.955043, 0.934683, 0.835697),
    "Brats18_TCIA10_637_1": (0.952151, 0.892023, 0.869339),
    "Brats18_TCIA13_623_1": (0.952634, 0.950614, 0.782012),
}


def row_masks(*rows: str) -> RegionMasks:
    """Return region masks (3, n, 1, 1) from a text per region, with `#` inside."""
    masks = np.array([[letter == "#" for letter in row] for row in rows])
    return masks[:, :, None, None]


def random_masks(rng: np.random.Generator) -> RegionMasks:
    return rng.random((3, 5, 4, 3)) < rng.random((3, 1, 1, 1))


def test_counts_of_a_row_worked_out_by_hand() -> None:
    prediction = row_masks("###...", "##....", "#.....")
    reference = row_masks("..##..", "##....", ".....#")

    counts = count_regions(prediction, reference, "a")

    assert counts.case_id == "a"
    assert counts.true_positive.tolist() == [1, 2, 0]
    assert counts.false_positive.tolist() == [2, 0, 1]
    assert counts.false_negative.tolist() == [1, 0, 1]
    assert counts.true_negative.tolist() == [2, 4, 4]
    assert counts.in_prediction.tolist() == [3, 2, 1]
    assert counts.in_reference.tolist() == [2, 2, 1]
    assert dice(counts) == pytest.approx([2 / 5, 1, 0])
    assert jaccard(counts) == pytest.approx([1 / 4, 1, 0])


@pytest.mark.parametrize("seed", range(5))
def test_counts_equal_those_of_a_loop_over_voxels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prediction, reference = random_masks(rng), random_masks(rng)
    expected = np.zeros((3, 2, 2), dtype=int)
    for region, x, y, z in np.ndindex(prediction.shape):
        p, r = prediction[region, x, y, z], reference[region, x, y, z]
        expected[region, int(p), int(r)] += 1

    counts = count_regions(prediction, reference, "a")

    assert counts.true_positive.tolist() == expected[:, 1, 1].tolist()
    assert counts.false_positive.tolist() == expected[:, 1, 0].tolist()
    assert counts.false_negative.tolist() == expected[:, 0, 1].tolist()
    assert counts.true_negative.tolist() == expected[:, 0, 0].tolist()


@pytest.mark.parametrize("metric", [dice, jaccard])
@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [("....", "....", 1), ("#...", "....", 0), ("....", "#...", 0), ("##..", "##..", 1)],
)
def test_an_empty_region_scores_one_on_both_sides_and_zero_on_one(
    metric: Metric, prediction: str, reference: str, score: float
) -> None:
    scores = metric(count_regions(row_masks(*[prediction] * 3), row_masks(*[reference] * 3), "a"))

    assert scores.tolist() == [score] * 3


@pytest.mark.parametrize("seed", range(5))
def test_dice_and_jaccard_equal_those_of_monai(seed: int) -> None:
    """Also where a region is empty on one side or on both."""
    import torch
    from monai.metrics import compute_dice, compute_iou

    rng = np.random.default_rng(seed)
    prediction, reference = random_masks(rng), random_masks(rng)
    prediction[seed % 3] = False
    reference[seed % 2] = False

    counts = count_regions(prediction, reference, "a")

    tensors = [torch.from_numpy(masks[None]).float() for masks in (prediction, reference)]
    for metric, of_monai in ((dice, compute_dice), (jaccard, compute_iou)):
        expected = of_monai(*tensors, include_background=True, ignore_empty=False)
        assert metric(counts) == pytest.approx(expected[0].numpy())


@pytest.mark.parametrize("seed", range(5))
def test_jaccard_is_dice_over_two_minus_dice(seed: int) -> None:
    rng = np.random.default_rng(seed)

    counts = count_regions(random_masks(rng), random_masks(rng), "a")

    assert jaccard(counts) == pytest.approx(dice(counts) / (2 - dice(counts)), abs=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_both_metrics_are_symmetric(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = random_masks(rng), random_masks(rng)

    there, back = count_regions(a, b, "a"), count_regions(b, a, "a")

    assert dice(there).tolist() == dice(back).tolist()
    assert jaccard(there).tolist() == jaccard(back).tolist()


def test_counts_of_parts_add_up_to_those_of_the_whole(rng: np.random.Generator) -> None:
    prediction, reference = random_masks(rng), random_masks(rng)

    whole = count_regions(prediction, reference, "a")
    parts = [
        count_regions(prediction[:, part], reference[:, part], "a")
        for part in (slice(0, 2), slice(2, 5))
    ]

    assert sum(part.true_positive for part in parts).tolist() == whole.true_positive.tolist()
    assert sum(part.true_negative for part in parts).tolist() == whole.true_negative.tolist()


def test_counts_do_not_overflow() -> None:
    n = np.array([2**40] * 3)
    counts = RegionCounts(
        case_id="a", true_positive=n, false_positive=n, false_negative=n, true_negative=n
    )

    assert dice(counts).tolist() == [0.5] * 3


def test_a_label_map_agrees_with_itself_in_either_convention() -> None:
    legacy = make_label_map()
    modern = np.where(legacy == 4, 3, legacy).astype(np.uint8)

    counts = count_regions(regions_of(modern, BRATS2023), regions_of(legacy, BRATS2017), "a")

    assert (counts.in_reference > 0).all()
    assert dice(counts).tolist() == [1, 1, 1]


def test_masks_on_two_grids_are_refused() -> None:
    masks = np.zeros((3, 4, 4, 4), dtype=bool)

    with pytest.raises(
        CaseError, match=r"case a, file prediction: found .*\(3, 4, 4, 1\); expected \(3, 4, 4, 4\)"
    ):
        count_regions(masks[..., :1], masks, "a")


@pytest.mark.real
@pytest.mark.parametrize("case_id", REAL_DICE)
def test_dice_of_real_predictions_is_the_known_one(real_data: Path, case_id: str) -> None:
    predictions = real_data / "metric_fixtures" / "network_predictions"
    [reference_path] = real_data.glob(f"BraTS2018/*/{case_id}/{case_id}_seg.nii.gz")
    reference = np.asarray(nib.load(reference_path).dataobj).astype(np.uint8)
    prediction = np.asarray(nib.load(predictions / f"{case_id}.nii.gz").dataobj).astype(np.uint8)

    # the predictions number their labels as the releases from 2023 on do
    counts = count_regions(
        regions_of(prediction, BRATS2023), regions_of(reference, BRATS2017), case_id
    )

    assert [round(float(score), 6) for score in dice(counts)] == list(REAL_DICE[case_id])
