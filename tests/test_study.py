"""Features and outcomes together."""

import numpy as np
import pytest

from brats_seg.survival.cross_validation import Study
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.models import BASELINE
from tests.survival_builders import make_feature_table, make_outcomes

NO, YES, UNKNOWN = Leakage.NO, Leakage.YES, Leakage.UNKNOWN


def study_of(values, columns, **given):
    outcomes = make_outcomes(range(1, len(values) + 1), ages=[50, 60, 70][: len(values)])
    return Study.of(make_feature_table(values, columns, **given), outcomes)


def test_age_and_resection_are_features():
    outcomes = make_outcomes([1, 2, 3], ages=[50, 60, 70], resections=["GTR", "STR", ""])

    study = Study.of(make_feature_table([[4.0], [5], [6]], ["wt_ml"]), outcomes)

    assert study.columns == ("age_years", "resection_gtr", "resection_str", "wt_ml")
    assert study.values.tolist() == [[50, 1, 0, 4], [60, 0, 1, 5], [70, 0, 0, 6]]


def test_the_age_of_the_outcomes_takes_the_place_of_that_of_the_table():
    study = study_of([[1.0, 4], [np.nan, 5], [3, 6]], ["age_years", "wt_ml"])

    assert study.columns == ("age_years", "wt_ml")
    assert study.values[:, 0].tolist() == [50, 60, 70]


def test_columns_that_say_nothing_are_left_out_by_name():
    nan = np.nan
    values = [[7.0, nan, 7, 1], [7, nan, nan, 2], [7, nan, 7, nan]]

    study = study_of(values, ["equal", "empty", "equal_or_empty", "good"])

    assert study.columns == ("age_years", "good")
    assert set(study.dropped) >= {"equal", "empty", "equal_or_empty", "resection_gtr"}


def test_the_baseline_has_the_age_and_nothing_else():
    study = study_of([[1.0], [2], [3]], ["x"])

    assert study.features_of(0, age_only=BASELINE.age_only).tolist() == [[50], [60], [70]]


def test_the_baseline_keeps_an_age_that_says_nothing():
    outcomes = make_outcomes([1, 2], ages=[np.nan, np.nan])

    study = Study.of(make_feature_table([[1.0], [2]]), outcomes)

    assert study.columns[0] == "age_years"


@pytest.mark.parametrize(("encoder", "expected"), [(0, [1, 5]), (1, [1, 8])])
def test_the_vectors_of_two_autoencoders_are_never_mixed(encoder, expected):
    values = [[1.0, 5, 8], [2, 6, 9], [3, 7, 10]]
    study = study_of(values, ["x", "latent0_000", "latent1_000"], latent_leakage=[(NO, YES)] * 3)

    assert study.features_of(encoder)[0].tolist() == [50, *expected]


def test_each_case_has_the_autoencoder_that_has_not_seen_it():
    seen = [(NO, YES), (YES, NO), (YES, UNKNOWN)]
    study = study_of([[1.0], [2], [3]], ["x"], latent_leakage=seen)

    assert study.encoders.tolist() == [0, 1, 1]


def test_without_autoencoders_all_cases_are_alike():
    assert study_of([[1.0], [2], [3]], ["x"]).encoders.tolist() == [0, 0, 0]
