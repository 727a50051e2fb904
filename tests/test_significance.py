"""Test intervals, p values and the choice between settings."""

from itertools import permutations, product

import numpy as np
import pytest

from brats_seg.evaluation import significance
from brats_seg.evaluation.significance import Values, best_candidate, bootstrap_interval, gain_of


def mean(values: Values) -> Values:
    return values.mean(axis=-1)


def total(values: Values) -> Values:
    return values.sum(axis=-1)


def test_arrays_are_resampled_together_and_the_generator_decides() -> None:
    one = np.random.default_rng(1).random(20)

    def interval(values: list[Values]) -> tuple[Values, Values]:
        return bootstrap_interval(lambda a, b: mean(b - a), values, np.random.default_rng(5))

    assert interval([one, one + 1]) == pytest.approx((1, 1))
    assert interval([0 * one, one]) == interval([0 * one, one])


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3)])
def test_patients_are_resampled_with_all_of_their_cases(sizes: tuple[int, ...]) -> None:
    """The slow oracle draws patients one by one; they have one case, or up to three."""
    rng = np.random.default_rng(0)
    patients = [name for k, name in enumerate("abcdefghijkl") for _ in range(sizes[k % len(sizes)])]
    groups = patients if len(sizes) > 1 else None
    values = rng.random(len(patients))
    by_patient = [values[np.array(patients) == name] for name in dict.fromkeys(patients)]
    means = [
        np.concatenate([by_patient[k] for k in rng.integers(12, size=12)]).mean()
        for _ in range(20_000)
    ]
    ends = bootstrap_interval(mean, [values], rng, groups=groups, n_resamples=20_000)
    assert ends == pytest.approx(tuple(np.quantile(means, (0.025, 0.975))), abs=0.005)
    # one patient has an interval without width
    for groups in (["a"], ["a", "a"]):
        ends = bootstrap_interval(mean, [np.array([0.4] * len(groups))], rng, groups=groups)
        assert ends == (0.4, 0.4)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_permutations_are_all_tried(n: int, rng: np.random.Generator) -> None:
    one, other = rng.integers(-3, 5, n).astype(float), rng.permutation(n).astype(float)
    sums = [one @ np.array(signs) for signs in product((-1, 1), repeat=n)]
    products = [np.array(order) @ other for order in permutations(one)]
    p_value = significance.permutation_p_value
    flipped = p_value(total, one, rng, permutation_type="samples")
    shuffled = p_value(lambda v: v @ other, one, rng, permutation_type="pairings")
    assert flipped == np.mean(np.array(sums) >= one.sum())
    assert shuffled == np.mean(np.array(products) >= one @ other)


def test_p_values_at_the_ends(rng: np.random.Generator) -> None:
    """Random permutations count the values themselves; no difference proves nothing."""
    p_value = significance.permutation_p_value(total, np.ones(60), rng, permutation_type="samples")
    assert p_value == 1 / (significance.N_PERMUTATIONS + 1)
    assert significance.signed_rank_p_value(np.zeros(5)) == 1
    assert significance.signed_rank_p_value(np.array([0, 0.1, 0.2, 0.3])) == 2 / 8


def test_a_gain_is_counted_case_by_case() -> None:
    gain = gain_of(np.full(4, 0.5), np.array([0.625, 0.5, 0.25, 1.0]))
    # differences 1/8, 0, -1/4, 1/2; ranks 1, -, 2, 3: of the 8 ways to draw signs, 3 reach a sum of
    # 4 in those that rise: +++, -++ and +-+
    assert gain.mean == pytest.approx(0.375 / 4)
    assert (gain.n_raised, gain.n_lowered) == (2, 1)
    assert gain.p_value == pytest.approx(3 / 8)
    assert not gain.is_sure


def test_a_gain_in_every_case_has_the_least_p_value() -> None:
    for n_cases in (1, 4, significance.FEWEST_CASES - 1, significance.FEWEST_CASES, 12):
        for after in (np.full(n_cases, 0.01), 0.01 * np.arange(1, n_cases + 1)):
            gain = gain_of(np.zeros(n_cases), after)
            assert gain.p_value == 0.5**n_cases
            assert gain.is_sure == (n_cases >= significance.FEWEST_CASES)


def test_the_largest_sure_gain_is_taken_and_the_first_of_equals() -> None:
    default = np.full(10, 0.5)
    small, large = default + 0.01, default + 0.02
    # on average better than all, by one case alone
    lucky = default + np.array([0.9] + [0.0] * 9)
    assert best_candidate([default, small, lucky, large, large.copy()]) == 3
    assert best_candidate([default, lucky]) == 0
    assert best_candidate([default]) == 0


@pytest.mark.parametrize(
    ("differences", "is_sure"),
    [
        ([0.0009] * 30, False),  # too small to matter
        ([0.02, 0.01] * 5, True),
        ([0.05, -0.01] * 5, False),  # as many cases harmed as helped
        # nine cases of twenty go from 0 to 1, as when a false ET becomes necrosis; then six
        ([1.0] * 9 + [0.0] * 11, True),
        ([1.0] * 6 + [0.0] * 14, False),
        # two that fell from 1 to 0 undo it
        ([1.0] * 9 + [-1.0] * 2 + [0.0] * 9, False),
        # more cases harmed than helped, whatever the mean
        ([0.1] * 10 + [-0.001] * 11, False),
        ([0.1] * 30 + [-0.001] * 31, False),
    ],
)
def test_a_sure_gain_is_large_and_significant(differences: list[float], is_sure: bool) -> None:
    assert gain_of(np.zeros(len(differences)), np.array(differences)).is_sure == is_sure


def test_noise_rarely_wins() -> None:
    """Twelve candidates that are no better, a hundred times."""
    for n_cases in (6, 40):
        rng = np.random.default_rng(0)
        won = 0
        for _ in range(100):
            default = rng.normal(0.8, 0.1, n_cases)
            candidates = [default + rng.normal(0, 0.02, n_cases) for _ in range(12)]
            won += best_candidate([default, *candidates]) > 0
        assert won <= 6
