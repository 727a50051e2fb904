"""Read the survival of the patients of a table of features from the tables of the releases.

A censored patient was alive at the last contact: the days are a lower bound of the survival. Models
of days are not trained on such cases and their figures do not include them, except for the number
of cases that were predicted to die before a day on which they were alive. The Cox model is trained on
them, and the concordance index includes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.clinical import (
    ClinicalTable,
    check_columns,
    mapping_files,
    read_clinical_files,
)
from brats_seg.errors import UsageError, counted, some_of
from brats_seg.survival.table import AGE, FeatureTable

GTR, STR = "GTR", "STR"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcomes:
    """Survival, age and resection of the patient of each row of a table of features."""

    days: npt.NDArray[np.float64]
    """(n,) days from the scan to death or to the last contact; NaN where unknown."""
    censored: npt.NDArray[np.bool_]
    """(n,) whether the patient was alive after these days."""
    ages: npt.NDArray[np.float64]
    """(n,) years, NaN where unknown."""
    resections: tuple[str, ...]
    """`GTR`, `STR`, or empty where unknown."""

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """(n,) the cases whose survival is known, at least as a lower bound."""
        return np.isfinite(self.days)

    @property
    def died(self) -> npt.NDArray[np.bool_]:
        """(n,) the cases whose patient died."""
        return self.known & ~self.censored

    @property
    def lived(self) -> npt.NDArray[np.bool_]:
        """(n,) the censored cases."""
        return self.known & self.censored


def read_outcomes(table: FeatureTable, path: Path, mappings: Sequence[Path] = ()) -> Outcomes:
    """Find the outcome of every case of a table of features.

    Args:
        table: Table of features; its ages and resections take precedence.
        path: Table of survival of any release.
        mappings: Tables that join the ids of one patient in several years. Those called
            `name_mapping*.csv` beside the table of survival are read as well.

    Raises:
        UsageError: The table lacks columns, has none of the cases, or has no death.
    """
    check_columns(path, with_survival=True)
    known = read_clinical_files(dict.fromkeys([path, *mappings, *mapping_files(path.parent)]))
    rows = [known.row(case_id) for case_id in table.case_ids]
    if not any(rows):
        raise _no_match(table, known, path)
    own_ages = table.column(AGE)
    ages = [
        row.age_years if row and row.age_years is not None and np.isnan(own) else own
        for row, own in zip(rows, own_ages, strict=True)
    ]
    outcomes = Outcomes(
        days=np.array([_days(row.survival_days if row else None) for row in rows]),
        censored=np.array([bool(row and row.survival_censored) for row in rows]),
        ages=np.array(ages, dtype=np.float64),
        resections=tuple(
            own or (row.resection if row else "")
            for row, own in zip(rows, table.resections, strict=True)
        ),
    )
    if not outcomes.died.any():
        msg = (
            f"{path} has no death among the {counted(sum(map(bool, rows)), 'case')} that it shares with "
            f"the features: {outcomes.lived.sum()} alive at the last contact, the others without "
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


def _days(days: float | None) -> float:
    return float("nan") if days is None else days


def _no_match(table: FeatureTable, known: ClinicalTable, path: Path) -> UsageError:
    theirs = list(dict.fromkeys(case_id for row in known.rows.values() for case_id in row.ids))
    return UsageError(
        f"{path} has none of the {counted(len(table.case_ids), 'case')} of the features. The features are of "
        f"{some_of(table.case_ids)}, the table has {some_of(theirs) or 'no rows'}. Give the table of "
        "the same year, or with --clinical the name_mapping.csv that joins the ids of the years."
    )
