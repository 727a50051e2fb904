"""Test fitting one family of models, and the Cox model on deaths and censored patients."""

import sys
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LinearRegression, Ridge

from brats_seg.survival.models import (
    BASELINE,
    COX,
    FAMILIES,
    CoxEstimator,
    concordance,
    days_family,
    fit_family,
    has_lifelines,
)

EVERY = pytest.mark.parametrize("family", [*FAMILIES, COX], ids=lambda family: family.name)


def splits_of(n, n_folds=3):
    indices = np.arange(n)
    return [(np.setdiff1d(indices, held), held) for held in np.array_split(indices, n_folds)]


def cohort(n_cases=60, *, seed=0, share_died=0.7):
    """Return features, the first of which shortens survival, days and deaths."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_cases, 6))
    days = np.exp(6 - 0.8 * features[:, 0] + 0.2 * rng.normal(size=n_cases))
    died = rng.random(n_cases) < share_died
    return features, np.where(died, days, days * rng.random(n_cases)), died


def fit(family, features, days, died=None):
    if family is COX:
        days = np.column_stack([days, np.ones(len(days)) if died is None else died])
    return fit_family(family, features, days, splits_of(len(days)))


@pytest.mark.parametrize("family", [BASELINE, *FAMILIES, COX], ids=lambda family: family.name)
def test_every_family_finds_a_strong_effect(family):
    features, days, died = cohort(share_died=0.7 if family is COX else 1)
    n_kept = 1 if family is BASELINE else 6

    model = fit(family, features[:, :n_kept], days, died)

    unseen, days, died = cohort(seed=1)
    predicted = model.predict(unseen[:, :n_kept])
    assert concordance(days, died, -predicted if family is COX else predicted) > 0.85
    assert family is COX or (predicted > 0).all()


@EVERY
def test_few_cases_with_empty_and_constant_columns_are_fitted(family):
    features, days, _ = cohort(3, share_died=1)
    features[:, 1], features[:, 2], features[0, 3] = np.nan, 7, np.nan
    days[1] = 0

    assert np.isfinite(fit(family, features, days).predict(features)).all()


@EVERY
def test_nothing_of_unseen_cases_is_learnt(family):
    """Scale and medians are those of the training cases, and not of the predicted ones."""
    features, days, died = cohort()
    model = fit(family, features, days, died)

    with_others = model.predict(np.concatenate([features[:1], np.full((5, 6), 1e6)]))[:1]

    assert model.predict(features[:1]) == pytest.approx(with_others)


def test_the_strongest_features_are_kept_whichever_way_they_go():
    features, _, _ = cohort(30)
    days = np.exp(6 + 0.5 * (features[:, 1] - features[:, 4]))

    model = fit(days_family("two", Ridge(), (2,)), features, days)

    kept = model.best_estimator_["selectkbest"].get_support(indices=True)
    assert kept.tolist() == [1, 4]


def test_a_wild_prediction_is_a_century_at_most_and_a_wild_ratio_is_finite():
    features, days, died = cohort()
    wild = fit(days_family("wild", LinearRegression(), (1,)), features, days)
    hazard = fit(COX, features, days, died)

    sides = [wild.predict(np.full((1, 6), value))[0] for value in (-1e9, 1e9)]
    assert min(sides) == 0
    assert 36000 < max(sides) < 40000
    assert np.exp(hazard.predict(np.full((1, 6), 1e9))) == pytest.approx(1e6)


def test_the_coefficients_are_those_of_lifelines():
    from lifelines import CoxPHFitter

    features, days, died = cohort()
    frame = pd.DataFrame(features).assign(days=days, died=died).rename(columns=str)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = CoxPHFitter(penalizer=0.1).fit(frame, "days", "died").params_

    model = CoxEstimator(penalty=0.1).fit(features, np.column_stack([days, died]))

    assert model.coefficients_ == pytest.approx(expected.to_numpy(), rel=1e-9)


def test_censored_patients_are_learnt_from():
    """Those without the risk factor are all alive at the end: the deaths alone do not show it."""
    risk = np.repeat([0.0, 1.0], 20)
    died = (np.arange(40) % 2 == 1) & (risk == 1)
    died[:2] = True
    days = np.where(died, 300.0 + np.arange(40) % 7, 600.0)

    assert np.diff(fit(COX, risk[:, None], days, died).predict(np.array([[0.0], [1.0]]))) > 0.2


def test_without_deaths_or_varying_features_all_have_the_same_hazard():
    features, days, died = cohort(12)

    assert fit(COX, features, days, np.zeros(12)).predict(features).tolist() == [0] * 12
    constant = np.full((12, 3), 7.0)
    assert fit(COX, constant, days, died).predict(constant).tolist() == [0] * 12


def test_a_feature_that_separates_deaths_from_survivors_does_not_warn():
    _, days, died = cohort(20)

    model = fit(COX, died[:, None].astype(float), days, died)

    assert np.diff(model.predict(np.array([[0.0], [1.0]]))) > 0


def test_a_fit_that_does_not_converge_predicts_the_mean_hazard_and_says_so(monkeypatch, caplog):
    from lifelines import CoxPHFitter
    from lifelines.exceptions import ConvergenceError

    def diverge(*_, **__):
        raise ConvergenceError("delta contains nan", ValueError())

    monkeypatch.setattr(CoxPHFitter, "fit", diverge)
    features, days, died = cohort(12)

    model = CoxEstimator().fit(features, np.column_stack([days, died]))

    assert model.predict(features).tolist() == [0] * 12
    assert "did not converge and predicts the mean hazard" in caplog.text


def test_the_strongest_features_are_those_of_the_score_test():
    """Compare with the score of the partial likelihood at 0, by a loop over the deaths."""
    features, days, died = cohort(30)
    scores = np.zeros(6)
    for index in np.flatnonzero(died):
        scores += features[index] - features[days >= days[index]].mean(axis=0)
    norms = np.linalg.norm(features - features.mean(axis=0), axis=0)

    ratios = COX.strength(features, np.column_stack([days, died])) / (np.abs(scores) / norms)

    assert ratios == pytest.approx(np.full(6, ratios[0]))


def test_whether_lifelines_is_installed(monkeypatch):
    assert has_lifelines()

    monkeypatch.setitem(sys.modules, "lifelines", None)

    assert not has_lifelines()


def test_the_concordance_index_by_hand():
    # known orders: 1 before 2, 3, 4; 3 before 4. Patient 2 was alive at 200 days.
    days, died = np.array([100.0, 200, 300, 400]), np.array([True, False, True, True])

    assert concordance(days, died, days) == 1
    assert concordance(days, died, -days) == 0
    assert concordance(days, died, np.full(4, 7.0)) == 0.5
    # 1 before 2 is wrong, the other three are right
    assert concordance(days, died, np.array([150.0, 100, 300, 400])) == 0.75
    # no known order
    assert concordance(days[:2], np.array([False, False]), days[:2]) == 0.5
