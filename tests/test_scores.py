"""Test the table of scores and its summary over cases."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import region_counts
from brats_seg.evaluation.scores import (
    LESION_COLUMNS,
    REGION_COLUMNS,
    joined_scores,
    read_scores,
    summarise_counts,
    summarise_scores,
    with_worst_scores,
    write_scores,
    write_summary,
)

REGION_VALUES = (2 / 3, 0.5, 373.12866, 1.0, 0.99, 1.25, 0.0)
LESION_VALUES = (0.25, 187.0, 0.1, 0.2, 3, 1, 2)
PLAIN = pd.DataFrame([("a", "wt", *REGION_VALUES)], columns=["case_id", "region", *REGION_COLUMNS])
LESIONWISE = PLAIN.join(pd.DataFrame([LESION_VALUES], columns=list(LESION_COLUMNS)))
HEAD = "case_id,region,dice,jaccard,hd95,sensitivity,specificity,reference_ml,prediction_ml"


def score_row(
    case_id: str, dice: float, region: str = "wt", *, hd95: float = 0.0, ml=(1.0, 1.0)
) -> dict[str, object]:
    """Return a row of a table of scores."""
    values = (dice, dice / (2 - dice), hd95, 1.0, 1.0, *ml)
    return {"case_id": case_id, "region": region} | dict(zip(REGION_COLUMNS, values, strict=True))


def table_of(dices, **columns) -> pd.DataFrame:
    return pd.DataFrame([score_row(f"{k:03d}", dice) for k, dice in enumerate(dices)]).assign(
        **columns
    )


def test_the_table_has_a_row_per_case_and_region(tmp_path: Path) -> None:
    write_scores(LESIONWISE, tmp_path / "scores.csv")

    assert (tmp_path / "scores.csv").read_text() == (
        f"{HEAD},{','.join(LESION_COLUMNS)}\n"
        "a,wt,0.666667,0.500000,373.128660,1.000000,0.990000,1.250000,0.000000,"
        "0.250000,187.000000,0.100000,0.200000,3,1,2\n"
    )


@pytest.mark.parametrize("scores", [PLAIN, LESIONWISE, joined_scores(())])
def test_what_was_written_is_read_back(tmp_path: Path, scores: pd.DataFrame) -> None:
    write_scores(scores, tmp_path / "new" / "scores.csv")

    back = read_scores(tmp_path / "new" / "scores.csv")

    pd.testing.assert_frame_equal(back, scores, check_dtype=not scores.empty, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, r"a\.csv does not exist"),
        ("a,b\n1,2\n", "has no column case_id, region, dice.*; found the columns a, b"),
        (f"{HEAD}\na,wt,high,1,1,1,1,1,1\n", "not a table of scores, .*'high'"),
        (f"{HEAD}\na,wt,,1,1,1,1,1,1\n", "not a table of scores"),
        (f"{HEAD},lesionwise_dice\na,wt,1,1,1,1,1,1,1,1\n", "not a table of scores"),
    ],
)
def test_another_table_is_refused(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "a.csv").write_text(text)

    with pytest.raises(UsageError, match=expected):
        read_scores(tmp_path / "a.csv")


def test_the_worst_scores_keep_volumes_and_counts() -> None:
    [row] = with_worst_scores(LESIONWISE, 337.0).to_dict("records")

    assert [row[c] for c in REGION_COLUMNS] == [0, 0, 337, 0, 0, 1.25, 0]
    assert [row[c] for c in LESION_COLUMNS] == [0, 337, 0, 0, 3, 1, 2]


def test_mean_median_and_quartiles_worked_out_by_hand(rng: np.random.Generator) -> None:
    [summary] = summarise_scores(table_of((0.5, 0.9, 0.7, 0.8, 0.1)), rng)

    spread = summary.spread("dice")
    assert (summary.region, summary.n_cases) == ("wt", 5)
    assert spread.mean == pytest.approx(0.6)
    quartiles = (spread.lower_quartile, spread.median, spread.upper_quartile)
    assert quartiles == pytest.approx((0.5, 0.7, 0.8))
    assert spread.mean_low < 0.6 < spread.mean_high
    assert spread.mean_text(5).startswith("0.600 [")
    assert spread.mean_text(1) == "0.600"


def test_every_region_has_its_own_summary_and_the_order_of_rows_changes_nothing() -> None:
    rows = [("b", 0.7, "wt"), ("b", 0.3, "rc"), ("a", 0.5, "wt"), ("a", 0.1, "rc")]
    table = pd.DataFrame([score_row(*row) for row in rows])
    other = table.loc[[2, 3, 0, 1]]

    summaries, again = (summarise_scores(t, np.random.default_rng(3)) for t in (table, other))

    means = [(one.region, one.spread("dice").mean) for one in summaries]
    assert means == [("wt", pytest.approx(0.6)), ("rc", pytest.approx(0.2))]
    assert summaries == again
    spread = summarise_scores(table_of([0.4]), np.random.default_rng(3))[0].spread("dice")
    assert (spread.mean_low, spread.mean, spread.mean_high) == (0.4, 0.4, 0.4)
    assert summarise_scores(joined_scores(()), np.random.default_rng(3)) == ()


def test_counted_cases_are_summarised_as_their_scores(rng: np.random.Generator) -> None:
    cases = [
        region_counts("b", [[1, 0, 0], [1, 0, 0], [0, 0, 0], [9, 9, 9]]),
        region_counts("a", [[0, 1, 0], [0, 0, 2], [1, 0, 0], [9, 9, 9]]),
    ]

    wt, tc, et = summarise_counts(cases, rng)

    assert wt.spread("dice").mean == pytest.approx((2 / 3 + 0) / 2)
    assert [one.column for one in tc.spreads][:2] == ["dice", "jaccard"]
    assert (tc.n_reference_empty, tc.n_both_empty) == (1, 1)
    assert (et.n_reference_empty, et.n_prediction_empty, et.n_both_empty) == (2, 1, 1)


def test_the_summary_is_read_by_region_and_column(tmp_path: Path, rng: np.random.Generator) -> None:
    write_summary(summarise_scores(LESIONWISE, rng), tmp_path / "summary.json")

    wt = json.loads((tmp_path / "summary.json").read_text())["wt"]
    assert (wt["n_cases"], wt["n_prediction_empty"]) == (1, 1)
    assert list(wt["lesionwise_dice"].values()) == [0.25] * 6
