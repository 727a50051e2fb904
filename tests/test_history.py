"""What an epoch measured: sums first, ratios once."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.training.history import (
    COLUMNS,
    Tally,
    region_counts,
    row_line,
    scores_of,
    write_history,
)

# rows: true positive, false positive, false negative, true negative; columns: WT, TC, ET
HALF_RIGHT = [[2, 1, 0], [2, 0, 0], [2, 1, 0], [10, 14, 16]]
PERFECT = [[4, 4, 4], [0, 0, 0], [0, 0, 0], [12, 12, 12]]


def test_scores_are_means_of_case_ratios_with_empty_regions_counted() -> None:
    scores = scores_of(0.5, [region_counts("a", HALF_RIGHT), region_counts("b", PERFECT)])

    assert scores.dice == pytest.approx([(0.5 + 1) / 2, (2 / 3 + 1) / 2, 1])
    assert scores.jaccard == pytest.approx([(1 / 3 + 1) / 2, (1 / 2 + 1) / 2, 1])
    assert list(scores.n_empty) == [0, 0, 1]


def test_patches_of_a_case_are_pooled_before_the_ratio() -> None:
    tally = Tally(loss_sum=3.0, n_patches=2)
    tally.add("a", HALF_RIGHT)
    tally.add("a", PERFECT)

    scores = tally.scores()

    assert scores.loss == 1.5
    assert scores.dice[0] == pytest.approx(2 * 6 / (8 + 8))


def test_the_order_in_which_cases_come_changes_nothing() -> None:
    there, back = Tally(n_patches=1), Tally(n_patches=1)
    for tally, ids in ((there, "abc"), (back, "cba")):
        for case_id in ids:
            tally.add(case_id, (np.array(HALF_RIGHT) * ord(case_id)).tolist())

    assert np.array_equal(there.scores().dice, back.scores().dice)


def row(epoch: int, *, validated: bool) -> dict[str, float]:
    scores = scores_of(1 / epoch, [region_counts("a", HALF_RIGHT)])
    return {
        "epoch": epoch,
        "step": epoch * 3,
        "lr": 0.1,
        "seconds": 1.0,
        "peak_memory_mb": 10.0,
        **scores.columns("train"),
        **(scores.columns("val") if validated else {}),
    }


def test_history_csv_has_the_articles_columns_and_empty_cells_without_validation(
    tmp_path: Path,
) -> None:
    write_history([row(1, validated=False), row(2, validated=True)], tmp_path)

    table = pd.read_csv(tmp_path / "history.csv")

    assert tuple(table.columns) == COLUMNS
    assert {
        "train_loss",
        "val_loss",
        "train_dice",
        "val_dice",
        "train_jaccard",
        "val_jaccard",
    } < set(table.columns)
    assert {"val_dice_wt", "val_dice_tc", "val_dice_et", "train_jaccard_et", "val_empty_et"} < set(
        table.columns
    )
    assert table["val_dice"].isna().tolist() == [True, False]
    assert table["val_dice_wt"][1] == pytest.approx(0.5)
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")


def test_the_line_on_screen_says_what_was_measured() -> None:
    assert row_line(row(1, validated=False), 5).startswith("epoch 1/5 | training loss 1.0000 Dice")
    assert "validation loss 0.5000 Dice 0.722 (WT 0.500 TC 0.667 ET 1.000)" in row_line(
        row(2, validated=True), 5
    )
