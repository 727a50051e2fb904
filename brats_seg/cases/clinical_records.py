"""One row of one table that came with a release: its ids, and what it says about the patient.

The columns have other names in every year: `Brats17ID`, `BraTS20ID`, `BraTS_2019_subject_ID`;
`Survival`, `Survival_days`; `ResectionStatus`, `Extent_of_Resection`. A table of one's own may
call the ids `case_id`.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from brats_seg.errors import CaseError, UsageError

_ID_COLUMN = re.compile(r"caseid|brats\d+(id|subjectid)|tcgatciasubjectid")
_SURVIVAL_COLUMNS = ("survival", "survivaldays")
_RESECTION_COLUMNS = ("resectionstatus", "extentofresection")
_MISSING = frozenset({"", "na", "nan", "n/a"})
_NUMBER = re.compile(r"\d+(\.\d*)?")
_ALIVE = re.compile(r"alive \((\d+) days later\)", re.IGNORECASE)
_NEXT_STEP = "Mend or remove that row."


@dataclass(frozen=True, kw_only=True, slots=True)
class ClinicalRecord:
    """One row of one file."""

    ids: tuple[str, ...]
    """Of one patient, in different years."""
    grade: str
    age_years: float | None
    survival_days: float | None
    survival_censored: bool
    resection: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The ids without their case, about which the tables disagree."""
        return tuple(case_id.lower() for case_id in self.ids)

    @classmethod
    def parse(cls, cells: Mapping[str, str], ids: Sequence[str], file: str) -> Self:
        """Read a row, given by the plain names of its columns."""
        days, censored = _survival(_cell(cells, *_SURVIVAL_COLUMNS), ids[0], file)
        return cls(
            ids=tuple(ids),
            grade=_cell(cells, "grade").upper(),
            age_years=_age(_cell(cells, "age"), ids[0], file),
            survival_days=days,
            survival_censored=censored,
            resection=_cell(cells, *_RESECTION_COLUMNS).upper(),
        )


def read_records(path: Path, root: Path) -> Iterator[ClinicalRecord]:
    """Read the rows that have an id; none of a file without a column of ids.

    Args:
        path: A CSV file.
        root: What its name in messages is relative to.

    Raises:
        CaseError: An age or a survival that cannot be read.
    """
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
                yield ClinicalRecord.parse(cells, ids, path.relative_to(root).as_posix())


def check_columns(path: Path, *, with_survival: bool) -> None:
    """Raise `UsageError` unless a table has a column of ids and, if asked for, one of survival."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            columns = tuple(csv.DictReader(stream).fieldnames or ())
    except (OSError, csv.Error) as error:
        msg = f"the table {path} cannot be read ({error}). Give a CSV file as the challenge has it."
        raise UsageError(msg) from None
    plain = {_plain(name) for name in columns}
    lacks = "" if any(map(_ID_COLUMN.fullmatch, plain)) else "ids"
    if with_survival and not plain.intersection(_SURVIVAL_COLUMNS):
        lacks = f"{lacks} and no column of survival" if lacks else "survival"
    if lacks:
        msg = (
            f"{path} has no column of {lacks}; found {', '.join(columns) or 'an empty file'}. "
            "Expected a table as the challenge's survival_info.csv, separated by commas: "
            "BraTS20ID,Age,Survival_days,Extent_of_Resection."
        )
        raise UsageError(msg)


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
