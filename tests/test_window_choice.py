"""Test which of the windows that were tried is chosen."""

import numpy as np
import pytest

from brats_seg.evaluation.significance import FEWEST_CASES
from brats_seg.inference.window_choice import chosen_window

DEFAULT = np.linspace(0.6, 0.8, FEWEST_CASES)
UP_AND_DOWN = 0.05 * (-1.0) ** np.arange(FEWEST_CASES)


@pytest.mark.parametrize(
    ("gains", "seconds", "expected"),
    [
        # the fastest of those that lose at most 0.001 against the best
        ([0, -0.0005, -0.002], [9, 5, 2], 1),
        ([0, 0.004, 0.0035], [9, 5, 2], 2),
        # the best is not the default: what is within 0.001 of the default alone is not enough
        ([0, 0.02, 0.0], [9, 10, 2], 1),
        # as fast but for noise: the better one
        ([0, -0.0005, 0.0], [9, 2, 2.05], 2),
        # nothing gained, nothing saved
        ([0, 0.0, -0.0005], [2, 9, 9], 0),
    ],
)
def test_the_fastest_window_without_a_loss_is_chosen(gains, seconds, expected) -> None:
    scores = np.stack([DEFAULT + gain for gain in gains])

    assert chosen_window(scores, np.array(seconds)) == expected


def test_a_slower_window_must_be_better_by_more_than_chance() -> None:
    scores = np.stack([DEFAULT, DEFAULT + 0.02 + UP_AND_DOWN])

    assert chosen_window(scores, np.array([2.0, 3.0])) == 0
    assert chosen_window(scores, np.array([3.0, 2.0])) == 1


def test_few_cases_keep_the_default() -> None:
    scores = np.stack([DEFAULT, DEFAULT + 0.1])[:, 1:]

    assert chosen_window(scores, np.array([9.0, 1.0])) == 0
