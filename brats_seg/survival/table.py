"""Write and read the table of features, which has a row for each case.

The first columns hold ids, the source of the label map, whether the networks were trained on the
patient, and the resection; all others are features. Those of a latent vector are `latent0_000`, ...
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
import pandas as pd

from brats_seg.errors import UsageError
from brats_seg.tables import read_table, write_table

Seen: TypeAlias = Literal["no", "unknown", "yes"]
"""Whether a network was trained on the patient of a case; the best answer first."""
SEEN: tuple[Seen, ...] = get_args(Seen)

AGE = "age_years"
RESECTION = "resection"
LABELS_SEEN, LATENT_SEEN = "labels_seen", "latent0_seen"
_TEXTS = ("case_id", "patient_id", "labels_from", LABELS_SEEN, RESECTION)
_MAKE_FEATURES = "Make a table of features with `brats-seg features DATA -o features.csv`."


def feature_columns(table: pd.DataFrame) -> list[str]:
    """Return the names of the features in a table."""
    return [name for name in table.columns if name not in {*_TEXTS, LATENT_SEEN}]


def write_features(rows: Sequence[Mapping[str, str | float]], path: Path) -> None:
    """Write rows of equal columns as CSV, with seven digits; unknown values are empty.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    cells = [
        {name: cell if isinstance(cell, str) else _digits(cell) for name, cell in row.items()}
        for row in rows
    ]
    write_table(path, list(rows[0]) if rows else _TEXTS, cells)


def read_features(path: Path) -> pd.DataFrame:
    """Read what `write_features` wrote; columns that somebody added must be numbers.

    Numbers are NaN where they are unknown or not finite.

    Raises:
        UsageError: The file is missing or empty, lacks a column, or has a cell that is no number.
    """
    try:
        table = read_table(path, required=_TEXTS)
    except UsageError as error:
        msg = f"{error}. {_MAKE_FEATURES}"
        raise UsageError(msg) from None
    if table.empty:
        msg = f"{path} has no rows; expected one for each case. {_MAKE_FEATURES}"
        raise UsageError(msg)
    _check_texts(path, table)
    names = feature_columns(table)
    texts = [name for name in table.columns if name not in names]
    return pd.concat([table[texts], _numbers(path, table, names)], axis=1)


def _digits(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.7g}"


def _check_texts(path: Path, table: pd.DataFrame) -> None:
    repeated = table["case_id"][table["case_id"].duplicated()].unique()
    if len(repeated):
        names = ", ".join(sorted(repeated)[:5])
        msg = f"{path} has more than one row for {names}; expected one each."
        raise UsageError(msg)
    for name, known in ((LABELS_SEEN, ("", *SEEN)), (LATENT_SEEN, SEEN)):
        unknown = set(table.get(name, ())) - set(known)
        if unknown:
            msg = f"{path} has {min(unknown)!r} in column {name}; expected {', '.join(SEEN)}."
            raise UsageError(msg)


def _numbers(path: Path, table: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    texts = table[names].map(str.strip)
    numbers = texts.apply(pd.to_numeric, errors="coerce").astype(float)
    wrong = np.argwhere(numbers.isna() & ~texts.isin(["", "nan", "NaN"]))
    if len(wrong):
        row, column = wrong[0].tolist()
        msg = (
            f"{path}, case {table['case_id'].iloc[row]}: found {texts.iat[row, column]!r} in column "
            f"{names[column]}; expected a number, or nothing where it is unknown. Correct the cell or "
            "remove the column."
        )
        raise UsageError(msg)
    return numbers.where(np.isfinite(numbers))
