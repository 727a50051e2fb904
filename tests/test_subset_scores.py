"""Test how the loss of Dice without some modalities is summed, pooled and put into words."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from brats_seg.evaluation.scores import AllSubsetScores, SubsetScores, absent_from, pooled
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS

RNG = np.random.default_rng(0)
STORED = TypeAdapter(AllSubsetScores)
"""Scores as the card of a model stores them."""
DICE, DICE_OF_ALL = RNG.uniform(size=(2, 7, 3))


def test_there_are_fourteen_subsets_of_one_to_three_modalities_in_their_order() -> None:
    assert len({*MODALITY_SUBSETS}) == 14
    assert [len(subset) for subset in MODALITY_SUBSETS] == [3] * 4 + [2] * 6 + [1] * 4
    for subset in MODALITY_SUBSETS:
        assert list(subset) == sorted(subset, key=MODALITIES.index)


def test_the_cases_of_several_runs_are_pooled_as_if_they_were_one() -> None:
    parts = [
        SubsetScores.of_cases(subset, DICE[cases], DICE_OF_ALL[cases])
        for cases in (slice(0, 2), slice(2, 7))
        for subset in (("t2f",), ("t1n", "t1c"))
    ]

    pair, single = pooled(parts)

    assert (pair.modalities, single.modalities) == (("t1n", "t1c"), ("t2f",))
    assert single.n_cases == 7
    loss = DICE_OF_ALL - DICE
    assert single.mean_dice == pytest.approx(DICE.mean(axis=0))
    assert single.mean_loss == pytest.approx(loss.mean(axis=0))
    assert single.std_loss == pytest.approx(loss.std(axis=0, ddof=1))


def test_one_case_has_no_spread_and_missing_modalities_are_named_in_their_order() -> None:
    scores = SubsetScores.of_cases(("t1c",), DICE[:1], np.add(DICE[:1], [[0.25, -0.004, -0.5]]))

    assert scores.std_loss is None
    assert str(scores) == "WT 0.25 lower, TC 0.00 lower, ET 0.50 higher on 1 held-out case"
    assert absent_from(("t2f", "t1c")) == ("t1n", "t2w")
    assert absent_from(MODALITIES) == ()


def test_damaged_scores_are_refused() -> None:
    stored = SubsetScores.of_cases(("t1c",), DICE, DICE_OF_ALL).model_dump()

    assert STORED.validate_python([stored])[0].n_cases == 7
    for wrong in ({"n_cases": 0}, {"loss_sum": (1.0, float("nan"), 0.0)}, {"unknown": 1}):
        with pytest.raises(ValidationError):
            STORED.validate_python([{**stored, **wrong}])
    with pytest.raises(ValidationError):
        STORED.validate_python([stored] * 15)
