"""Which networks know a case."""

import pytest

from brats_seg.survival.leakage import Leakage, least_leakage

NO, UNKNOWN, YES = Leakage.NO, Leakage.UNKNOWN, Leakage.YES


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([NO], ((0,), NO)),
        ([YES, NO, YES, NO], ((1, 3), NO)),
        ([YES, UNKNOWN, YES], ((1,), UNKNOWN)),
        ([YES, YES], ((0, 1), YES)),
        ([UNKNOWN, NO], ((1,), NO)),
    ],
)
def test_those_that_know_it_least_are_taken(answers, expected):
    assert least_leakage(answers) == expected
