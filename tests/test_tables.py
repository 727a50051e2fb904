"""CSV tables: what is written is what is read, in a spreadsheet too."""

import os
from pathlib import Path

import pytest

from brats_seg.errors import UsageError
from brats_seg.tables import read_table, write_table


def test_cells_come_back_as_texts(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_table(path, ["a", "b"], [{"a": 1, "b": None}, ('x, "y"', 2.5)])
    assert path.read_text() == 'a,b\n1,\n"x, ""y""",2.5\n'
    assert read_table(path).to_numpy().tolist() == [["1", ""], ['x, "y"', "2.5"]]


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-x", "@SUM(A1)", "\t=1", "'=1", "''-x"])
def test_a_formula_is_a_text_to_a_spreadsheet(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    write_table(path, ["a"], [[text]])
    assert "'" + text in path.read_text()
    assert read_table(path)["a"][0] == text
    for number in ("-3.5", "+2", "-1e-3"):  # a number is no formula
        write_table(path, ["a"], [[number]])
        assert path.read_text() == f"a\n{number}\n"


@pytest.mark.parametrize("text", ["a\rb", "a\nb", "'", "''", "a'=", " =1"])
def test_any_text_is_read_back(tmp_path: Path, text: str) -> None:
    write_table(tmp_path / "t.csv", ["a", "b"], [[text, "c"], ["d", text]])
    assert read_table(tmp_path / "t.csv").to_numpy().tolist() == [[text, "c"], ["d", text]]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is not a CSV table"),
        ("a,b\n1,2,3\n", "is not a CSV table: a row has more cells than the header"),
        ("a\0,\0b\0", "is not a CSV table: it holds NUL characters, as UTF-16 does"),
        ('a,b\n"1\n', "is not a CSV table"),
        ("a,c\n1,2\n", "has no column b; found the columns a, c"),
    ],
)
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(UsageError, match=match):
        read_table(path, required=["a", "b"])
    path.unlink()
    with pytest.raises(UsageError, match=r"t\.csv does not exist"):
        read_table(path)
    os.mkfifo(path)
    with pytest.raises(UsageError, match=r"t\.csv cannot be read: it is a named pipe"):
        read_table(path)


def test_a_short_row_is_filled_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1\n")
    assert read_table(path).to_numpy().tolist() == [["1", ""]]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark is skipped
    assert list(read_table(path).columns) == ["a", "b"]
    with pytest.raises(UsageError, match="the row of '1' has fewer cells"):
        read_table(path, short_rows=False)


def test_tables_of_spreadsheets_are_read(tmp_path: Path) -> None:
    """Where the comma is in numbers, semicolons or tabs separate cells; empty rows are left at the end."""
    path = tmp_path / "t.csv"
    path.write_text("\na;b\n1,5;2\n;\n;\n")
    assert read_table(path, required=["a", "b"]).to_numpy().tolist() == [["1,5", "2"]]
    path.write_text("a\tb\n1,5\t2\n")
    assert read_table(path).to_numpy().tolist() == [["1,5", "2"]]
    path.write_text("a,b\n;;;,\n,\n")
    assert read_table(path, short_rows=False).to_numpy().tolist() == [[";;;", ""]]
