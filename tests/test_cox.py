"""Test the Cox model on deaths and censored patients."""

import sys
import warnings

import numpy as np
import pandas as pd
import pytest

from brats_seg.survival import cox
from brats_seg.survival.cox import CoxEstimator, fit_cox, is_installed
from brats_seg.survival.scores import concordance


def splits_of(n, n_folds=3):
    places = np.arange(n)
    return [(np.setdiff1d(places, held), held) for held in np.array_split(places, n_folds)]


def cohort(n_cases=60, *, seed=0, n_features=6, share_died=0.7):
    """Return features, the first of which shortens survival, days and deaths."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_cases, n_features))
    days = np.exp(6 - 0.8 * features[:, 0] + 0.2 * rng.normal(size=n_cases))
    died = rng.random(n_cases) < share_died
    return features, np.where(died, days, days * rng.random(n_cases)), died


def test_a_strong_effect_is_found():
    features, days, died = cohort()

    fit = fit_cox(features, days, died, splits_of(60))

    unseen = cohort(seed=1)
    assert concordance(unseen[1], unseen[2], -fit.predict(unseen[0])) > 0.85


def test_the_coefficients_are_those_of_lifelines():
    from lifelines import CoxPHFitter

    features, days, died = cohort()
    frame = pd.DataFrame(features).assign(days=days, died=died).rename(columns=str)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = CoxPHFitter(penalizer=0.1).fit(frame, "days", "died").params_

    fit = CoxEstimator(penalty=0.1).fit(features, np.column_stack([days, died]))

    assert fit.coefficients_ == pytest.approx(expected.to_numpy(), rel=1e-9)


def test_censored_patients_are_learnt_from():
    """Those without the risk factor are all alive at the end: the deaths alone do not show it."""
    risk = np.repeat([0.0, 1.0], 20)
    died = (np.arange(40) % 2 == 1) & (risk == 1)
    died[:2] = True
    days = np.where(died, 300.0 + np.arange(40) % 7, 600.0)

    fit = fit_cox(risk[:, None], days, died, splits_of(40))

    assert np.diff(fit.predict(np.array([[0.0], [1.0]]))) > 0.2


@pytest.mark.parametrize("n_cases", [3, 5])
def test_few_cases_with_empty_and_constant_columns_are_fitted(n_cases):
    features, days, died = cohort(n_cases, share_died=1)
    features[:, 1], features[:, 2], features[0, 3] = np.nan, 7, np.nan

    fit = fit_cox(features, days, died, splits_of(n_cases))

    assert np.isfinite(fit.predict(features)).all()


def test_without_deaths_all_have_the_same_hazard():
    features, days, _ = cohort(12)

    fit = fit_cox(features, days, np.zeros(12, dtype=bool), splits_of(12))

    assert fit.predict(features).tolist() == [0] * 12


def test_features_that_are_all_constant_give_the_same_hazard():
    _, days, died = cohort(12)

    fit = fit_cox(np.full((12, 3), 7.0), days, died, splits_of(12))

    assert fit.predict(np.full((2, 3), 7.0)).tolist() == [0, 0]


def test_a_feature_that_separates_deaths_from_survivors_does_not_warn():
    _, days, died = cohort(20)

    fit = fit_cox(died[:, None].astype(float), days, died, splits_of(20))

    assert fit.predict(np.array([[1.0]])) > fit.predict(np.array([[0.0]]))


def test_days_of_zero_and_equal_days_are_fitted():
    features, days, died = cohort(12, share_died=1)
    days[:3], days[3:6] = 0, 100

    assert np.isfinite(fit_cox(features, days, died, splits_of(12)).predict(features)).all()


def test_a_fit_that_does_not_converge_predicts_the_mean_hazard_and_says_so(monkeypatch, caplog):
    from lifelines import CoxPHFitter
    from lifelines.exceptions import ConvergenceError

    def diverge(*_, **__):
        raise ConvergenceError("delta contains nan", ValueError())

    monkeypatch.setattr(CoxPHFitter, "fit", diverge)
    features, days, died = cohort(12)

    fit = CoxEstimator().fit(features, np.column_stack([days, died]))

    assert fit.predict(features).tolist() == [0] * 12
    assert "did not converge and predicts the mean hazard" in caplog.text


def test_a_wild_case_has_a_finite_ratio():
    features, days, died = cohort()
    fit = fit_cox(features, days, died, splits_of(60))

    assert np.exp(fit.predict(np.full((1, 6), 1e9))) == pytest.approx(1e6)


def test_nothing_of_unseen_cases_is_learnt():
    features, days, died = cohort()
    fit = fit_cox(features, days, died, splits_of(60))

    beside = fit.predict(np.concatenate([features[:1], np.full((5, 6), 1e6)]))[:1]

    assert fit.predict(features[:1]) == pytest.approx(beside)


def test_the_strongest_features_are_those_of_the_score_test():
    """Compare with the score of the partial likelihood at 0, by a loop over the deaths."""
    features, days, died = cohort(30)
    scores = np.zeros(6)
    for place in np.flatnonzero(died):
        scores += features[place] - features[days >= days[place]].mean(axis=0)
    norms = np.linalg.norm(features - features.mean(axis=0), axis=0)

    found = cox._strength(features, np.column_stack([days, died]))

    ratios = found / (np.abs(scores) / norms)
    assert ratios == pytest.approx(np.full(6, ratios[0]))


def test_whether_lifelines_is_installed(monkeypatch):
    assert is_installed()

    monkeypatch.setitem(sys.modules, "lifelines", None)

    assert not is_installed()
