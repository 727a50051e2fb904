"""Write, read and summarise the table of scores, which has a row per case and region."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.errors import UsageError
from brats_seg.evaluation.lesionwise import LesionScores
from brats_seg.evaluation.overlap import RegionCounts, dice, jaccard
from brats_seg.evaluation.significance import bootstrap_interval
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS
from brats_seg.tables import read_table, write_table

_KEYS = ("case_id", "region")

REGION_COLUMNS = (
    "dice",
    "jaccard",
    "hd95",
    "sensitivity",
    "specificity",
    "reference_ml",
    "prediction_ml",
)
"""Columns of whole regions."""

LESION_COLUMNS = (
    "lesionwise_dice",
    "lesionwise_hd95",
    "lesionwise_nsd_0.5",
    "lesionwise_nsd_1.0",
    "n_lesions",
    "n_false_positive",
    "n_false_negative",
)
"""Columns that the lesion-wise protocols add."""
_N_COUNTS = 3
"""Number of counts at the end of `LESION_COLUMNS`."""

_WRITTEN = (
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


_IN_MM = "hd95"
"""Part of the names of columns that are distances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The scores of one region of one case."""

    case_id: str
    region: str
    dice: float
    jaccard: float
    hd95: float
    """95th percentile Hausdorff distance in mm; the protocol's penalty where one side is empty."""
    sensitivity: float
    """Share of the reference that is in the prediction."""
    specificity: float
    """Share of the volume outside the reference that is not in the prediction: nearly always 1."""
    reference_ml: float
    """Volume in the reference."""
    prediction_ml: float
    """Volume in the prediction."""
    lesions: LesionScores | None = None
    """None if the protocol scores whole regions only."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the values, in the order of the table."""
        return REGION_COLUMNS if self.lesions is None else REGION_COLUMNS + LESION_COLUMNS

    @property
    def values(self) -> tuple[float, ...]:
        """The values, in the order of `columns`."""
        region = tuple(getattr(self, column) for column in REGION_COLUMNS)
        if self.lesions is None:
            return region
        found = self.lesions
        counts = (found.n_lesions, found.n_false_positive, found.n_false_negative)
        return (*region, found.dice, found.hd95, *found.nsd, *counts)

    def value(self, column: str) -> float:
        """Return the value of a column."""
        return self.values[self.columns.index(column)]


@dataclass(frozen=True, kw_only=True, slots=True)
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
        n_digits = 1 if _IN_MM in self.column else 3
        mean, low, high = (
            f"{value:.{n_digits}f}" for value in (self.mean, self.mean_low, self.mean_high)
        )
        return f"{mean} [{low}, {high}]" if n_cases > 1 else mean


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
    words = column.replace("_", " ")
    for plain, written in _WRITTEN:
        words = words.replace(plain, written)
    return words


