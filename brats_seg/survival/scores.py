"""How good predicted days are: the figures of the challenge, their intervals, and chance.

Only deaths count. The challenge ranked by accuracy over short, mid and long survivors, and listed
errors in days and the rank correlation beside it. It asked for patients with gross total resection
only; here all deaths of the table count, so give a table of those to compare with its leaderboards.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS

Days = npt.NDArray[np.float64]

CONFIDENCE = 0.95
"""Of the interval around a figure."""
N_RESAMPLES = 1000
"""Draws of patients behind that interval."""
N_PERMUTATIONS = 5000
"""Draws behind a p-value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One figure with its interval."""

    name: str
    value: float
    low: float
    """Lower end: percentile of the figure over patients drawn anew."""
    high: float


def accuracy(reported: Days, predicted: Days) -> Days:
    """Return the share of cases predicted to be the short, mid or long survivors that they were."""
    short, long = SURVIVAL_CLASS_DAYS
    # mid survivors have both borders
    classes = ((days >= short).astype(int) + (days > long) for days in (reported, predicted))
    return np.equal(*classes).mean(axis=-1)


def mean_squared_error(reported: Days, predicted: Days) -> Days:
    """Return the mean squared error in days squared."""
    return np.mean((predicted - reported) ** 2, axis=-1)


def median_squared_error(reported: Days, predicted: Days) -> Days:
    """Return the median squared error in days squared."""
    return np.median((predicted - reported) ** 2, axis=-1)


def std_squared_error(reported: Days, predicted: Days) -> Days:
    """Return the standard deviation of the squared errors in days squared."""
    return np.std((predicted - reported) ** 2, axis=-1)


def spearman(reported: Days, predicted: Days) -> Days:
    """Return the rank correlation; 0 where one side is all equal, and so tells nothing."""
    one, other = _ranks(reported), _ranks(predicted)
    scale = np.sqrt((one**2).sum(axis=-1) * (other**2).sum(axis=-1))
    return (one * other).sum(axis=-1) / np.where(scale == 0, 1, scale)


def mean_absolute_error(reported: Days, predicted: Days) -> Days:
    """Return the mean absolute error in days."""
    return np.mean(np.abs(predicted - reported), axis=-1)


def relative_error(reported: Days, predicted: Days) -> Days:
    """Return the sum of the errors over the sum of the days: the figure of the Kaggle notebook."""
    return np.abs(predicted - reported).sum(axis=-1) / reported.sum(axis=-1)


FIGURES: tuple[tuple[str, Callable[[Days, Days], Days]], ...] = (
    ("accuracy", accuracy),
    ("mse_days2", mean_squared_error),
    ("median_se_days2", median_squared_error),
    ("std_se_days2", std_squared_error),
    ("spearman", spearman),
    ("mae_days", mean_absolute_error),
    ("relative_error", relative_error),
)
"""Reported and predicted days `(..., n)` to a figure `(...)`."""
CONCORDANCE = "concordance"


def concordance(days: Days, died: npt.NDArray[np.bool_], predicted: Days) -> float:
    """Return the concordance index of predicted times (n,), deaths and censored patients counting.

    Of the pairs of patients of whom it is known who died first, the share that is predicted in this
    order (Harrell et al. 1996); 0.5, as by chance, where no pair can be compared. Needs lifelines.

    Args:
        days: (n,) until death or the last news.
        died: (n,) whether they ended with death.
        predicted: (n,) anything that is larger for those who are predicted to live longer.
    """
    from lifelines.utils import concordance_index

    try:
        return float(concordance_index(days, predicted, died))
    except ZeroDivisionError:
        return 0.5


def concordance_estimate(
    days: Days,
    died: npt.NDArray[np.bool_],
    predicted: Days,
    patients: Sequence[str],
    rng: np.random.Generator,
) -> Estimate:
    """Return the concordance index, with its interval over patients drawn anew."""
    draws = (rows for keys in _draws(patients, rng) for rows in keys)
    drawn = [concordance(days[rows], died[rows], predicted[rows]) for rows in draws]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    value = concordance(days, died, predicted)
    return Estimate(name=CONCORDANCE, value=value, low=float(low), high=float(high))


def estimates(
    reported: Days, predicted: Days, patients: Sequence[str], rng: np.random.Generator
) -> tuple[Estimate, ...]:
    """Return every figure of predictions `(n,)`, with intervals over patients drawn anew."""
    keys = _draws(patients, rng)
    tail = (1 - CONFIDENCE) / 2
    found = []
    for name, figure in FIGURES:
        drawn = np.concatenate([figure(reported[rows], predicted[rows]) for rows in keys])
        low, high = np.quantile(drawn, (tail, 1 - tail))
        value = float(figure(reported, predicted))
        found.append(Estimate(name=name, value=value, low=float(low), high=float(high)))
    return tuple(found)


def chance_of_ranks(reported: Days, predicted: Days, rng: np.random.Generator) -> float:
    """Return how often shuffled predictions agree as well with the order of deaths (Spearman)."""
    one, other = _ranks(reported), _ranks(predicted)
    shuffled = rng.permuted(np.tile(other, (N_PERMUTATIONS, 1)), axis=1) @ one
    return _p_value(shuffled, float(other @ one))


def chance_of_gain(
    reported: Days, predicted: Days, baseline: Days, rng: np.random.Generator
) -> float:
    """Return how often chance makes predictions as much better than a baseline as these are.

    The errors of each case change sides at random; the mean absolute error decides.
    """
    gains = np.abs(baseline - reported) - np.abs(predicted - reported)
    signs = rng.choice((-1.0, 1.0), size=(N_PERMUTATIONS, len(gains)))
    return _p_value(signs @ gains, float(gains.sum()))


def _p_value(by_chance: Days, found: float) -> float:
    # what was found is one of the possible keys; equal ones differ by rounding
    slack = 1e-9 * max(abs(found), 1.0)
    return float((np.count_nonzero(by_chance >= found - slack) + 1) / (len(by_chance) + 1))


def _ranks(days: Days) -> Days:
    """Return the ranks (..., n), 0 in the middle."""
    return rankdata(days, axis=-1) - (days.shape[-1] + 1) / 2


def _draws(patients: Sequence[str], rng: np.random.Generator) -> list[npt.NDArray[np.intp]]:
    """Return rows of patients drawn with replacement, keys (m, n) of equally many rows together."""
    names = np.array(patients)
    rows = [np.flatnonzero(names == name) for name in dict.fromkeys(patients)]
    by_length: defaultdict[int, list[npt.NDArray[np.intp]]] = defaultdict(list)
    for places in rng.integers(len(rows), size=(N_RESAMPLES, len(rows))):
        draw = np.concatenate([rows[place] for place in places])
        by_length[len(draw)].append(draw)
    return [np.stack(keys) for keys in by_length.values()]
