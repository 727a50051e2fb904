"""The table of features: a row for each case, on disk and in memory.

The first columns say who the case is of and where its row came from, all others are features. The
columns of a latent vector are `latent0_000`, `latent0_001`, ... for the first autoencoder,
`latent1_000`, ... for the next: two networks mean different things by their numbers.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.radiomics import Feature

AGE = "age_years"
RESECTION = "resection"
_TEXTS = ("case_id", "patient_id", "labels_from", "labels_seen", RESECTION)
_SEEN = re.compile(r"latent(\d+)_seen")
_LATENT = re.compile(r"latent(\d+)_\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureRow:
    """The features of a case."""

    case_id: str
    patient_id: str
    labels_from: str
    """`reference` or `prediction`."""
    labels_seen: Leakage | None
    """Whether the networks that predicted the label map had learnt on the case; None for a reference."""
    latent_seen: tuple[Leakage, ...]
    """The same of each autoencoder."""
    resection: str
    """`GTR`, `STR`, or empty when unknown."""
    features: tuple[Feature, ...]
    """The same ones, in the same order, for every case of a table."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureTable:
    """The features of many cases."""

    case_ids: tuple[str, ...]
    patient_ids: tuple[str, ...]
    labels_from: tuple[str, ...]
    labels_seen: tuple[Leakage | None, ...]
    latent_seen: tuple[tuple[Leakage, ...], ...]
    """Of each case, by autoencoder."""
    resections: tuple[str, ...]
    columns: tuple[str, ...]
    """Names of the features."""
    values: npt.NDArray[np.float64]
    """(cases, features), NaN where there is none."""

    @property
    def n_encoders(self) -> int:
        """How many autoencoders there are latent vectors of."""
        return len(self.latent_seen[0])

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
    """Write the table as CSV, with seven digits; what is not there is left empty.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    seen = [f"latent{number}_seen" for number in range(len(rows[0].latent_seen))] if rows else []
    names = [feature.name for feature in rows[0].features] if rows else []
    with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*_TEXTS, *seen, *names))
        for row in rows:
            texts = (row.case_id, row.patient_id, row.labels_from, row.labels_seen, row.resection)
            values = (_text(feature.value) for feature in row.features)
            writer.writerow((*texts, *row.latent_seen, *values))


def read_features(path: Path) -> FeatureTable:
    """Read what `write_features` wrote; columns that somebody added must be numbers.

    Raises:
        UsageError: The file is missing or empty, lacks a column, or holds what is not a number.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, restval="")
            names = list(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        msg = f"{path} cannot be read ({error}). {_MAKE_FEATURES}"
        raise UsageError(msg) from None
    missing = [name for name in _TEXTS if name not in names]
    if missing:
        found = ", ".join(names[:8]) or "nothing"
        msg = (
            f"{path} is no table of features: found the columns {found}; expected "
            f"{', '.join(missing)} as well. {_MAKE_FEATURES}"
        )
        raise UsageError(msg)
    if not rows:
        msg = f"{path} has no rows; expected one for each case. {_MAKE_FEATURES}"
        raise UsageError(msg)
    return _table(path, names, rows)


_MAKE_FEATURES = "Make one with `brats-seg features DATA -o features.csv`."


def _table(path: Path, names: Sequence[str], rows: Sequence[dict[str, str]]) -> FeatureTable:
    case_ids = tuple(row["case_id"] for row in rows)
    if len(set(case_ids)) < len(rows):
        repeated = sorted({case_id for case_id in case_ids if case_ids.count(case_id) > 1})
        msg = f"{path} has more than one row for {', '.join(repeated[:5])}; expected one each."
        raise UsageError(msg)
    seen = [name for name in names if _SEEN.fullmatch(name)]
    columns = [name for name in names if name not in {*_TEXTS, *seen}]
    try:
        latent_seen = tuple(tuple(Leakage(row[name]) for name in seen) for row in rows)
        labels_seen = tuple(Leakage(text) if (text := row["labels_seen"]) else None for row in rows)
    except ValueError as error:
        msg = (
            f"{path}: {error}; expected {', '.join(Leakage)} in {', '.join(seen)} and labels_seen."
        )
        raise UsageError(msg) from None
    return FeatureTable(
        case_ids=case_ids,
        patient_ids=tuple(row["patient_id"] for row in rows),
        labels_from=tuple(row["labels_from"] for row in rows),
        labels_seen=labels_seen,
        latent_seen=latent_seen,
        resections=tuple(row[RESECTION].upper() for row in rows),
        columns=tuple(columns),
        values=np.array([[_number(path, row, name) for name in columns] for row in rows]),
    )


def _number(path: Path, row: dict[str, str], column: str) -> float:
    text = (row[column] or "").strip()
    try:
        value = float(text) if text else float("nan")
    except ValueError:
        msg = (
            f"{path}, case {row['case_id']}: found {text!r} in column {column}; expected a number, "
            "or nothing where it is unknown. Mend the cell or remove the column."
        )
        raise UsageError(msg) from None
    # what is infinite is as little known as what is missing
    return value if np.isfinite(value) else float("nan")


def _text(value: float) -> str:
    return "" if isnan(value) else f"{value:.7g}"
