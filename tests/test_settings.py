"""Test how settings of the user, fitted settings and defaults are combined."""

import json

import pytest

from brats_seg.errors import ConfigError
from brats_seg.inference.model import resolve
from brats_seg.inference.settings import PredictionSettings, prediction_settings
from brats_seg.runtime.weights import Decoding
from brats_seg.runtime.windows import Window

DEFAULT = Window(size=(12, 12, 12), overlap=0.25)
FITTED = Decoding(thresholds=(0.3, 0.4, 0.5), smallest_mm3=(9, 8, 7), smallest_et_mm3=200)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, DEFAULT),
        ({"window": "auto"}, DEFAULT),
        ({"window": "whole"}, Window(size=None, overlap=0.25)),
        ({"window": "8,8,4"}, Window(size=(8, 8, 4), overlap=0.25)),
        ({"window": (8, 8, 8), "overlap": 0.75}, Window(size=(8, 8, 8), overlap=0.75)),
        ({"overlap": 0}, Window(size=(12, 12, 12), overlap=0)),
    ],
)
def test_a_window_that_is_given_replaces_the_default(given: dict, expected: Window) -> None:
    window, decoding = resolve(prediction_settings(given), FITTED, DEFAULT)

    assert (window, decoding) == (expected, FITTED)


@pytest.mark.parametrize(
    ("name", "value"),
    [("thresholds", (0.5, 0.5, 0.5)), ("smallest_mm3", (0, 0, 0)), ("smallest_et_mm3", 0)],
)
def test_a_default_that_is_given_replaces_what_was_fitted(name: str, value: object) -> None:
    settings = prediction_settings({name: value})

    assert resolve(settings, FITTED, DEFAULT)[1] == FITTED.model_copy(update={name: value})
    # results must be told apart
    assert settings != PredictionSettings()
    assert settings.result_text != PredictionSettings().result_text


def test_finished_predictions_are_recognised_by_what_they_depend_on() -> None:
    settings = prediction_settings({"thresholds": (0.4, 0.5, 0.6), "device": "cpu", "labels": None})

    names = {*PredictionSettings.model_fields} - {"device", "report"}
    assert {*json.loads(settings.result_text)} == names
    assert PredictionSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": "brats1999"}, "setting labels: expected 'brats2017'.*got 'brats1999'"),
        ({"thresholds": ["0.5", "2", "0.5"]}, r"setting thresholds\.1: .* less than 1"),
        ({"window": ["64", "64"]}, "setting window: expected three positive whole numbers"),
        ({"window": "a,64,64"}, "setting window: expected three positive whole numbers"),
        ({"window": "centre"}, "setting window: .* or 'whole'"),
        ({"overlap": 1.0}, r"setting overlap: .* less than 1"),
        ({"overlp": 0.5}, "setting overlp is unknown; .* Did you mean overlap?"),
    ],
)
def test_settings_out_of_range_are_named(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prediction_settings(given)
