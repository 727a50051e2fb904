"""Many cases in a few numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from brats_seg.evaluation.scores import (
    RegionSummary,
    Score,
    Spread,
    summarise_scores,
    write_summary,
)
from tests.test_scores import LESIONWISE


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
