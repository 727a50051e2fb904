"""Read the survival of the patients of a table of features from the tables of the releases.

A censored patient was alive at the last contact: the days are a lower bound of the survival. Models
of days are not trained on such cases and their figures do not include them, except for the number
of cases that were predicted to die before a day on which they were alive. The Cox model is trained on
them, and the concordance index includes them.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from brats_seg.cases.clinical import check_columns, mapping_files, read_clinical_files
from brats_seg.errors import UsageError, counted, some_of
from brats_seg.survival.table import AGE, RESECTION


def read_outcomes(table: pd.DataFrame, path: Path, mappings: Sequence[Path] = ()) -> pd.DataFrame:
    """Find the outcome of every case of a table of features.

    Args:
        table: Table of features; its ages and resections take precedence.
        path: Table of survival of any release.
        mappings: Tables that join the ids of one patient in several years. Those called
            `name_mapping*.csv` beside the table of survival are read as well.

    Returns:
        A row for each case: `days` from the scan to death or the last contact, NaN where unknown;
        `died`, `lived` (censored) and `known` (either); `age_years`, and `resection`: `GTR`, `STR`
        or empty.

    Raises:
        UsageError: The table lacks columns, has none of the cases, or has no death.
    """
    check_columns(path, with_survival=True)
    clinical = read_clinical_files(dict.fromkeys([path, *mappings, *mapping_files(path.parent)]))
    rows = [clinical.row(case_id) for case_id in table["case_id"]]
    if not any(rows):
        theirs = (
            some_of(list(dict.fromkeys(row.ids[0] for row in clinical.rows.values()))) or "no rows"
        )
        msg = (
            f"{path} has none of the {counted(len(table), 'case')} of the features. The features "
            f"are of {some_of(list(table['case_id']))}, the table has {theirs}. Give the table of "
            "the same year, or as a further --clinical the name_mapping.csv that joins the ids of "
            "the years."
        )
        raise UsageError(msg)
    days = pd.Series([row.survival_days if row else None for row in rows], dtype=float)
    ages = pd.Series([row.age_years if row else None for row in rows], dtype=float)
    resections = pd.Series([row.resection if row else "" for row in rows], dtype=object)
    censored = pd.Series([bool(row and row.survival_censored) for row in rows])
    known = days.notna()
    if AGE in table:
        ages = table[AGE].fillna(ages)
    measured = table[RESECTION].str.upper()
    outcomes = pd.DataFrame(
        {
            "days": days,
            "known": known,
            "died": known & ~censored,
            "lived": known & censored,
            AGE: ages,
            RESECTION: measured.where(measured != "", resections),
        }
    )
    if not outcomes["died"].any():
        msg = (
            f"{path} has no death among the {counted(sum(map(bool, rows)), 'case')} that it shares with "
            f"the features: {outcomes['lived'].sum()} alive at the last contact, the others without "
            "survival. Expected days until death, to train on; add such cases."
        )
        raise UsageError(msg)
    return outcomes


def read_ids(path: Path) -> tuple[str, ...]:
    """Return the ids in a table of patients, in lower case.

    Raises:
        UsageError: The table cannot be read, or has no ids.
    """
    ids = tuple(read_clinical_files([path]).rows)
    if not ids:
        msg = f"{path} has no rows; expected one for each case to submit"
        raise UsageError(msg)
    return ids
