"""Predict survival of held-out cases by nested cross-validation over several families of models.

The outer folds hold patients out; the inner folds choose the values of each family and, among the
families, the one for `selected`. Imputation, scaling and selection of features are learnt from the
training cases alone. Regression learns the logarithm of the days until death, so that a few long
survivors do not dominate the fit. The Cox model (D. R. Cox, 1972; fitted by lifelines) also learns from
censored patients, who count among those at risk until the last contact.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from brats_seg.cases.case import Case, CaseFacts
from brats_seg.cases.folds import FoldTable, check_covers, make_folds
from brats_seg.config import FoldConfig
from brats_seg.errors import FoldError, UsageError, counted
from brats_seg.progress import Track, untracked
from brats_seg.survival.table import AGE, feature_columns

log = logging.getLogger(__name__)

Matrix = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
Splits = Sequence[tuple[Indices, Indices]]

SELECTED = "selected"
"""Name of the predictions of the family that did best on the inner folds."""
N_INNER_FOLDS = 3
FEWEST_DEATHS = 4
"""Fewest patients with a known day of death for which a study is possible."""
_NO_FOLD = -1
"""Fold of the cases of unknown outcome."""
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
    """Values of the parameters of the estimator that are tried, by their names in the pipeline."""
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
    n_kept = sorted({min(k, features.shape[1]) for k in family.n_kept})
    grid = {**family.grid, "selectkbest__k": n_kept}
    return GridSearchCV(pipeline, grid, scoring=family.scoring, cv=splits).fit(features, outcomes)


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
        """Maximise the penalised partial likelihood of features (n, p), and (n, 2) days and deaths.

        All coefficients are 0, so that every case has the mean hazard, without a death, and where
        lifelines finds no maximum.
        """
        from lifelines import CoxPHFitter
        from lifelines.exceptions import ConvergenceError, ConvergenceWarning

        self.coefficients_ = np.zeros(features.shape[1])
        varying = features.std(axis=0) > _SMALLEST_STD
        if not outcomes[:, 1].any() or not varying.any():
            return self
        frame = pd.DataFrame(features[:, varying]).add_prefix("feature")
        frame["days"], frame["died"] = outcomes.T
        with warnings.catch_warnings():
            # the penalty makes the maximum unique, also where a feature separates deaths from the rest
            warnings.simplefilter("ignore", ConvergenceWarning)
            # lifelines 0.30 passes arguments by position that pandas 4 wants by name
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                fitter = CoxPHFitter(penalizer=self.penalty).fit(frame, "days", "died")
                self.coefficients_[varying] = fitter.params_
            except ConvergenceError as error:
                log.warning("a Cox model did not converge and predicts the mean hazard: %s", error)
        return self

    def predict(self, features: Matrix) -> Matrix:
        """Return the log hazard ratio (n,) to a case whose features are all 0."""
        return np.clip(features @ self.coefficients_, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


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
        grid={f"transformedtargetregressor__regressor__{key}": grid[key] for key in grid},
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
    grid={"coxestimator__penalty": (0.1, 1.0)},
    # fewer than for days, about ten deaths each being customary
    n_kept=(8, 32),
    strength=_hazard_strength,
    scoring=_concordance_score,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Study:
    """A table of features and the outcomes of its patients."""

    table: pd.DataFrame
    """Table of features, of `read_features`."""
    outcomes: pd.DataFrame
    """Outcome of each case, of `read_outcomes`."""
    features: pd.DataFrame
    """Features that are used, the age first: columns that are empty or equal wherever known are left out."""

    @classmethod
    def of(cls, table: pd.DataFrame, outcomes: pd.DataFrame) -> Self:
        """Combine a table with its outcomes; age and resection become features."""
        names = [name for name in feature_columns(table) if name != AGE]
        kinds = {
            f"resection_{kind.lower()}": (outcomes["resection"] == kind).astype(float)
            for kind in ("GTR", "STR")
        }
        features = pd.concat([outcomes[[AGE]].assign(**kinds), table[names]], axis=1)
        # the baseline has no other feature than the age
        varies = (features.nunique() > 1) | (features.columns == AGE)
        return cls(table=table, outcomes=outcomes, features=features.loc[:, varies])


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings of the cross-validation."""

    n_folds: int = 5
    """Number of new folds, where no fold table is given."""
    n_repeats: int = 3
    seed: int = 55
    families: tuple[Family, ...] = FAMILIES
    """Families that are fitted; with `COX`, which needs lifelines, a Cox model as well."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predictions:
    """Predictions for every case by models of the other patients; of unknown outcome, by models of all others."""

    days: pd.DataFrame
    """Days by `selected`, the baseline and the families."""
    folds: Indices
    """(cases,) outer fold of each case in the first repeat; -1 where no outcome of the patient is known."""
    n_chosen: dict[str, int]
    """Number of times that each family was selected."""
    log_hazards: npt.NDArray[np.float64] | None = None
    """(cases,) log hazard ratio to the mean training case by the Cox model; None without one."""


def cross_validate(
    study: Study, plan: Plan, folds: FoldTable | None = None, track: Track = untracked
) -> Predictions:
    """Predict each patient of known outcome by models of the others, and the rest by models of all.

    The days are learnt from deaths alone, the hazards from censored cases as well.

    Args:
        study: Features and outcomes.
        plan: Settings.
        folds: Fold table of the project; the repeats then differ in their inner folds only. Without
            it each repeat assigns the patients to new folds.
        track: Shows progress.

    Raises:
        FoldError: The fold table lacks a case, divides a patient, or leaves too few deaths to learn from.
        UsageError: There are too few deaths for the folds.
    """
    _check_enough(study, plan, folds)
    repeats = [_outer_folds(study, plan, folds, repeat) for repeat in range(plan.n_repeats)]
    rounds = [
        (held_out, (plan.seed, repeat, fold + 1, 0))
        for repeat, folds_of_cases in enumerate(repeats)
        for fold, held_out in _held_out(study, folds_of_cases)
    ]
    n_chosen = {family.name: 0 for family in plan.families if family is not COX}
    sums = pd.DataFrame(0.0, study.features.index, [SELECTED, BASELINE.name, *n_chosen, COX.name])
    for held_out, seed in track(rounds, what="fitting", total=len(rounds)):
        scores, predicted = {}, {}
        for family in (BASELINE, *plan.families):
            features = study.features.to_numpy()[:, : 1 if family is BASELINE else None]
            fit = _fit(study, family, features, ~held_out, seed)
            scores[family.name] = fit.best_score_
            predicted[family.name] = fit.predict(features[held_out])
        best = max(n_chosen, key=scores.__getitem__)
        n_chosen[best] += 1
        for name, values in [(SELECTED, predicted[best]), *predicted.items()]:
            sums.loc[held_out, name] += values
    means = sums / plan.n_repeats
    return Predictions(
        days=means.drop(columns=COX.name),
        folds=repeats[0],
        n_chosen=n_chosen,
        log_hazards=means[COX.name].to_numpy() if COX in plan.families else None,
    )


def _fit(
    study: Study, family: Family, features: Matrix, usable: Mask, seed: tuple[int, ...]
) -> Any:
    """Fit a family to those of the usable cases that it learns from, in inner folds of patients."""
    is_cox = family is COX
    train = np.flatnonzero(usable & study.outcomes["known" if is_cox else "died"])
    outcomes = study.outcomes[["days", "died"]].to_numpy(np.float64)[train]
    patients = study.table["patient_id"].to_numpy()[train]
    # other random numbers for the Cox model, which has more cases to split
    rng = np.random.default_rng([*seed, *[1] * is_cox])
    groups = np.array_split(rng.permutation(sorted(set(patients))), N_INNER_FOLDS)
    held_out = [np.isin(patients, group) for group in groups]
    splits = [(np.flatnonzero(~held), np.flatnonzero(held)) for held in held_out]
    return fit_family(family, features[train], outcomes if is_cox else outcomes[:, 0], splits)


def _held_out(study: Study, folds: Indices) -> Iterator[tuple[int, Mask]]:
    """Yield each fold and a mask (cases,) of its cases; fold -1 has the patients of unknown outcome."""
    for fold in sorted(set(folds.tolist())):
        n_died = study.table["patient_id"][study.outcomes["died"] & (folds != fold)].nunique()
        if n_died < FEWEST_DEATHS - 1:
            msg = f"fold {fold} leaves the deaths of only {counted(n_died, 'patient')} in the other folds to train on; expected {FEWEST_DEATHS - 1} at least. Use another --fold-table, or add patients."
            raise FoldError(msg)
        yield fold, folds == fold


def _outer_folds(study: Study, plan: Plan, folds: FoldTable | None, repeat: int) -> Indices:
    """Return the outer fold (cases,) of each case, that of its patient; -1 if none of its outcomes is known."""
    known, case_ids = study.outcomes["known"], study.table["case_id"]
    cases = _cases(study)
    config = FoldConfig(n_folds=plan.n_folds, seed=plan.seed + repeat)
    table = folds or make_folds(cases, config)
    fold_of = case_ids.map({row.case_id: row.fold for row in table.rows}).where(known)
    if len(missing := case_ids[known & fold_of.isna()]):
        msg = (
            f"the fold table has no fold for {counted(len(missing), 'case')} of known survival, such as "
            f"{missing.iloc[0]}. Give that of the same data, or leave --fold-table out for new folds."
        )
        raise FoldError(msg)
    check_covers(table, cases)
    of_patients = fold_of.groupby(study.table["patient_id"]).transform("first")
    return of_patients.fillna(_NO_FOLD).to_numpy(np.intp)


def _cases(study: Study) -> list[Case]:
    """Return the cases of known outcome, with the facts that balance folds."""
    facts = study.table.reindex(columns=["case_id", "patient_id", "wt_ml"])
    facts = facts.assign(age=study.outcomes[AGE])[study.outcomes["known"]].replace({np.nan: None})
    return [
        Case(
            case_id=row["case_id"],
            patient_id=row["patient_id"],
            release="unknown",
            facts=CaseFacts(age_years=row["age"], tumour_ml=row["wt_ml"]),
        )
        for row in facts.to_dict("records")
    ]


def _check_enough(study: Study, plan: Plan, folds: FoldTable | None) -> None:
    n_patients = study.table["patient_id"][study.outcomes["died"]].nunique()
    n_folds = len(folds.folds) if folds else plan.n_folds
    expected = max(n_folds, FEWEST_DEATHS)
    if n_patients < expected:
        msg = f"{counted(n_patients, 'patient')} died on a known day: too few for {n_folds} folds; expected {expected} at least. Add patients; for {FEWEST_DEATHS}, give a --fold-table of as many folds."
        raise UsageError(msg)
