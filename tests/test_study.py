"""Test nested cross-validation, and fitting of one family of models of survival."""

from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.base import BaseEstimator
from sklearn.linear_model import LinearRegression, Ridge

from brats_seg.cases.folds import FoldRow, FoldTable
from brats_seg.errors import FoldError, UsageError
from brats_seg.survival import study as study_module
from brats_seg.survival.study import BASELINE, COX, FAMILIES, Family, Study, cross_validate
from tests.survival_builders import make_feature_table, make_outcomes, make_plan, make_study

Array = np.ndarray
Fits = list[tuple[str, Array, Array, study_module.Splits]]
DAYS = [float(day) for day in range(100, 1201, 100)]


def test_age_and_resection_are_features_and_columns_without_information_are_dropped():
    nan = np.nan
    values = [[1.0, 4, 7, nan, 7], [nan, 5, 7, nan, nan], [3, 6, 7, nan, 7]]
    table = make_feature_table(values, ["age_years", "wt_ml", "equal", "empty", "equal_or_empty"])
    study = Study.of(table, make_outcomes([1, 2, 3], None, [50, 60, 70], ["GTR", "STR", ""]))
    ageless = Study.of(table, make_outcomes([1, 2, 3], None, [nan, nan, nan]))
    names = ["age_years", "resection_gtr", "resection_str", "wt_ml"]
    assert study.features.columns.tolist() == names
    assert study.features.to_numpy().tolist() == [[50, 1, 0, 4], [60, 0, 1, 5], [70, 0, 0, 6]]
    # the baseline keeps an age without information
    assert ageless.features.columns.tolist() == ["age_years", "wt_ml"]


def fold_table(case_ids: list[str]) -> FoldTable:
    rows = [FoldRow(case_id=name, patient_id=name, fold=n % 3) for n, name in enumerate(case_ids)]
    return FoldTable(rows=tuple(rows))


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> Fits:
    fits: Fits = []

    def record(
        family: Family, features: Array, outcomes: Array, splits: study_module.Splits
    ) -> SimpleNamespace:
        fits.append((family.name, features.copy(), outcomes.copy(), splits))
        value = outcomes[:, 1].sum() if family is COX else np.median(outcomes)
        return SimpleNamespace(predict=lambda rows: np.full(len(rows), value), best_score_=-1.0)

    monkeypatch.setattr(study_module, "fit_family", record)
    return fits


def numbered(
    days: list[float] = DAYS, patients: list[str] | None = None, **outcomes: list[bool]
) -> Study:
    table = make_feature_table(np.arange(12)[:, None], ["number"], patient_ids=patients)
    return Study.of(table, make_outcomes(days, **outcomes))


def trained(fitted: Fits, family: str) -> list[set[int]]:
    return [set(features[:, -1].astype(int)) for name, features, *_ in fitted if name == family]


IDS = [f"case{number:03d}" for number in range(12)]
IN_FOLDS = fold_table(IDS)
OUTSIDE = [{number for number in range(12) if number % 3 != fold} for fold in range(3)]
"""Cases that are not held out, by fold."""


def test_no_case_is_predicted_by_a_model_that_saw_it(fitted):
    """Only the Cox model is trained on censored cases, 2 and 5; the outcome of 7 is unknown."""
    days = [100.0 * number if number != 8 else np.nan for number in range(1, 13)]
    study = numbered(days, censored=[number in {2, 5} for number in range(12)])
    predictions = cross_validate(study, make_plan(with_cox=True), IN_FOLDS)
    # a case of unknown outcome is predicted by a model of all others
    rounds = [set(range(12)), *OUTSIDE]
    assert trained(fitted, "ridge") == [cases - {2, 5, 7} for cases in rounds]
    assert trained(fitted, "cox") == [cases - {7} for cases in rounds]
    assert np.flatnonzero(predictions.folds == -1).tolist() == [7]
    assert predictions.days[study_module.SELECTED][7] == np.median(np.delete(days, [2, 5, 7]))
    assert predictions.log_hazards[:3].tolist() == [5, 6, 7]
    # the baseline has the age and nothing else
    assert {features.shape[1] for name, features, *_ in fitted if name == "age"} == {1}


