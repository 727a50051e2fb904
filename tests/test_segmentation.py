"""Voxels per patch, and the scores of an epoch: sums first, ratios once."""

import numpy as np
import pytest
import torch

from brats_seg.training.tasks import (
    RunningSums,
    count_voxels,
    overlap_columns,
    region_counts,
    scores_of,
)

# rows: true positive, false positive, false negative, true negative; columns: WT, TC, ET
HALF_RIGHT = [[2, 1, 0], [2, 0, 0], [2, 1, 0], [10, 14, 16]]
PERFECT = [[4, 4, 4], [0, 0, 0], [0, 0, 0], [12, 12, 12]]


def test_voxels_are_counted_patch_by_patch() -> None:
    logits = torch.full((2, 3, 2, 2, 2), -1.0)
    logits[0, 0, 0] = 1  # 4 voxels of WT in the first patch
    target = torch.zeros(2, 3, 2, 2, 2)
    target[0, 0, :, 0] = 1  # 4 voxels, 2 of them the same

    counts = count_voxels(logits, target)

    assert counts[0, :, 0].tolist() == [2, 2, 2, 2]
    assert counts[1, :, 0].tolist() == [0, 0, 0, 8]


def test_scores_are_means_of_case_ratios_with_empty_regions_counted() -> None:
    scores = scores_of(0.5, [region_counts("a", HALF_RIGHT), region_counts("b", PERFECT)])

    assert scores.dice == pytest.approx([(0.5 + 1) / 2, (2 / 3 + 1) / 2, 1])
    assert scores.jaccard == pytest.approx([(1 / 3 + 1) / 2, (1 / 2 + 1) / 2, 1])
    assert list(scores.n_empty) == [0, 0, 1]


def test_patches_of_a_case_are_pooled_before_the_ratio() -> None:
    sums = RunningSums(loss_sum=3.0, n_patches=2)
    sums.add("a", HALF_RIGHT)
    sums.add("a", PERFECT)

    scores = overlap_columns(sums)

    assert scores["loss"] == 1.5
    assert scores["dice_wt"] == pytest.approx(2 * 6 / (8 + 8))


def test_the_order_in_which_cases_come_changes_nothing() -> None:
    there, back = RunningSums(n_patches=1), RunningSums(n_patches=1)
    for sums, ids in ((there, "abc"), (back, "cba")):
        for case_id in ids:
            sums.add(case_id, (np.array(HALF_RIGHT) * ord(case_id)).tolist())

    assert overlap_columns(there) == overlap_columns(back)
