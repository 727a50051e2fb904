"""Which patients are held out together: the fold table, how it is made and how it is kept.

All cases of a patient, and scans that occur under two ids, lie in one fold. The table is made
once and written down: every later command reads it, and refuses it when it leaks.
"""

import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brats_seg.cases.case import Case
from brats_seg.cases.fold_schemes import kept_together, notebook_folds, stratified_folds
from brats_seg.config import FoldConfig
from brats_seg.errors import FoldError
from brats_seg.files import whole_file

SPLIT_NAME = "split.csv"
"""In the folder of a run: which cases it was trained on, and which were held out."""
_COLUMNS = ("case_id", "patient_id", "fold")
_ROLES = ("train", "validation")
_N_NAMED = 5
"""Cases that a message names before it counts the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The two sides of a fold, as case ids in alphabetical order."""

    train: tuple[str, ...]
    validation: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldRow:
    """Where one case lies."""

    case_id: str
    patient_id: str
    fold: int | None
    """None for a case that is neither trained on nor validated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldTable:
    """The fold of every case; no patient lies in two."""

    rows: tuple[FoldRow, ...]

    def __post_init__(self) -> None:
        _check_no_repeats(self.rows)
        _check_no_leaks(self.rows)

    @property
    def folds(self) -> tuple[int, ...]:
        """The folds there are."""
        return tuple(sorted({row.fold for row in self.rows if row.fold is not None}))

    def split(self, fold: int) -> Split:
        """Hold one fold out.

        Raises:
            FoldError: The table lacks that fold, or has no other to train on.
        """
        if fold not in self.folds:
            msg = f"fold {fold} is not in the fold table, which has folds {_joined(self.folds)}"
            raise FoldError(msg)
        if len(self.folds) == 1:
            msg = f"the fold table has only fold {fold}; expected another one to train on"
            raise FoldError(msg)
        used = sorted((row.case_id, row.fold) for row in self.rows if row.fold is not None)
        return Split(
            train=tuple(case_id for case_id, own in used if own != fold),
            validation=tuple(case_id for case_id, own in used if own == fold),
        )


def make_folds(cases: Sequence[Case], config: FoldConfig) -> FoldTable:
    """Share cases out by the scheme of the settings, whatever the order they come in.

    The scheme `notebook` has a number of folds and a seed of its own.

    Raises:
        FoldError: Too few patients for the folds asked for, or for the scheme.
    """
    ordered = sorted(cases, key=lambda case: case.case_id)
    groups = kept_together(ordered)
    if config.scheme == "notebook":
        folds = notebook_folds(groups)
    else:
        folds = stratified_folds(groups, config.n_folds, config.seed)
    return FoldTable(
        rows=tuple(
            FoldRow(case_id=c.case_id, patient_id=c.patient_id, fold=folds.get(c.case_id))
            for c in ordered
        )
    )


def check_covers(table: FoldTable, cases: Sequence[Case]) -> None:
    """Check that the table has a row for every case, and parts none that belong together.

    The ids of patients in the table may be older than what is known about the cases now.

    Raises:
        FoldError: Naming the cases.
    """
    fold_of = {row.case_id: row.fold for row in table.rows}
    missing = sorted({case.case_id for case in cases} - fold_of.keys())
    if missing:
        msg = (
            f"the fold table has no row for {_named(missing)}. Give each a row, with an empty "
            "fold to leave it out; or remove the table, and new folds are made of all cases"
        )
        raise FoldError(msg)
    for group in kept_together(cases):
        used = {c.case_id: fold for c in group if (fold := fold_of[c.case_id]) is not None}
        folds = sorted(set(used.values()))
        if len(folds) > 1:
            msg = (
                f"{_named(list(used))} are scans of one patient, but lie in folds {_joined(folds)} of "
                "the fold table. Give them one fold, or remove the table to have new folds made"
            )
            raise FoldError(msg)


def read_folds(path: Path) -> FoldTable:
    """Read what `write_folds` wrote, or what somebody made of it.

    Raises:
        FoldError: The file is missing or no fold table, or a patient lies in two folds.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = tuple(_parsed(row) for row in csv.DictReader(stream))
        if not rows:
            msg = f"found no rows; expected the columns {', '.join(_COLUMNS)}"
            raise FoldError(msg)
        return FoldTable(rows=rows)
    except FileNotFoundError:
        msg = f"there is no fold table {path}"
        raise FoldError(msg) from None
    except (FoldError, UnicodeDecodeError, csv.Error) as error:
        msg = f"fold table {path}: {error}. Mend it, or remove it to have new folds made"
        raise FoldError(msg) from None


