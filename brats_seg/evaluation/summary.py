"""Many cases in a few numbers: the spread of each score over cases, and how many regions are empty."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.evaluation.scores import Score
from brats_seg.files import whole_file

CONFIDENCE = 0.95
"""Of the interval around a mean."""

N_RESAMPLES = 2000
"""Draws behind that interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One column of one region over cases."""

    column: str
    mean: float
    mean_low: float
    """Lower end of the interval around the mean: percentiles of means over cases drawn anew."""
    mean_high: float
    median: float
    lower_quartile: float
    upper_quartile: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSummary:
    """One region over cases."""

    region: str
    n_cases: int
    n_reference_empty: int
    """Cases whose reference lacks the region: one voxel predicted there scores 0, none scores 1."""
    n_prediction_empty: int
    """Cases in which the region was not predicted."""
    n_both_empty: int
    """Cases that have the region on neither side, and score full marks for that."""
    spreads: tuple[Spread, ...]
    """A column of the table of scores each."""


def summarise_scores(
    scores: Iterable[Score], rng: np.random.Generator
) -> tuple[RegionSummary, ...]:
    """Summarise a table of scores by region, in the order in which regions come first.

    The order of the cases changes nothing.
    """
    by_region: dict[str, list[Score]] = {}
    for score in sorted(scores, key=lambda score: score.case_id):
        by_region.setdefault(score.region, []).append(score)
    return tuple(_summary(region, rows, rng) for region, rows in by_region.items())


def write_summary(summaries: Iterable[RegionSummary], path: Path) -> None:
    """Write summaries as JSON, by region and column; a reader never sees half of it.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    content = {summary.region: _as_json(summary) for summary in summaries}
    with whole_file(path) as beside:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _summary(region: str, rows: Sequence[Score], rng: np.random.Generator) -> RegionSummary:
    values = np.array([row.values for row in rows])
    without_reference = np.array([row.reference_ml == 0 for row in rows])
    without_prediction = np.array([row.prediction_ml == 0 for row in rows])
    return RegionSummary(
        region=region,
        n_cases=len(rows),
        n_reference_empty=int(without_reference.sum()),
        n_prediction_empty=int(without_prediction.sum()),
        n_both_empty=int((without_reference & without_prediction).sum()),
        spreads=_spreads(rows[0].columns, values, rng),
    )


def _spreads(
    columns: Sequence[str], values: npt.NDArray[np.float64], rng: np.random.Generator
) -> tuple[Spread, ...]:
    """Spread values (cases, columns), all columns over the same draws of cases."""
    n_cases = len(values)
    draws = rng.multinomial(n_cases, np.full(n_cases, 1 / n_cases), size=N_RESAMPLES)
    means = draws @ values / n_cases
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail), axis=0)
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
    return tuple(
        Spread(
            column=column,
            mean=float(values[:, k].mean()),
            mean_low=float(low[k]),
            mean_high=float(high[k]),
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
