"""Read tables of paths: cases whose files are listed in a CSV file or a JSON list.

    case_id,patient_id,t1n,t1c,t2w,t2f,label
    p01_day0,p01,p01/day0/pre.nii.gz,p01/day0/post.nii.gz,...

Columns of modalities and of the label map may have any of their names, such as `FLAIR` and `seg`.
`patient_id`, which keeps the cases of a patient in one fold, and `label` may be absent. Paths are
relative to the table; `all.nii.gz#2` is the third volume of a 4-D file.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from brats_seg.cases.case import Case, ScanFile, missing_problem
from brats_seg.cases.layouts import LABEL, is_label_word, modality_named
from brats_seg.errors import CaseError, UsageError
from brats_seg.labels import MODALITIES
from brats_seg.tables import read_table

_TABLE_ERRORS = (
    OSError,
    UsageError,
    ValueError,
    AttributeError,
    KeyError,
    TypeError,
    RecursionError,
)
"""Errors that a file raises which is no table, is too deep, or lacks what a table needs."""
_FORBIDDEN = frozenset('/\\:*?"<>|\0')
"""Characters that make a name a path, or that some systems do not allow in names."""
_OF_AN_INDEX = "files_key"
"""Column of `cases.csv`, whose paths are relative to the data folder."""


def is_path_table(data: Path) -> bool:
    """Return whether the data are given as a table of paths."""
    # Path.is_file raises if the name is too long
    return data.suffix.lower() in _ROWS and os.path.isfile(data)  # noqa: PTH113


def data_folder(data: Path) -> Path:
    """Return the folder that the paths of the cases are relative to."""
    return data.parent if is_path_table(data) else data


def read_path_table(path: Path) -> tuple[Case, ...]:
    """Return the cases of a table of paths in its order; errors of a case are in its `problems`.

    Raises:
        UsageError: The table cannot be read, or lists no case.
    """
    try:
        rows = _ROWS[path.suffix.lower()](path)
        cases = tuple(_case(row, path.parent) for row in rows)
    except _TABLE_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, UsageError):
            reason = str(error).removeprefix(f"{path} ")
        msg = (
            f"{path} cannot be read as a table of cases ({reason}). "
            f"Expected {', '.join(('case_id', *MODALITIES))} for each case, as columns of a CSV "
            "file or keys of a JSON list, and for training label and patient_id; paths are "
            "relative to the table."
        )
        raise UsageError(msg) from error
    if not cases:
        msg = f"{path} lists no cases; expected at least one"
        raise UsageError(msg)
    files = [case.path_of(scan) for case in cases for scan in case.images]
    if _OF_AN_INDEX in rows[0] and not any(map(os.path.exists, files)):
        msg = (
            f"{path} is an index that `brats-seg index` wrote, whose paths are relative to the data "
            "folder. Give the data folder, or move the table there."
        )
        raise UsageError(msg)
    return cases


def path_problems(case: Case) -> Iterator[str]:
    """Yield what is wrong with a case whose files and id a person has given."""
    files = " and ".join(map(str, case.images)) or "(none)"
    if not case.problems and (missing := missing_problem(case)):
        yield missing
    for scan in filter(None, (*case.images, case.label)):
        if not _can_be_a_path(scan.path):
            found, next_step = "a path that no file can have", "Correct the table."
            yield str(CaseError(case.case_id, str(scan), found, "the path of a file", next_step))
    name = case.case_id
    if not name or name.startswith(".") or name != name.strip() or _FORBIDDEN & set(name):
        found = f"the id {name!r}, which cannot be the name of a file"
        expected, next_step = "a file name without special characters", "Give the case another id."
        yield str(CaseError(name, files, found, expected, next_step))


def _case(row: Mapping[Any, Any], folder: Path) -> Case:
    cells = {str(key): str(value).strip() for key, value in row.items() if value}
    columns: dict[str, str] = {}
    for name in cells:
        kind = LABEL if is_label_word(name) else modality_named(name)
        if kind in columns:
            msg = f"the columns {columns[kind]} and {name} both name {kind}"
            raise UsageError(msg)
        if kind:
            columns[kind] = name
    files = {kind: ScanFile.parse(cells[name]) for kind, name in columns.items()}
    case = Case.named(cells["case_id"], files)
    case = replace(case, root=folder, patient_id=cells.get("patient_id", case.patient_id))
    case = replace(case, problems=tuple(path_problems(case)))
    # nothing can open such a file, not even to see that it is not there
    impossible: dict[str, Any] = {
        kind: None for kind, scan in files.items() if not _can_be_a_path(scan.path)
    }
    return replace(case, **impossible) if impossible else case


def _csv_rows(path: Path) -> Sequence[Mapping[Any, Any]]:
    with path.open(encoding="utf-8", errors="replace") as stream:
        header = stream.readline()
    # spreadsheets of many countries separate by semicolon
    separator = ";" if header.count(";") > header.count(",") else ","
    return read_table(path, required=("case_id",), separator=separator).to_dict("records")


def _json_rows(path: Path) -> Sequence[Mapping[Any, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        msg = "has no list of cases at its top level"
        raise UsageError(msg)
    return rows


_ROWS = {".csv": _csv_rows, ".json": _json_rows}


def _can_be_a_path(path: Path) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
