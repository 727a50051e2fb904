"""Write, read and summarise the table of scores, which has a row per case and region.

`SubsetScores` sums how much Dice is lost where cases are predicted from a subset of their modalities,
so that the held-out cases of several runs are pooled exactly; its values are in the order of `REGIONS`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self, TypeAlias

import numpy as np
import pandas as pd
from pydantic import Field
from pydantic_core import to_jsonable_python

from brats_seg.config import Section
from brats_seg.errors import UsageError, counted
from brats_seg.evaluation import metrics
from brats_seg.evaluation.metrics import RegionCounts, Values
from brats_seg.evaluation.significance import bootstrap_interval
from brats_seg.files import check_writable, write_json
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS, REGIONS
from brats_seg.tables import read_table, write_table

_KEYS = ("case_id", "region")
IN_TRAINING = "in_training"
"""Column of scores and volumes: `yes` and `no` say whether the model was trained on the patient."""
PROTOCOL = "protocol"
"""Column of scores that names the protocol, its challenge and the program that it follows."""
VOLUMES_NAME = "volumes.csv"
"""Table in a folder of predictions."""

_VOLUMES = ("reference_ml", "prediction_ml")
REGION_COLUMNS = ("dice", "jaccard", "hd95", "sensitivity", "specificity", *_VOLUMES)
"""Columns of whole regions."""
_COUNTS = ("n_lesions", "n_false_positive", "n_false_negative")
LESION_COLUMNS = (
    *("lesionwise_dice", "lesionwise_hd95", "lesionwise_nsd_0.5", "lesionwise_nsd_1.0"),
    *_COUNTS,
)
"""Columns that the lesion-wise protocols add."""
MATCHED_COLUMNS = (
    *("dice", "hd95", "nsd", "lesionwise_dice", "lesionwise_hd95", "lesionwise_nsd"),
    *(*_COUNTS, "f1", "n_large_found", "n_large_missed", "large_f1"),
    *("n_small_found", "n_small_missed", "small_f1"),
)
"""Columns of the protocols that match lesions; the last six are those of metastases."""

_TITLES = (
    ("lesionwise", "lesion-wise"),
    ("dice", "Dice"),
    ("jaccard", "Jaccard"),
    ("hd95", "HD95 (mm)"),
    ("nsd 0.5", "NSD at 0.5 mm"),
    ("nsd 1.0", "NSD at 1 mm"),
    ("nsd", "NSD"),
    ("f1", "F1"),
    (" ml", " volume (ml)"),
)
"""Parts of the names of columns, and how they are written for people."""

LARGE_DISTANCE = 1e100
"""Number in the place of an infinite distance, between which numpy can interpolate."""
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


def score_title(column: str) -> str:
    """Return the name of a score as people write it, with its unit.

    Example:
        >>> score_title("lesionwise_hd95")
        'lesion-wise HD95 (mm)'
    """
    title = column.replace("_", " ")
    for part, written in _TITLES:
        title = title.replace(part, written)
    return title


def score_columns(scores: pd.DataFrame) -> list[str]:
    """Return the names of the numbers in a table of scores."""
    return [column for column in scores.columns if column not in (*_KEYS, PROTOCOL, IN_TRAINING)]


def join_scores(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the scores of several cases as one table; without any, its columns alone."""
    if not tables:
        return pd.DataFrame(columns=[*_KEYS, *REGION_COLUMNS])
    return pd.concat(tables, ignore_index=True)


def scores_of_counts(
    counts: RegionCounts, regions: Sequence[str] = REGIONS, voxel_ml: float = 1.0
) -> pd.DataFrame:
    """Return the scores of a case that follow from its voxel counts."""
    values = {
        "dice": metrics.dice(counts),
        "jaccard": metrics.jaccard(counts),
        "sensitivity": metrics.sensitivity(counts),
        "specificity": metrics.specificity(counts),
        "reference_ml": counts.in_reference * voxel_ml,
        "prediction_ml": counts.in_prediction * voxel_ml,
    }
    return pd.DataFrame({"case_id": counts.case_id, "region": regions, **values})


