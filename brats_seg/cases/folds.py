"""Make, write and check the fold table, which assigns the cases to folds of cross-validation.

All cases of a patient, and scans that occur under two ids, perhaps with small changes, are in one
fold. The table is made once and written to a file; every later command reads it, and rejects it if it
leaks. The name of the file holds the settings, as in `folds-5-seed55.csv`, so that tables of several
settings do not overwrite each other.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from brats_seg.cases.case import Case
from brats_seg.config import FoldConfig
from brats_seg.errors import FoldError, UsageError, counted, some_of
from brats_seg.tables import read_table, write_table
from brats_seg.voxels.shapes import group_by

SPLIT_NAME = "split.csv"
"""File in the folder of a run that lists its training and validation cases."""
GIVEN_NAME = "folds.csv"
"""Fold table that an earlier version has made, or a user."""
_COLUMNS = ("case_id", "patient_id", "fold")
_SPLIT_COLUMNS = ("case_id", "role")
_ROLES = ("train", "validation")

_NOTEBOOK_FOLDS = 7
_NOTEBOOK_SEED = 55
_NOTEBOOK_DROPPED = "BraTS20_Training_355"


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Case ids of the two sides of a fold, in alphabetical order."""

    train: tuple[str, ...]
    validation: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoldRow:
    """The fold of one case."""

    case_id: str
    patient_id: str
    fold: int | None
    """Number of the fold; None for a case that is neither trained on nor validated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldTable:
    """The fold of every case; no patient is in two folds."""

    rows: tuple[FoldRow, ...]

    def __post_init__(self) -> None:
        repeated = [name for name, n in Counter(row.case_id for row in self.rows).items() if n > 1]
        if repeated:
            msg = f"the fold table has more than one row for {_list_cases(repeated)}; expected one each"
            raise FoldError(msg)
        for rows in group_by(self.rows, lambda row: [row.patient_id]):
            folds = {row.fold for row in rows if row.fold is not None}
            if len(folds) > 1:
                msg = f"patient {rows[0].patient_id} lies in folds {_join(sorted(folds))}; expected one"
                raise FoldError(msg)

    @property
    def folds(self) -> tuple[int, ...]:
        """Numbers of the folds, ascending."""
        return tuple(sorted({row.fold for row in self.rows if row.fold is not None}))

    def split(self, fold: int) -> Split:
        """Return the split that holds one fold out."""
        if fold not in self.folds:
            msg = f"fold {fold} is not in the fold table, which has folds {_join(self.folds)}"
            raise FoldError(msg)
        if len(self.folds) == 1:
            msg = f"the fold table has only fold {fold}; expected another one to train on"
            raise FoldError(msg)
        used = sorted((row.case_id, row.fold) for row in self.rows if row.fold is not None)
        return Split(
            train=tuple(case_id for case_id, of_case in used if of_case != fold),
            validation=tuple(case_id for case_id, of_case in used if of_case == fold),
        )


def fold_table_path(folder: Path, config: FoldConfig) -> Path:
    """Return the path of the fold table of these settings, which need not exist.

    A table `folds.csv`, which earlier versions made, or a user, is taken if it has the number of folds of
    the settings; its seed is not known.

    Example:
        >>> fold_table_path(Path("prepared"), FoldConfig(n_folds=3)).name
        'folds-3-seed55.csv'
    """
    given = folder / GIVEN_NAME
    if given.exists() and len(read_folds(given).folds) == _n_folds(config):
        return given
    if config.scheme == "notebook":
        return folder / "folds-notebook.csv"
    return folder / f"folds-{config.n_folds}-seed{config.seed}.csv"


def check_fold(fold: int, folder: Path, config: FoldConfig) -> None:
    """Check that a fold of a folder of prepared cases can be held out, without reading any case."""
    if (path := fold_table_path(folder, config)).exists():
        read_folds(path).split(fold)
    elif fold not in range(n_folds := _n_folds(config)):
        msg = f"there is no fold {fold}: the settings have {n_folds} folds, 0 to {n_folds - 1}. Choose one of them, or set folds.n_folds"
        raise FoldError(msg)


def make_folds(cases: Sequence[Case], config: FoldConfig) -> FoldTable:
    """Distribute cases to folds by their patients, see `with_clinical`; the order of the cases does not matter.

    The scheme `notebook` has its own number of folds and its own seed.

    Example:
        >>> cases = [Case(case_id=f"c{n}", patient_id=f"p{n}", release="unknown") for n in range(4)]
        >>> table = make_folds(cases, FoldConfig(n_folds=2))
        >>> split = table.split(0)
        >>> len(split.train), len(split.validation)
        (2, 2)
    """
    ordered = sorted(cases, key=lambda case: case.case_id)
    groups = group_by(ordered, lambda case: [case.patient_id])
    if config.scheme == "notebook":
        folds = _notebook_folds(ordered, groups)
    else:
        folds = _stratified_folds(groups, config.n_folds, config.seed)
    rows = (FoldRow(case.case_id, case.patient_id, folds.get(case.case_id)) for case in ordered)
    return FoldTable(rows=tuple(rows))


def check_covers(table: FoldTable, cases: Sequence[Case]) -> None:
    """Check that the table has a row for every case and separates no cases of one patient.

    The patients are those of the cases; those in the table may be older.
    """
    fold_of = {row.case_id: row.fold for row in table.rows}
    if missing := sorted({case.case_id for case in cases} - fold_of.keys()):
        next_step = "Give each a row, with an empty fold to leave it out, or remove the table"
        msg = f"the fold table has no row for {_list_cases(missing)}. {next_step}"
        raise FoldError(msg)
    for group in group_by(cases, lambda case: [case.patient_id]):
        used = [case.case_id for case in group if fold_of[case.case_id] is not None]
        folds = {fold for case_id in used if (fold := fold_of[case_id]) is not None}
        if len(folds) > 1:
            msg = f"{_list_cases(used)} are scans of one patient, or near copies of one, but lie in folds {_join(sorted(folds))} of the fold table. Give them one fold, or remove the table"
            raise FoldError(msg)


def read_folds(path: Path) -> FoldTable:
    """Read a fold table that `write_folds` wrote; it may have been edited."""
    next_step = "Correct it, or remove it to have new folds made"
    rows = _read(path, _COLUMNS, "fold table", next_step).itertuples(index=False)
    try:
        return FoldTable(rows=tuple(_parse_row(*row) for row in rows))
    except FoldError as error:
        msg = f"fold table {path}: {error}. {next_step}"
        raise FoldError(msg) from None


def write_folds(table: FoldTable, path: Path) -> None:
    """Write the table as CSV."""
    write_table(path, _COLUMNS, map(astuple, table.rows))


def read_split(path: Path) -> Split:
    """Read a split that `write_split` wrote."""
    next_step = "It is written when the run is trained, and again by its next start"
    table = _read(path, _SPLIT_COLUMNS, "split of a run", next_step)
    if not table["role"].isin(_ROLES).all():
        msg = f"{path}: found a role that is not {' or '.join(_ROLES)}. {next_step}"
        raise FoldError(msg)
    train, validation = (tuple(sorted(table["case_id"][table["role"] == role])) for role in _ROLES)
    return Split(train=train, validation=validation)


def write_split(split: Split, path: Path) -> None:
    """Write the training and validation cases as CSV."""
    rows = [(case_id, role) for role, case_ids in asdict(split).items() for case_id in case_ids]
    write_table(path, _SPLIT_COLUMNS, rows)


def _read(path: Path, columns: Sequence[str], noun: str, next_step: str) -> pd.DataFrame:
    """Return these columns of a table that has at least one row."""
    try:
        table = read_table(path, required=columns, short_rows=False)[list(columns)]
        problem = f"{path} has no rows" if table.empty else ""
    except UsageError as error:
        problem = str(error)
    if problem:
        msg = f"no {noun}: {problem}; expected the columns {', '.join(columns)}. {next_step}"
        raise FoldError(msg)
    return table


def _n_folds(config: FoldConfig) -> int:
    return _NOTEBOOK_FOLDS if config.scheme == "notebook" else config.n_folds


def _stratified_folds(groups: Sequence[list[Case]], n_folds: int, seed: int) -> dict[str, int]:
    """Return the fold of each case.

    Each group of a stratum is assigned to the fold with the fewest cases of the stratum, and of those
    to the smallest. scikit-learn's StratifiedGroupKFold warns or leaves folds empty if there are few
    patients.
    """
    if len(groups) < n_folds:
        msg = f"{counted(len(groups), 'patient')} cannot fill {n_folds} folds (those who share a scan count as one). Add patients, or ask for fewer folds: --set folds.n_folds=N"
        raise FoldError(msg)
    rng = np.random.default_rng(seed)
    totals = [0] * n_folds
    folds: dict[str, int] = {}
    for stratum in _strata(groups, n_folds):
        counts = [0] * n_folds
        # the largest groups first, so that the small ones even out the differences
        shuffled = sorted((stratum[i] for i in rng.permutation(len(stratum))), key=len)
        for group in reversed(shuffled):
            fold = min(range(n_folds), key=lambda f: (counts[f], totals[f], f))
            counts[fold] += len(group)
            totals[fold] += len(group)
            folds |= {case.case_id: fold for case in group}
    return folds


def _notebook_folds(cases: Sequence[Case], groups: Sequence[list[Case]]) -> dict[str, int]:
    """Return the folds of the Kaggle notebook: cases with an age, in seven folds by decade of age.

    The notebook uses the rows of `name_mapping.csv`, which are in the order of the 2020 ids, as `cases`
    are. It distributes cases; here all cases of a group are in the fold of the first one. BraTS 2020 has one
    case per patient, so the folds are those of the notebook.
    """
    ages = {case.case_id: case.facts.age_years for case in cases}
    aged = [name for name, age in ages.items() if age is not None and name != _NOTEBOOK_DROPPED]
    decades = [(ages[name] or 0) // 10 for name in aged]
    if max(Counter(decades).values(), default=0) < _NOTEBOOK_FOLDS:
        msg = (
            f"only {len(aged)} of {counted(len(cases), 'case')} have an age, too few of one decade. Add "
            "the release's survival_*.csv to the data, or use --set folds.scheme=stratified"
        )
        raise FoldError(msg)
    # scikit-learn takes a second to import, and no other scheme uses it
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(_NOTEBOOK_FOLDS, shuffle=True, random_state=_NOTEBOOK_SEED)
    folds: dict[str, int] = {}
    with warnings.catch_warnings():
        # the first and last decades have fewer than seven patients, as in the notebook
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        for fold, (_, held_out) in enumerate(splitter.split(decades, decades)):
            folds |= {aged[i]: fold for i in held_out}
    for group in groups:
        used = [case.case_id for case in group if case.case_id in folds]
        folds |= dict.fromkeys(used, folds[used[0]]) if used else {}
    return folds


def _strata(groups: Sequence[list[Case]], n_folds: int) -> list[list[list[Case]]]:
    """Group similar patients: by grade and decade of age, or else by tumour volume.

    Patients of similar volume form a stratum of as many patients as there are folds. Neighbouring
    strata are similar too, so that small ones even out along the list.
    """
    strata: defaultdict[tuple[str, float], list[list[Case]]] = defaultdict(list)
    for group in groups:
        grade = next((case.facts.grade for case in group if case.facts.grade), "")
        ages = (case.facts.age_years for case in group)
        decade = next((age // 10 for age in ages if age is not None), -1)
        strata[grade, decade].append(group)
    unknown = sorted(strata.pop(("", -1), []), key=_volume_ml)
    by_volume = [unknown[i : i + n_folds] for i in range(0, len(unknown), n_folds)]
    return [strata[key] for key in sorted(strata)] + by_volume


def _volume_ml(group: list[Case]) -> float:
    return max(case.facts.tumour_ml or 0.0 for case in group)


def _parse_row(case_id: str, patient_id: str, fold: str) -> FoldRow:
    if fold and not (fold.isdecimal() and len(fold) < 10):
        msg = f"case {case_id} has fold {fold!r}; expected a number from 0, or nothing"
        raise FoldError(msg)
    return FoldRow(case_id, patient_id, int(fold) if fold else None)


def _list_cases(case_ids: Sequence[str]) -> str:
    return f"{'case' if len(case_ids) == 1 else 'cases'} {some_of(case_ids)}"


def _join(folds: Sequence[int]) -> str:
    return ", ".join(map(str, folds))
