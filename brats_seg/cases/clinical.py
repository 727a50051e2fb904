"""Read grade, age and survival of patients from the tables that come with BraTS 2017 to 2020.

Each year gives new ids to the patients of earlier years. `name_mapping*.csv` contains the grade of
each patient and the ids of all years; `survival_*.csv` contains age and survival under the ids of its
year. The data of a patient are found under any of the ids.

The names of the columns differ between years: `Brats17ID`, `BraTS20ID`, `BraTS_2019_subject_ID`;
`Survival`, `Survival_days`; `ResectionStatus`, `Extent_of_Resection`. A table of another source may
call the ids `case_id`.
"""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.case import Case, CaseFacts
from brats_seg.errors import CaseError, UsageError
from brats_seg.tables import read_table
from brats_seg.voxels.shapes import first_of_group

log = logging.getLogger(__name__)

_MAX_DEPTH = 5
"""Depth of the folders that are searched, enough for the mounts of Kaggle."""

_TABLE_NAME = re.compile(r"(name_mapping.*|survival_.*)\.csv", re.IGNORECASE)

SURVIVAL_CLASS_DAYS = (300.0, 450.0)
"""Bounds of the mid-survivors in days: 10 and 15 months of 30 days, as in the challenge."""

_ID_COLUMN = re.compile(r"caseid|brats\d+(id|subjectid)|tcgatciasubjectid")
_SURVIVAL_COLUMNS = ("survival", "survivaldays")
_RESECTION_COLUMNS = ("resectionstatus", "extentofresection")
_MISSING = frozenset({"", "na", "nan", "n/a"})
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{0,9})?")
_ALIVE = re.compile(r"alive \(([0-9]{1,6}) days later\)", re.IGNORECASE)
_AGE, _SURVIVAL = "years, or NA", "days, ALIVE (n days later), or NA"
_NEXT_STEP = "Correct or remove that row."


