"""Grade, age and survival of patients, from the tables that come with BraTS 2017 to 2020.

Every year has new ids for old patients. `name_mapping*.csv` gives grades and tells which ids are
one person; `survival_*.csv` gives age and survival under the ids of its year. A case finds the
rows of its patient under any id.
"""

import csv
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from brats_seg.cases.case import Case
from brats_seg.cases.groups import first_of_group
from brats_seg.errors import CaseError

_MAX_DEPTH = 5
"""Folders below the data folder, enough for the mounts of Kaggle."""

_TABLE_NAME = re.compile(r"(name_mapping.*|survival_.*)\.csv", re.IGNORECASE)
_ID_COLUMN = re.compile(r"brats\d+(id|subjectid)|tcgatciasubjectid")
_MISSING = frozenset({"", "na", "nan", "n/a"})
_NUMBER = re.compile(r"\d+(\.\d*)?")
_ALIVE = re.compile(r"alive \((\d+) days later\)", re.IGNORECASE)
_NEXT_STEP = "Mend or remove that row."


@dataclass(frozen=True, kw_only=True, slots=True)
class ClinicalRow:
    """What the tables say about the patient of a case."""

    case_id: str
    """As the tables spell it."""
    person: str
    """The patient's first id in the tables: equal for all ids of one patient."""
    grade: str = ""
    """`HGG` or `LGG`, empty when unknown."""
    age_years: float | None = None
    survival_days: float | None = None
    """From the scan to death, or to the last news of a patient who lived."""
    survival_censored: bool = False
    """Whether the patient was alive after `survival_days`."""
    resection: str = ""
    """`GTR` (gross total), `STR` (subtotal), empty when unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClinicalTable:
    """The clinical rows of a data folder."""

    rows: Mapping[str, ClinicalRow]
    """By case id in lower case: the tables disagree about `Brats` and `BraTS`."""

    def row(self, case_id: str) -> ClinicalRow | None:
        """Return the row of the patient of that case, or None if the tables do not know the id."""
        return self.rows.get(case_id.lower())


def read_clinical_tables(root: Path) -> ClinicalTable:
    """Read every `name_mapping*.csv` and `survival_*.csv` below a data folder.

    A file of such a name without a column of BraTS ids is passed over; a data folder without
    tables has an empty table. Where two files contradict each other, the first by path counts.

    Raises:
        CaseError: An age or a survival that cannot be read.
    """
    records = [record for path in _table_paths(root) for record in _read_records(path, root)]
    people: defaultdict[int, list[_Record]] = defaultdict(list)
    for first, record in zip(first_of_group([r.keys for r in records]), records, strict=True):
        people[first].append(record)
    rows = (row for person in people.values() for row in _rows_of(person))
    return ClinicalTable(rows={row.case_id.lower(): row for row in rows})


def with_clinical(cases: Iterable[Case], table: ClinicalTable) -> tuple[Case, ...]:
    """Return the cases with grade and age filled in where they were unknown.

    Cases of one person under ids of different years get one patient id, the first of theirs by
    the alphabet, so that folds keep them together.
    """
    cases = tuple(cases)
    rows = [table.row(case.case_id) for case in cases]
    keys = [
        [("patient", case.patient_id), *([("person", row.person)] if row else [])]
        for case, row in zip(cases, rows, strict=True)
    ]
    groups = first_of_group(keys)
    patient_ids: dict[int, str] = {}
    for group, case in zip(groups, cases, strict=True):
        patient_ids[group] = min(case.patient_id, patient_ids.get(group, case.patient_id))
    return tuple(
        replace(
            case,
            patient_id=patient_ids[group],
            grade=case.grade or (row.grade if row else ""),
            age_years=row.age_years if row and case.age_years is None else case.age_years,
        )
        for case, row, group in zip(cases, rows, groups, strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """One row of one file."""

    ids: tuple[str, ...]
    grade: str
    age_years: float | None
    survival_days: float | None
    survival_censored: bool
    resection: str

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(case_id.lower() for case_id in self.ids)

    @classmethod
    def parse(cls, cells: Mapping[str, str], ids: Sequence[str], file: str) -> Self:
        """Read a row, given by the plain names of its columns."""
        days, censored = _survival(_cell(cells, "survival", "survivaldays"), ids[0], file)
        return cls(
            ids=tuple(ids),
            grade=_cell(cells, "grade").upper(),
            age_years=_age(_cell(cells, "age"), ids[0], file),
            survival_days=days,
            survival_censored=censored,
            resection=_cell(cells, "resectionstatus", "extentofresection").upper(),
        )


def _table_paths(root: Path) -> list[Path]:
    paths = []
    for folder, subfolders, names in os.walk(root):
        if len(Path(folder).relative_to(root).parts) >= _MAX_DEPTH:
            subfolders.clear()
        paths += [Path(folder) / name for name in names if _TABLE_NAME.fullmatch(name)]
    return sorted(paths)


def _read_records(path: Path, root: Path) -> Iterator[_Record]:
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        reader = csv.DictReader(stream, restval="")
        columns = {name: _plain(name) for name in reader.fieldnames or ()}
        for row in reader:
            cells = {plain: row[name].strip() for name, plain in columns.items()}
            ids = [
                text
                for plain, text in cells.items()
                if _ID_COLUMN.fullmatch(plain) and not _is_missing(text)
            ]
            if ids:
                yield _Record.parse(cells, ids, path.relative_to(root).as_posix())


def _rows_of(records: Sequence[_Record]) -> Iterator[ClinicalRow]:
    """Join what the files say about one person."""
    lived = next((r for r in records if r.survival_days is not None), records[0])
    person = ClinicalRow(
        case_id="",
        person=records[0].ids[0],
        grade=next((r.grade for r in records if r.grade), ""),
        age_years=next((r.age_years for r in records if r.age_years is not None), None),
        survival_days=lived.survival_days,
        survival_censored=lived.survival_censored,
        resection=next((r.resection for r in records if r.resection), ""),
    )
    for record in records:
        for case_id in record.ids:
            yield replace(person, case_id=case_id)


def _plain(name: str) -> str:
    """Return the name of a column without case and signs, of which some spreadsheets add one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_missing(text: str) -> bool:
    return text.lower() in _MISSING


def _cell(cells: Mapping[str, str], *columns: str) -> str:
    texts = (cells[column] for column in columns if column in cells)
    return next((text for text in texts if not _is_missing(text)), "")


def _age(text: str, case_id: str, file: str) -> float | None:
    if not text:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    raise CaseError(case_id, file, f"age {text!r}", "years, or NA", _NEXT_STEP)


def _survival(text: str, case_id: str, file: str) -> tuple[float | None, bool]:
    """Return the days, and whether the patient was alive at their end."""
    if not text:
        return None, False
    if alive := _ALIVE.fullmatch(text):
        return float(alive[1]), True
    if _NUMBER.fullmatch(text):
        return float(text), False
    expected = "days, ALIVE (n days later), or NA"
    raise CaseError(case_id, file, f"survival {text!r}", expected, _NEXT_STEP)