def write_folds(table: FoldTable, path: Path) -> None:
    """Write the table as CSV, unless it is there already.

    Raises:
        FoldError: The file holds other folds: runs may have been trained on them.
    """
    if path.exists():
        if set(read_folds(path).rows) == set(table.rows):
            return
        msg = (
            f"{path} holds other folds, which runs may have been trained on. Use them as they "
            "are, or move the file away to start afresh"
        )
        raise FoldError(msg)
    with whole_file(path) as beside, beside.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows((row.case_id, row.patient_id, row.fold) for row in table.rows)


def read_split(path: Path) -> Split:
    """Read what `write_split` wrote.

    Raises:
        FoldError: The file is missing or no split.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = [(row["case_id"], row["role"]) for row in csv.DictReader(stream)]
        if not rows or not {role for _, role in rows} <= {*_ROLES}:
            msg = f"found {len(rows)} rows"
            raise ValueError(msg)
    except FileNotFoundError:
        msg = f"there is no {path}: it is written when the run is trained"
        raise FoldError(msg) from None
    except (KeyError, ValueError, csv.Error) as error:
        msg = (
            f"{path} is not the split of a run ({error}); expected the columns case_id and role, "
            f"which is {' or '.join(_ROLES)}. The next start of the run writes it anew"
        )
        raise FoldError(msg) from None
    train, validation = (
        tuple(sorted(case_id for case_id, own in rows if own == role)) for role in _ROLES
    )
    return Split(train=train, validation=validation)


def write_split(split: Split, path: Path) -> None:
    """Write which cases are trained on and which are held out, as CSV."""
    with whole_file(path) as beside, beside.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("case_id", "role"))
        for role, case_ids in zip(_ROLES, (split.train, split.validation), strict=True):
            writer.writerows((case_id, role) for case_id in case_ids)


def _check_no_repeats(rows: Sequence[FoldRow]) -> None:
    repeated = [case_id for case_id, n in Counter(row.case_id for row in rows).items() if n > 1]
    if repeated:
        msg = f"the fold table has more than one row for {_named(repeated)}; expected one each"
        raise FoldError(msg)


def _check_no_leaks(rows: Sequence[FoldRow]) -> None:
    folds_of: defaultdict[str, set[int]] = defaultdict(set)
    for row in rows:
        if row.fold is not None:
            folds_of[row.patient_id].add(row.fold)
    for patient_id, folds in folds_of.items():
        if len(folds) > 1:
            msg = (
                f"patient {patient_id} lies in folds {_joined(sorted(folds))}: what is learnt "
                "from one would be tested on the other; expected one fold per patient"
            )
            raise FoldError(msg)


def _parsed(row: dict[str, str | None]) -> FoldRow:
    cells = {column: row.get(column) for column in _COLUMNS}
    case_id, patient_id, fold = cells.values()
    if case_id is None or patient_id is None or fold is None:
        msg = f"found a row {list(row.values())}; expected the columns {', '.join(_COLUMNS)}"
        raise FoldError(msg)
    if fold and not fold.isdecimal():
        msg = f"case {case_id} has fold {fold!r}; expected a number from 0, or nothing"
        raise FoldError(msg)
    return FoldRow(case_id=case_id, patient_id=patient_id, fold=int(fold) if fold else None)


def _named(case_ids: Sequence[str]) -> str:
    noun = "case" if len(case_ids) == 1 else "cases"
    more = f" and {len(case_ids) - _N_NAMED} more" if len(case_ids) > _N_NAMED else ""
    return f"{noun} {', '.join(case_ids[:_N_NAMED])}{more}"


def _joined(folds: Sequence[int]) -> str:
    return ", ".join(map(str, folds))
