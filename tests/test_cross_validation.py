"""Test studies of survival and nested cross-validation."""

from dataclasses import replace

import numpy as np
import pytest

from brats_seg.cases.folds import FoldRow, FoldTable
from brats_seg.errors import FoldError, UsageError
from brats_seg.survival import cross_validation as cross_validation
from brats_seg.survival.cross_validation import SELECTED, Study, cross_validate
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.models import BASELINE
from tests.survival_builders import make_feature_table, make_outcomes, make_plan, make_study

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


def test_columns_without_information_are_dropped_and_named():
    nan = np.nan
    values = [[7.0, nan, 7, 1], [7, nan, nan, 2], [7, nan, 7, nan]]

    study = study_of(values, ["equal", "empty", "equal_or_empty", "good"])

    assert study.columns == ("age_years", "good")
    assert set(study.dropped) >= {"equal", "empty", "equal_or_empty", "resection_gtr"}


def test_the_baseline_has_the_age_and_nothing_else():
    study = study_of([[1.0], [2], [3]], ["x"])

    assert study.features_of(0, age_only=BASELINE.age_only).tolist() == [[50], [60], [70]]


def test_the_baseline_keeps_an_age_without_information():
    outcomes = make_outcomes([1, 2], ages=[np.nan, np.nan])

    study = Study.of(make_feature_table([[1.0], [2]]), outcomes)

    assert study.columns[0] == "age_years"


@pytest.mark.parametrize(("encoder", "expected"), [(0, [1, 5]), (1, [1, 8])])
def test_the_vectors_of_two_autoencoders_are_never_mixed(encoder, expected):
    values = [[1.0, 5, 8], [2, 6, 9], [3, 7, 10]]
    study = study_of(values, ["x", "latent0_000", "latent1_000"], latent_leakage=[(NO, YES)] * 3)

    assert study.features_of(encoder)[0].tolist() == [50, *expected]


def test_each_case_has_the_autoencoder_that_was_not_trained_on_it():
    seen = [(NO, YES), (YES, NO), (YES, UNKNOWN)]
    study = study_of([[1.0], [2], [3]], ["x"], latent_leakage=seen)

    assert study.encoders.tolist() == [0, 1, 1]


def test_without_autoencoders_all_cases_are_alike():
    assert study_of([[1.0], [2], [3]], ["x"]).encoders.tolist() == [0, 0, 0]


def fold_table(case_ids, n_folds=3, patient_ids=None):
    return FoldTable(
        rows=tuple(
            FoldRow(case_id=case_id, patient_id=patient, fold=place % n_folds)
            for place, (case_id, patient) in enumerate(
                zip(case_ids, patient_ids or case_ids, strict=True)
            )
        )
    )


@pytest.fixture
def fitted(monkeypatch):
    """Record the cases of each fit by their first feature, which numbers them."""
    seen = []

    def record(family, features, days, splits, seed):
        seen.append((family.name, features.copy(), days.copy(), splits))
        return cross_validation.FittedModel(model=_Median(float(np.median(days))), error_days=1.0)

    monkeypatch.setattr(cross_validation, "fit_family", record)
    return seen


class _Median:
    def __init__(self, days):
        self.days = days

    def predict(self, features):
        return np.full(len(features), self.days)


def numbered(n_cases=12, **outcomes):
    """Return a study whose only feature is the number of the case."""
    table = make_feature_table(np.arange(n_cases)[:, None], ["number"])
    return Study.of(table, make_outcomes(np.arange(1.0, n_cases + 1) * 100, **outcomes))


def numbers(features):
    return set(features[:, -1].astype(int).tolist())


def test_no_case_is_predicted_by_a_model_that_saw_it(fitted):
    study = numbered()
    table = fold_table(study.table.case_ids)

    cross_validate(study, make_plan(), table)

    trained = [numbers(features) for name, features, _, _ in fitted if name == "ridge"]
    held_out = [{row_number for row_number in range(12) if row_number % 3 == f} for f in range(3)]
    assert trained == [set(range(12)) - held for held in held_out]


