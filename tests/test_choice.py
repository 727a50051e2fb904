"""A default is left only where another value is better by more than chance."""

import numpy as np
import pytest

from brats_seg.evaluation.significance import best_candidate, gain_of


def test_a_gain_is_counted_case_by_case() -> None:
    before = np.array([0.5, 0.5, 0.5, 0.5])
    after = np.array([0.625, 0.5, 0.25, 1.0])

    gain = gain_of(before, after)

    # differences 1/8, 0, -1/4, 1/2; ranks 1, -, 2, 3: of the 8 ways to draw signs, 3 reach a sum of
    # 4 in those that rise: +++, -++ and +-+
    assert gain.mean == pytest.approx(0.375 / 4)
    assert (gain.n_raised, gain.n_lowered) == (2, 1)
    assert gain.p_value == pytest.approx(3 / 8)
    assert not gain.is_sure


def test_nothing_gained_is_no_gain() -> None:
    assert gain_of(np.ones(9), np.ones(9)).p_value == 1.0


def test_the_largest_sure_gain_is_taken_and_the_first_of_equals() -> None:
    default = np.full(10, 0.5)
    small, large = default + 0.01, default + 0.02
    # on average better than all, by one case alone
    lucky = default + np.array([0.9] + [0.0] * 9)

    assert best_candidate(default, [small, lucky, large, large.copy()]) == 2
    assert best_candidate(default, [lucky]) is None
    assert best_candidate(default, []) is None


@pytest.mark.parametrize(
    ("differences", "is_sure"),
    [
        ([0.01] * 9, True),  # all of nine: chance is 1 in 512
        ([0.01] * 8, False),
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
def test_what_is_sure(differences: list[float], is_sure: bool) -> None:
    before = np.zeros(len(differences))

    assert gain_of(before, np.array(differences)).is_sure == is_sure


@pytest.mark.parametrize("n_cases", [6, 10, 40])
def test_noise_rarely_wins(n_cases: int) -> None:
    """Twelve candidates that are no better, a hundred times."""
    rng = np.random.default_rng(0)
    won = 0
    for _ in range(100):
        default = rng.normal(0.8, 0.1, n_cases)
        candidates = [default + rng.normal(0, 0.02, n_cases) for _ in range(12)]
        won += best_candidate(default, candidates) is not None

    assert won <= 6
