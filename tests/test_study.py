"""Test studies of survival and nested cross-validation."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from brats_seg.cases.folds import FoldRow, FoldTable
from brats_seg.errors import FoldError, UsageError
from brats_seg.survival import study as study_module
from brats_seg.survival.study import SELECTED, Study, cross_validate
from tests.survival_builders import make_feature_table, make_outcomes, make_plan, make_study


def test_age_and_resection_are_features_and_columns_without_information_are_dropped():
    nan = np.nan
    values = [[1.0, 4, 7, nan, 7], [nan, 5, 7, nan, nan], [3, 6, 7, nan, 7]]
    names = ["age_years", "wt_ml", "equal", "empty", "equal_or_empty"]
    outcomes = make_outcomes([1, 2, 3], ages=[50, 60, 70], resections=["GTR", "STR", ""])

    study = Study.of(make_feature_table(values, names), outcomes)

    assert study.features.columns.tolist() == [
        "age_years",
        "resection_gtr",
        "resection_str",
        "wt_ml",
    ]
    assert study.features.to_numpy().tolist() == [[50, 1, 0, 4], [60, 0, 1, 5], [70, 0, 0, 6]]
    assert study.dropped == ("equal", "empty", "equal_or_empty")


def test_the_baseline_keeps_an_age_without_information():
    outcomes = make_outcomes([1, 2], ages=[np.nan, np.nan])

    study = Study.of(make_feature_table([[1.0], [2]]), outcomes)

    assert study.features.columns[0] == "age_years"
    assert "resection_gtr" in study.dropped


def fold_table(case_ids, n_folds=3):
    rows = (
        FoldRow(case_id=case_id, patient_id=case_id, fold=index % n_folds)
        for index, case_id in enumerate(case_ids)
    )
    return FoldTable(rows=tuple(rows))


@pytest.fixture
def fitted(monkeypatch):
    """Record the cases of each fit by their last feature, which numbers them."""
    seen = []

    def record(family, features, outcomes, splits):
        seen.append((family.name, features.copy(), outcomes.copy(), splits))
        value = outcomes[:, 1].sum() if family.name == "cox" else np.median(outcomes)
        return SimpleNamespace(predict=lambda rows: np.full(len(rows), value), best_score_=-1.0)

    monkeypatch.setattr(study_module, "fit_family", record)
    return seen


def numbered(n_cases=12, patient_ids=None, **outcomes):
    """Return a study whose only feature is the number of the case."""
    table = make_feature_table(np.arange(n_cases)[:, None], ["number"], patient_ids=patient_ids)
    return Study.of(table, make_outcomes(np.arange(1.0, n_cases + 1) * 100, **outcomes))


def numbers(features):
    return set(features[:, -1].astype(int).tolist())


def trained(fitted, family):
    return [numbers(features) for name, features, _, _ in fitted if name == family]


HELD_OUT = [{number for number in range(12) if number % 3 == fold} for fold in range(3)]


def test_no_case_is_predicted_by_a_model_that_saw_it(fitted):
    study = numbered()

    cross_validate(study, make_plan(with_cox=True), fold_table(study.table["case_id"]))

    assert trained(fitted, "ridge") == [set(range(12)) - held for held in HELD_OUT]
    assert trained(fitted, "cox") == trained(fitted, "ridge")
    # the baseline has the age and nothing else
    assert {features.shape[1] for name, features, _, _ in fitted if name == "age"} == {1}


def test_only_the_cox_model_is_trained_on_censored_cases(fitted):
    study = numbered(censored=[number in {2, 5} for number in range(12)])

    predictions = cross_validate(
        study, make_plan(with_cox=True), fold_table(study.table["case_id"])
    )

    assert all(not {2, 5} & cases for cases in trained(fitted, "ridge"))
    assert all(not {300, 600} & set(o) for name, _, o, _ in fitted if name == "ridge")
    assert (predictions.days > 0).all(axis=None)
    assert predictions.held_out.all()
    assert trained(fitted, "cox") == [set(range(12)) - held for held in HELD_OUT]
    assert predictions.log_hazards.tolist() == [6, 6, 8] * 4


def test_a_case_of_unknown_outcome_is_predicted_by_a_model_of_all_deaths(fitted):
    days = np.arange(1.0, 13) * 100
    days[7] = np.nan
    study = replace(numbered(), outcomes=make_outcomes(days))

    predictions = cross_validate(study, make_plan(), fold_table(study.table["case_id"]))

    assert trained(fitted, "ridge")[-1] == set(range(12)) - {7}
    assert not predictions.held_out[7]
    assert predictions.days[SELECTED][7] == np.nanmedian(days)


def test_all_cases_of_a_patient_are_held_out_together(fitted):
    patients = [f"P{number // 2}" for number in range(12)]

    cross_validate(numbered(patient_ids=patients), make_plan(n_folds=3, n_repeats=2, with_cox=True))

    for name, features, _, splits in fitted:
        if name != "age":
            cases = numbers(features)
            assert all((number ^ 1) in cases for number in cases)
            of_row = [patients[int(number)] for number in features[:, -1]]
            for train, held in splits:
                assert not {of_row[row] for row in train} & {of_row[row] for row in held}


def test_the_seed_decides():
    study = make_study(n_cases=16)

    first, again, other = (cross_validate(study, make_plan(seed=seed)) for seed in (0, 0, 1))

    assert first.days.columns.tolist() == [SELECTED, "age", "ridge"]
    assert first.days.equals(again.days)
    assert not first.days.equals(other.days)


def test_an_effect_is_found_and_the_only_family_is_selected():
    study = make_study(effect=0.95)

    predictions = cross_validate(study, make_plan(n_repeats=2))

    days = np.log(study.outcomes["days"])
    assert np.corrcoef(np.log(predictions.days["ridge"]), days)[0, 1] > 0.7
    assert predictions.days[SELECTED].equals(predictions.days["ridge"])
    assert predictions.n_chosen == {"ridge": 8}


def test_with_the_cox_model_the_days_are_the_same():
    study = make_study(n_cases=16, effect=0.9)

    without, beside = (cross_validate(study, make_plan(with_cox=cox)) for cox in (False, True))

    assert without.days.equals(beside.days)
    assert without.log_hazards is None
    assert np.corrcoef(beside.log_hazards, np.log(study.outcomes["days"]))[0, 1] < -0.4


@pytest.mark.parametrize(
    ("study", "n_folds", "folds", "error", "message"),
    [
        (
            make_study(n_cases=12),
            4,
            ["case000", "x", "y"],
            FoldError,
            r"no row for 11 cases .*such as case001\. Give the fold table",
        ),
        (make_study(n_cases=3), 4, None, UsageError, r"3 patients .*too few for 4 folds"),
        (make_study(n_cases=5), 6, None, UsageError, r"too few for 6 folds; expected 6 at least"),
        (
            numbered(censored=[number % 3 != 0 for number in range(12)]),
            4,
            [f"case{number:03d}" for number in range(12)],
            FoldError,
            r"fold 0 is held out with only 0 deaths in the other folds",
        ),
    ],
)
def test_folds_that_cannot_be_used_are_refused(study, n_folds, folds, error, message):
    with pytest.raises(error, match=message):
        cross_validate(study, make_plan(n_folds=n_folds), folds and fold_table(folds))