def test_a_censored_case_is_predicted_and_never_trained_on(fitted):
    censored = [number in {2, 5} for number in range(12)]
    study = numbered(censored=censored)

    predictions = cross_validate(study, make_plan(), fold_table(study.table.case_ids))

    assert all(not {2, 5} & numbers(features) for name, features, _, _ in fitted if name == "ridge")
    assert all(not {300, 600} & set(days) for _, _, days, _ in fitted)
    assert (predictions.days > 0).all()
    assert predictions.held_out.all()


def test_a_case_of_unknown_outcome_is_predicted_by_a_model_of_all_deaths(fitted):
    study = numbered()
    days = study.outcomes.days.copy()
    days[7] = np.nan
    study = replace(study, outcomes=replace(study.outcomes, days=days))

    predictions = cross_validate(study, make_plan(), fold_table(study.table.case_ids))

    assert numbers(fitted[-1][1]) == set(range(12)) - {7}
    assert predictions.folds[7] is None
    assert predictions.days[0, 7] == np.median(np.delete(days, 7))


def test_all_cases_of_a_patient_are_held_out_together(fitted):
    patients = [f"P{number // 2}" for number in range(12)]
    table = make_feature_table(np.arange(12)[:, None], ["number"], patient_ids=patients)
    study = Study.of(table, make_outcomes(np.arange(1.0, 13) * 100))

    cross_validate(study, make_plan(n_folds=3, n_repeats=2))

    for name, features, _, splits in fitted:
        if name == "ridge":
            places = numbers(features)
            assert all((number ^ 1) in places for number in places)
            of_row = [patients[int(number)] for number in features[:, -1]]
            for train, held in splits:
                assert not {of_row[row] for row in train} & {of_row[row] for row in held}


