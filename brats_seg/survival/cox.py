"""Fit Cox proportional hazards to deaths and censored patients (lifelines).

Regression of days can learn from deaths only. The Cox model (D. R. Cox, "Regression models and
life-tables", 1972) also learns from patients who were alive at the last contact: they count among
those at risk until then. It predicts a hazard, not days. Features are imputed, scaled and selected
as for the other models, and the penalty and the number of features are chosen on the inner folds.

lifelines comes with the extra `brats_seg[survival]`; nothing here imports it before a fit.
"""

import logging
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.feature_selection import r_regression
from sklearn.model_selection import GridSearchCV

from brats_seg.survival.models import Matrix, Splits, pipeline_of
from brats_seg.survival.scores import concordance

log = logging.getLogger(__name__)

_PENALTIES = (0.1, 1.0)
"""Weights of the squared coefficients beside the mean log-likelihood."""
_KEPT = (8, 32)
"""Numbers of features that are tried: fewer than for days, about ten deaths each being customary."""
_LARGEST_LOG_RATIO = float(np.log(1e6))
"""Bound of predicted log hazard ratios, so that no ratio overflows."""
_SMALLEST_STD = 1e-9
_DAYS, _DIED = 0, 1
"""Columns of the outcomes (n, 2) that scikit-learn passes to the estimator."""


def is_installed() -> bool:
    """Return whether lifelines can be imported."""
    return find_spec("lifelines") is not None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedCox:
    """A Cox model with the penalty and the number of features that did best on the inner folds."""

    model: Any
    """Fitted pipeline of scikit-learn."""

    def predict(self, features: Matrix) -> Matrix:
        """Return the log hazard ratio (n,) to the mean training case of features (n, p)."""
        return np.asarray(self.model.predict(features), dtype=np.float64)


def fit_cox(
    features: Matrix, days: Matrix, died: npt.NDArray[np.bool_], splits: Splits
) -> FittedCox:
    """Choose penalty and features by the concordance index on the splits, and fit all cases.

    Args:
        features: (n, p), NaN where unknown.
        days: (n,) days until death or the last contact.
        died: (n,) whether the patient died then.
        splits: Inner folds, as (training, held-out) indices.
    """
    kept = sorted({min(k, features.shape[1]) for k in _KEPT})
    grid = {"selectkbest__k": kept, "coxestimator__penalty": list(_PENALTIES)}
    model = pipeline_of(_strength, CoxEstimator())
    search = GridSearchCV(model, grid, scoring=_score, cv=splits)
    search.fit(features, np.column_stack([days, died]))
    return FittedCox(model=search.best_estimator_)


class CoxEstimator(BaseEstimator):  # type: ignore[misc]
    """Cox model of lifelines as an estimator of scikit-learn; features are standardised before."""

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty

    def fit(self, features: Matrix, outcomes: Matrix) -> Self:
        """Fit features (n, p) to outcomes (n, 2) of days and deaths.

        Without a death all coefficients are 0, so that every case has the mean hazard.
        """
        self.coefficients_ = np.zeros(features.shape[1])
        varying = features.std(axis=0) > _SMALLEST_STD
        if outcomes[:, _DIED].any() and varying.any():
            self.coefficients_[varying] = _coefficients(
                features[:, varying], outcomes, self.penalty
            )
        return self

    def predict(self, features: Matrix) -> Matrix:
        """Return the log hazard ratio (n,) to a case whose features are all 0."""
        ratios: Matrix = features @ self.coefficients_
        return np.clip(ratios, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


def _coefficients(features: Matrix, outcomes: Matrix, penalty: float) -> Matrix:
    """Maximise the penalised partial likelihood; zeros where lifelines finds no maximum."""
    from lifelines import CoxPHFitter
    from lifelines.exceptions import ConvergenceError, ConvergenceWarning

    frame = pd.DataFrame(features).add_prefix("feature")
    frame["days"], frame["died"] = outcomes[:, _DAYS], outcomes[:, _DIED]
    with warnings.catch_warnings():
        # the penalty makes the maximum unique, also where a feature separates deaths from the rest
        warnings.simplefilter("ignore", ConvergenceWarning)
        # lifelines 0.30 passes arguments by position that pandas 4 wants by name
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            fitter = CoxPHFitter(penalizer=penalty).fit(frame, "days", "died")
        except ConvergenceError as error:
            log.warning("a Cox model did not converge and predicts the mean hazard: %s", error)
            return np.zeros(features.shape[1])
    return np.asarray(fitter.params_, dtype=np.float64)


def _strength(features: Matrix, outcomes: Matrix) -> Matrix:
    """Return the correlation of each feature with the martingale residuals of an empty model.

    A residual is 1 for a death and 0 otherwise, less the cumulative hazard (Nelson-Aalen) of all
    cases at that time: positive for those who died early. Its correlation with a feature is the
    score of the Cox model with that feature alone.
    """
    days, died = outcomes[:, _DAYS], outcomes[:, _DIED]
    at_risk = (days[None, :] >= days[:, None]).sum(axis=1)
    before = days[None, :] <= days[:, None]
    residuals = died - before @ (died / at_risk)
    return np.abs(r_regression(features, residuals))


def _score(model: Any, features: Matrix, outcomes: Matrix) -> float:
    died = outcomes[:, _DIED] > 0
    return concordance(outcomes[:, _DAYS], died, -model.predict(features))
