"""The fold table: what it answers, what it refuses, and how it is kept."""

from dataclasses import replace
from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.folds import (
    FoldRow,
    FoldTable,
    check_covers,
    make_folds,
    read_folds,
    read_split,
    write_folds,
    write_split,
)
from brats_seg.config import FoldConfig
from brats_seg.errors import EnvironmentalError, FoldError


def make_table(*rows: tuple[str, str, int | None]) -> FoldTable:
    return FoldTable(rows=tuple(FoldRow(case_id=c, patient_id=p, fold=f) for c, p, f in rows))


TABLE = make_table(("B", "b", 1), ("A1", "a", 0), ("A2", "a", 0), ("C", "c", 2), ("D", "d", None))


def make_cases(*case_ids: str) -> list[Case]:
    return [Case(case_id=case_id, patient_id=case_id, release="msd") for case_id in case_ids]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["case_id,patient_id,fold", *lines, ""]))
    return path


@pytest.mark.parametrize(
    ("fold", "train", "validation"),
    [(0, ("B", "C"), ("A1", "A2")), (1, ("A1", "A2", "C"), ("B",)), (2, ("A1", "A2", "B"), ("C",))],
)
def test_a_split_holds_one_fold_out(fold, train, validation):
    """A case without a fold is on neither side."""
    split = TABLE.split(fold)

    assert split.train == train
    assert split.validation == validation


@pytest.mark.parametrize("fold", [3, -1, 99])
def test_an_absent_fold_is_refused_with_the_folds_there_are(fold):
    with pytest.raises(FoldError, match=rf"fold {fold} is not .* which has folds 0, 1, 2$"):
        TABLE.split(fold)


def test_a_table_of_one_fold_cannot_be_split():
    with pytest.raises(FoldError, match="only fold 0; expected another one to train on"):
        make_table(("A", "a", 0), ("B", "b", 0)).split(0)


def test_a_patient_in_two_folds_is_refused_with_patient_and_folds():
    with pytest.raises(FoldError, match="patient a lies in folds 0, 2"):
        make_table(("A1", "a", 2), ("B", "b", 1), ("A2", "a", 0))


def test_a_patient_with_a_case_left_out_does_not_leak():
    table = make_table(("A1", "a", 0), ("A2", "a", None), ("B", "b", 1))

    assert table.split(0).validation == ("A1",)


def test_a_case_with_two_rows_is_refused():
    with pytest.raises(FoldError, match="more than one row for case A; expected one"):
        make_table(("A", "a", 0), ("A", "a", 0))


def test_a_written_table_is_read_back(tmp_path):
    path = tmp_path / "runs" / "folds.csv"

    write_folds(TABLE, path)

    assert read_folds(path) == TABLE
    assert path.read_text().splitlines()[:2] == ["case_id,patient_id,fold", "B,b,1"]
    assert [file.name for file in path.parent.iterdir()] == ["folds.csv"]


def test_a_table_that_is_there_already_stays_untouched(tmp_path):
    """Also when its lines are in another order: a person may have sorted it."""
    path = write(tmp_path / "folds.csv", "A1,a,0", "A2,a,0", "B,b,1", "C,c,2", "D,d,")
    before = path.stat().st_mtime_ns

    write_folds(TABLE, path)

    assert path.stat().st_mtime_ns == before


def test_other_folds_are_not_written_over(tmp_path):
    path = write(tmp_path / "folds.csv", "A,a,0", "B,b,1")

    with pytest.raises(FoldError, match=r"folds\.csv holds other folds, .* move the file away"):
        write_folds(TABLE, path)

    assert read_folds(path).folds == (0, 1)


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(EnvironmentalError, match=r"folds\.csv .*cannot be written|cannot write"):
        write_folds(TABLE, tmp_path / "file" / "folds.csv")


