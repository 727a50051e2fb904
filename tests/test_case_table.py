"""The case table as a file, and its summary."""

import csv
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest

from brats_seg.cases.case import Case, CaseIndex, ScanFile
from brats_seg.cases.index import COLUMNS, read_index, write_index
from brats_seg.errors import EnvironmentalError, UsageError

FULL = Case(
    case_id="BRATS_001",
    patient_id="001",
    timepoint="000",
    release="msd",
    label_convention="msd",
    t1n=ScanFile(path=Path("a, b/BRATS_001.nii.gz"), volume=1),
    t1c=ScanFile(path=Path("a, b/BRATS_001.nii.gz"), volume=2),
    t2w=ScanFile(path=Path("number #3/t2.nii")),
    t2f=ScanFile(path=Path('"quoted"/flair.nii')),
    label=ScanFile(path=Path("x/seg.nii.gz")),
    problems=("case BRATS_001, file x: found a; expected b. Try c.", 'another, "quoted" one'),
    remarks=("one", "two\nlines"),
    scan_remarks=("one",),
    label_values=(0, 1, 2, 3),
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


AGE = COLUMNS.index("age_years")


def test_columns_are_those_promised_and_all_there_are(tmp_path: Path) -> None:
    write_index(CaseIndex(root=tmp_path, cases=(FULL,)), tmp_path / "cases.csv")

    with (tmp_path / "cases.csv").open(newline="") as stream:
        header, row = csv.reader(stream)

    assert ",".join(header).startswith(
        "case_id,patient_id,timepoint,release,label_convention,t1n,t1c,t2w,t2f,label,problems,"
    )
    assert {*header, "root"} == {field.name for field in fields(Case)}
    assert row[COLUMNS.index("t1n")] == "a, b/BRATS_001.nii.gz#1"
    assert row[COLUMNS.index("label_values")] == "0 1 2 3"


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


def test_a_table_of_an_earlier_version_is_read_and_its_cases_are_opened_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cases.csv"
    write_index(CaseIndex(root=tmp_path, cases=(FULL, BARE)), path)
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table.drop(columns=["scan_remarks", "outermost_label", "enhancing_label"]).to_csv(
        path, index=False
    )

    found = read_index(path, tmp_path).cases

    assert [case.case_id for case in found] == [FULL.case_id, BARE.case_id]
    assert [case.facts.files_key for case in found] == ["", ""]