def test_each_case_is_predicted_from_an_autoencoder_not_trained_on_it(fitted):
    """Latent vectors of two networks in one column would have different meanings."""
    yes, no = Leakage.YES, Leakage.NO
    seen = [(no, yes) if number % 2 else (yes, no) for number in range(12)]
    values = np.stack([np.arange(12) + 100, np.arange(12) + 200], axis=1)
    table = make_feature_table(values, ["latent0_000", "latent1_000"], latent_leakage=seen)
    study = Study.of(table, make_outcomes(np.arange(1.0, 13) * 100))
    folds = FoldTable(
        rows=tuple(
            FoldRow(case_id=case_id, patient_id=case_id, fold=place // 6)
            for place, case_id in enumerate(table.case_ids)
        )
    )

    cross_validate(study, make_plan(), folds)

    fits = [features[:, -1] for name, features, _, _ in fitted if name == "ridge"]
    # two folds, and in each cases of both networks
    assert len(fits) == 4
    assert sorted({int(latent.min()) // 100 for latent in fits}) == [1, 2]
    assert all(int(latent.min()) // 100 == int(latent.max()) // 100 for latent in fits)


def test_the_seed_decides_and_the_order_of_families_stays():
    study = make_study(n_cases=16)

    first, again, other = (cross_validate(study, make_plan(seed=seed)) for seed in (0, 0, 1))

    assert first.names == (SELECTED, "age", "ridge")
    assert np.array_equal(first.days, again.days)
    assert not np.array_equal(first.days, other.days)


def test_with_one_family_that_one_is_selected():
    predictions = cross_validate(make_study(n_cases=16), make_plan(n_repeats=2))

    assert np.array_equal(predictions.of(SELECTED), predictions.of("ridge"))
    assert predictions.chosen == (("ridge", 8),)


def test_an_effect_is_found():
    study = make_study(effect=0.95)

    predictions = cross_validate(study, make_plan())

    assert np.corrcoef(np.log(predictions.of("ridge")), np.log(study.outcomes.days))[0, 1] > 0.7


def test_a_fold_table_of_other_cases_is_refused():
    study = make_study(n_cases=12)

    with pytest.raises(
        FoldError, match=r"no row for 11 cases .*such as case001\. Give the fold table"
    ):
        cross_validate(study, make_plan(), fold_table([*study.table.case_ids[:1], "x", "y"]))


@pytest.mark.parametrize(
    ("n_cases", "message"),
    [
        (3, r"3 patients .*too few for 4 folds; expected 4 at least\. Give more cases\.$"),
        (5, r"5 patients .*too few for 6 folds; expected 6 .* or n_folds=5\.$"),
    ],
)
def test_too_few_deaths_are_refused(n_cases, message):
    with pytest.raises(UsageError, match=message):
        cross_validate(make_study(n_cases=n_cases), make_plan(n_folds=max(4, n_cases + 1)))


def test_a_fold_that_holds_all_deaths_is_an_error():
    study = numbered(censored=[number % 3 != 0 for number in range(12)])

    with pytest.raises(
        FoldError, match=r"fold 0 is held out with only 0 deaths in the other folds"
    ):
        cross_validate(study, make_plan(), fold_table(study.table.case_ids))


@pytest.fixture
def cox_fitted(monkeypatch):
    """Record the cases of each fit of a Cox model; it predicts how many deaths it learnt from."""
    seen = []

    def record(features, days, died, splits):
        seen.append((features.copy(), died.copy(), splits))
        return _Median(float(died.sum()))

    monkeypatch.setattr(cross_validation, "fit_cox", record)
    return seen


def with_cox(**settings):
    return replace(make_plan(**settings), with_cox=True)


@pytest.mark.usefixtures("fitted")
def test_the_cox_model_learns_from_deaths_and_censored_cases_of_the_other_folds(cox_fitted):
    study = numbered(censored=[number in {2, 5} for number in range(12)])

    predictions = cross_validate(study, with_cox(), fold_table(study.table.case_ids))

    held_out = [{number for number in range(12) if number % 3 == fold} for fold in range(3)]
    assert [numbers(features) for features, _, _ in cox_fitted] == [
        set(range(12)) - held for held in held_out
    ]
    assert predictions.log_hazards.tolist() == [6, 6, 8] * 4


@pytest.mark.usefixtures("fitted")
def test_all_scans_of_a_patient_are_in_one_inner_fold_of_the_cox_model(cox_fitted):
    patients = [f"P{number // 2}" for number in range(12)]
    table = make_feature_table(np.arange(12)[:, None], ["number"], patient_ids=patients)
    study = Study.of(table, make_outcomes(np.arange(1.0, 13) * 100))

    cross_validate(study, with_cox(n_folds=3))

    for features, _, splits in cox_fitted:
        of_row = [patients[int(number)] for number in features[:, -1]]
        for train, held in splits:
            assert not {of_row[row] for row in train} & {of_row[row] for row in held}


@pytest.mark.usefixtures("fitted")
def test_each_hazard_comes_from_an_autoencoder_that_was_not_trained_on_the_case(cox_fitted):
    yes, no = Leakage.YES, Leakage.NO
    seen = [(no, yes) if number % 2 else (yes, no) for number in range(12)]
    values = np.stack([np.arange(12) + 100, np.arange(12) + 200], axis=1)
    table = make_feature_table(values, ["latent0_000", "latent1_000"], latent_leakage=seen)
    study = Study.of(table, make_outcomes(np.arange(1.0, 13) * 100))

    cross_validate(study, with_cox(n_folds=3))

    latents = [features[:, -1] for features, _, _ in cox_fitted]
    assert {int(latent.min()) // 100 for latent in latents} == {1, 2}
    assert all(int(latent.min()) // 100 == int(latent.max()) // 100 for latent in latents)


def test_with_the_cox_model_the_days_are_the_same():
    study = make_study(n_cases=16, effect=0.9)

    without, beside = (cross_validate(study, plan) for plan in (make_plan(), with_cox()))

    assert np.array_equal(without.days, beside.days)
    assert without.log_hazards is None
    order = np.corrcoef(beside.log_hazards, np.log(study.outcomes.days))[0, 1]
    assert order < -0.4
