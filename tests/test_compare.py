"""Test the comparison of two sets of predictions."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.errors import LayoutError, UsageError
from brats_seg.evaluation.compare import compare_folders, compare_scores, rank_sets
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.evaluation.scores import LESION_COLUMNS
from tests.builders import make_label_map, write_nifti
from tests.test_scores import score_row

LEGACY = protocol_named("legacy")
LESIONS = dict(zip(LESION_COLUMNS, (1.0, 0.0, 1.0, 1.0, 0, 0, 0), strict=True))


def table(dices: Sequence[float], hd95s: Sequence[float] | None = None) -> pd.DataFrame:
    distances = hd95s or [1.0] * len(dices)
    return pd.DataFrame(
        score_row(f"{k:03d}", dice, hd95=hd95)
        for k, (dice, hd95) in enumerate(zip(dices, distances, strict=True))
    )


def test_pairs_are_tested_worked_out_by_hand(rng: np.random.Generator) -> None:
    """Six cases better by different amounts: the smallest p of six pairs is 2 / 2**6."""
    first = table((0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.5), (1.0,) * 6 + (2.0,))
    second = table((0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.5), (1.0,) * 6 + (3.0,))
    found = compare_scores(("a", "b"), (first, second), rng)
    # whatever the order of the rows
    assert compare_scores(("a", "b"), (first, second[::-1]), np.random.default_rng(0)) == found
    dice, hd95 = found.tests
    assert found.n_cases == 7
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
    whole, shared = (
        compare_folders(brats_root, folders, LEGACY, only_predicted=only) for only in (False, True)
    )
    assert (whole.comparison.n_cases, shared.comparison.n_cases) == (6, 2)
    assert [one.comparison.ranking[0].name for one in (whole, shared)] == [*map(str, folders)]
    assert len(shared.first.left_out) == 4
    for number in range(2):
        path = tmp_path / "short" / f"BraTS2021_{number:05d}.nii.gz"
        path.rename(path.with_name(f"BraTS2021_{number + 4:05d}.nii.gz"))
    with pytest.raises(LayoutError, match=r"long and .*short predict no case in common"):
        compare_folders(brats_root, folders, LEGACY, only_predicted=True)
    with pytest.raises(UsageError, match=r"volumes.csv is no table of scores"):
        compare_folders(brats_root, folders, LEGACY, output=folders[0] / "volumes.csv")


def test_mean_ranks_worked_out_by_hand(rng: np.random.Generator) -> None:
    """Dice ranks 1 2 3 and 2.5 1 2.5; HD95 is 2 for all."""
    ranking = rank_sets("abc", [table((0.9, 0.5)), table((0.8, 0.6)), table((0.7, 0.5))], rng)
    assert [standing.name for standing in ranking] == ["b", "a", "c"]
    assert [4 * one.mean_rank for one in ranking] == [2 + 1 + 4, 1 + 2.5 + 4, 3 + 2.5 + 4]
    assert ranking[-1].p_value is None
    # ranks of 3, 5, 5 and 5 in each case, and of 6, 4, 4 and 4: the order given is kept
    columns = ["lesionwise_dice", "lesionwise_nsd", "small_f1"]
    wins = pd.DataFrame(np.vstack([np.ones(3), np.eye(3)]), columns=columns)
    tied = [table([0.5] * 4).join(one) for one in (wins, 1 - wins)]
    assert [one.name for one in rank_sets("ab", tied, rng)] == ["a", "b"]


@pytest.mark.parametrize("seed", range(5))
def test_mean_ranks_equal_those_of_mist(seed: int) -> None:
    """With mist-medical, as the environment of `make bench` has it."""
    mist = pytest.importorskip("mist.evaluation.ranking")
    values = np.random.default_rng(seed).integers(0, 6, (4, 2, 7)) / 5
    sets = [table(*one.tolist()) for one in values]
    columns = {"case_id": "id", "dice": "wt_dice", "hd95": "wt_haus95"}
    theirs = [one[[*columns]].rename(columns=columns) for one in sets]
    ranking = rank_sets("abcd", sets, np.random.default_rng(0))
    expected = dict(mist.rank_results(theirs, [*"abcd"])[0].itertuples(index=False, name=None))
    assert {one.name: one.mean_rank for one in ranking} == pytest.approx(expected)


def test_chance_rarely_leads_in_every_case_and_often_in_none() -> None:
    """Twelve cases won by one set: only one in 2**12 exchanges keeps the lead."""
    dices = np.linspace(0.3, 0.8, 12)
    better, worse, equal = (table((dices + gain).tolist()) for gain in (0.1, -0.1, 0))
    clear = rank_sets("-+", [worse, better], np.random.default_rng(0))
    tied = rank_sets(("=", "also"), [equal, equal], np.random.default_rng(0))
    assert [standing.name for standing in (*clear, *tied)] == ["+", "-", "=", "also"]
    assert clear[0].p_value == pytest.approx(1 / 2**12, abs=5e-4)
    assert (tied[0].p_value, tied[0].mean_rank) == (1, 1.5)


def test_lesionwise_sets_are_ranked_by_their_lesions(rng: np.random.Generator) -> None:
    """The scores of whole regions rank them the other way."""
    sets = [
        table([dice]).assign(**LESIONS | {"lesionwise_dice": lesion_dice})
        for dice, lesion_dice in ((0.9, 0.3), (0.4, 0.7))
    ]
    found = compare_scores(("whole", "lesions"), (sets[0], sets[1]), rng)
    assert [standing.name for standing in found.ranking] == ["lesions", "whole"]
    assert [test.column for test in found.tests] == ["dice", "hd95", *LESION_COLUMNS[:4]]


def test_sets_of_2025_are_ranked_by_dice_and_nsd(rng: np.random.Generator) -> None:
    """HD95 is not ranked; what is neither there nor predicted is as good as a full score."""
    first = table((0.9, np.nan), (9.0, 9.0)).assign(nsd=[0.8, np.nan], lesionwise_hd95=np.inf)
    second = table((0.7, 0.0), (1.0, 1.0)).assign(nsd=[0.8, 0.0], lesionwise_hd95=[np.inf, 3.0])
    lesions = {"lesionwise_dice": 0.5, "lesionwise_nsd": 0.5}
    sizes = [one.assign(**lesions, small_f1=f1) for one, f1 in ((first, 0.0), (second, 0.5))]
    found = compare_scores(("a", "b"), (first, second), rng)
    metastases = rank_sets("ab", sizes, rng)
    assert [standing.mean_rank for standing in found.ranking] == [(1 + 1.5 + 1 + 1) / 4, 1.875]
    dice, _, _, distance = found.tests
    assert (dice.mean_first, dice.mean_second, distance.mean_first) == (0.9, 0.35, np.inf)
    assert (dice.n_first_better, dice.n_second_better) == (2, 0)
    assert (distance.column, distance.n_second_better) == ("lesionwise_hd95", 1)
    assert [one.name for one in metastases] == ["b", "a"]
    assert [3 * one.mean_rank for one in metastases] == pytest.approx([4, 5])


def test_a_case_that_fails_in_one_set_is_compared_in_neither(tmp_path: Path) -> None:
    reference, *folders = (tmp_path / name for name in ("reference", "whole", "damaged"))
    for folder, number in product((reference, *folders), range(3)):
        write_nifti(folder / f"case{number}.nii.gz", make_label_map(seed=number))
    (folders[1] / "case0.nii.gz").write_bytes(b"damaged")
    found = compare_folders(reference, (folders[0], folders[1]), LEGACY)
    assert found.comparison.n_cases == 2
    assert [failure.case_id for failure in found.second.failures] == ["case0"]
    for number in range(3):
        (folders[1] / f"case{number}.nii.gz").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"scored in both .*first error: .*case0, file .*case0"):
        compare_folders(reference, (folders[0], folders[1]), LEGACY)
