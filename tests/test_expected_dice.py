"""The Dice that is expected of a prediction, and its interval."""

import numpy as np
import pytest

from brats_seg.evaluation.metrics import RegionCounts, dice, region_counts
from brats_seg.quality.expected_dice import (
    COVERAGE,
    FEWEST_CASES,
    DiceLine,
    fit_predicted_dice,
    mean_probabilities,
    predicted_dice,
)

LINE = DiceLine(
    region="wt", n_cases=12, intercept=-0.5, slope=1.5, width=0.5, worst_fifth=0.6, mean_error=0.05
)


def counts_of(*dices: float) -> RegionCounts:
    """Return the voxels of a case with a given Dice of WT, TC and ET: of 1000 in either side."""
    both = [round(1000 * one) for one in dices]
    rest = [1000 - one for one in both]
    return region_counts("case", [both, rest, rest, [0, 0, 0]])


def test_the_mean_probability_is_that_inside_each_region() -> None:
    probabilities = np.zeros((3, 2, 2, 1), np.float32)
    probabilities[0] = np.array([[[0.9], [0.7]], [[0.2], [0.1]]])
    probabilities[1, 0, 0] = 0.6
    regions = probabilities > 0.5

    found = mean_probabilities(probabilities, regions)

    np.testing.assert_allclose(found, [0.8, 0.6, np.nan], rtol=1e-6)


def test_a_line_is_found_and_its_interval_has_no_width() -> None:
    sure = np.linspace(0.5, 0.9, 12)
    cases = [np.array([x, x, np.nan]) for x in sure]
    counts = [counts_of(x, 1.2 * x - 0.2, 0) for x in sure]

    wt, tc = fit_predicted_dice(cases, counts)

    assert (wt.region, tc.region) == ("wt", "tc")
    assert (wt.slope, tc.slope) == (pytest.approx(1, abs=0.01), pytest.approx(1.2, abs=0.01))
    assert wt.width < 0.01
    (told,) = predicted_dice([wt], np.array([0.75, 0.5, 0.5]))
    assert told.dice == pytest.approx(0.75, abs=0.002)


def test_a_region_that_few_cases_have_is_left_out() -> None:
    cases = [np.array([0.5, 0.5, 0.5])] * (FEWEST_CASES - 1) + [np.array([0.5, np.nan, np.nan])]
    counts = [counts_of(0.5, 0.5, 0.5)] * FEWEST_CASES

    assert [line.region for line in fit_predicted_dice(cases, counts)] == ["wt"]


def test_less_sure_cases_are_never_expected_to_be_better() -> None:
    cases = [np.full(3, x) for x in np.linspace(0.5, 0.9, 12)]
    counts = [counts_of(*[1 - x[0]] * 3) for x in cases]

    lines = fit_predicted_dice(cases, counts)

    assert {line.slope for line in lines} == {0.0}
    assert lines[0].intercept == pytest.approx(0.3, abs=0.01)


def test_nothing_is_told_of_a_region_that_was_not_found() -> None:
    assert predicted_dice([LINE], np.array([np.nan, 0.9, 0.9])) == ()


def test_an_interval_stays_between_no_overlap_and_a_perfect_one() -> None:
    high, low = LINE.at(0.99), LINE.at(0.3)

    assert (high.dice, high.low, high.high) == (0.985, 0.9275, 1.0)
    assert (low.dice, low.low, low.high) == (0.0, 0.0, 0.55)
    assert str(high) == "WT 0.98 (0.93 to 1.00)"
    assert high.columns["wt_predicted_dice_low"] == 0.9275


def test_a_dice_is_low_in_the_worst_fifth_of_cases_unless_it_is_good() -> None:
    good = LINE.model_copy(update={"worst_fifth": 0.9})

    assert [LINE.at(x).is_low for x in (0.72, 0.75)] == [True, False]
    assert [good.at(x).is_low for x in (0.75, 0.81)] == [True, False]


def test_the_worst_fifth_is_known_from_the_held_out_cases() -> None:
    sure = np.linspace(0.5, 0.9, 11)
    counts = [counts_of(x, x, x) for x in sure]

    (line, *_) = fit_predicted_dice([np.full(3, x) for x in sure], counts)

    assert line.worst_fifth == pytest.approx(sure[2], abs=0.002)


@pytest.mark.parametrize("n_cases", [FEWEST_CASES, 12, 40])
def test_the_interval_covers_new_cases_as_often_as_it_says(n_cases: int) -> None:
    rng = np.random.default_rng(0)
    n_covered = 0
    for _ in range(250):
        x = rng.uniform(0.5, 1, n_cases + 1)
        y = np.clip(1.4 * x - 0.45 + rng.normal(0, 0.08, n_cases + 1), 0, 1)
        counts = [counts_of(value, value, value) for value in y]
        (line, *_) = fit_predicted_dice([np.full(3, value) for value in x[:-1]], counts[:-1])
        told = line.at(x[-1])
        n_covered += told.low - 1e-3 <= dice(counts[-1])[0] <= told.high + 1e-3

    assert n_covered / 250 > COVERAGE - 0.05
