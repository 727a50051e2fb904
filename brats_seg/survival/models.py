"""Fit models of survival: the families that are tried, and how one of them is fitted.

Regression learns the logarithm of the days until death, so that a few long survivors do not dominate
the fit and no prediction is negative. The Cox model (D. R. Cox, 1972; fitted by lifelines) also learns
from censored patients, who count among those at risk until the last contact; it predicts the
logarithm of a hazard ratio. Missing values are imputed with the median, features are standardised,
and those with the strongest relation to survival are kept: each learnt from the training cases alone.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.compose import TransformedTargetRegressor
from sklearn.feature_selection import SelectKBest, r_regression
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

log = logging.getLogger(__name__)

Matrix = npt.NDArray[np.float64]
Splits = Sequence[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]

_LONGEST_DAYS = 36525.0
"""Upper bound of predictions, a century, so that no exponential overflows."""
_LARGEST_LOG_RATIO = float(np.log(1e6))
"""Bound of predicted log hazard ratios, so that no ratio overflows."""
_SMALLEST_STD = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """A kind of model, and the parameters that are tried."""

    name: str
    estimator: Any
    """Estimator of scikit-learn."""
    grid: Mapping[str, Sequence[Any]]
    """Values of the parameters of the estimator that are tried."""
    n_kept: Sequence[int]
    """Numbers of features that are tried."""
    strength: Callable[[Matrix, Matrix], Matrix]
    """Turns features (n, p) and outcomes into scores (p,) to select features by."""
    scoring: Any
    """Score on the inner folds by which parameters are chosen."""


def fit_family(family: Family, features: Matrix, outcomes: Matrix, splits: Splits) -> Any:
    """Choose the values of the grid with the best score on the splits, and fit all cases.

    Args:
        family: Family to fit.
        features: (n, p), NaN where unknown.
        outcomes: (n,) days until death; for the Cox model (n, 2) days and whether the patient died.
        splits: Inner folds, as (training, held-out) indices.

    Returns:
        The fitted search of scikit-learn, with `predict` and `best_score_`.
    """
    pipeline = make_pipeline(
        # a column that is empty in the training cases stays, as a constant that no model can use
        SimpleImputer(strategy="median", keep_empty_features=True),
        StandardScaler(),
        SelectKBest(family.strength),
        family.estimator,
    )
    name = pipeline.steps[-1][0]
    grid = {f"{name}__{parameter}": list(values) for parameter, values in family.grid.items()}
    grid["selectkbest__k"] = sorted({min(k, features.shape[1]) for k in family.n_kept})
    search = GridSearchCV(pipeline, grid, scoring=family.scoring, cv=splits)
    return search.fit(features, outcomes)


def has_lifelines() -> bool:
    """Return whether lifelines, of the extra `survival`, can be imported."""
    return find_spec("lifelines") is not None


def concordance(days: Matrix, died: npt.NDArray[np.bool_], predicted: Matrix) -> float:
    """Return the concordance index of predictions, over deaths and censored patients.

    It is the share of pairs in the right order, among the pairs of which it is known who died first
    (Harrell et al. 1996); 0.5, the value of chance, where there is no such pair. Needs lifelines.

    Args:
        days: (n,) days until death or the last contact.
        died: (n,) whether the patient died then.
        predicted: (n,) any number that is larger for a longer survival.

    Example:
        >>> days, died = np.array([100.0, 200, 300]), np.array([True, False, True])
        >>> concordance(days, died, predicted=np.array([150.0, 350, 250]))
        1.0
    """
    from lifelines.utils import concordance_index

    try:
        return float(concordance_index(days, predicted, died))
    except ZeroDivisionError:
        return 0.5


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
        if outcomes[:, 1].any() and varying.any():
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
    frame["days"], frame["died"] = outcomes.T
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


def _days_strength(features: Matrix, days: Matrix) -> Matrix:
    """Return the absolute correlation of each feature with the logarithm of the days."""
    return np.abs(r_regression(features, np.log1p(days)))


def _hazard_strength(features: Matrix, outcomes: Matrix) -> Matrix:
    """Return the correlation of each feature with the martingale residuals of an empty model.

    A residual is 1 for a death and 0 otherwise, less the cumulative hazard (Nelson-Aalen) of all
    cases at that time: positive for those who died early. Its correlation with a feature is the
    score of the Cox model with that feature alone.
    """
    days, died = outcomes.T
    at_risk = (days[None, :] >= days[:, None]).sum(axis=1)
    before = days[None, :] <= days[:, None]
    return np.abs(r_regression(features, died - before @ (died / at_risk)))


def _concordance_score(model: Any, features: Matrix, outcomes: Matrix) -> float:
    days, died = outcomes.T
    return concordance(days, died > 0, -model.predict(features))


def _days(logarithms: Matrix) -> Matrix:
    return np.expm1(np.clip(logarithms, 0, np.log1p(_LONGEST_DAYS)))


def days_family(
    name: str, regressor: Any, n_kept: Sequence[int] = (8, 32, 128), **grid: Sequence[float]
) -> Family:
    """Return a family that regresses the logarithm of the days, and the grid of its regressor."""
    return Family(
        name=name,
        estimator=TransformedTargetRegressor(
            regressor, func=np.log1p, inverse_func=_days, check_inverse=False
        ),
        grid={f"regressor__{parameter}": values for parameter, values in grid.items()},
        n_kept=n_kept,
        strength=_days_strength,
        scoring="neg_mean_absolute_error",
    )


BASELINE = days_family("age", Ridge(), (1,), alpha=(1.0,))
"""Age alone: imaging features must do better."""
FAMILIES = (
    # C is 5 in the notebook, whose features were not standardised
    days_family("svr", SVR(), C=(0.1, 0.5, 5.0)),
    days_family("ridge", Ridge(), alpha=(10.0, 100.0, 1000.0)),
)
COX = Family(
    name="cox",
    estimator=CoxEstimator(),
    grid={"penalty": (0.1, 1.0)},
    # fewer than for days, about ten deaths each being customary
    n_kept=(8, 32),
    strength=_hazard_strength,
    scoring=_concordance_score,
)