def with_worst_scores(scores: pd.DataFrame, penalty_mm: float) -> pd.DataFrame:
    """Return the worst possible scores, with the volumes and counts unchanged.

    Where lesions are matched, the program of the challenges counts no lesion of such a case.
    """
    kept = _VOLUMES + (_COUNTS[:1] if "f1" in scores else _COUNTS)
    columns = [c for c in score_columns(scores) if c not in kept]
    worst = {c: penalty_mm if c in LOWER_IS_BETTER else 0.0 for c in columns}
    # counts stay whole numbers, as which they are read
    return scores.assign(**worst).astype(scores.dtypes)


def check_output(path: Path, *inputs: Path) -> None:
    """Raise an error unless a file can be a table of scores, is none that `predict` writes and no input, and can be written."""
    if path.suffix != ".csv" or path.name in {VOLUMES_NAME, "failures.csv"} or path in inputs:
        msg = f"{path} is no table of scores by its name; expected a .csv, no input and none of predict"
        raise UsageError(msg)
    check_writable(path.parent)


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
        UsageError: The file does not exist, is not a table of scores, or has a case and region twice.
    """
    table = read_table(path, required=(*_KEYS, *REGION_COLUMNS))
    if table.duplicated([*_KEYS]).any():
        msg = f"{path} holds two rows for a case and region; expected the scores of one set of predictions"
        raise UsageError(msg)
    try:
        kinds = {c: int if c in _COUNTS else float for c in score_columns(table)}
        return table.astype(kinds)
    except ValueError as error:
        msg = f"{path} is not a table of scores, as `brats-seg evaluate` writes it, with decimal points: {error}"
        raise UsageError(msg) from None


def summarise_scores(scores: pd.DataFrame, rng: np.random.Generator) -> tuple[RegionSummary, ...]:
    """Summarise a table of scores by region, in the order of their first rows.

    The order of the cases does not matter.
    """
    by_region = scores.sort_values("case_id", kind="stable").groupby("region", sort=False)
    return tuple(_summarise(str(region), table, rng) for region, table in by_region)


def summarise_counts(
    counts: Iterable[RegionCounts], rng: np.random.Generator
) -> tuple[RegionSummary, ...]:
    """Summarise cases whose voxels have been counted; the volumes are in voxels."""
    return summarise_scores(pd.concat(map(scores_of_counts, counts)), rng)


def write_summary(summaries: Sequence[RegionSummary], path: Path) -> None:
    """Write summaries as JSON, by region and column, atomically; what is not finite is null."""
    content = {}
    for summary in to_jsonable_python(summaries, inf_nan_mode="null"):
        region, spreads = summary.pop("region"), summary.pop("spreads")
        content[region] = summary | {spread.pop("column"): spread for spread in spreads}
    write_json(path, content)


def _summarise(region: str, table: pd.DataFrame, rng: np.random.Generator) -> RegionSummary:
    columns = score_columns(table)
    values = np.minimum(table[columns].to_numpy(np.float64).T, LARGE_DISTANCE)
    is_score, rows = ~np.isnan(values), np.full((len(columns), 6), np.nan)
    # columns in which the same cases have scores are resampled together
    for cases in np.unique(is_score, axis=0):
        if cases.any():
            together = (is_score == cases).all(axis=1)
            chosen = values[together][:, cases]
            ends = bootstrap_interval(lambda drawn: drawn.mean(axis=-1), [chosen], rng)
            quantiles = np.quantile(chosen, (0.5, 0.25, 0.75), axis=1)
            rows[together] = np.transpose([chosen.mean(axis=1), *ends, *quantiles])
    rows[rows > LARGE_DISTANCE / 1e9] = np.inf
    pairs = zip(columns, rows.tolist(), strict=True)
    no_reference, no_prediction = table["reference_ml"] == 0, table["prediction_ml"] == 0
    return RegionSummary(
        region=region,
        n_cases=len(table),
        n_reference_empty=int(no_reference.sum()),
        n_prediction_empty=int(no_prediction.sum()),
        n_both_empty=int((no_reference & no_prediction).sum()),
        spreads=tuple(Spread(column, *row) for column, row in pairs),
    )


PerRegion: TypeAlias = tuple[float, float, float]
_SUMS = ("n_cases", "dice_sum", "loss_sum", "squared_loss_sum")
_SMALLEST_CHANGE = 0.005
"""Change of Dice that is shown as 0.00."""


class SubsetScores(Section):
    """Dice of held-out cases that were predicted from a subset of their modalities, and from all.

    Example:
        >>> scores = SubsetScores.of_cases(
        ...     ("t1c", "t2f"), np.array([[0.8, 0.7, 0.6]]), np.array([[0.9, 0.7, 0.8]])
        ... )
        >>> print(scores)
        WT 0.10 lower, TC 0.00 lower, ET 0.20 lower on 1 held-out case
    """

    modalities: tuple[str, ...]
    """The subset."""
    n_cases: Annotated[int, Field(gt=0)]
    dice_sum: PerRegion
    """Sum over cases of the Dice from the subset."""
    loss_sum: PerRegion
    """Sum over cases of the loss: the Dice from all modalities minus that from the subset."""
    squared_loss_sum: PerRegion

    @classmethod
    def of_cases(cls, modalities: Sequence[str], dice: Values, dice_of_all: Values) -> Self:
        """Sum the Dice (n, 3) of cases predicted from a subset, and from all modalities."""
        loss = dice_of_all - dice
        sums = (len(dice), *(values.sum(axis=0).tolist() for values in (dice, loss, loss**2)))
        return cls(modalities=tuple(modalities), **dict(zip(_SUMS, sums, strict=True)))

    @property
    def mean_dice(self) -> tuple[float, ...]:
        """Mean Dice from the subset."""
        return tuple(total / self.n_cases for total in self.dice_sum)

    @property
    def mean_loss(self) -> tuple[float, ...]:
        """Mean loss of Dice, which is what to expect for a new case."""
        return tuple(total / self.n_cases for total in self.loss_sum)

    @property
    def std_loss(self) -> tuple[float, ...] | None:
        """Standard deviation of the loss over cases; None with a single case."""
        if self.n_cases == 1:
            return None
        squares = np.subtract(self.squared_loss_sum, self.n_cases * np.square(self.mean_loss))
        return tuple(np.sqrt(squares.clip(0) / (self.n_cases - 1)).tolist())

    def texts(self) -> tuple[str, ...]:
        """Return the mean Dice of each region and its change, such as `0.812 (-0.043)`."""
        pairs = zip(self.mean_dice, self.mean_loss, strict=True)
        return tuple(f"{dice:.3f} ({-loss:+.3f})" for dice, loss in pairs)

    def __str__(self) -> str:
        """Return the mean loss and its spread as words."""
        parts = [
            f"{region.upper()} {abs(loss):.2f} {'higher' if loss < -_SMALLEST_CHANGE else 'lower'}"
            for region, loss in zip(REGIONS, self.mean_loss, strict=True)
        ]
        if self.std_loss is not None:
            spread = zip(parts, self.std_loss, strict=True)
            parts = [f"{part} (standard deviation {std:.2f})" for part, std in spread]
        return f"{', '.join(parts)} on {counted(self.n_cases, 'held-out case')}"


AllSubsetScores = Annotated[tuple[SubsetScores, ...], Field(max_length=len(MODALITY_SUBSETS))]


def pool_scores(scores: Sequence[SubsetScores]) -> tuple[SubsetScores, ...]:
    """Add the scores of several runs, whose held-out cases differ, in the order of `MODALITY_SUBSETS`."""
    totals = []
    for subset in MODALITY_SUBSETS:
        if group := [part for part in scores if part.modalities == subset]:
            sums = {n: np.sum([getattr(part, n) for part in group], axis=0).tolist() for n in _SUMS}
            totals.append(SubsetScores(modalities=subset, **sums))
    return tuple(totals)


def absent_from(modalities: Sequence[str]) -> tuple[str, ...]:
    """Return the modalities that a subset lacks, in the order of `MODALITIES`."""
    return tuple(modality for modality in MODALITIES if modality not in modalities)
