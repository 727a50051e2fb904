"""Predict the Dice of a segmentation that has no reference, with an interval.

A network that is right is sure of it more often: the Dice of a region rises with the mean probability
of its voxels. The line is fitted on cases that the network was not trained on. The interval is a
conformal prediction interval (Lei et al. 2018, doi:10.1080/01621459.2017.1307116): a quantile of the
errors of held-out cases, each predicted from the others. It holds for cases like those.
"""

from collections.abc import Sequence
from math import ceil
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue, TypeAdapter

from brats_seg.config import Section
from brats_seg.evaluation.metrics import RegionCounts, dice
from brats_seg.labels import REGIONS, RegionMasks
from brats_seg.wings import Notes, PredictedDice

COVERAGE = 0.9
"""Share of the cases whose Dice is in the interval."""
LEAST_DICE = 0.7
"""Dice from which nothing is low."""
FEWEST_CASES = round(COVERAGE / (1 - COVERAGE))
"""Smallest number of cases, 9, of which the largest error bounds that share of new errors."""
_NOTE = "predicted_dice"
"""Entry of the notes of a model."""

Values = npt.NDArray[np.float64]
Share = Annotated[float, Field(ge=0, le=1)]


class DiceLine(Section):
    """Relation of the Dice of one region to the mean probability in it."""

    region: str
    n_cases: Annotated[int, Field(ge=FEWEST_CASES)]
    """Held-out cases that it was fitted to."""
    intercept: float
    """Dice at a mean probability of 0."""
    slope: Annotated[float, Field(ge=0)]
    """Rise of the Dice from a mean probability of 0 to one of 1."""
    width: Annotated[float, Field(ge=0)]
    """Half width of the interval where a Dice of 0.1 is expected; less where more is expected."""
    worst_fifth: Share
    """Largest Dice that was predicted of the worst fifth of the held-out cases."""
    mean_error: Share
    """Mean absolute error in the held-out cases, each predicted from the others."""

    def at(self, probability: float) -> PredictedDice:
        """Return the Dice that is expected at a mean probability."""
        middle = float(np.clip(self.intercept + self.slope * probability, 0, 1))
        half = self.width * _difficulty(middle)
        return PredictedDice(
            region=self.region,
            dice=round(middle, 4),
            low=round(max(middle - half, 0.0), 4),
            high=round(min(middle + half, 1.0), 4),
            is_low=middle < LEAST_DICE and middle <= self.worst_fifth,
        )


_LINES = TypeAdapter(tuple[DiceLine, ...])


def mean_probabilities(probabilities: npt.NDArray[np.float32], regions: RegionMasks) -> Values:
    """Return the mean probability (3,) of the voxels of each region; NaN where it is empty.

    Args:
        probabilities: (3, x, y, z)
        regions: Region masks (3, x, y, z) that were decoded from them.
    """
    return np.array(
        [
            values[mask].mean(dtype=np.float64) if mask.any() else np.nan
            for values, mask in zip(probabilities, regions, strict=True)
        ]
    )


def fit_predicted_dice(
    probabilities: Sequence[Values], counts: Sequence[RegionCounts]
) -> tuple[DiceLine, ...]:
    """Fit the Dice of each region to the mean probability in it, over held-out cases.

    Cases without the region in the prediction do not count: their Dice is 0 or 1. A region that too few
    cases have is left out.

    Args:
        probabilities: Result of `mean_probabilities` for each case.
        counts: Voxels of each case.
    """
    lines = []
    scores = np.array([dice(one) for one in counts])
    for region, x, y in zip(REGIONS, np.transpose(probabilities), scores.T, strict=True):
        has_region = np.isfinite(x)
        if np.count_nonzero(has_region) >= FEWEST_CASES:
            lines.append(_fit(region, x[has_region], y[has_region]))
    return tuple(lines)


def predicted_dice(lines: Sequence[DiceLine], probabilities: Values) -> tuple[PredictedDice, ...]:
    """Return the expected Dice of the regions that were predicted and have a fit.

    Args:
        lines: Result of `fit_predicted_dice`.
        probabilities: Result of `mean_probabilities`.
    """
    by_region = dict(zip(REGIONS, probabilities.tolist(), strict=True))
    return tuple(
        line.at(by_region[line.region]) for line in lines if np.isfinite(by_region[line.region])
    )


def notes_of_held_out(
    probabilities: Sequence[Values], counts: Sequence[RegionCounts]
) -> dict[str, JsonValue]:
    """Return the notes of a model with the fit of its Dice; the arguments are those of the fit."""
    lines = fit_predicted_dice(probabilities, counts)
    return {_NOTE: [line.model_dump() for line in lines]}


def dice_lines(notes: Sequence[Notes]) -> tuple[DiceLine, ...]:
    """Return the fit that all members of a model have in their notes; none if they differ.

    Raises:
        ValueError: An entry is unknown, missing or out of range.
    """
    first, *others = [note.get(_NOTE, ()) for note in notes] or [()]
    return _LINES.validate_python(first) if all(lines == first for lines in others) else ()


def _fit(region: str, x: Values, y: Values) -> DiceLine:
    predicted = np.empty(len(x))
    for index in range(len(x)):
        intercept, slope = _line(np.delete(x, index), np.delete(y, index))
        predicted[index] = np.clip(intercept + slope * x[index], 0, 1)
    errors = abs(predicted - y)
    intercept, slope = _line(x, y)
    # of n errors and that of a new case, each rank is equally likely for the new one
    rank = ceil(COVERAGE * (len(x) + 1)) - 1
    return DiceLine(
        region=region,
        n_cases=len(x),
        intercept=intercept,
        slope=slope,
        worst_fifth=float(np.quantile(predicted, 0.2, method="lower")),
        width=float(np.sort(errors / _difficulty(predicted))[rank]),
        mean_error=float(errors.mean()),
    )


def _difficulty(dice: Any) -> Any:
    """Return what errors are proportional to: the distance to a Dice a little above a perfect one."""
    return 1.1 - dice


def _line(x: Values, y: Values) -> tuple[float, float]:
    """Return intercept and slope by least squares; a slope below 0 becomes 0, which is the mean."""
    spread = float(np.square(x - x.mean()).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread > 0 else 0.0
    slope = max(slope, 0.0)
    return float(y.mean() - slope * x.mean()), slope