@dataclass(frozen=True, kw_only=True, slots=True)
class ClinicalRow:
    """Clinical data of one patient: a row of a table, or those of all tables together."""

    ids: tuple[str, ...]
    """Case ids of the patient, as the tables spell them."""
    grade: str = ""
    """Grade `HGG` or `LGG`; empty if unknown."""
    age_years: float | None = None
    survival_days: float | None = None
    """Days from the scan to death, or to the last record of a patient who was alive."""
    survival_censored: bool = False
    """Whether the patient was alive after `survival_days`."""
    resection: str = ""
    """Extent of resection: `GTR` (gross total), `STR` (subtotal), empty if unknown."""

    @property
    def person(self) -> str:
        """First id of the patient in the tables: equal for all ids of one patient."""
        return self.ids[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClinicalTable:
    """The clinical rows of a data folder."""

    rows: Mapping[str, ClinicalRow]
    """Rows by case id in lower case: the tables disagree about `Brats` and `BraTS`."""

    def row(self, case_id: str) -> ClinicalRow | None:
        """Return the row of the patient of a case, or None if the tables do not contain the id."""
        return self.rows.get(case_id.lower())


def read_clinical_tables(root: Path, named: Iterable[Path] = ()) -> ClinicalTable:
    """Read every `name_mapping*.csv` and `survival_*.csv` below a data folder.

    A file without a column of BraTS ids is ignored; a data folder without tables has an empty
    table. If two files contradict each other, those in `named` take precedence, then the first by
    path.

    Raises:
        CaseError: An age or a survival cannot be parsed.
        UsageError: A table in `named` cannot be read, or has no column of ids.
    """
    records = _records_of(named)
    records += [record for path in _table_paths(root) for record in read_records(path, root)]
    return _joined(records)


def read_clinical_files(paths: Iterable[Path]) -> ClinicalTable:
    """Read tables with any names; if two contradict each other, the first takes precedence."""
    return _joined(_records_of(paths))


def mapping_files(folder: Path) -> tuple[Path, ...]:
    """Return the tables directly in a folder that list the ids of each patient."""
    return tuple(sorted(folder.glob("[Nn]ame_[Mm]apping*.csv")))


def with_clinical(cases: Iterable[Case], table: ClinicalTable) -> tuple[Case, ...]:
    """Return the cases with grade and age filled in where they were unknown.

    Cases of one person under ids of different years get one patient id, the first of them in
    alphabetical order, so that folds keep them together.
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
            facts=_with_row(case.facts, row) if row else case.facts,
        )
        for case, row, group in zip(cases, rows, groups, strict=True)
    )


def _with_row(facts: CaseFacts, row: ClinicalRow) -> CaseFacts:
    age_years = row.age_years if facts.age_years is None else facts.age_years
    return replace(facts, grade=facts.grade or row.grade, age_years=age_years)


def read_records(path: Path, root: Path) -> Iterator[ClinicalRow]:
    """Yield the rows of a table that have an id; none if the table has no column of ids."""
    try:
        rows = read_table(path).to_dict("records")
    except UsageError as error:
        log.warning("ignored: %s", error)
        return
    for row in rows:
        cells = {_plain(str(name)): text.strip() for name, text in row.items()}
        ids = [
            text
            for plain, text in cells.items()
            if _ID_COLUMN.fullmatch(plain) and text.lower() not in _MISSING
        ]
        if ids:
            yield _parsed(cells, ids, path.relative_to(root).as_posix())


def check_columns(path: Path, *, with_survival: bool) -> None:
    """Raise `UsageError` unless a table has a column of ids and, if required, one of survival."""
    columns = tuple(map(str, read_table(path).columns))
    plain = {_plain(name) for name in columns}
    lacks = "" if any(map(_ID_COLUMN.fullmatch, plain)) else "ids"
    if with_survival and not plain.intersection(_SURVIVAL_COLUMNS):
        lacks = f"{lacks} and no column of survival" if lacks else "survival"
    if lacks:
        msg = (
            f"{path} has no column of {lacks}; found {', '.join(columns)}. "
            "Expected a table as the challenge's survival_info.csv, separated by commas: "
            "BraTS20ID,Age,Survival_days,Extent_of_Resection."
        )
        raise UsageError(msg)


def _records_of(paths: Iterable[Path]) -> list[ClinicalRow]:
    records: list[ClinicalRow] = []
    for path in paths:
        check_columns(path, with_survival=False)
        records += read_records(path, path.parent)
    return records


def _parsed(cells: Mapping[str, str], ids: Sequence[str], file: str) -> ClinicalRow:
    """Parse a row, given by the normalised names of its columns."""
    age, survival = _cell(cells, "age"), _cell(cells, *_SURVIVAL_COLUMNS)
    alive = _ALIVE.fullmatch(survival)
    days = alive[1] if alive else survival
    for what, text, expected in (("age", age, _AGE), ("survival", days, _SURVIVAL)):
        if text and not _NUMBER.fullmatch(text):
            raise CaseError(ids[0], file, f"{what} {text!r}", expected, _NEXT_STEP)
    return ClinicalRow(
        ids=tuple(ids),
        grade=_cell(cells, "grade").upper(),
        age_years=float(age) if age else None,
        survival_days=float(days) if days else None,
        survival_censored=alive is not None,
        resection=_cell(cells, *_RESECTION_COLUMNS).upper(),
    )


def _joined(records: Sequence[ClinicalRow]) -> ClinicalTable:
    """Combine the records of each person; where two contradict each other, the first counts."""
    people: defaultdict[int, list[ClinicalRow]] = defaultdict(list)
    keys = [[case_id.lower() for case_id in record.ids] for record in records]
    for first, record in zip(first_of_group(keys), records, strict=True):
        people[first].append(record)
    rows: dict[str, ClinicalRow] = {}
    for known in people.values():
        lived = next((one for one in known if one.survival_days is not None), known[0])
        person = replace(
            lived,
            ids=tuple(dict.fromkeys(case_id for one in known for case_id in one.ids)),
            grade=next((one.grade for one in known if one.grade), ""),
            age_years=next((one.age_years for one in known if one.age_years is not None), None),
            resection=next((one.resection for one in known if one.resection), ""),
        )
        rows |= {case_id.lower(): person for case_id in person.ids}
    return ClinicalTable(rows=rows)


def _table_paths(root: Path) -> list[Path]:
    paths = []
    for folder, subfolders, names in os.walk(root):
        if len(Path(folder).relative_to(root).parts) >= _MAX_DEPTH:
            subfolders.clear()
        paths += [Path(folder) / name for name in names if _TABLE_NAME.fullmatch(name)]
    return sorted(paths)


def _plain(name: str) -> str:
    """Return the name of a column in lower case, with letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _cell(cells: Mapping[str, str], *columns: str) -> str:
    texts = (cells[column] for column in columns if column in cells)
    return next((text for text in texts if text.lower() not in _MISSING), "")
