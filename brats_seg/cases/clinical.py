"""Read grade, age and survival of patients from the tables that come with BraTS 2017 to 2020.

Each year gives new ids to the patients of earlier years. `name_mapping*.csv` contains the grade of
each patient and the ids of all years; `survival_*.csv` contains age and survival under the ids of its
year. The data of a patient are found under any of the ids.

The names of the columns differ between years: `Brats17ID`, `BraTS20ID`, `BraTS_2019_subject_ID`;
`Survival`, `Survival_days`; `ResectionStatus`, `Extent_of_Resection`. A table of another source may
call the ids `case_id`.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.case import Case
from brats_seg.cases.layouts import files_below
from brats_seg.errors import CaseError, UsageError
from brats_seg.tables import read_table
from brats_seg.voxels.shapes import group_by

log = logging.getLogger(__name__)

SURVIVAL_CLASS_DAYS = (300.0, 450.0)
"""Bounds of the mid-survivors in days: 10 and 15 months of 30 days, as in the challenge."""

_TABLE_NAME = re.compile(r"(name_mapping.*|survival_.*)\.csv", re.IGNORECASE)
# names of columns, in lower case and without signs
_COLUMNS = {
    "ids": re.compile(r"caseid|brats\d+(id|subjectid)|tcgatciasubjectid"),
    "grade": re.compile("grade"),
    "age": re.compile("age"),
    "survival": re.compile("survival(days)?"),
    "resection": re.compile("resectionstatus|extentofresection"),
}
_MISSING = frozenset({"", "na", "nan", "n/a"})
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]*)?")
_ALIVE = re.compile(r"alive \(([0-9]{1,6}) days later\)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClinicalRow:
    """Clinical data of one patient: a row of a table, or those of all tables together."""

    ids: tuple[str, ...]
    """Case ids of the patient, as the tables spell them; the first identifies the patient."""
    grade: str = ""
    """Grade `HGG` or `LGG`; empty if unknown."""
    age_years: float | None = None
    survival_days: float | None = None
    """Days from the scan to death, or to the last record of a patient who was alive."""
    survival_censored: bool = False
    """Whether the patient was alive after `survival_days`."""
    resection: str = ""
    """Extent of resection: `GTR` (gross total), `STR` (subtotal), empty if unknown."""


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
    rows = list(_rows_of_files(named))
    for path in sorted(path for path in files_below(root) if _TABLE_NAME.fullmatch(path.name)):
        try:
            rows += _read_rows(path, path.relative_to(root).as_posix())
        except UsageError as error:
            log.warning("ignored: %s", error)
    return _merge_rows(rows)


def read_clinical_files(paths: Iterable[Path]) -> ClinicalTable:
    """Read tables with any names; if two contradict each other, the first takes precedence."""
    return _merge_rows(list(_rows_of_files(paths)))


def mapping_files(folder: Path) -> tuple[Path, ...]:
    """Return the tables directly in a folder that list the ids of each patient."""
    return tuple(sorted(folder.glob("[Nn]ame_[Mm]apping*.csv")))


def with_clinical(cases: Iterable[Case], table: ClinicalTable) -> tuple[Case, ...]:
    """Return the cases with their age, and their grade if it was unknown.

    Cases of one person under several ids, of different years, or because their scans are copies or near
    copies, get one patient id, the first of them in alphabetical order, so that folds keep them together.
    """
    pairs = [(case, table.row(case.case_id) or ClinicalRow(ids=(case.case_id,))) for case in cases]
    patients: dict[str, str] = {}
    for group in group_by(pairs, lambda pair: _keys(*pair)):
        ids = [case.patient_id for case, _ in group]
        patients |= dict.fromkeys(ids, min(ids))
    filled = []
    for case, row in pairs:
        # an age from an earlier call may be that of a table which comes second
        facts = replace(case.facts, grade=case.facts.grade or row.grade, age_years=row.age_years)
        filled.append(replace(case, patient_id=patients[case.patient_id], facts=facts))
    return tuple(filled)


def _keys(case: Case, row: ClinicalRow) -> list[Hashable]:
    """Return what a case shares with those of its patient, and with copies and near copies of its scan."""
    ids = [("case", case_id) for case_id in (case.case_id, row.ids[0], *case.facts.near_copies)]
    scan = [("voxels", case.facts.voxel_hash)] if case.facts.voxel_hash else []
    return [("patient", case.patient_id.lower()), *ids, *scan]


def check_columns(path: Path, *needed: str) -> None:
    """Raise `UsageError` unless a table has the needed columns: `ids`, `survival` or others of `_COLUMNS`."""
    kinds = {name: _classify_column(name) for name in map(str, read_table(path).columns)}
    if missing := [kind for kind in needed if kind not in kinds.values()]:
        msg = (
            f"{path} has no column of {' and no column of '.join(missing)}; found {', '.join(kinds)}. "
            "Expected BraTS20ID,Age,Survival_days,Extent_of_Resection."
        )
        raise UsageError(msg)


def _rows_of_files(paths: Iterable[Path]) -> Iterator[ClinicalRow]:
    for path in paths:
        check_columns(path, "ids")
        yield from _read_rows(path, path.name)


def _read_rows(path: Path, file: str) -> Iterator[ClinicalRow]:
    """Yield the rows of a table that have an id; none if the table has no column of ids."""
    for row in read_table(path).to_dict("records"):
        cells: defaultdict[str, list[str]] = defaultdict(list)
        for name, text in row.items():
            if text.strip().lower() not in _MISSING:
                cells[_classify_column(str(name))].append(text.strip())
        if cells["ids"]:
            yield _parse_row({kind: texts[0] for kind, texts in cells.items()}, cells["ids"], file)


def _classify_column(column: str) -> str:
    """Return what a column holds by its name; empty if it is not used."""
    plain = re.sub(r"[^a-z0-9]", "", column.lower())
    return next((kind for kind, pattern in _COLUMNS.items() if pattern.fullmatch(plain)), "")


def _parse_row(cells: Mapping[str, str], ids: Sequence[str], file: str) -> ClinicalRow:
    age, survival = cells.get("age", ""), cells.get("survival", "")
    alive = _ALIVE.fullmatch(survival)
    days = alive[1] if alive else survival
    for kind, text, expected in (
        ("age", age, "years with a decimal point, or NA"),
        ("survival", days, "days, ALIVE (n days later), or NA"),
    ):
        if text and not _NUMBER.fullmatch(text):
            next_step = "Correct or remove that row."
            raise CaseError(ids[0], file, f"{kind} {text!r}", expected, next_step)
    return ClinicalRow(
        ids=tuple(ids),
        grade=cells.get("grade", "").upper(),
        age_years=float(age) if age else None,
        survival_days=float(days) if days else None,
        survival_censored=alive is not None,
        resection=cells.get("resection", "").upper(),
    )


def _merge_rows(rows: Sequence[ClinicalRow]) -> ClinicalTable:
    """Combine the rows of each person; where two contradict each other, the first counts."""
    joined: dict[str, ClinicalRow] = {}
    for known in group_by(rows, lambda row: map(str.lower, row.ids)):
        lived = next((row for row in known if row.survival_days is not None), known[0])
        ids = tuple(dict.fromkeys(case_id for row in known for case_id in row.ids))
        person = replace(
            lived,
            ids=ids,
            grade=next((row.grade for row in known if row.grade), ""),
            age_years=next((row.age_years for row in known if row.age_years is not None), None),
            resection=next((row.resection for row in known if row.resection), ""),
        )
        joined |= {case_id.lower(): person for case_id in ids}
    return ClinicalTable(rows=joined)