def test_a_leak_in_a_file_is_refused_with_file_patient_and_folds(tmp_path):
    """What a careless edit does."""
    cases = [
        Case(case_id=f"P{n}-{scan}", patient_id=f"P{n}", release="brats2024-gli")
        for n in range(6)
        for scan in range(2)
    ]
    path = tmp_path / "folds.csv"
    write_folds(make_folds(cases, FoldConfig(n_folds=3)), path)
    [line] = [line for line in path.read_text().splitlines() if line.startswith("P3-1,")]
    fold = int(line[-1])
    edited = f"{line[:-1]}{(fold + 1) % 3}"
    path.write_text(path.read_text().replace(line, edited))

    folds = ", ".join(map(str, sorted({fold, (fold + 1) % 3})))
    with pytest.raises(
        FoldError, match=rf"folds\.csv: patient P3 lies in folds {folds}:.*Correct it"
    ):
        read_folds(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is not a CSV table: .* expected case_id, patient_id, fold"),
        ("case_id,patient_id,fold\n", "found no rows"),
        ("case_id,fold\nA,0\n", "has no column patient_id; .* expected case_id, pat"),
        ("case_id,patient_id,fold\nA,a\n", "line 2 has fewer cells than the header"),
        ("case_id,patient_id,fold\nA,a,first\n", "case A has fold 'first'; expected a number"),
        ("case_id,patient_id,fold\nA,a,-1\n", "case A has fold '-1'"),
        ("case_id,patient_id,fold\nA,a,1.0\n", r"case A has fold '1\.0'"),
    ],
)
def test_a_file_that_is_no_fold_table_is_refused(tmp_path, text, match):
    path = tmp_path / "folds.csv"
    path.write_text(text)

    with pytest.raises(FoldError, match=match):
        read_folds(path)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "folds.csv"
    path.write_bytes(b"\x1f\x8b\xff\xfe" * 9)

    with pytest.raises(FoldError, match=r"fold table: .*folds\.csv .*Correct it, or remove it"):
        read_folds(path)


def test_a_table_that_went_through_a_spreadsheet_is_read(tmp_path):
    """With a byte order mark, other line ends, columns moved and one added."""
    path = tmp_path / "folds.csv"
    path.write_bytes(
        b"\xef\xbb\xbffold,case_id,remark,patient_id\r\n0,A,,a\r\n1,B,x,b\r\n,C,,c\r\n"
    )

    assert read_folds(path) == make_table(("A", "a", 0), ("B", "b", 1), ("C", "c", None))


def test_a_missing_table_is_told(tmp_path):
    with pytest.raises(FoldError, match=r"there is no fold table .*folds\.csv"):
        read_folds(tmp_path / "folds.csv")


def test_a_table_covers_its_cases_and_may_hold_more():
    check_covers(TABLE, make_cases("A1", "B", "D"))


@pytest.mark.parametrize(
    ("case_ids", "match"),
    [
        (["A1", "X"], "no row for case X. Give each a row, with an empty fold to leave it out"),
        (["Y", "X"], "no row for cases X, Y"),
        ([f"X{n}" for n in range(9)], "no row for cases X0, X1, X2, X3, X4 and 4 more"),
    ],
)
def test_cases_that_the_table_lacks_are_named(case_ids, match):
    with pytest.raises(FoldError, match=match):
        check_covers(TABLE, make_cases(*case_ids))


@pytest.mark.parametrize(
    "known", [{"patient_id": "a"}, {"voxel_hash": "same"}], ids=["patient", "scan"]
)
def test_cases_found_to_belong_together_later_leak(known):
    """A mapping of ids, or a second copy of a scan, came after the table was written."""
    cases = [replace(case, **known) for case in make_cases("A1", "C", "D")]

    with pytest.raises(FoldError, match=r"cases A1, C are scans of one patient, .* folds 0, 2"):
        check_covers(TABLE, cases)


def test_the_split_of_a_run_is_read_as_it_was_written(tmp_path):
    split = TABLE.split(0)

    write_split(split, tmp_path / "split.csv")

    assert read_split(tmp_path / "split.csv") == split
    assert (tmp_path / "split.csv").read_text().startswith("case_id,role\n")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, r"there is no .*split\.csv: it is written when the run is trained"),
        ("", "not the split of a run: .* expected the columns case_id and role"),
        ("case_id,fold\nA,0\n", "not the split of a run: .* has no column role"),
        ("case_id,role\nA,test\n", r"not the split of a run .*train or validation"),
    ],
)
def test_what_is_no_split_is_refused(tmp_path, text, match):
    path = tmp_path / "split.csv"
    if text is not None:
        path.write_text(text)

    with pytest.raises(FoldError, match=match):
        read_split(path)
