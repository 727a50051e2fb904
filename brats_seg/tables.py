"""Write and read CSV tables, which are safe to open in a spreadsheet.

A text cell that begins with `=`, `+`, `-` or `@` is a formula to a spreadsheet. Such cells are
written with an apostrophe in front, which spreadsheets do not show, and read without it (OWASP,
"CSV injection"); so is a cell that has apostrophes before such a sign. Numbers are written as they are.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from brats_seg.errors import UsageError
from brats_seg.files import check_regular, whole_file

BETWEEN_TEXTS = " | "
"""Separator of several texts in one cell."""

_FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
_GUARD = "'"


def write_table(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any] | Sequence[Any]]
) -> None:
    """Write rows as CSV; a reader never sees an incomplete file.

    Args:
        path: The file.
        columns: Names of the columns, in order.
        rows: A mapping from column to cell, or the cells in the order of the columns. None and NaN
            become empty cells; floats are written in full unless they are formatted beforehand.
    """
    cells = [
        [row.get(column) for column in columns] if isinstance(row, Mapping) else row for row in rows
    ]
    guarded = [[_escape_formula(cell) for cell in row] for row in cells]
    # object: pandas would turn whole numbers into floats if a cell is empty
    frame = pd.DataFrame(guarded, columns=list(columns), dtype=object)
    # pandas quotes a cell with a carriage return, as file names may have, only if lines end with one
    text = frame.to_csv(index=False, lineterminator="\r\n").replace("\r\n", "\n")
    with whole_file(path) as temporary:
        # file names need not be UTF-8
        temporary.write_bytes(text.encode(errors="surrogateescape"))


def read_table(
    path: Path, *, required: Sequence[str] = (), short_rows: bool = True
) -> pd.DataFrame:
    """Read a CSV file with a header; every cell is a str, and rows of empty cells are skipped.

    Spreadsheets separate cells by comma, semicolon or tab, and leave empty rows at the end.

    Args:
        path: The file; a byte order mark, as Excel writes it, is skipped.
        required: Columns that must be there.
        short_rows: Whether rows may have fewer cells than the header; the rest is then empty.
    """
    try:
        check_regular(path)
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
        if "\0" in text:
            msg = "it holds NUL characters, as UTF-16 does. Save it as CSV in UTF-8"
            raise ValueError(msg)
        with warnings.catch_warnings():
            # pandas cuts rows that are too long, and only warns
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                StringIO(text, newline=""),
                dtype=str,
                keep_default_na=False,
                sep=max(",;\t", key=text.lstrip("\r\n").partition("\n")[0].count),
                index_col=False,
                engine="python",
            )
        problem = _wrong_columns(frame, required, short_rows=short_rows)
    except FileNotFoundError:
        problem = "does not exist"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except pd.errors.ParserWarning:
        problem = "is not a CSV table: a row has more cells than the header"
    except ValueError as error:
        problem = f"is not a CSV table: {error}"
    if problem:
        msg = f"{path} {problem}"
        raise UsageError(msg)
    cells = frame.fillna("").map(_unescape_formula)
    return cells[(cells != "").any(axis=1)].reset_index(drop=True)


def _wrong_columns(frame: pd.DataFrame, required: Sequence[str], *, short_rows: bool) -> str:
    """Return what is wrong with the columns of a table, or nothing."""
    is_short = frame.isna().any(axis=1)
    if is_short.any() and not short_rows:
        return f"is not a CSV table: the row of {frame[is_short].iat[0, 0]!r} has fewer cells than the header"
    if missing := [column for column in required if column not in frame.columns]:
        columns = ", ".join(map(str, frame.columns[:8])) or "nothing"
        return f"has no column {', '.join(missing)}; found the columns {columns}"
    return ""


def _escape_formula(cell: Any) -> Any:
    is_formula = isinstance(cell, str) and _has_sign(cell) and not _is_number(cell)
    return _GUARD + cell if is_formula else cell


def _unescape_formula(cell: str) -> str:
    return cell[1:] if cell.startswith(_GUARD) and _has_sign(cell) else cell


def _has_sign(cell: str) -> bool:
    return cell.lstrip(_GUARD).startswith(_FORMULA_SIGNS)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
