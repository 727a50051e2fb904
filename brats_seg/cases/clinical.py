"""Grade, age and survival of patients, from the tables that come with BraTS 2017 to 2020.

Every year has new ids for old patients. `name_mapping*.csv` gives grades and tells which ids are
one person; `survival_*.csv` gives age and survival under the ids of its year. A case finds the
rows of its patient under any id.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.case import Case
from brats_seg.cases.clinical_records import ClinicalRecord, check_columns, read_records
from brats_seg.cases.groups import first_of_group

_MAX_DEPTH = 5
"""Folders below the data folder, enough for the mounts of Kaggle."""

_TABLE_NAME = re.compile(r"(name_mapping.*|survival_.*)\.csv", re.IGNORECASE)

SURVIVAL_CLASS_DAYS = (300.0, 450.0)
"""Where mid survivors begin and end: the 10 and 15 months of the challenge, of 30 days each."""


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


def read_clinical_tables(root: Path, named: Iterable[Path] = ()) -> ClinicalTable:
    """Read every `name_mapping*.csv` and `survival_*.csv` below a data folder.

    A file of such a name without a column of BraTS ids is passed over; a data folder without
    tables has an empty table. Where two files contradict each other, the first by path counts,
    and before them those that were named.

    Raises:
        CaseError: An age or a survival that cannot be read.
        UsageError: A table that was named cannot be read, or has no column of ids.
    """
    records = _records_of(named)
    records += [record for path in _table_paths(root) for record in read_records(path, root)]
    return _joined(records)


def read_clinical_files(paths: Iterable[Path]) -> ClinicalTable:
    """Read tables whatever their names; where two contradict each other, the first counts.

    Raises:
        UsageError: One of them cannot be read, or has no column of ids.
        CaseError: As `read_clinical_tables`.
    """
    return _joined(_records_of(paths))


def mapping_files(folder: Path) -> tuple[Path, ...]:
    """Return the tables right in a folder that tell which ids are one patient."""
    return tuple(sorted(folder.glob("[Nn]ame_[Mm]apping*.csv")))


def _records_of(paths: Iterable[Path]) -> list[ClinicalRecord]:
    records: list[ClinicalRecord] = []
    for path in paths:
        check_columns(path, with_survival=False)
        records += read_records(path, path.parent)
    return records


def _joined(records: Sequence[ClinicalRecord]) -> ClinicalTable:
    people: defaultdict[int, list[ClinicalRecord]] = defaultdict(list)
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


def _table_paths(root: Path) -> list[Path]:
    paths = []
    for folder, subfolders, names in os.walk(root):
        if len(Path(folder).relative_to(root).parts) >= _MAX_DEPTH:
            subfolders.clear()
        paths += [Path(folder) / name for name in names if _TABLE_NAME.fullmatch(name)]
    return sorted(paths)


def _rows_of(records: Sequence[ClinicalRecord]) -> Iterator[ClinicalRow]:
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