def test_all_cases_of_a_patient_are_held_out_together(fitted):
    patients = [f"P{number // 2}" for number in range(12)]
    cross_validate(numbered(patients=patients), make_plan(n_folds=3, n_repeats=2, with_cox=True))
    for name, features, _, splits in fitted:
        if name != "age":
            numbers = features[:, -1].astype(int)
            assert {number ^ 1 for number in numbers} == set(numbers)
            for train, held in splits:
                assert not {*numbers[train] // 2} & {*numbers[held] // 2}


def test_a_scan_without_an_outcome_is_predicted_without_the_other_scans_of_its_patient(fitted):
    patients = [*IDS[:11], IDS[0]]
    study = numbered([*DAYS[:11], np.nan], patients)
    predictions = cross_validate(study, make_plan(), fold_table(IDS[:11]))
    # fold 0 holds out 0, 3, 6, 9
    assert trained(fitted, "ridge") == [cases - {11} for cases in OUTSIDE]
    assert predictions.days["ridge"][11] == predictions.days["ridge"][0]
    assert predictions.folds.tolist() == [*(number % 3 for number in range(11)), 0]


@pytest.mark.slow
def test_the_seed_decides_and_the_cox_model_changes_no_days(monkeypatch):
    """An effect is found by days and by hazards, and the only family is selected."""
    monkeypatch.setitem(COX.grid, "coxestimator__penalty", (1.0,))
    study = make_study(n_cases=16, effect=0.95)
    first, other = (cross_validate(study, make_plan(seed=seed)) for seed in (0, 1))
    with_cox = cross_validate(study, make_plan(with_cox=True))
    assert not first.days.equals(other.days)
    assert first.days.equals(with_cox.days)
    assert first.log_hazards is None
    logs = np.log(study.outcomes["days"])
    assert np.corrcoef(with_cox.log_hazards, logs)[0, 1] < -0.4
    assert np.corrcoef(np.log(first.days["ridge"]), logs)[0, 1] > 0.6
    assert first.days[study_module.SELECTED].equals(first.days["ridge"])
    assert first.n_chosen == {"ridge": 4}


FEW = [f"P{number if number % 3 == 0 else number % 3}" for number in range(12)]
CENSORED = numbered(censored=[number % 3 != 0 for number in range(12)])
TWO_IDS = ["case000", "x"]


@pytest.mark.parametrize(
    ("study", "n_folds", "folds", "error", "message"),
    [
        (make_study(n_cases=12), 4, TWO_IDS, FoldError, "no fold for 11 .*such as case001"),
        # a fold table of 3 folds would not be enough
        (make_study(n_cases=3), 3, None, UsageError, "3 patients .*too few for 3 folds.* for 4, g"),
        (make_study(n_cases=5), 6, None, UsageError, r"too few for 6 folds; expected 6 at least"),
        (CENSORED, 4, IDS, FoldError, "fold 0 leaves the deaths of only 0 patients in the other"),
        (numbered(patients=FEW), 4, IDS, FoldError, "fold 0 leaves the deaths of only 2 patients"),
        (numbered(patients=[*"AABCDEFGHIJK"]), 4, IDS, FoldError, "lie in folds 0, 1 of the fold"),
    ],
)
def test_folds_that_cannot_be_used_are_refused(study, n_folds, folds, error, message):
    with pytest.raises(error, match=message):
        cross_validate(study, make_plan(n_folds=n_folds), folds and fold_table(folds))


def cohort(n_cases: int = 60, *, seed: int = 0, share_died: float = 0.7) -> tuple[Array, ...]:
    """Return features, the first of which shortens survival, days and deaths."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_cases, 6))
    days = np.exp(6 - 0.8 * features[:, 0] + 0.2 * rng.normal(size=n_cases))
    died = rng.random(n_cases) < share_died
    return features, np.where(died, days, days * rng.random(n_cases)), died


def fit(family: Family, features: Array, days: Array, died: Array | None = None) -> BaseEstimator:
    if family is COX:
        days = np.column_stack([days, np.ones(len(days)) if died is None else died])
    indices = np.arange(len(days))
    splits = [(np.setdiff1d(indices, held), held) for held in np.array_split(indices, 3)]
    return study_module.fit_family(family, features, days, splits)


@pytest.mark.parametrize("family", [BASELINE, *FAMILIES, COX], ids=lambda family: family.name)
def test_every_family_finds_a_strong_effect_and_learns_nothing_of_unseen_cases(family):
    n_kept = 1 if family is BASELINE else 6
    features, days, died = cohort(share_died=0.7 if family is COX else 1)
    model = fit(family, features[:, :n_kept], days, died)
    unseen, days, died = cohort(seed=1)
    predicted = model.predict(unseen[:, :n_kept])
    assert study_module.concordance(days, died, -predicted if family is COX else predicted) > 0.85
    assert family is COX or (predicted > 0).all()
    # scale and medians are those of the training cases
    wild = np.concatenate([unseen[:1, :n_kept], np.full((5, n_kept), 1e6)])
    assert model.predict(wild)[0] == pytest.approx(predicted[0])


@pytest.mark.parametrize("family", [*FAMILIES, COX], ids=lambda family: family.name)
def test_few_cases_with_empty_and_constant_columns_are_fitted(family):
    features, days, _ = cohort(3, share_died=1)
    features[:, 1], features[:, 2], features[0, 3] = np.nan, 7, np.nan
    days[1] = 0
    assert np.isfinite(fit(family, features, days).predict(features)).all()


def test_the_strongest_features_are_kept_whichever_way_they_go():
    features, _, _ = cohort(30)
    days = np.exp(6 + 0.5 * (features[:, 1] - features[:, 4]))
    model = fit(study_module.days_family("two", Ridge(), (2,)), features, days)
    assert model.best_estimator_["selectkbest"].get_support(indices=True).tolist() == [1, 4]


def test_a_wild_prediction_is_a_century_at_most_and_a_wild_ratio_is_finite():
    features, days, died = cohort()
    wild = fit(study_module.days_family("wild", LinearRegression(), (1,)), features, days)
    hazard = fit(COX, features, days, died)
    sides = [wild.predict(np.full((1, 6), value))[0] for value in (-1e9, 1e9)]
    assert min(sides) == 0
    assert 36000 < max(sides) < 40000
    assert np.exp(hazard.predict(np.full((1, 6), 1e9))) == pytest.approx(1e6)


def ratio(features: Array, days: Array, died: Array) -> float:
    model = fit(COX, np.asarray(features, float)[:, None], days, died)
    return float(np.diff(model.predict(np.array([[0.0], [1.0]])))[0])


def test_censored_patients_are_learnt_from():
    """Those without the risk factor are all alive at the end: the deaths alone do not show it."""
    risk, number = np.repeat([0.0, 1.0], 20), np.arange(40)
    died = (number < 2) | ((number % 2 == 1) & (risk == 1))
    days = np.where(died, 300.0 + number % 7, 600.0)
    assert ratio(risk, days, died) > 0.2
    # a feature that separates deaths from survivors does not warn
    assert ratio(died, days, died) > 0
    # without deaths, or with a constant feature, all have the same hazard
    assert ratio(risk, days, np.zeros(40)) == ratio(np.full(40, 7.0), days, died) == 0


def test_a_fit_that_does_not_converge_predicts_the_mean_hazard_and_says_so(monkeypatch, caplog):
    from lifelines import CoxPHFitter
    from lifelines.exceptions import ConvergenceError

    def diverge(*_: object, **__: object) -> None:
        raise ConvergenceError("delta contains nan", ValueError())

    monkeypatch.setattr(CoxPHFitter, "fit", diverge)
    features, days, died = cohort(12)
    model = study_module.CoxEstimator().fit(features, np.column_stack([days, died]))
    assert model.predict(features).tolist() == [0] * 12
    assert "did not converge and predicts the mean hazard" in caplog.text


def test_the_strongest_features_are_those_of_the_score_test():
    """Compare with the score of the partial likelihood at 0, by a loop over the deaths."""
    features, days, died = cohort(30)
    deaths = np.flatnonzero(died)
    scores = sum(features[one] - features[days >= days[one]].mean(axis=0) for one in deaths)
    norms = np.linalg.norm(features - features.mean(axis=0), axis=0)
    ratios = COX.strength(features, np.column_stack([days, died])) / (np.abs(scores) / norms)
    assert ratios == pytest.approx(np.full(6, ratios[0]))


def test_the_concordance_index_is_that_of_known_orders():
    """These are 1 before 2, 3, 4 and 3 before 4: patient 2 was alive at 200 days."""
    days, died = np.array([100.0, 200, 300, 400]), np.array([True, False, True, True])
    predicted = np.array([150.0, 100, 300, 400])
    assert study_module.concordance(days, died, predicted) == 0.75
    # no known order
    assert study_module.concordance(days, np.zeros(4, bool), predicted) == 0.5
