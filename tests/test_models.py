"""Test fitting one family of models."""

import numpy as np
import pytest

from brats_seg.survival.models import BASELINE, FAMILIES, Family, fit_family


def splits_of(n, n_folds=3):
    places = np.arange(n)
    return [(np.setdiff1d(places, held), held) for held in np.array_split(places, n_folds)]


@pytest.fixture
def features(rng):
    return rng.normal(size=(30, 6))


def days_of(signal):
    return np.exp(6 + 0.5 * signal)


@pytest.mark.parametrize("family", [BASELINE, *FAMILIES], ids=lambda family: family.name)
def test_every_family_finds_a_strong_effect(family, features):
    if family.age_only:
        features = features[:, :1]
    days = days_of(features[:, 0])

    fit = fit_family(family, features, days, splits_of(30), seed=0)

    assert np.corrcoef(np.log(fit.predict(features)), features[:, 0])[0, 1] > 0.8
    assert (fit.predict(features) > 0).all()


@pytest.mark.parametrize("family", FAMILIES[2:], ids=lambda family: family.name)
def test_the_same_seed_gives_the_same_model(family, features, rng):
    days = days_of(rng.normal(size=30))

    first, second = (fit_family(family, features, days, splits_of(30), seed=3) for _ in range(2))

    assert np.array_equal(first.predict(features), second.predict(features))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("n_cases", [3])
def test_few_cases_with_empty_and_constant_columns_are_fitted(family, n_cases, rng):
    features = rng.normal(size=(n_cases, 5))
    features[:, 1], features[:, 2], features[0, 3] = np.nan, 7, np.nan

    fit = fit_family(family, features, days_of(features[:, 0]), splits_of(n_cases), seed=0)

    assert np.isfinite(fit.predict(features)).all()


def test_nothing_of_unseen_cases_is_learnt(features):
    """Scale and medians are those of the training cases, and not of the predicted ones."""
    family = FAMILIES[1]
    fit = fit_family(family, features, days_of(features[:, 0]), splits_of(30), seed=0)

    alone = fit.predict(features[:1])
    beside = fit.predict(np.concatenate([features[:1], np.full((5, 6), 1e6)]))[:1]

    assert alone == pytest.approx(beside)


def test_the_strongest_features_are_kept_whichever_way_they_go(features):
    from sklearn.linear_model import Ridge

    family = Family(name="two", regressor=Ridge(), grid={}, kept=(2,))
    days = days_of(features[:, 1] - features[:, 4])

    fit = fit_family(family, features, days, splits_of(30), seed=0)

    assert fit.model["selectkbest"].get_support(indices=True).tolist() == [1, 4]


def test_a_wild_prediction_is_a_century_at_most(features):
    from sklearn.linear_model import LinearRegression

    family = Family(name="wild", regressor=LinearRegression(), grid={}, kept=(1,))
    fit = fit_family(family, features, days_of(features[:, 0]), splits_of(30), seed=0)

    assert fit.predict(np.full((1, 6), 1e9)).max() < 40000
    assert fit.predict(np.full((1, 6), -1e9)).min() == 0
