"""Read and write the index of a data folder as `cases.csv`, one row per case, and summarise it."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from brats_seg.cases.case import Case, CaseIndex, ScanFile
from brats_seg.cases.label_files import EXPECTED_LABELS
from brats_seg.cases.path_table import data_folder
from brats_seg.errors import UsageError, counted
from brats_seg.tables import BETWEEN_TEXTS, read_table, write_table

Item = TypeVar("Item")

COLUMNS = (
    "case_id",
    "patient_id",
    "timepoint",
    "release",
    "label_convention",
    "t1n",
    "t1c",
    "t2w",
    "t2f",
    "label",
    "problems",
    "remarks",
    "scan_remarks",
    "label_values",
    "outermost_label",
    "enhancing_label",
    "grade",
    "age_years",
    "tumour_ml",
    "near_copies",
    "fingerprint",
    "voxel_hash",
    "files_key",
)

_LATER_COLUMNS = {
    "scan_remarks",
    "outermost_label",
    "enhancing_label",
    "near_copies",
    "fingerprint",
}
"""Columns that tables of earlier versions lack."""


def write_index(index: CaseIndex, path: Path) -> None:
    """Write the case table; raise `EnvironmentalError` if the file cannot be written."""
    write_table(path, COLUMNS, map(_row, index.cases))


def read_index(path: Path, root: Path) -> CaseIndex:
    """Read a case table that `write_index` wrote of a data folder or a table of paths.

    File names are relative to the data folder, or to the folder of the table of paths. The cases of an earlier version have no key of their files, so that they are opened again.

    Raises:
        UsageError: The file is missing or is no case table.
    """
    expected = (
        "Expected a case table as `brats-seg index` writes it. Remove the file, and index the data "
        "folder again."
    )
    try:
        required = [column for column in COLUMNS if column not in _LATER_COLUMNS]
        table = read_table(path, required=required, short_rows=False)
        missing = _LATER_COLUMNS.difference(table.columns)
        if missing:
            table = table.assign(**dict.fromkeys((*missing, "files_key"), ""))
        rows, folder = table.to_dict("records"), data_folder(root)
        return CaseIndex(root=folder, cases=tuple(_case(row, folder) for row in rows))
    except UsageError as error:
        msg = f"{error}. {expected}"
        raise UsageError(msg) from None
    except ValueError as error:
        msg = f"{path} is not a case table: {error}. {expected}"
        raise UsageError(msg) from error


def summarise(index: CaseIndex) -> tuple[str, ...]:
    """Return lines that describe an index: the cases of each release, problems, and remarks."""
    return (
        f"{counted(len(index.cases), 'case')}, {len(index.usable)} usable, "
        f"{len(index.trainable)} of these with a label map",
        *_release_lines(index.cases),
        *_label_lines(index.cases),
        *_problem_lines(index.cases),
        *remark_lines(index.cases),
    )


def remark_lines(cases: Iterable[Case]) -> Iterator[str]:
    """Yield lines with the remarks on cases; equal remarks share a line."""
    remarks = [(remark, case.case_id) for case in cases for remark in case.remarks]
    if remarks:
        yield "remarks:"
    for remark, group in _grouped(remarks, lambda pair: pair[0]):
        whose = group[0][1] if len(group) == 1 else counted(len(group), "case")
        yield f"  {whose}: {remark}"


def _row(case: Case) -> dict[str, str]:
    return {column: _cell(getattr(case, column)) for column in COLUMNS}


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        texts = all(isinstance(part, str) for part in value)
        return (BETWEEN_TEXTS if texts else " ").join(map(str, value))
    return str(value)


def _case(row: Mapping[Any, str], root: Path) -> Case:
    return Case(
        case_id=row["case_id"],
        patient_id=row["patient_id"],
        root=root,
        timepoint=row["timepoint"],
        release=row["release"],
        label_convention=row["label_convention"],
        t1n=_scan(row["t1n"]),
        t1c=_scan(row["t1c"]),
        t2w=_scan(row["t2w"]),
        t2f=_scan(row["t2f"]),
        label=_scan(row["label"]),
        problems=_texts(row["problems"]),
        remarks=_texts(row["remarks"]),
        scan_remarks=_texts(row["scan_remarks"]),
        label_values=tuple(map(int, row["label_values"].split())),
        outermost_label=_integer(row["outermost_label"]),
        enhancing_label=_integer(row["enhancing_label"]),
        grade=row["grade"],
        age_years=_number(row["age_years"]),
        tumour_ml=_number(row["tumour_ml"]),
        near_copies=_texts(row["near_copies"]),
        fingerprint=row["fingerprint"],
        voxel_hash=row["voxel_hash"],
        files_key=row["files_key"],
    )


def _scan(cell: str) -> ScanFile | None:
    return ScanFile.parse(cell) if cell else None


def _texts(cell: str) -> tuple[str, ...]:
    return tuple(cell.split(BETWEEN_TEXTS)) if cell else ()


def _integer(cell: str) -> int | None:
    return int(cell) if cell else None


def _number(cell: str) -> float | None:
    number = float(cell) if cell else None
    if number is not None and not math.isfinite(number):
        msg = f"found the number {cell}"
        raise ValueError(msg)
    return number


def _release_lines(cases: Iterable[Case]) -> Iterator[str]:
    for release, of_release in _grouped(cases, lambda case: case.release):
        yield f"{release}: {counted(len(of_release), 'case')}"
        for labels, group in _grouped(of_release, _labels):
            values = sorted({value for case in group for value in case.label_values})
            of_values = f"label values {' '.join(map(str, values))}, " if values else ""
            yield f"  {counted(len(group), 'case')}: {of_values}{labels}"


def _label_lines(cases: Collection[Case]) -> Iterator[str]:
    if cases and not any(case.label for case in cases):
        yield f"looked for label maps called {EXPECTED_LABELS}; name others with --label-files"


def _labels(case: Case) -> str:
    if case.label is None:
        return "no label map"
    if not case.label_convention:
        return "no label map that can be read"
    return f"read as {case.label_convention}"


def _problem_lines(cases: Iterable[Case]) -> Iterator[str]:
    broken = [case for case in cases if not case.usable]
    if broken:
        yield f"{counted(len(broken), 'case')} cannot be used:"
        yield from (f"  {problem}" for case in broken for problem in case.problems)


def _grouped(items: Iterable[Item], key: Callable[[Item], str]) -> Iterable[tuple[str, list[Item]]]:
    """Group items by key, in the order in which the keys first occur."""
    groups: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.items()
