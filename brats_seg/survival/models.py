"""The families of models that days of survival are learnt with, and how one is fitted.

All learn the logarithm of the days, so that a few long survivors do not rule the fit and no
prediction is negative. What is not known is filled with the median, all features get the same
scale, and those that go along with survival most are kept: each learnt from the training cases
alone, inside the pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.feature_selection import SelectKBest, r_regression
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

Matrix = npt.NDArray[np.float64]
Splits = Sequence[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]

_LONGEST_DAYS = 36525.0
"""A century, beyond which no prediction goes: the exponential of a wild one would be infinite."""
_KEPT = (8, 32, 128)
"""How many features may be kept."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """Models of one kind, of which the best is looked for."""

    name: str
    regressor: Any
    """Of scikit-learn."""
    grid: Mapping[str, Sequence[Any]]
    """Values that are tried."""
    kept: Sequence[int] = _KEPT
    age_only: bool = False
    """Whether it is given nothing but the age."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedModel:
    """The best model of a family on some cases."""

    model: Any
    error_days: float
    """Mean absolute error on the inner folds."""

    def predict(self, features: Matrix) -> Matrix:
        """Return the days (n,) of features (n, p)."""
        return np.asarray(self.model.predict(features), dtype=np.float64)


BASELINE = Family(name="age", regressor=Ridge(), grid={"alpha": (1.0,)}, kept=(1,), age_only=True)
"""Age alone: what pictures must be better than."""

FAMILIES = (
    # C is the notebook's 5 or weaker; its SVR saw features without a common scale
    Family(name="svr", regressor=SVR(), grid={"C": (0.1, 0.5, 5.0)}),
    Family(name="ridge", regressor=Ridge(), grid={"alpha": (10.0, 100.0, 1000.0)}),
    Family(
        name="forest",
        regressor=RandomForestRegressor(150, min_samples_leaf=3, max_features=1 / 3),
        grid={},
        kept=(32, 128),
    ),
    Family(
        name="boosting",
        regressor=GradientBoostingRegressor(
            n_estimators=80, learning_rate=0.05, max_depth=2, subsample=0.7, max_features="sqrt"
        ),
        grid={},
        kept=(32, 128),
    ),
)


def fit_family(
    family: Family, features: Matrix, days: Matrix, splits: Splits, seed: int
) -> FittedModel:
    """Find the values of the grid with the least error on the splits, and fit all cases with them.

    Args:
        family: What to fit.
        features: (n, p), NaN where there is none.
        days: (n,) until death.
        splits: Inner folds, as (training, held-out) places.
        seed: Of forests and boosting.
    """
    n_features = features.shape[1]
    regressor = clone(family.regressor)
    if "random_state" in regressor.get_params():
        regressor.set_params(random_state=seed)
    model = make_pipeline(
        # a column that is empty in the training cases stays, as a constant that no model can use
        SimpleImputer(strategy="median", keep_empty_features=True),
        StandardScaler(),
        SelectKBest(_strength),
        TransformedTargetRegressor(
            regressor, func=np.log1p, inverse_func=_days_of, check_inverse=False
        ),
    )
    kept = sorted({min(k, n_features) for k in family.kept})
    grid = {"selectkbest__k": kept} | {
        f"transformedtargetregressor__regressor__{name}": list(values)
        for name, values in family.grid.items()
    }
    search = GridSearchCV(model, grid, scoring="neg_mean_absolute_error", cv=splits)
    search.fit(features, days)
    return FittedModel(model=search.best_estimator_, error_days=-float(search.best_score_))


def _strength(features: Matrix, days: Matrix) -> Matrix:
    """Return how much each feature goes along with survival, up or down."""
    return np.abs(r_regression(features, np.log1p(days)))


def _days_of(logarithms: Matrix) -> Matrix:
    return np.expm1(np.clip(logarithms, 0, np.log1p(_LONGEST_DAYS)))
