"""Test the comparison of two sets of predictions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.errors import LayoutError, UsageError
from brats_seg.evaluation.compare import compare_folders, compare_scores
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.evaluation.scores import joined_scores
from tests.builders import make_label_map, write_nifti
from tests.test_scores import score_row


def table(dices: Sequence[float], hd95s: Sequence[float] | None = None) -> pd.DataFrame:
    """Return scores of one region; HD95 is tied everywhere unless it is given."""
    distances = hd95s or [1.0] * len(dices)
    return pd.DataFrame(
        score_row(f"{k:03d}", dice, hd95=hd95)
        for k, (dice, hd95) in enumerate(zip(dices, distances, strict=True))
    )


def test_pairs_are_tested_worked_out_by_hand() -> None:
    """Six cases better by different amounts: the smallest p of six pairs is 2 / 2**6."""
    first = table((0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.5), (1.0,) * 6 + (2.0,))
    second = table((0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.5), (1.0,) * 6 + (3.0,))
    found = compare_scores(("a", "b"), (first, second))
    # whatever the order of the rows
    again = compare_scores(("a", "b"), (first, second[::-1]))
    assert again == found
    dice, hd95 = found
    assert (dice.region, dice.column, hd95.column) == ("wt", "dice", "hd95")
    assert (dice.n_first_better, dice.n_second_better) == (6, 0)
    assert dice.mean_first == pytest.approx(4.61 / 7)
    assert dice.p_value == pytest.approx(2 / 64)
    # the shorter distance is the better one
    assert (hd95.n_first_better, hd95.n_second_better, hd95.p_value) == (1, 0, 1)


def test_a_missing_prediction_counts_against_its_set(brats_root: Path, tmp_path: Path) -> None:
    for number in range(4):
        name = f"BraTS2021_{number:05d}.nii.gz"
        write_nifti(tmp_path / "long" / name, make_label_map(seed=number + 1))
        if number < 2:
            write_nifti(tmp_path / "short" / name, make_label_map(seed=number))
    folders = (tmp_path / "long", tmp_path / "short")
    legacy = protocol_named("legacy")
    whole, shared = (
        compare_folders(brats_root, folders, legacy, only_predicted=only) for only in (False, True)
    )
    assert (len(whole.first.case_ids), len(shared.first.case_ids)) == (6, 2)
    assert whole.tests[0].mean_first > whole.tests[0].mean_second
    assert shared.tests[0].mean_first < shared.tests[0].mean_second
    assert len(shared.first.left_out) == 4
    for number in range(2):
        (tmp_path / "short" / f"BraTS2021_{number:05d}.nii.gz").rename(
            tmp_path / "short" / f"BraTS2021_{number + 4:05d}.nii.gz"
        )
    with pytest.raises(LayoutError, match=r"long and .*short predict no case in common"):
        compare_folders(brats_root, folders, protocol_named("legacy"), only_predicted=True)


def test_regions_without_a_score_and_infinite_distances_are_compared() -> None:
    """What is neither there nor predicted is as good as a full score."""
    first = table((0.9, np.nan), (9.0, 9.0)).assign(nsd=[0.8, np.nan], lesionwise_hd95=np.inf)
    second = table((0.7, 0.0), (1.0, 1.0)).assign(nsd=[0.8, 0.0], lesionwise_hd95=[np.inf, 3.0])
    found = compare_scores(("a", "b"), (first, second))
    dice, _, _, distance = found
    assert (dice.mean_first, dice.mean_second) == (0.9, 0.35)
    assert (dice.n_first_better, dice.n_second_better) == (2, 0)
    found = distance.column, distance.mean_first, distance.n_second_better
    assert found == ("lesionwise_hd95", np.inf, 1)


def test_sets_that_cannot_be_paired_are_refused() -> None:
    first, short = table((0.9, 0.3, 0.6)), table((0.9, 0.3))
    with pytest.raises(UsageError, match=r"a and b do not hold .*: 1 are in one only, such as 002"):
        compare_scores(("a", "b"), (first, short))
    with pytest.raises(UsageError, match="empty holds no scores"):
        compare_scores(("empty", "a"), (joined_scores(()), first))
