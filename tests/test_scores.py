"""The table of scores, its summary over cases, and what is lost without some modalities."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.errors import UsageError
from brats_seg.evaluation import scores
from brats_seg.evaluation.metrics import region_counts
from brats_seg.evaluation.scores import LESION_COLUMNS, MATCHED_COLUMNS, REGION_COLUMNS
from brats_seg.labels import MODALITIES

REGION_VALUES = (2 / 3, 0.5, 373.12866, 1.0, 0.99, 1.25, 0.0)
LESION_VALUES = (0.25, 187.0, 0.1, 0.2, 3, 1, 2)
PLAIN = pd.DataFrame([("a", "wt", *REGION_VALUES)], columns=["case_id", "region", *REGION_COLUMNS])
MATCHED_VALUES = (0.2, 9.0, 0.5, 0.3, np.inf, 0.4, 3, 1, 2, 0.4, *(np.nan,) * 3, 1.0, 2.0, 0.5)
MATCHED = PLAIN.assign(
    protocol="brats2025",
    in_training="yes",
    **dict(zip(MATCHED_COLUMNS, MATCHED_VALUES, strict=True)),
)
LESIONWISE = PLAIN.join(pd.DataFrame([LESION_VALUES], columns=list(LESION_COLUMNS)))
HEAD = "case_id,region,dice,jaccard,hd95,sensitivity,specificity,reference_ml,prediction_ml"


def score_row(case: str, dice: float, region: str = "wt", hd95: float = 0.0) -> dict[str, object]:
    values = (dice, dice / (2 - dice), hd95, 1.0, 1.0, 1.0, 1.0)
    return {"case_id": case, "region": region} | dict(zip(REGION_COLUMNS, values, strict=True))


def table_of(*dices: float) -> pd.DataFrame:
    return pd.DataFrame([score_row(f"{k:03d}", dice) for k, dice in enumerate(dices)])


def test_the_table_is_written_with_six_decimals_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "scores.csv"
    for table in (PLAIN, scores.join_scores(()), MATCHED, LESIONWISE):
        scores.write_scores(table, path)
        options = {"check_dtype": not table.empty, "atol": 1e-6}
        pd.testing.assert_frame_equal(scores.read_scores(path), table, **options)
    assert path.read_text() == (
        f"{HEAD},{','.join(LESION_COLUMNS)}\n"
        "a,wt,0.666667,0.500000,373.128660,1.000000,0.990000,1.250000,0.000000,"
        "0.250000,187.000000,0.100000,0.200000,3,1,2\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, r"a\.csv does not exist"),
        ("a,b\n1,2\n", "has no column case_id, region, dice.*; found the columns a, b"),
        (f"{HEAD}\na,wt,high,1,1,1,1,1,1\n", "not a table of scores, .*'high'"),
        (f"{HEAD}\na,wt,,1,1,1,1,1,1\n", "not a table of scores"),
        (f"{HEAD}\n" + "a,wt,1,1,1,1,1,1,1\n" * 2, "two rows for a case and region"),
        (f"{HEAD},remark\na,wt,1,1,1,1,1,1,1,good\n", "not a table of scores, .*'good'"),
    ],
)
def test_another_table_is_refused(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UsageError, match=expected):
        scores.read_scores(tmp_path / "a.csv")


def test_the_worst_scores_keep_volumes_and_counts() -> None:
    [row] = scores.with_worst_scores(LESIONWISE, 337.0).to_dict("records")
    assert [row[c] for c in REGION_COLUMNS] == [0, 0, 337, 0, 0, 1.25, 0]
    assert [row[c] for c in LESION_COLUMNS] == [0, 337, 0, 0, 3, 1, 2]
    # the program of 2025 gives 0 and 373 in all of its columns
    [row] = scores.with_worst_scores(MATCHED, 373.0).to_dict("records")
    assert [row[c] for c in MATCHED_COLUMNS] == [0, 373, 0, 0, 373, 0, 3, *(0,) * 9]
    assert row["prediction_ml"] == 0
    assert scores.with_worst_scores(MATCHED, 373.0).dtypes.equals(MATCHED.dtypes)


def test_mean_median_and_quartiles_worked_out_by_hand(rng: np.random.Generator) -> None:
    [summary] = scores.summarise_scores(table_of(0.5, 0.9, 0.7, 0.8, 0.1), rng)
    spread = summary.spread("dice")
    assert (summary.region, summary.n_cases) == ("wt", 5)
    assert spread.mean == pytest.approx(0.6)
    quartiles = (spread.lower_quartile, spread.median, spread.upper_quartile)
    assert quartiles == pytest.approx((0.5, 0.7, 0.8))
    assert spread.mean_low < 0.6 < spread.mean_high
    assert spread.mean_text(5).startswith("0.600 [")
    assert spread.mean_text(1) == "0.600"


def test_nan_is_left_out_and_infinity_stays(tmp_path: Path, rng: np.random.Generator) -> None:
    nothing = table_of(0.5, np.nan, 0.9, 0.1).assign(f1=np.nan, nsd=[1.0, 2.0, np.inf, 3.0])
    [summary] = scores.summarise_scores(nothing, rng)
    dice, nsd, f1 = map(summary.spread, ("dice", "nsd", "f1"))
    assert (dice.mean, dice.median) == pytest.approx((0.5, 0.5))
    assert 0.1 <= dice.mean_low < dice.mean_high <= 0.9
    assert (nsd.mean, nsd.mean_high, nsd.upper_quartile) == (np.inf, np.inf, np.inf)
    assert (nsd.lower_quartile, nsd.median) == (1.75, 2.5)
    assert np.isnan([f1.mean, f1.mean_low, f1.median]).all()
    scores.write_summary([summary], tmp_path / "a.json")
    written = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)["wt"]
    assert (written["f1"]["mean"], written["nsd"]["mean"]) == (None, None)


def test_every_region_has_its_own_summary_and_the_order_of_rows_changes_nothing() -> None:
    rows = [("b", 0.7, "wt"), ("b", 0.3, "rc"), ("a", 0.5, "wt"), ("a", 0.1, "rc")]
    table, many = pd.DataFrame([score_row(*row) for row in rows]), table_of(*DICE[:, 0])
    summaries, one, other = (
        scores.summarise_scores(t, np.random.default_rng(3)) for t in (table, many, many[::-1])
    )
    means = [(one.region, one.spread("dice").mean) for one in summaries]
    assert means == [("wt", pytest.approx(0.6)), ("rc", pytest.approx(0.2))]
    assert one == other
    spread = scores.summarise_scores(table_of(0.4), np.random.default_rng(3))[0].spread("dice")
    assert (spread.mean_low, spread.mean, spread.mean_high) == (0.4, 0.4, 0.4)
    assert scores.summarise_scores(scores.join_scores(()), np.random.default_rng(3)) == ()


def test_counted_cases_are_summarised_as_their_scores(rng: np.random.Generator) -> None:
    cases = [
        region_counts("b", [[1, 0, 0], [1, 0, 0], [0, 0, 0], [9, 9, 9]]),
        region_counts("a", [[0, 1, 0], [0, 0, 2], [1, 0, 0], [9, 9, 9]]),
    ]
    wt, tc, et = scores.summarise_counts(cases, rng)
    assert wt.spread("dice").mean == pytest.approx((2 / 3 + 0) / 2)
    assert [one.column for one in tc.spreads][:2] == ["dice", "jaccard"]
    assert (tc.n_reference_empty, tc.n_both_empty) == (1, 1)
    assert (et.n_reference_empty, et.n_prediction_empty, et.n_both_empty) == (2, 1, 1)


DICE, DICE_OF_ALL = np.random.default_rng(0).uniform(size=(2, 7, 3))


def test_the_cases_of_several_runs_are_pooled_as_if_they_were_one() -> None:
    parts = [
        scores.SubsetScores.of_cases(subset, DICE[cases], DICE_OF_ALL[cases])
        for cases in (slice(0, 2), slice(2, 7))
        for subset in (("t2f",), ("t1n", "t1c"))
    ]
    pair, single = scores.pool_scores(parts)
    assert (pair.modalities, single.modalities, single.n_cases) == (("t1n", "t1c"), ("t2f",), 7)
    loss = DICE_OF_ALL - DICE
    assert single.mean_dice == pytest.approx(DICE.mean(axis=0))
    assert single.mean_loss == pytest.approx(loss.mean(axis=0))
    assert single.std_loss == pytest.approx(loss.std(axis=0, ddof=1))


def test_one_case_has_no_spread_and_missing_modalities_are_named_in_their_order() -> None:
    of_all = np.add(DICE[:1], [[0.25, -0.004, -0.5]])
    subset = scores.SubsetScores.of_cases(("t1c",), DICE[:1], of_all)
    assert subset.std_loss is None
    # equal losses, whose squares add up to less than those of their mean by rounding
    alike = scores.SubsetScores.of_cases(("t1c",), np.zeros((3, 3)), np.full((3, 3), 0.1))
    assert alike.std_loss == (0, 0, 0)
    assert str(subset) == "WT 0.25 lower, TC 0.00 lower, ET 0.50 higher on 1 held-out case"
    assert scores.absent_from(("t2f", "t1c")) == ("t1n", "t2w")
    assert scores.absent_from(MODALITIES) == ()
