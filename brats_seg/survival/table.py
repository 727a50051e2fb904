"""Read and write the tables of a study: the features of cases, and the survival of their patients.

The first columns of the table of features hold ids, the source of the label map, whether the networks
were trained on the patient, and the resection; all others are features. A censored patient was alive
at the last contact: the days are a lower bound of the survival.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd

from brats_seg.cases.case import Case
from brats_seg.cases.clinical import (
    ClinicalRow,
    check_columns,
    mapping_files,
    read_clinical_files,
    with_clinical,
)
from brats_seg.data.fold import Seen
from brats_seg.errors import UsageError, counted, some_of
from brats_seg.tables import read_table, write_table

_ANSWERS = get_args(Seen)
"""Whether a network was trained on the patient of a case; the best answer first."""

AGE = "age_years"
LABELS_SEEN, LATENT_SEEN = "labels_seen", "latent0_seen"
"""Columns that say whether networks were trained on the patient of a case."""
_TEXTS = ("case_id", "patient_id", "labels_from", LABELS_SEEN, "resection")
_TOO_LARGE = 1e100
_MAKE_FEATURES = "Make a table of features with `brats-seg features DATA -o features.csv`."


def feature_columns(table: pd.DataFrame) -> list[str]:
    """Return the names of the features in a table."""
    return [name for name in table.columns if name not in {*_TEXTS, LATENT_SEEN}]


def write_features(rows: Sequence[Mapping[str, str | float]], path: Path) -> None:
    """Write rows of equal columns as CSV, with seven digits; unknown values are empty."""
    frame = pd.DataFrame(rows, columns=list(rows[0]) if rows else _TEXTS)
    numbers = frame.select_dtypes("number")
    frame[numbers.columns] = numbers.map("{:.7g}".format, na_action="ignore").astype(object)
    write_table(path, list(frame.columns), frame.itertuples(index=False))


def read_features(path: Path) -> pd.DataFrame:
    """Read what `write_features` wrote; columns that were added must be numbers.

    Numbers are NaN where they are unknown, not finite, or so large that squares would not be finite.
    """
    try:
        table = read_table(path, required=_TEXTS)
    except UsageError as error:
        msg = f"{error}. {_MAKE_FEATURES}"
        raise UsageError(msg) from None
    if table.empty:
        msg = f"{path} has no rows; expected one for each case. {_MAKE_FEATURES}"
        raise UsageError(msg)
    if repeated := sorted(set(table["case_id"][table["case_id"].duplicated()])):
        msg = f"{path} has several rows for {some_of(repeated)}; expected one each."
        raise UsageError(msg)
    for name, known in ((LABELS_SEEN, ("", *_ANSWERS)), (LATENT_SEEN, _ANSWERS)):
        if unknown := set(table.get(name, ())) - set(known):
            msg = f"{path} has {min(unknown)!r} in column {name}; expected {', '.join(_ANSWERS)}."
            raise UsageError(msg)
    names = feature_columns(table)
    texts = table[names].map(str.strip)
    numbers = texts.apply(pd.to_numeric, errors="coerce").astype(float)
    if len(wrong := np.argwhere(numbers.isna() & ~texts.isin(["", "nan", "NaN"]))):
        row, column = wrong[0]
        msg = (
            f"{path}, case {table['case_id'].iloc[row]}: found {texts.iat[row, column]!r} in column "
            f"{names[column]}; expected a number with a decimal point, or nothing. Correct it, or remove the column."
        )
        raise UsageError(msg)
    return table.drop(columns=names).join(numbers.where(numbers.abs() < _TOO_LARGE))


def seen_remarks(table: pd.DataFrame) -> Iterator[str]:
    """Count the cases that were measured by networks which may have been trained on their patients."""
    for column, kind in ((LATENT_SEEN, "latent vector"), (LABELS_SEEN, "label map")):
        for answer, networks in (
            ("yes", "networks that were trained on their patients, so the figures may be too good"),
            ("unknown", "networks without a record of the patients they were trained on"),
        ):
            if column in table and (n := int((table[column] == answer).sum())):
                yield f"the {kind} of {n} of {len(table)} cases is of {networks}"


def read_outcomes(table: pd.DataFrame, paths: Sequence[Path]) -> pd.DataFrame:
    """Find the outcome of every case of a table of features, whose ages and resections count first.

    The row of each case has `patient_id`, the same for all ids of a patient; `days` from the scan to
    death or the last contact, NaN where unknown; `died`; `known` (died or censored);
    `age_years`; and `resection`: `GTR`, `STR` or empty. The first path is a table of survival of any
    release; the others join the ids of one patient in several years, as do those called
    `name_mapping*.csv` in its folder.
    """
    path = paths[0]
    check_columns(path, "ids", "survival")
    clinical = read_clinical_files(dict.fromkeys([*paths, *mapping_files(path.parent)]))
    rows = [clinical.row(case_id) for case_id in table["case_id"]]
    if not any(rows):
        people = dict.fromkeys(row.ids[0] for row in clinical.rows.values())
        present, ids = some_of(list(people)) or "no rows", some_of(list(table["case_id"]))
        msg = (
            f"{path} has none of the cases of the features, {ids}: it has {present}. Give the table of "
            "the same year, or the name_mapping.csv of both years as a further --clinical."
        )
        raise UsageError(msg)
    pairs = zip(table["case_id"], table["patient_id"], strict=True)
    cases = (Case(case_id=name, patient_id=patient, release="unknown") for name, patient in pairs)
    patients = pd.DataFrame([row or ClinicalRow(ids=()) for row in rows])
    known, censored = patients["survival_days"].notna(), patients["survival_censored"]
    ages, resections = patients[AGE].astype(float), table["resection"].str.upper()
    outcomes = pd.DataFrame(
        {
            "patient_id": [case.patient_id for case in with_clinical(cases, clinical)],
            "days": patients["survival_days"].astype(float),
            "known": known,
            "died": known & ~censored,
            AGE: table[AGE].fillna(ages) if AGE in table else ages,
            "resection": resections.where(resections != "", patients["resection"]),
        }
    )
    if not outcomes["died"].any():
        msg = (
            f"{path} has no death among the {counted(sum(map(bool, rows)), 'case')} of the features, and "
            f"{known.sum()} alive at the last contact; expected days until death."
        )
        raise UsageError(msg)
    return outcomes
