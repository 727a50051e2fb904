"""Fit models of days of survival: the families that are tried, and how one of them is fitted.

All learn the logarithm of the days, so that a few long survivors do not dominate the fit and no
prediction is negative. Missing values are imputed with the median, features are standardised, and
those with the strongest relation to survival are kept: each learnt from the training cases alone,
inside the pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.compose import TransformedTargetRegressor
from sklearn.feature_selection import SelectKBest, r_regression
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

Matrix = npt.NDArray[np.float64]
Splits = Sequence[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]

_LONGEST_DAYS = 36525.0
"""Upper bound of predictions, a century, so that no exponential overflows."""
_KEPT = (8, 32, 128)
"""Numbers of features that are tried."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """A kind of model, and the parameters that are tried."""

    name: str
    regressor: Any
    """Estimator of scikit-learn."""
    grid: Mapping[str, Sequence[Any]]
    """Values of the parameters of the estimator that are tried."""
    kept: Sequence[int] = _KEPT
    """Numbers of features that are tried."""
    age_only: bool = False
    """Whether the age is the only feature."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedModel:
    """The best model of a family on some cases."""

    model: Any
    """Fitted pipeline of scikit-learn."""
    error_days: float
    """Mean absolute error on the inner folds."""

    def predict(self, features: Matrix) -> Matrix:
        """Return the days (n,) of features (n, p)."""
        return np.asarray(self.model.predict(features), dtype=np.float64)


BASELINE = Family(name="age", regressor=Ridge(), grid={"alpha": (1.0,)}, kept=(1,), age_only=True)
"""Age alone: imaging features must do better."""

FAMILIES = (
    # C is 5 in the notebook, whose features were not standardised
    Family(name="svr", regressor=SVR(), grid={"C": (0.1, 0.5, 5.0)}),
    Family(name="ridge", regressor=Ridge(), grid={"alpha": (10.0, 100.0, 1000.0)}),
)


def fit_family(
    family: Family, features: Matrix, days: Matrix, splits: Splits, seed: int
) -> FittedModel:
    """Choose the values of the grid with the least error on the splits, and fit all cases.

    Args:
        family: Family to fit.
        features: (n, p), NaN where unknown.
        days: (n,) days until death.
        splits: Inner folds, as (training, held-out) indices.
        seed: Seed of forests and boosting.
    """
    n_features = features.shape[1]
    logarithmic = TransformedTargetRegressor(
        family.regressor, func=np.log1p, inverse_func=_days_of, check_inverse=False
    )
    model = pipeline_of(_strength, logarithmic)
    kept = sorted({min(k, n_features) for k in family.kept})
    grid = {"selectkbest__k": kept} | {
        f"transformedtargetregressor__regressor__{name}": list(values)
        for name, values in family.grid.items()
    }
    search = GridSearchCV(model, grid, scoring="neg_mean_absolute_error", cv=splits)
    search.fit(features, days)
    return FittedModel(model=search.best_estimator_, error_days=-float(search.best_score_))


def pipeline_of(strength: Callable[[Matrix, Matrix], Matrix], estimator: Any) -> Pipeline:
    """Impute, standardise and select features before an estimator.

    Args:
        strength: Turns features (n, p) and outcomes into scores (p,) to select features by.
        estimator: Estimator of scikit-learn.
    """
    return make_pipeline(
        # a column that is empty in the training cases stays, as a constant that no model can use
        SimpleImputer(strategy="median", keep_empty_features=True),
        StandardScaler(),
        SelectKBest(strength),
        estimator,
    )


def _strength(features: Matrix, days: Matrix) -> Matrix:
    """Return the absolute correlation of each feature with the logarithm of the days."""
    return np.abs(r_regression(features, np.log1p(days)))


def _days_of(logarithms: Matrix) -> Matrix:
    return np.expm1(np.clip(logarithms, 0, np.log1p(_LONGEST_DAYS)))
