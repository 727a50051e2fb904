"""Test how settings of the user, fitted settings and defaults are combined."""

import json
import pickle

import pytest
from pydantic import ValidationError

from brats_seg.config import OVERLAP
from brats_seg.inference.settings import PredictionSettings, prediction_settings
from brats_seg.runtime.weights import NOT_FITTED, Decoding, FittedPrediction

FITTED = FittedPrediction(
    window=(32, 32, 32), decoding=Decoding(thresholds=(0.3, 0.4, 0.5), smallest_et_mm3=50)
)


def test_what_is_asked_for_wins_over_what_is_stored_and_that_over_the_default() -> None:
    asked = prediction_settings({"thresholds": (0.5, 0.5, 0.5)})

    completed = asked.over(FITTED)

    assert completed.decoding.thresholds == (0.5, 0.5, 0.5)
    assert completed.decoding.smallest_et_mm3 == 50
    assert completed.decoding.smallest_mm3 == (0, 0, 0)
    assert completed.window == (32, 32, 32)
    assert completed.least_overlap == OVERLAP
    assert asked.over(NOT_FITTED) == PredictionSettings(
        decoding=Decoding(**asked.over(NOT_FITTED).decoding.model_dump())
    )


@pytest.mark.parametrize(
    ("given", "fitted", "expected"),
    [
        ({}, "whole", ("whole", None)),
        ({}, (8, 8, 8), ("auto", (8, 8, 8))),
        ({}, None, ("auto", None)),
        ({"windows": "whole"}, (8, 8, 8), ("whole", None)),
        ({}, "centre", ("centre", None)),
        ({"windows": "whole"}, "centre", ("whole", None)),
        ({"window": (4, 4, 4)}, "centre", ("auto", (4, 4, 4))),
        ({"windows": "sliding"}, "whole", ("sliding", None)),
        ({"windows": "sliding"}, (8, 8, 8), ("sliding", (8, 8, 8))),
        ({"window": (4, 4, 4)}, "whole", ("auto", (4, 4, 4))),
    ],
)
def test_windows_are_completed_by_the_one_that_was_fitted(given, fitted, expected) -> None:
    completed = prediction_settings(given).over(FittedPrediction(window=fitted))

    assert (completed.windows, completed.window) == expected


def test_a_fitted_overlap_is_that_of_the_fitted_window_alone() -> None:
    fitted = FittedPrediction(window=(32, 32, 32), overlap=0.25)

    assert PredictionSettings().over(fitted).least_overlap == 0.25
    assert PredictionSettings(overlap=0.75).over(fitted).least_overlap == 0.75
    assert PredictionSettings(window=(64, 64, 64)).over(fitted).least_overlap == OVERLAP


def test_windows_in_words() -> None:
    fitted = FittedPrediction(window=(32, 32, 16), overlap=0.25)
    centre = PredictionSettings().over(FittedPrediction(window="centre"))

    assert PredictionSettings().over(fitted).window_words() == "32x32x16 voxels, overlap 0.25"
    assert centre.window_words() == "the whole brain in one pass, with the statistics of its centre"


def test_a_default_that_is_asked_for_is_not_the_same_as_none() -> None:
    """It overrides the stored value, so that caches and records must distinguish the two."""
    asked = PredictionSettings(decoding=Decoding(smallest_et_mm3=0))

    assert asked != PredictionSettings()
    assert hash(asked) != hash(PredictionSettings())
    assert asked == pickle.loads(pickle.dumps(asked))


def test_json_is_flat_and_null_where_nothing_is_asked_for() -> None:
    settings = prediction_settings({"thresholds": (0.4, 0.5, 0.6), "device": "cpu"})

    text = settings.model_dump_json(exclude={"device", "layout", "report"})

    # finished predictions are recognised by it
    assert text == (
        '{"precision":"auto","windows":"auto","window":null,"overlap":null,"tta":false,'
        '"thresholds":[0.4,0.5,0.6],"smallest_mm3":null,"smallest_et_mm3":null,"labels":null,'
        '"probabilities":false,"uncertainty":false,"preview":true}'
    )
    assert PredictionSettings.model_validate_json(settings.model_dump_json()) == settings
    assert PredictionSettings.model_validate(json.loads(text) | {"device": "cpu"}) == settings


def test_what_is_not_given_is_left_alone_and_what_is_unknown_refused() -> None:
    assert prediction_settings({"overlap": None, "tta": True}) == PredictionSettings(tta=True)
    with pytest.raises(ValidationError, match="speed"):
        PredictionSettings(speed=3)