def write_scores(scores: Iterable[Score], path: Path) -> None:
    """Write the table as CSV with six decimals, atomically.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    rows = list(scores)
    columns = rows[0].columns if rows else REGION_COLUMNS
    cells = ((row.case_id, row.region, *map(_text, row.values)) for row in rows)
    write_table(path, (*_KEYS, *columns), cells)


def read_scores(path: Path) -> tuple[Score, ...]:
    """Read the table that `write_scores` wrote.

    Raises:
        UsageError: The file does not exist, or is not a table of scores.
    """
    table = read_table(path, required=(*_KEYS, *REGION_COLUMNS))
    try:
        return tuple(_parsed(row) for row in table.to_dict("records"))
    except (KeyError, ValueError) as error:
        msg = f"{path} is not a table of scores, as `brats-seg evaluate` writes it: {error}"
        raise UsageError(msg) from None


def summarise_scores(
    scores: Iterable[Score], rng: np.random.Generator
) -> tuple[RegionSummary, ...]:
    """Summarise a table of scores by region, in the order of their first rows.

    The order of the cases does not matter.
    """
    by_region: dict[str, list[Score]] = {}
    for score in sorted(scores, key=lambda score: score.case_id):
        by_region.setdefault(score.region, []).append(score)
    return tuple(
        _summary(
            region,
            rows[0].columns,
            np.array([row.values for row in rows]),
            _Empty(
                in_reference=np.array([row.reference_ml == 0 for row in rows]),
                in_prediction=np.array([row.prediction_ml == 0 for row in rows]),
            ),
            rng,
        )
        for region, rows in by_region.items()
    )


def summarise_counts(
    counts: Sequence[RegionCounts], rng: np.random.Generator
) -> tuple[RegionSummary, ...]:
    """Summarise Dice and Jaccard of cases whose voxels have been counted, by region.

    The order of the cases does not matter.
    """
    cases = sorted(counts, key=lambda case: case.case_id)
    values = np.array([[dice(case), jaccard(case)] for case in cases])
    return tuple(
        _summary(
            region,
            ("dice", "jaccard"),
            values[:, :, place],
            _Empty(
                in_reference=np.array([case.in_reference[place] == 0 for case in cases]),
                in_prediction=np.array([case.in_prediction[place] == 0 for case in cases]),
            ),
            rng,
        )
        for place, region in enumerate(REGIONS)
    )


def write_summary(summaries: Iterable[RegionSummary], path: Path) -> None:
    """Write summaries as JSON, by region and column, atomically.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    content = {summary.region: _as_json(summary) for summary in summaries}
    with whole_file(path) as beside:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _parsed(row: Mapping[Any, str]) -> Score:
    lesions = None
    if LESION_COLUMNS[0] in row:
        dice, hd95, *nsd = (float(row[column]) for column in LESION_COLUMNS[:-_N_COUNTS])
        n_lesions, n_false_positive, n_false_negative = (
            int(row[column]) for column in LESION_COLUMNS[-_N_COUNTS:]
        )
        lesions = LesionScores(
            dice=dice,
            hd95=hd95,
            nsd=tuple(nsd),
            n_lesions=n_lesions,
            n_false_positive=n_false_positive,
            n_false_negative=n_false_negative,
        )
    values = {column: float(row[column]) for column in REGION_COLUMNS}
    return Score(case_id=row["case_id"], region=row["region"], lesions=lesions, **values)


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6f}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Empty:
    """Whether each case (n,) lacks a region."""

    in_reference: npt.NDArray[np.bool_]
    in_prediction: npt.NDArray[np.bool_]


def _summary(
    region: str,
    columns: Sequence[str],
    values: npt.NDArray[np.float64],
    empty: _Empty,
    rng: np.random.Generator,
) -> RegionSummary:
    """Summarise the columns of values (cases, columns) of a region."""
    return RegionSummary(
        region=region,
        n_cases=len(values),
        n_reference_empty=int(empty.in_reference.sum()),
        n_prediction_empty=int(empty.in_prediction.sum()),
        n_both_empty=int((empty.in_reference & empty.in_prediction).sum()),
        spreads=_spreads(columns, values, rng),
    )


def _spreads(
    columns: Sequence[str], values: npt.NDArray[np.float64], rng: np.random.Generator
) -> tuple[Spread, ...]:
    """Return the spread of each column of values (cases, columns)."""
    mean = bootstrap_interval(lambda columns: columns.mean(axis=-1), [values.T], rng)
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
    return tuple(
        Spread(
            column=column,
            mean=float(values[:, k].mean()),
            mean_low=float(mean.low[k]),
            mean_high=float(mean.high[k]),
            median=float(median[k]),
            lower_quartile=float(lower[k]),
            upper_quartile=float(upper[k]),
        )
        for k, column in enumerate(columns)
    )


def _as_json(summary: RegionSummary) -> dict[str, object]:
    content = asdict(summary)
    del content["region"]
    for spread in content.pop("spreads"):
        content[spread.pop("column")] = spread
    return content
