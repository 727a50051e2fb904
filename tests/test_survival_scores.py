"""Test the figures of predicted survival."""

import numpy as np
import pytest
from scipy import stats

from brats_seg.survival.scores import (
    FIGURES,
    accuracy,
    chance_of_gain,
    chance_of_ranks,
    concordance,
    concordance_estimate,
    estimates,
    mean_absolute_error,
    mean_squared_error,
    median_squared_error,
    relative_error,
    spearman,
    std_squared_error,
)

REPORTED = np.array([100.0, 200.0, 400.0, 1000.0])
PREDICTED = np.array([110.0, 170.0, 500.0, 900.0])


def test_errors_by_hand():
    # errors 10, 30, 100, 100; squared 100, 900, 10000, 10000
    assert mean_squared_error(REPORTED, PREDICTED) == 5250
    assert median_squared_error(REPORTED, PREDICTED) == 5450
    assert std_squared_error(REPORTED, PREDICTED) == pytest.approx(np.std([100, 900, 1e4, 1e4]))
    assert mean_absolute_error(REPORTED, PREDICTED) == 60
    assert relative_error(REPORTED, PREDICTED) == pytest.approx(240 / 1700)


def test_accuracy_is_over_the_three_kinds_of_survivors():
    # short, short, mid for long, long
    assert accuracy(REPORTED, PREDICTED) == 0.75


@pytest.mark.parametrize(
    ("days", "kin"), [(299.0, 1.0), (300.0, 400.0), (450.0, 400.0), (451.0, 5000.0)]
)
def test_mid_survivors_have_both_borders(days, kin):
    others = {1.0, 400.0, 5000.0} - {kin}

    assert accuracy(np.array([days]), np.array([kin])) == 1
    assert all(accuracy(np.array([days]), np.array([other])) == 0 for other in others)


@pytest.mark.parametrize("seed", range(3))
def test_the_rank_correlation_is_that_of_scipy(seed):
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, 10, 30).astype(float), rng.integers(0, 10, 30).astype(float)

    assert spearman(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)


def test_equal_predictions_have_no_rank_correlation():
    assert spearman(REPORTED, np.full(4, 300.0)) == 0


def test_the_interval_holds_the_figure_and_shrinks_with_more_patients():
    rng = np.random.default_rng(0)
    widths = []
    for n in (20, 200):
        reported = rng.gamma(2, 200, n)
        predicted = reported + rng.normal(0, 100, n)
        found = estimates(reported, predicted, [str(i) for i in range(n)], np.random.default_rng(0))
        assert [one.name for one in found] == [name for name, _ in FIGURES]
        assert all(one.low <= one.value <= one.high for one in found)
        widths.append(next(one.high - one.low for one in found if one.name == "mae_days"))

    assert widths[1] < widths[0] / 2


def test_patients_are_drawn_not_cases():
    """Ten scans of one patient are not ten patients."""
    rng = np.random.default_rng(0)
    reported, predicted = rng.gamma(2, 200, 8), rng.gamma(2, 200, 8)
    once = estimates(reported, predicted, list("abcdefgh"), np.random.default_rng(1))
    often = estimates(
        np.repeat(reported, 10),
        np.repeat(predicted, 10),
        list(np.repeat(list("abcdefgh"), 10)),
        np.random.default_rng(1),
    )

    for one, other in zip(once, often, strict=True):
        assert (one.low, one.high) == pytest.approx((other.low, other.high))


def test_a_clear_order_is_no_chance_and_a_shuffled_one_is():
    rng = np.random.default_rng(0)
    reported = rng.gamma(2, 200, 40)

    assert chance_of_ranks(reported, reported * 1.1, rng) < 0.001
    assert chance_of_ranks(reported, -reported, rng) > 0.999
    assert 0.05 < chance_of_ranks(reported, rng.permutation(reported), rng) < 0.95


def test_one_of_the_possible_orders_is_the_one_that_was_found():
    """Of two cases half of all orders are right, so that no p value is below 0.5."""
    two = np.array([100.0, 200.0])

    assert chance_of_ranks(two, two, np.random.default_rng(0)) == pytest.approx(0.5, abs=0.03)


def test_a_gain_over_the_baseline_is_judged_case_by_case():
    rng = np.random.default_rng(0)
    reported = rng.gamma(2, 200, 40)
    near, far = reported + rng.normal(0, 20, 40), reported + rng.normal(0, 200, 40)

    assert chance_of_gain(reported, near, far, rng) < 0.001
    assert chance_of_gain(reported, far, near, rng) > 0.999
    assert chance_of_gain(reported, far, far, rng) == 1


@pytest.mark.parametrize(
    "figure", [chance_of_ranks, lambda a, b, r: chance_of_gain(a, b, a + 300, r)]
)
def test_p_values_of_pure_chance_are_even(figure):
    """Without an effect, five p values in a hundred are below 0.05."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(200):
        reported = rng.normal(500, 100, 25)
        predicted = (
            rng.normal(500, 100, 25)
            if figure is chance_of_ranks
            else (reported + 300 * rng.choice([-1, 1], 25))
        )
        values.append(figure(reported, predicted, rng))

    assert np.mean(np.array(values) < 0.05) < 0.1


def test_the_concordance_index_by_hand():
    # known orders: 1 before 2, 3, 4; 3 before 4. Patient 2 was alive at 200 days.
    days, died = np.array([100.0, 200, 300, 400]), np.array([True, False, True, True])

    assert concordance(days, died, days) == 1
    assert concordance(days, died, -days) == 0
    assert concordance(days, died, np.full(4, 7.0)) == 0.5
    # 1 before 2 is wrong, the other three are right
    assert concordance(days, died, np.array([150.0, 100, 300, 400])) == 0.75


def test_without_a_known_order_the_concordance_index_is_that_of_chance():
    days = np.array([100.0, 200])

    assert concordance(days, np.array([False, False]), days) == 0.5


def test_the_interval_of_the_concordance_index_is_over_patients():
    rng = np.random.default_rng(0)
    days, died = rng.gamma(2, 200, 12), rng.random(12) < 0.7
    predicted = days + rng.normal(0, 200, 12)
    names = list("abcdefghijkl")

    once = concordance_estimate(days, died, predicted, names, np.random.default_rng(1))
    twice = concordance_estimate(
        *(np.repeat(values, 2) for values in (days, died, predicted)),
        [name for name in names for _ in range(2)],
        np.random.default_rng(1),
    )

    assert once.low < once.value < once.high
    assert (once.low, once.high) == pytest.approx((twice.low, twice.high))
