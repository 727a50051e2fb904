"""Predict survival of held-out cases by nested cross-validation.

The outer folds hold patients out; the inner folds choose the values of each family and, among the
families, the one for `selected`. Held-out patients are not used for training, neither of a model
nor of the scaling and selection of features. Predictions of repeats are averaged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from brats_seg.cases.case import Case, CaseFacts
from brats_seg.cases.folds import FoldTable, make_folds
from brats_seg.config import FoldConfig
from brats_seg.errors import FoldError, UsageError, counted
from brats_seg.progress import Track, untracked
from brats_seg.survival.models import BASELINE, COX, Family, Splits, fit_family
from brats_seg.survival.table import AGE, RESECTION, feature_columns

Indices = npt.NDArray[np.intp]

SELECTED = "selected"
"""Name of the predictions of the family that did best on the inner folds."""
N_INNER_FOLDS = 3
FEWEST_DEATHS = 4
"""Fewest patients with a known day of death for which a study is possible."""
_NO_FOLD = -1
"""Fold of the cases of unknown outcome."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Study:
    """A table of features and the outcomes of its patients."""

    table: pd.DataFrame
    """Table of features, of `read_features`."""
    outcomes: pd.DataFrame
    """Outcome of each case, of `read_outcomes`."""
    features: pd.DataFrame
    """Features that are used, the age first."""
    dropped: tuple[str, ...]
    """Columns without information: empty, or equal wherever they are known."""

    @classmethod
    def of(cls, table: pd.DataFrame, outcomes: pd.DataFrame) -> Self:
        """Combine a table with its outcomes; age and resection become features."""
        extra = {AGE: outcomes[AGE]} | {
            f"resection_{kind.lower()}": (outcomes[RESECTION] == kind).astype(float)
            for kind in ("GTR", "STR")
        }
        names = [name for name in feature_columns(table) if name != AGE]
        features = pd.concat([pd.DataFrame(extra), table[names]], axis=1)
        # the baseline has no other feature than the age
        varies = (features.nunique() > 1) | (features.columns == AGE)
        return cls(
            table=table,
            outcomes=outcomes,
            features=features.loc[:, varies],
            dropped=tuple(features.columns[~varies]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings of the cross-validation."""

    n_folds: int
    """Number of new folds, where no fold table is given."""
    n_repeats: int
    seed: int
    families: tuple[Family, ...]
    with_cox: bool = False
    """Whether a Cox model is fitted as well; needs lifelines."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predictions:
    """Predictions for every case: held out where the outcome is known, else by a model of all deaths."""

    days: pd.DataFrame
    """Days by `selected`, the baseline and the families."""
    folds: npt.NDArray[np.intp]
    """(cases,) outer fold of each case in the first repeat; -1 for unknown outcomes."""
    n_chosen: dict[str, int]
    """Number of times that each family was selected."""
    log_hazards: npt.NDArray[np.float64] | None = None
    """(cases,) log hazard ratio to the mean training case by the Cox model; None without one."""

    @property
    def held_out(self) -> npt.NDArray[np.bool_]:
        """(cases,) whether a fold holds the case, so that its prediction can be scored."""
        return self.folds != _NO_FOLD


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Job:
    """Held-out cases to predict, and the cases to train on."""

    fold: int
    train: Indices
    held_out: Indices
    seed: tuple[int, ...]


def cross_validate(
    study: Study, plan: Plan, folds: FoldTable | None = None, track: Track = untracked
) -> Predictions:
    """Predict each case of known outcome by models of the others, and the rest by models of all.

    Args:
        study: Features and outcomes.
        plan: Settings.
        folds: Fold table of the project; the repeats then differ in their inner folds only. Without
            it each repeat assigns the patients to new folds.
        track: Shows progress.

    Raises:
        FoldError: The fold table lacks a case, or leaves too few deaths to learn from.
        UsageError: There are too few deaths for the folds.
    """
    _check_enough(study, plan, folds)
    repeats = [_outer_folds(study, plan, folds, repeat) for repeat in range(plan.n_repeats)]
    died = study.outcomes["died"].to_numpy()
    jobs = [job for repeat, own in enumerate(repeats) for job in _jobs(study, own, repeat, died)]
    _check_each_learns(jobs)
    families = (BASELINE, *plan.families)
    days = pd.DataFrame(0.0, study.features.index, [SELECTED, *(one.name for one in families)])
    n_chosen = {family.name: 0 for family in plan.families}
    for job in track(jobs, what="fitting", total=len(jobs)):
        splits = _inner_splits(study, job, np.random.default_rng([plan.seed, *job.seed]))
        fits = {one.name: _predict(study, job, one, splits) for one in families}
        best = max(n_chosen, key=lambda name: fits[name][1])
        n_chosen[best] += 1
        for name, (predicted, _) in (fits | {SELECTED: fits[best]}).items():
            days.loc[job.held_out, name] += predicted
    return Predictions(
        days=days / plan.n_repeats,
        folds=repeats[0],
        n_chosen=n_chosen,
        log_hazards=_log_hazards(study, plan, repeats, track) if plan.with_cox else None,
    )


def _jobs(
    study: Study, folds: Indices, repeat: int, usable: npt.NDArray[np.bool_]
) -> Iterator[_Job]:
    """Yield the fits of a repeat, which learn from the usable cases (n,) of the other folds."""
    known = folds != _NO_FOLD
    # the last job predicts the cases of unknown outcome, which are in no fold
    for fold in (*sorted(set(folds[known].tolist())), _NO_FOLD):
        held_out = folds == fold
        if held_out.any():
            yield _Job(
                fold=fold,
                train=np.flatnonzero(usable & known & ~held_out),
                held_out=np.flatnonzero(held_out),
                seed=(repeat, fold + 1, 0),
            )


def _predict(
    study: Study, job: _Job, family: Family, splits: Splits
) -> tuple[npt.NDArray[np.float64], float]:
    """Return what a family predicts for the held-out cases, and its score on the inner folds."""
    features = study.features.to_numpy()[:, : 1 if family is BASELINE else None]
    outcomes = study.outcomes[["days", "died"]].to_numpy(np.float64)[job.train]
    fit = fit_family(
        family, features[job.train], outcomes if family is COX else outcomes[:, 0], splits
    )
    return fit.predict(features[job.held_out]), fit.best_score_


def _log_hazards(
    study: Study, plan: Plan, repeats: Sequence[Indices], track: Track
) -> npt.NDArray[np.float64]:
    """Return the log hazard ratios (cases,) of Cox models that learn from censored cases as well."""
    known = study.outcomes["known"].to_numpy()
    jobs = [job for repeat, own in enumerate(repeats) for job in _jobs(study, own, repeat, known)]
    sums = np.zeros(len(known))
    for job in track(jobs, what="fitting Cox models", total=len(jobs)):
        # other random numbers than for the days: there are more cases to split
        splits = _inner_splits(study, job, np.random.default_rng([plan.seed, *job.seed, 1]))
        sums[job.held_out] += _predict(study, job, COX, splits)[0]
    return sums / plan.n_repeats


def _inner_splits(study: Study, job: _Job, rng: np.random.Generator) -> Splits:
    """Split the patients at random; all cases of a patient stay together."""
    patients = study.table["patient_id"].to_numpy()[job.train]
    names = rng.permutation(sorted(set(patients)))
    groups = np.array_split(names, min(N_INNER_FOLDS, len(names)))
    held_out = [np.isin(patients, group) for group in groups]
    return [(np.flatnonzero(~held), np.flatnonzero(held)) for held in held_out]


def _outer_folds(study: Study, plan: Plan, folds: FoldTable | None, repeat: int) -> Indices:
    """Return the outer fold (cases,) of each case; -1 for those of unknown outcome."""
    known = study.outcomes["known"].to_numpy()
    table = folds or make_folds(
        [_case(study, index) for index in np.flatnonzero(known).tolist()],
        FoldConfig(n_folds=plan.n_folds, seed=plan.seed + repeat),
    )
    fold_of = {row.case_id: row.fold for row in table.rows}
    case_ids = study.table["case_id"]
    missing = case_ids[known & ~case_ids.isin(fold_of)]
    if len(missing):
        msg = (
            f"the fold table has no row for {counted(len(missing), 'case')} of known survival, such as "
            f"{missing.iloc[0]}. Give the fold table of the data that the features are of, or leave "
            "--fold-table out to have new folds made."
        )
        raise FoldError(msg)
    return np.where(known, case_ids.map(fold_of).fillna(_NO_FOLD), _NO_FOLD).astype(np.intp)


def _case(study: Study, index: int) -> Case:
    age = study.outcomes[AGE][index]
    volume = study.table["wt_ml"][index] if "wt_ml" in study.table else np.nan
    return Case(
        case_id=study.table["case_id"][index],
        patient_id=study.table["patient_id"][index],
        release="unknown",
        facts=CaseFacts(
            age_years=None if np.isnan(age) else float(age),
            tumour_ml=None if np.isnan(volume) else float(volume),
        ),
    )


def _check_enough(study: Study, plan: Plan, folds: FoldTable | None) -> None:
    n_patients = study.table["patient_id"][study.outcomes["died"]].nunique()
    n_folds = len(folds.folds) if folds else plan.n_folds
    expected = max(n_folds, FEWEST_DEATHS)
    if n_patients < expected:
        msg = (
            f"{counted(n_patients, 'patient')} with a known day of death: too few for {n_folds} folds; "
            f"expected {expected} at least. Give more cases, or fewer folds."
        )
        raise UsageError(msg)


def _check_each_learns(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if len(job.train) < FEWEST_DEATHS - 1:
            msg = (
                f"fold {job.fold} is held out with only {counted(len(job.train), 'death')} in the other folds "
                f"to learn from; expected {FEWEST_DEATHS - 1} at least. Use other folds, or give more "
                "cases."
            )
            raise FoldError(msg)
