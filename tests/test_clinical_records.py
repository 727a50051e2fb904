"""The rows and columns of single tables."""

from pathlib import Path

import pytest

from brats_seg.cases.clinical import (
    check_columns,
    mapping_files,
    read_clinical_files,
    read_clinical_tables,
    read_records,
)
from brats_seg.errors import UsageError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_table_of_ones_own_may_call_the_ids_case_id(tmp_path):
    path = write(tmp_path / "mine.csv", "case_id,Age,Survival_days\nscan 7,61,NA\nscan 8,50,9\n")

    first, second = read_records(path, tmp_path)

    assert (first.ids, first.age_years, first.survival_days) == (("scan 7",), 61, None)
    assert second.survival_days == 9


def test_columns_may_come_with_signs_and_in_any_case(tmp_path):
    path = write(tmp_path / "t.csv", "\ufeffBRATS20ID,Survival days\nA,9\n")

    check_columns(path, with_survival=True)


@pytest.mark.parametrize(
    ("header", "with_survival", "message"),
    [
        ("Age,Survival", False, r"has no column of ids; found Age, Survival\. Expected"),
        ("case_id,Age", True, r"has no column of survival; found case_id, Age\. Expected"),
        ("a;b", True, r"no column of ids and no column of survival; found a;b\. .*by commas"),
    ],
)
def test_what_a_table_lacks_is_said(tmp_path, header, with_survival, message):
    with pytest.raises(UsageError, match=message):
        check_columns(write(tmp_path / "t.csv", f"{header}\n"), with_survival=with_survival)


def test_files_of_any_name_are_read_and_the_first_counts(tmp_path):
    paths = [
        write(tmp_path / "a.csv", "case_id,Age\nX,50\n"),
        write(tmp_path / "b.csv", "case_id,Age\nX,60\nY,70\n"),
    ]

    table = read_clinical_files(paths)

    assert (table.row("x").age_years, table.row("y").age_years) == (50, 70)


def test_named_tables_count_before_those_of_the_folder(tmp_path):
    write(tmp_path / "data" / "survival_info.csv", "case_id,Age\nX,60\nY,70\n")
    named = write(tmp_path / "named.csv", "case_id,Age\nX,50\n")

    table = read_clinical_tables(tmp_path / "data", [named])

    assert (table.row("x").age_years, table.row("y").age_years) == (50, 70)


def test_a_named_table_without_ids_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no column of ids"):
        read_clinical_tables(tmp_path, [write(tmp_path / "named.csv", "Age\n50\n")])


def test_mappings_are_found_right_in_a_folder(tmp_path):
    for name in ("name_mapping.csv", "name_mapping_validation_data.csv", "survival_info.csv"):
        write(tmp_path / name, "case_id\n")
    write(tmp_path / "below" / "name_mapping.csv", "case_id\n")

    found = [path.name for path in mapping_files(tmp_path)]

    assert found == ["name_mapping.csv", "name_mapping_validation_data.csv"]
