"""Predict survival of held-out cases by nested cross-validation.

The outer folds hold patients out; the inner folds choose the values of each family and, among the
families, the one for `selected`. Held-out patients are not used for training, neither of a model
nor of the scaling and selection of features. Predictions of repeats are averaged.

Latent vectors of two autoencoders cannot be mixed: their numbers have different meanings. A
held-out case is predicted from the latent vector of an autoencoder that was not trained on it, by a
model that is trained on latent vectors of the same autoencoder. The autoencoder may have been
trained on the scans of those training cases, but never on an outcome.

Days are learnt from deaths. The Cox model also learns from censored patients and predicts a hazard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case, CaseFacts
from brats_seg.cases.folds import FoldTable, make_folds
from brats_seg.config import FoldConfig
from brats_seg.errors import FoldError, UsageError, counted
from brats_seg.progress import Track, untracked
from brats_seg.survival.cox import fit_cox
from brats_seg.survival.leakage import least_leakage
from brats_seg.survival.models import BASELINE, Family, FittedModel, Splits, fit_family
from brats_seg.survival.outcomes import GTR, STR, Outcomes
from brats_seg.survival.table import AGE, FeatureTable, encoder_of

Places = npt.NDArray[np.intp]
Days = npt.NDArray[np.float64]

SELECTED = "selected"
"""Name of the predictions of the family that did best on the inner folds."""
N_INNER_FOLDS = 3
FEWEST_DEATHS = 4
"""Fewest patients with a known day of death for which a study is possible."""
_FEWEST_TO_LEARN = FEWEST_DEATHS - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Study:
    """A table of features and the outcomes of its patients."""

    table: FeatureTable
    outcomes: Outcomes
    columns: tuple[str, ...]
    """Names of the features that are used."""
    values: npt.NDArray[np.float64]
    """(cases, features)"""
    dropped: tuple[str, ...]
    """Columns without information: empty, or equal wherever they are known."""

    @classmethod
    def of(cls, table: FeatureTable, outcomes: Outcomes) -> Self:
        """Combine a table with its outcomes; age and resection become features."""
        resections = np.array(outcomes.resections)
        own = [name for name in table.columns if name != AGE]
        columns = (AGE, "resection_gtr", "resection_str", *own)
        extra = (outcomes.ages, resections == GTR, resections == STR)
        values = np.column_stack([*extra, *(table.column(name) for name in own)]).astype(np.float64)
        empty = np.isnan(values)
        lowest = np.where(empty, np.inf, values).min(axis=0)
        varies = np.where(empty, -np.inf, values).max(axis=0) > lowest
        # the baseline has no other feature than the age
        varies[0] = True
        return cls(
            table=table,
            outcomes=outcomes,
            columns=tuple(name for name, kept in zip(columns, varies, strict=True) if kept),
            values=values[:, varies],
            dropped=tuple(name for name, kept in zip(columns, varies, strict=True) if not kept),
        )

    @property
    def encoders(self) -> Places:
        """(cases,) the first autoencoder with the least leakage of each case; 0 without any."""
        if not self.table.n_encoders:
            return np.zeros(len(self.values), dtype=np.intp)
        return np.array([least_leakage(answers)[0][0] for answers in self.table.latent_leakage])

    def features_of(self, encoder: int, *, age_only: bool = False) -> npt.NDArray[np.float64]:
        """Return the features of all cases (n, p) with the latent vectors of one autoencoder."""
        if age_only:
            return self.values[:, :1]
        kept = [encoder_of(name) in (None, encoder) for name in self.columns]
        return self.values[:, kept]


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidationPlan:
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
    """Predicted days of every case by family, and hazards."""

    names: tuple[str, ...]
    """`selected`, the baseline and the families."""
    days: npt.NDArray[np.float64]
    """(names, cases): held out where the outcome is known, else by a model of all deaths."""
    folds: tuple[int | None, ...]
    """The outer fold of each case in the first repeat; None for unknown outcomes."""
    chosen: tuple[tuple[str, int], ...]
    """Number of times that each family was selected."""
    log_hazards: npt.NDArray[np.float64] | None = None
    """(cases,) log hazard ratio to the mean training case by the Cox model; None without one."""

    @property
    def held_out(self) -> npt.NDArray[np.bool_]:
        """(cases,) whether a fold holds the case, so that its prediction can be scored."""
        return np.array([fold is not None for fold in self.folds])

    def of(self, name: str) -> Days:
        """Return the days (n,) of one family."""
        return self.days[self.names.index(name)]


def cross_validate(
    study: Study,
    plan: CrossValidationPlan,
    folds: FoldTable | None = None,
    track: Track = untracked,
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
    repeats = [_folds_of(study, plan, folds, repeat) for repeat in range(plan.n_repeats)]
    died = study.outcomes.died
    jobs = [job for repeat, own in enumerate(repeats) for job in _jobs(study, own, repeat, died)]
    _check_each_learns(jobs)
    names = (SELECTED, BASELINE.name, *(family.name for family in plan.families))
    sums = np.zeros((len(names), len(study.values)))
    counts = dict.fromkeys(names[2:], 0)
    for job in track(jobs, what="fitting", total=len(jobs)):
        fits = _fitted(study, job, plan)
        best = min(range(1, len(fits)), key=lambda place: fits[place].error_days)
        counts[names[best + 1]] += 1
        for row, place in enumerate([best, *range(len(fits))]):
            family = (BASELINE, *plan.families)[place]
            features = study.features_of(job.encoder, age_only=family.age_only)
            sums[row, job.held_out] += fits[place].predict(features[job.held_out])
    return Predictions(
        names=names,
        days=sums / plan.n_repeats,
        folds=repeats[0],
        chosen=tuple(counts.items()),
        log_hazards=_log_hazards(study, plan, repeats, track) if plan.with_cox else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Job:
    """Held-out cases to predict, and the cases to train on."""

    fold: int
    train: Places
    held_out: Places
    encoder: int
    seed: tuple[int, ...]


def _jobs(
    study: Study, folds: Sequence[int | None], repeat: int, usable: npt.NDArray[np.bool_]
) -> Iterator[_Job]:
    """Yield the fits of a repeat, which learn from the usable cases (n,) of the other folds."""
    fold_of = np.array([-1 if fold is None else fold for fold in folds])
    encoders = study.encoders
    known = study.outcomes.known & (fold_of >= 0)
    for fold in (*sorted(set(fold_of[known].tolist())), -1):
        # the last job predicts the cases of unknown outcome, which are in no fold
        wanted = known & (fold_of == fold) if fold >= 0 else ~known
        train = usable & known & ~wanted
        for encoder in sorted(set(encoders[wanted].tolist())):
            yield _Job(
                fold=fold,
                train=np.flatnonzero(train),
                held_out=np.flatnonzero(wanted & (encoders == encoder)),
                encoder=encoder,
                seed=(repeat, fold + 1, encoder),
            )


def _fitted(study: Study, job: _Job, plan: CrossValidationPlan) -> list[FittedModel]:
    """Fit the baseline and every family to the training cases of a job."""
    rng = np.random.default_rng([plan.seed, *job.seed])
    patients = [study.table.patient_ids[place] for place in job.train]
    splits = _inner_splits(patients, rng)
    seed = int(rng.integers(2**31))
    days = study.outcomes.days[job.train]
    return [
        fit_family(
            family,
            study.features_of(job.encoder, age_only=family.age_only)[job.train],
            days,
            splits,
            seed,
        )
        for family in (BASELINE, *plan.families)
    ]


def _log_hazards(
    study: Study,
    plan: CrossValidationPlan,
    repeats: Sequence[Sequence[int | None]],
    track: Track,
) -> npt.NDArray[np.float64]:
    """Return the log hazard ratios (cases,) of Cox models that learn from censored cases as well."""
    known = study.outcomes.known
    jobs = [job for repeat, own in enumerate(repeats) for job in _jobs(study, own, repeat, known)]
    sums = np.zeros(len(study.values))
    for job in track(jobs, what="fitting Cox models", total=len(jobs)):
        features = study.features_of(job.encoder)
        # other random numbers than for the days: there are more cases to split
        rng = np.random.default_rng([plan.seed, *job.seed, 1])
        splits = _inner_splits([study.table.patient_ids[place] for place in job.train], rng)
        outcomes = study.outcomes
        model = fit_cox(
            features[job.train], outcomes.days[job.train], outcomes.died[job.train], splits
        )
        sums[job.held_out] += model.predict(features[job.held_out])
    return sums / plan.n_repeats


def _inner_splits(patients: Sequence[str], rng: np.random.Generator) -> Splits:
    """Split the patients at random; all cases of a patient stay together."""
    names = rng.permutation(sorted(set(patients)))
    groups = np.array_split(names, min(N_INNER_FOLDS, len(names)))
    held_out = [np.isin(patients, group) for group in groups]
    return [(np.flatnonzero(~held), np.flatnonzero(held)) for held in held_out]


def _folds_of(
    study: Study, plan: CrossValidationPlan, folds: FoldTable | None, repeat: int
) -> tuple[int | None, ...]:
    """Return the outer fold of each case; those of unknown outcome have none."""
    known = study.outcomes.known
    table = folds or make_folds(
        [_case(study, int(place)) for place in np.flatnonzero(known)],
        FoldConfig(n_folds=plan.n_folds, seed=plan.seed + repeat),
    )
    fold_of = {row.case_id: row.fold for row in table.rows}
    missing = [
        case_id
        for case_id, is_known in zip(study.table.case_ids, known, strict=True)
        if is_known and case_id not in fold_of
    ]
    if missing:
        msg = (
            f"the fold table has no row for {counted(len(missing), 'case')} of known survival, such as "
            f"{missing[0]}. Give the fold table of the data that the features are of, or leave "
            "--fold-table out to have new folds made."
        )
        raise FoldError(msg)
    return tuple(
        fold_of[case_id] if is_known else None
        for case_id, is_known in zip(study.table.case_ids, known, strict=True)
    )


def _case(study: Study, place: int) -> Case:
    age = study.outcomes.ages[place]
    volume = study.table.column("wt_ml")[place]
    return Case(
        case_id=study.table.case_ids[place],
        patient_id=study.table.patient_ids[place],
        release="unknown",
        facts=CaseFacts(
            age_years=None if np.isnan(age) else float(age),
            tumour_ml=None if np.isnan(volume) else float(volume),
        ),
    )


def _check_enough(study: Study, plan: CrossValidationPlan, folds: FoldTable | None) -> None:
    died = study.outcomes.died
    patients = {study.table.patient_ids[place] for place in np.flatnonzero(died)}
    n_folds = len(folds.folds) if folds else plan.n_folds
    expected = max(n_folds, FEWEST_DEATHS)
    if len(patients) < expected:
        way_out = f", or n_folds={len(patients)}" if len(patients) >= FEWEST_DEATHS else ""
        msg = (
            f"{counted(len(patients), 'patient')} with a known day of death: too few for {n_folds} folds; "
            f"expected {expected} at least. Give more cases{way_out}."
        )
        raise UsageError(msg)


def _check_each_learns(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if len(job.train) < _FEWEST_TO_LEARN:
            msg = (
                f"fold {job.fold} is held out with only {counted(len(job.train), 'death')} in the other folds "
                f"to learn from; expected {_FEWEST_TO_LEARN} at least. Use other folds, or give more "
                "cases."
            )
            raise FoldError(msg)
