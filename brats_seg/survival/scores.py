"""Score predicted survival: figures of the challenge, the concordance index, intervals, p values.

The figures in days are over deaths only. The challenge ranked by the accuracy over short, mid and
long survivors, and listed errors in days and the rank correlation beside it. It asked for patients
with gross total resection only; here all deaths of the table count, so give a table of those to
compare with its leaderboards. The concordance index is over deaths and censored patients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS
from brats_seg.evaluation.significance import bootstrap_interval, permutation_p_value

Days = npt.NDArray[np.float64]

_N_CONCORDANCE_RESAMPLES = 1000
"""Fewer bootstrap resamples than elsewhere: lifelines computes them one by one, 1 ms each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One figure with its bootstrap interval over patients."""

    name: str
    value: float
    low: float
    """Lower end of the interval."""
    high: float


def accuracy(reported: Days, predicted: Days) -> Days:
    """Return the share of cases in the right class of short, mid or long survivors."""
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
    """Return the rank correlation; 0 where one side is constant and has no order."""
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
"""Functions of reported and predicted days `(..., n)` that return a figure `(...)`."""
CONCORDANCE = "concordance"
"""Name of the concordance index among the figures."""


def estimates(
    reported: Days, predicted: Days, patients: Sequence[str], rng: np.random.Generator
) -> tuple[Estimate, ...]:
    """Return every figure of predictions `(n,)`, with intervals over patients."""

    def all_figures(reported: Days, predicted: Days) -> Days:
        return np.stack([figure(reported, predicted) for _, figure in FIGURES])

    interval = bootstrap_interval(all_figures, (reported, predicted), rng, groups=patients)
    values = all_figures(reported, predicted)
    names = (name for name, _ in FIGURES)
    return tuple(
        Estimate(name=name, value=float(value), low=float(low), high=float(high))
        for name, value, low, high in zip(names, values, interval.low, interval.high, strict=True)
    )


def concordance(days: Days, died: npt.NDArray[np.bool_], predicted: Days) -> float:
    """Return the concordance index of predictions, over deaths and censored patients.

    It is the share of pairs in the right order, among the pairs of which it is known who died first
    (Harrell et al. 1996); 0.5, the value of chance, where there is no such pair. Needs lifelines.

    Args:
        days: (n,) days until death or the last contact.
        died: (n,) whether the patient died then.
        predicted: (n,) any number that is larger for a longer survival.

    Example:
        >>> days, died = np.array([100.0, 200, 300]), np.array([True, False, True])
        >>> concordance(days, died, predicted=np.array([150.0, 350, 250]))
        1.0
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
    """Return the concordance index with its interval over patients; arguments as `concordance`."""

    def of_resamples(*drawn: Days) -> Days:
        return np.array([concordance(*rows) for rows in zip(*drawn, strict=True)])

    interval = bootstrap_interval(
        of_resamples,
        (days, died.astype(np.float64), predicted),
        rng,
        groups=patients,
        n_resamples=_N_CONCORDANCE_RESAMPLES,
    )
    return Estimate(
        name=CONCORDANCE,
        value=concordance(days, died, predicted),
        low=float(interval.low),
        high=float(interval.high),
    )


def chance_of_ranks(reported: Days, predicted: Days, rng: np.random.Generator) -> float:
    """Return the p value of the rank correlation: of shuffled predictions that correlate as much."""
    ranks = _ranks(reported)
    return permutation_p_value(
        lambda shuffled: shuffled @ ranks, _ranks(predicted), rng, permutation_type="pairings"
    )


def chance_of_gain(
    reported: Days, predicted: Days, baseline: Days, rng: np.random.Generator
) -> float:
    """Return the p value of the gain over a baseline in mean absolute error, paired by case."""
    gains = np.abs(baseline - reported) - np.abs(predicted - reported)
    return permutation_p_value(
        lambda flipped: flipped.mean(axis=-1), gains, rng, permutation_type="samples"
    )


def _ranks(days: Days) -> Days:
    """Return the ranks (..., n), centred on 0."""
    return rankdata(days, axis=-1) - (days.shape[-1] + 1) / 2
