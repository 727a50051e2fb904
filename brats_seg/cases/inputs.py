"""Find the cases to predict: in folders of any layout, in tables of paths, or in four files."""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.discovery import find_cases, id_problems
from brats_seg.cases.layouts import modality_named, parse_file_name
from brats_seg.errors import CaseError, UsageError
from brats_seg.labels import MODALITIES
from brats_seg.tables import read_table

log = logging.getLogger(__name__)

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


def find_inputs(paths: Sequence[Path]) -> tuple[Case, ...]:
    """Return the cases in folders and tables of paths, sorted by id.

    Their roots are absolute, so that a worker on another machine finds the files. Errors of a case
    are listed in its `problems`.

    Raises:
        LayoutError: A folder contains no cases.
        UsageError: A path is neither a folder nor a table, or a table cannot be read or is empty.
    """
    found = [case for path in paths for case in _inputs_of(path)]
    if not found:
        msg = f"{', '.join(map(str, paths)) or 'the input'} lists no cases; expected at least one"
        raise UsageError(msg)
    n_of_id = Counter(case.case_id for case in found)
    checked = [_checked(case, n_of_id) for case in found]
    return tuple(sorted(checked, key=lambda case: (case.case_id, str(case.images[:1]))))


def single_input(case_id: str | None, files: Mapping[str, Path]) -> Case:
    """Return the case of four files, given by modality.

    The default id is the common part of the file names before the modality, or else the name of the
    folder.
    """
    if case_id is None:
        names = [parse_file_name(path.name) for path in files.values()]
        ids = {name.case for name in names if name}
        folder = next(iter(files.values())).absolute().parent.name
        case_id = (ids.pop() if len(ids) == 1 else "") or folder
    scans = {modality: ScanFile(path=path.absolute()) for modality, path in files.items()}
    case = Case.named(case_id, scans)
    case = replace(case, root=Path("/"), problems=tuple(id_problems(case)))
    return _checked(case, Counter([case.case_id]))


def _inputs_of(path: Path) -> Iterator[Case]:
    is_file = os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises if the name is too long
    if is_file and path.suffix.lower() in _TABLES:
        yield from _table_inputs(path)
    elif is_file:
        msg = (
            f"{path} is a file; expected a folder of scans, or a .csv or .json table of paths. For "
            "one case give --t1n, --t1c, --t2w and --t2f."
        )
        raise UsageError(msg)
    else:
        discovery = find_cases(path)
        for notice in discovery.notices:
            log.warning("%s: %s", path, notice)
        for case in discovery.cases:
            yield replace(case, root=path.absolute())


def _table_inputs(path: Path) -> Iterator[Case]:
    try:
        for row in _TABLES[path.suffix.lower()](path):
            cells = {key: str(value).strip() for key, value in row.items() if value}
            scans = {
                modality: ScanFile.parse(cell)
                for name, cell in cells.items()
                if (modality := modality_named(name))
            }
            case = Case.named(cells["case_id"], scans)
            problems = tuple(id_problems(case))
            yield replace(case, root=path.absolute().parent, problems=problems)
    except _TABLE_ERRORS as error:
        msg = (
            f"{path} cannot be read as a table of cases ({type(error).__name__}: {error}). "
            f"Expected {', '.join(('case_id', *MODALITIES))} for each case, as columns of a CSV "
            "file or keys of a JSON list; paths are relative to the table."
        )
        raise UsageError(msg) from error


def _csv_rows(path: Path) -> Sequence[Mapping[Any, Any]]:
    with path.open(encoding="utf-8", errors="replace") as stream:
        header = stream.readline()
    # spreadsheets of many countries separate by semicolon
    separator = ";" if header.count(";") > header.count(",") else ","
    return read_table(path, required=("case_id",), separator=separator).to_dict("records")


def _json_rows(path: Path) -> Sequence[Mapping[Any, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        msg = f"found {type(rows).__name__}"
        raise TypeError(msg)
    return rows


_TABLES = {".csv": _csv_rows, ".json": _json_rows}


def _checked(case: Case, n_of_id: Mapping[str, int]) -> Case:
    problems = [*case.problems, *_problems(case, n_of_id)]
    return replace(case, problems=tuple(problems))


def _problems(case: Case, n_of_id: Mapping[str, int]) -> Iterator[str]:
    files = " and ".join(map(str, case.images)) or "(none)"
    if missing := [modality for modality in MODALITIES if getattr(case, modality) is None]:
        found = f"no {', '.join(missing)}"
        if not case.problems:
            yield str(
                CaseError(
                    case.case_id, files, found, ", ".join(MODALITIES), "Add the missing files."
                )
            )
    for scan in case.images:
        if not _can_be_a_path(scan.path):
            found = "a path that no file can have"
            next_step = "Correct the table."
            yield str(CaseError(case.case_id, str(scan), found, "the path of a file", next_step))
    name = case.case_id
    if not name or name.startswith(".") or name != name.strip() or _FORBIDDEN & set(name):
        found = f"the id {name!r}, which cannot be the name of a file"
        expected, next_step = "a file name without special characters", "Give the case another id."
        yield str(CaseError(name, files, found, expected, next_step))
    if n_of_id[name] > 1:
        found = f"{n_of_id[name]} cases of this id"
        next_step = "Rename or omit all but one: their results would have the same name."
        yield str(CaseError(name, files, found, "one", next_step))


def _can_be_a_path(path: Path) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
