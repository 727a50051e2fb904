"""Test the table of scores and its summary over cases."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.errors import UsageError
from brats_seg.evaluation.lesionwise import LesionScores
from brats_seg.evaluation.scores import (
    LESION_COLUMNS,
    REGION_COLUMNS,
    RegionSummary,
    Score,
    Spread,
    read_scores,
    summarise_scores,
    write_scores,
    write_summary,
)

PLAIN = Score(
    case_id="a",
    region="wt",
    dice=2 / 3,
    jaccard=0.5,
    hd95=373.12866,
    sensitivity=1.0,
    specificity=0.99,
    reference_ml=1.25,
    prediction_ml=0.0,
)
LESIONS = LesionScores(
    dice=0.25, hd95=187.0, nsd=(0.1, 0.2), n_lesions=3, n_false_positive=1, n_false_negative=2
)
LESIONWISE = Score(
    **{column: PLAIN.value(column) for column in REGION_COLUMNS},
    case_id="a",
    region="wt",
    lesions=LESIONS,
)


def test_the_table_has_a_row_per_case_and_region(tmp_path: Path) -> None:
    write_scores([PLAIN], tmp_path / "scores.csv")

    assert (tmp_path / "scores.csv").read_text() == (
        "case_id,region,dice,jaccard,hd95,sensitivity,specificity,reference_ml,prediction_ml\n"
        "a,wt,0.666667,0.500000,373.128660,1.000000,0.990000,1.250000,0.000000\n"
    )


def test_lesionwise_protocols_add_their_columns(tmp_path: Path) -> None:
    write_scores([LESIONWISE], tmp_path / "scores.csv")

    [row] = pd.read_csv(tmp_path / "scores.csv").to_dict("records")
    assert list(row) == ["case_id", "region", *REGION_COLUMNS, *LESION_COLUMNS]
    assert [row[column] for column in LESION_COLUMNS] == [0.25, 187, 0.1, 0.2, 3, 1, 2]


def test_a_value_is_found_by_its_column() -> None:
    assert LESIONWISE.value("reference_ml") == 1.25
    assert LESIONWISE.value("lesionwise_nsd_1.0") == 0.2
    assert LESIONWISE.value("n_false_negative") == 2
    with pytest.raises(ValueError, match="not in tuple"):
        PLAIN.value("n_lesions")


def test_a_table_without_rows_has_a_head(tmp_path: Path) -> None:
    write_scores([], tmp_path / "new" / "scores.csv")

    assert pd.read_csv(tmp_path / "new" / "scores.csv").empty


@pytest.mark.parametrize("score", [PLAIN, LESIONWISE], ids=["plain", "lesionwise"])
def test_what_was_written_is_read_back(tmp_path: Path, score: Score) -> None:
    write_scores([score], tmp_path / "scores.csv")

    (back,) = read_scores(tmp_path / "scores.csv")

    assert (back.case_id, back.region, back.columns) == ("a", "wt", score.columns)
    assert back.values == pytest.approx(score.values, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", "has no column case_id, region, dice.*; found the columns a, b"),
        (
            "case_id,region,dice,jaccard,hd95,sensitivity,specificity,reference_ml,prediction_ml\n"
            "a,wt,high,1,1,1,1,1,1\n",
            "not a table of scores, .*'high'",
        ),
    ],
)
def test_another_table_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.csv").write_text(text)

    with pytest.raises(UsageError, match=expected):
        read_scores(tmp_path / "a.csv")


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent.csv does not exist"):
        read_scores(tmp_path / "absent.csv")


def score(case_id: str, dice: float, region: str = "wt", ml: tuple[float, float] = (1, 1)) -> Score:
    return Score(
        case_id=case_id,
        region=region,
        dice=dice,
        jaccard=dice / (2 - dice),
        hd95=0.0,
        sensitivity=1.0,
        specificity=1.0,
        reference_ml=ml[0],
        prediction_ml=ml[1],
    )


def spread(summary: RegionSummary, column: str = "dice") -> Spread:
    return next(spread for spread in summary.spreads if spread.column == column)


def test_mean_median_and_quartiles_worked_out_by_hand(rng: np.random.Generator) -> None:
    dices = (0.5, 0.9, 0.7, 0.8, 0.1)

    [summary] = summarise_scores([score(str(k), dice) for k, dice in enumerate(dices)], rng)

    found = spread(summary)
    assert (summary.region, summary.n_cases) == ("wt", 5)
    assert found.mean == pytest.approx(0.6)
    assert (found.lower_quartile, found.median, found.upper_quartile) == pytest.approx(
        (0.5, 0.7, 0.8)
    )
    assert found.mean_low < 0.6 < found.mean_high


def test_counts_of_empty_regions(rng: np.random.Generator) -> None:
    volumes = [(0, 0), (0, 0), (0, 2), (3, 0), (3, 2), (3, 2)]

    [summary] = summarise_scores([score(str(k), 1, ml=ml) for k, ml in enumerate(volumes)], rng)

    assert (summary.n_reference_empty, summary.n_prediction_empty) == (3, 3)
    assert summary.n_both_empty == 2


def test_every_region_has_its_own_summary(rng: np.random.Generator) -> None:
    rows = [score("a", 0.5), score("a", 0.1, "rc"), score("b", 0.7), score("b", 0.3, "rc")]

    summaries = summarise_scores(rows, rng)

    assert [(s.region, spread(s).mean) for s in summaries] == [
        ("wt", pytest.approx(0.6)),
        ("rc", pytest.approx(0.2)),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_is_that_of_the_textbook(seed: int) -> None:
    """For many well-behaved cases the interval is the mean and 1.96 standard errors."""
    rng = np.random.default_rng(seed)
    dices = rng.normal(0.7, 0.05, 400)

    [summary] = summarise_scores([score(f"{k:03d}", dice) for k, dice in enumerate(dices)], rng)

    found = spread(summary)
    half = 1.96 * dices.std() / 20
    assert found.mean_low == pytest.approx(dices.mean() - half, abs=0.1 * half)
    assert found.mean_high == pytest.approx(dices.mean() + half, abs=0.1 * half)


def test_the_order_of_the_rows_changes_nothing() -> None:
    rows = [score(str(k), dice) for k, dice in enumerate((0.5, 0.9, 0.7, 0.8))]

    summaries = [summarise_scores(r, np.random.default_rng(3)) for r in (rows, rows[::-1])]

    assert summaries[0] == summaries[1]


def test_one_case_is_its_own_summary(rng: np.random.Generator) -> None:
    found = spread(summarise_scores([score("a", 0.4)], rng)[0])

    assert (found.mean_low, found.mean, found.mean_high) == (0.4, 0.4, 0.4)


def test_no_cases_have_no_summary(rng: np.random.Generator) -> None:
    assert summarise_scores([], rng) == ()


def test_the_file_is_read_by_region_and_column(tmp_path: Path, rng: np.random.Generator) -> None:
    write_summary(summarise_scores([LESIONWISE], rng), tmp_path / "summary.json")

    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["wt"]["n_cases"] == 1
    assert content["wt"]["n_prediction_empty"] == 1
    assert content["wt"]["lesionwise_dice"] == {
        "mean": 0.25,
        "mean_low": 0.25,
        "mean_high": 0.25,
        "median": 0.25,
        "lower_quartile": 0.25,
        "upper_quartile": 0.25,
    }
