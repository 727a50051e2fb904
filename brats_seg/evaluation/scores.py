"""Write, read and summarise the table of scores, which has a row per case and region."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import RegionCounts, dice, jaccard
from brats_seg.evaluation.significance import bootstrap_interval
from brats_seg.files import write_json
from brats_seg.labels import REGIONS
from brats_seg.tables import read_table, write_table

_KEYS = ("case_id", "region")

_VOLUMES = ("reference_ml", "prediction_ml")
REGION_COLUMNS = ("dice", "jaccard", "hd95", "sensitivity", "specificity", *_VOLUMES)
"""Columns of whole regions."""
_COUNTS = ("n_lesions", "n_false_positive", "n_false_negative")
LESION_COLUMNS = (
    *("lesionwise_dice", "lesionwise_hd95", "lesionwise_nsd_0.5", "lesionwise_nsd_1.0"),
    *_COUNTS,
)
"""Columns that the lesion-wise protocols add."""

_TITLES = (
    ("lesionwise", "lesion-wise"),
    ("dice", "Dice"),
    ("jaccard", "Jaccard"),
    ("hd95", "HD95 (mm)"),
    ("nsd 0.5", "NSD at 0.5 mm"),
    ("nsd 1.0", "NSD at 1 mm"),
    (" ml", " volume (ml)"),
)
"""Parts of the names of columns, and how they are written for people."""

LOWER_IS_BETTER = frozenset({"hd95", "lesionwise_hd95"})
"""Scores of which a smaller value is better; of the other scores a larger one is."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of one score of one region over cases."""

    column: str
    mean: float
    mean_low: float
    """Lower end of the bootstrap interval of the mean over cases."""
    mean_high: float
    median: float
    lower_quartile: float
    upper_quartile: float

    def mean_text(self, n_cases: int) -> str:
        """Return the mean and, of several cases, its interval: `0.945 [0.928, 0.959]`."""
        n = 1 if self.column in LOWER_IS_BETTER else 3
        interval = f" [{self.mean_low:.{n}f}, {self.mean_high:.{n}f}]" if n_cases > 1 else ""
        return f"{self.mean:.{n}f}{interval}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSummary:
    """Summary of one region over cases."""

    region: str
    n_cases: int
    n_reference_empty: int
    """Cases without the region in the reference: a single voxel predicted there scores 0."""
    n_prediction_empty: int
    """Cases without the region in the prediction."""
    n_both_empty: int
    """Cases without the region on either side, which get the best score."""
    spreads: tuple[Spread, ...]
    """One per column of the table of scores."""

    def spread(self, column: str) -> Spread:
        """Return the spread of a column."""
        return next(spread for spread in self.spreads if spread.column == column)


def title_of(column: str) -> str:
    """Return the name of a score as people write it, with its unit.

    Example:
        >>> title_of("lesionwise_hd95")
        'lesion-wise HD95 (mm)'
    """
    title = column.replace("_", " ")
    for part, written in _TITLES:
        title = title.replace(part, written)
    return title


def score_columns(scores: pd.DataFrame) -> list[str]:
    """Return the names of the numbers in a table of scores."""
    return [column for column in scores.columns if column not in _KEYS]


def joined_scores(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the scores of several cases as one table; without any, its columns alone."""
    if not tables:
        return pd.DataFrame(columns=[*_KEYS, *REGION_COLUMNS])
    return pd.concat(tables, ignore_index=True)


def with_worst_scores(scores: pd.DataFrame, penalty_mm: float) -> pd.DataFrame:
    """Return scores as bad as they can be, beside the volumes and counts that they have."""
    columns = [c for c in score_columns(scores) if c not in _VOLUMES + _COUNTS]
    return scores.assign(**{c: penalty_mm if c in LOWER_IS_BETTER else 0.0 for c in columns})


def write_scores(scores: pd.DataFrame, path: Path) -> None:
    """Write the table as CSV with six decimals, atomically.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    floats = scores.select_dtypes("float").map("{:.6f}".format)
    write_table(path, list(scores.columns), scores.assign(**floats).itertuples(index=False))


def read_scores(path: Path) -> pd.DataFrame:
    """Read the table that `write_scores` wrote.

    Raises:
        UsageError: The file does not exist, or is not a table of scores.
    """
    table = read_table(path, required=(*_KEYS, *REGION_COLUMNS))
    columns = REGION_COLUMNS + (LESION_COLUMNS if LESION_COLUMNS[0] in table else ())
    try:
        return table[[*_KEYS, *columns]].astype(
            {c: int if c in _COUNTS else float for c in columns}
        )
    except (KeyError, ValueError) as error:
        msg = f"{path} is not a table of scores, as `brats-seg evaluate` writes it: {error}"
        raise UsageError(msg) from None


def summarise_scores(scores: pd.DataFrame, rng: np.random.Generator) -> tuple[RegionSummary, ...]:
    """Summarise a table of scores by region, in the order of their first rows.

    The order of the cases does not matter.
    """
    by_region = scores.sort_values("case_id", kind="stable").groupby("region", sort=False)
    return tuple(_summarise(str(region), table, rng) for region, table in by_region)


def summarise_counts(
    counts: Sequence[RegionCounts], rng: np.random.Generator
) -> tuple[RegionSummary, ...]:
    """Summarise Dice and Jaccard of cases whose voxels have been counted, by region.

    The volumes are in voxels.
    """
    cases = (
        {
            "case_id": case.case_id,
            "region": REGIONS,
            "dice": dice(case),
            "jaccard": jaccard(case),
            "reference_ml": case.in_reference,
            "prediction_ml": case.in_prediction,
        }
        for case in counts
    )
    return summarise_scores(pd.concat(map(pd.DataFrame, cases)), rng)


def write_summary(summaries: Sequence[RegionSummary], path: Path) -> None:
    """Write summaries as JSON, by region and column, atomically."""
    content = {}
    for summary in map(asdict, summaries):
        region, spreads = summary.pop("region"), summary.pop("spreads")
        content[region] = summary | {spread.pop("column"): spread for spread in spreads}
    write_json(path, content)


def _summarise(region: str, table: pd.DataFrame, rng: np.random.Generator) -> RegionSummary:
    columns = score_columns(table)
    values = table[columns].to_numpy(np.float64).T
    mean = bootstrap_interval(lambda columns: columns.mean(axis=-1), [values], rng)
    quantiles = np.quantile(values, (0.5, 0.25, 0.75), axis=1)
    means = [score.mean() for score in values]
    rows = np.transpose([means, mean.low, mean.high, *quantiles]).tolist()
    no_reference, no_prediction = table["reference_ml"] == 0, table["prediction_ml"] == 0
    return RegionSummary(
        region=region,
        n_cases=len(table),
        n_reference_empty=int(no_reference.sum()),
        n_prediction_empty=int(no_prediction.sum()),
        n_both_empty=int((no_reference & no_prediction).sum()),
        spreads=tuple(Spread(column, *row) for column, row in zip(columns, rows, strict=True)),
    )
