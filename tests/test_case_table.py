"""The case table as a file, and its summary."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from brats_seg.cases.case import Case, CaseIndex, ScanFile
from brats_seg.cases.index import _columns, read_index, write_index
from brats_seg.cases.layouts import LABEL
from brats_seg.errors import EnvironmentalError, UsageError
from tests.builders import make_case

COLUMNS = list(_columns())

FULL = make_case(
    "BRATS_001",
    patient_id="001",
    timepoint="000",
    release="msd",
    convention="msd",
    files={
        "t1n": ScanFile(path=Path("a, b/BRATS_001.nii.gz"), volume=1),
        "t1c": ScanFile(path=Path("a, b/BRATS_001.nii.gz"), volume=2),
        "t2w": ScanFile(path=Path("number #3/t2.nii")),
        "t2f": ScanFile(path=Path('"quoted"/flair.nii')),
        LABEL: ScanFile(path=Path("x/seg.nii.gz")),
    },
    problems=("case BRATS_001, file x: found a; expected b. Try c.", 'another, "quoted" one'),
    remarks=("one", "two\nlines"),
    scan_remarks=("one",),
    label_voxels=((0, 1), (3, 20)),
    voxel_mm3=0.1,
    outermost_label=1,
    enhancing_label=3,
    grade="HGG",
    age_years=61.123287671232876,
    tumour_ml=0.1 + 0.2,
    near_copies=("a", "b"),
    fingerprint="12e5",
    voxel_hash="0012",
    files_key="12e5",
)
BARE = Case(case_id="007", patient_id="007", release="unknown")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    cases = tuple(replace(case, root=tmp_path) for case in (FULL, BARE))
    index = CaseIndex(root=tmp_path, cases=cases)

    write_index(index, tmp_path / "cases.csv")

    assert read_index(tmp_path / "cases.csv", tmp_path) == index


AGE = COLUMNS.index("voxel_mm3")


def test_a_row_can_be_read_by_a_person(tmp_path: Path) -> None:
    write_index(CaseIndex(root=tmp_path, cases=(FULL,)), tmp_path / "cases.csv")

    [row] = pd.read_csv(tmp_path / "cases.csv", dtype=str).to_dict("records")

    assert (row["t1n"], row["label"]) == ("a, b/BRATS_001.nii.gz#1", "x/seg.nii.gz")
    assert row["label_voxels"] == "0:1 3:20"


def test_equal_indexes_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        write_index(CaseIndex(root=tmp_path, cases=(FULL, BARE)), tmp_path / name)

    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("case_id,fold\na,1\n", "no column patient_id, timepoint, release"),
        ("", "is not a CSV table: No columns"),
        (",".join(COLUMNS) + "\na,b\n", "is not a CSV table: line 2 has fewer cells"),
        (
            ",".join(COLUMNS) + "\n" + "," * len(COLUMNS) + "x\n",
            "is not a CSV table: Length of header",
        ),
        (
            ",".join(COLUMNS) + "\n" + "," * AGE + "old" + "," * (len(COLUMNS) - 1 - AGE) + "\n",
            "could not convert .*'old'",
        ),
    ],
)
def test_another_table_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "cases.csv"
    path.write_text(text)

    with pytest.raises(
        UsageError,
        match=rf"cases\.csv .*{found}.*Expected a case table .*Remove the file, and",
    ):
        read_index(path, tmp_path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_bytes(b"\xff\xfe\x00binary")

    with pytest.raises(UsageError, match="has no column case_id"):
        read_index(tmp_path / "cases.csv", tmp_path)


def test_a_table_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cases\.csv does not exist\. Expected a case table"):
        read_index(tmp_path / "cases.csv", tmp_path)


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(EnvironmentalError, match=r"cases\.csv cannot be written"):
        write_index(CaseIndex(root=tmp_path, cases=()), tmp_path / "file" / "cases.csv")
