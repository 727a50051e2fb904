"""Write and read the table of features, which has a row for each case.

The first columns hold ids, the source of the label map, the leakage of the networks and the
resection; all others are features. The columns of a latent vector are `latent0_000`, `latent0_001`,
... for the first autoencoder, `latent1_000`, ... for the next: the numbers of two networks have
different meanings.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.errors import UsageError
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.radiomics import Feature
from brats_seg.tables import read_table, write_table

AGE = "age_years"
RESECTION = "resection"
_TEXTS = ("case_id", "patient_id", "labels_from", "labels_seen", RESECTION)
_LEAKAGE = re.compile(r"latent(\d+)_seen")
_LATENT = re.compile(r"latent(\d+)_\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureRow:
    """The features of a case."""

    case_id: str
    patient_id: str
    labels_from: str
    """`reference` or `prediction`."""
    labels_leakage: Leakage | None
    """Leakage of the networks that predicted the label map; None for a reference."""
    latent_leakage: tuple[Leakage, ...]
    """Leakage of each autoencoder."""
    resection: str
    """`GTR`, `STR`, or empty when unknown."""
    features: tuple[Feature, ...]
    """Features, of the same names in the same order for every case of a table."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureTable:
    """The features of many cases."""

    case_ids: tuple[str, ...]
    patient_ids: tuple[str, ...]
    labels_from: tuple[str, ...]
    labels_leakage: tuple[Leakage | None, ...]
    latent_leakage: tuple[tuple[Leakage, ...], ...]
    """Leakage by case and autoencoder."""
    resections: tuple[str, ...]
    columns: tuple[str, ...]
    """Names of the features."""
    values: npt.NDArray[np.float64]
    """(cases, features), NaN where unknown."""

    @property
    def n_encoders(self) -> int:
        """Number of autoencoders with latent vectors in the table."""
        return len(self.latent_leakage[0])

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Return one feature of all cases; NaN everywhere if the table lacks it."""
        if name not in self.columns:
            return np.full(len(self.case_ids), np.nan)
        return self.values[:, self.columns.index(name)]


def encoder_of(column: str) -> int | None:
    """Return the number of the autoencoder that a feature comes from; None for all other features."""
    match = _LATENT.fullmatch(column)
    return int(match[1]) if match else None


def write_features(rows: Sequence[FeatureRow], path: Path) -> None:
    """Write the table as CSV, with seven digits; unknown values are empty.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    leakage = (
        [f"latent{number}_seen" for number in range(len(rows[0].latent_leakage))] if rows else []
    )
    names = [feature.name for feature in rows[0].features] if rows else []
    write_table(path, (*_TEXTS, *leakage, *names), [_cells(row) for row in rows])


def read_features(path: Path) -> FeatureTable:
    """Read what `write_features` wrote; columns that somebody added must be numbers.

    Raises:
        UsageError: The file is missing or empty, lacks a column, or has a cell that is no number.
    """
    try:
        frame = read_table(path, required=_TEXTS)
    except UsageError as error:
        msg = f"{error}. {_MAKE_FEATURES}"
        raise UsageError(msg) from None
    if frame.empty:
        msg = f"{path} has no rows; expected one for each case. {_MAKE_FEATURES}"
        raise UsageError(msg)
    return _table(path, list(frame.columns), frame.to_dict("records"))


_MAKE_FEATURES = "Make a table of features with `brats-seg features DATA -o features.csv`."


def _cells(row: FeatureRow) -> tuple[object, ...]:
    texts = (row.case_id, row.patient_id, row.labels_from, row.labels_leakage, row.resection)
    return (*texts, *row.latent_leakage, *(_text(feature.value) for feature in row.features))


def _table(path: Path, names: Sequence[str], rows: Sequence[Mapping[Any, str]]) -> FeatureTable:
    case_ids = tuple(row["case_id"] for row in rows)
    if len(set(case_ids)) < len(rows):
        repeated = sorted({case_id for case_id in case_ids if case_ids.count(case_id) > 1})
        msg = f"{path} has more than one row for {', '.join(repeated[:5])}; expected one each."
        raise UsageError(msg)
    leakage = [name for name in names if _LEAKAGE.fullmatch(name)]
    columns = [name for name in names if name not in {*_TEXTS, *leakage}]
    try:
        latent_leakage = tuple(tuple(Leakage(row[name]) for name in leakage) for row in rows)
        labels_leakage = tuple(
            Leakage(text) if (text := row["labels_seen"]) else None for row in rows
        )
    except ValueError as error:
        msg = f"{path}: {error}; expected {', '.join(Leakage)} in {', '.join(leakage)} and labels_seen."
        raise UsageError(msg) from None
    return FeatureTable(
        case_ids=case_ids,
        patient_ids=tuple(row["patient_id"] for row in rows),
        labels_from=tuple(row["labels_from"] for row in rows),
        labels_leakage=labels_leakage,
        latent_leakage=latent_leakage,
        resections=tuple(row[RESECTION].upper() for row in rows),
        columns=tuple(columns),
        values=np.array([[_number(path, row, name) for name in columns] for row in rows]),
    )


def _number(path: Path, row: Mapping[Any, str], column: str) -> float:
    text = row[column].strip()
    try:
        value = float(text) if text else float("nan")
    except ValueError:
        msg = (
            f"{path}, case {row['case_id']}: found {text!r} in column {column}; expected a number, "
            "or nothing where it is unknown. Correct the cell or remove the column."
        )
        raise UsageError(msg) from None
    # an infinite value is treated as unknown
    return value if np.isfinite(value) else float("nan")


def _text(value: float) -> str:
    return "" if isnan(value) else f"{value:.7g}"
