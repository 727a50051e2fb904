"""Compute bootstrap intervals, permutation tests and the Wilcoxon signed-rank test.

Every interval and p value of the package is computed here, by `scipy.stats`. A statistic is a
function that reduces arrays `(..., n)` over their last axis, the cases, to `(...)`, so that all
resamples are computed in a few calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy as sp  # imports `scipy.stats` when it is used, which takes most of a second

CONFIDENCE = 0.95
"""Confidence level of an interval."""
N_RESAMPLES = 2000
"""Bootstrap resamples for an interval."""
N_PERMUTATIONS = 10_000
"""Permutations for a p value; if there are no more in all, the test is exact."""
SMALLEST_GAIN = 0.001
"""Smallest gain of the mean score for which a setting is changed."""
LARGEST_CHANCE = 0.002
"""Largest p value of a sure gain."""
FEWEST_CASES = ceil(-log2(LARGEST_CHANCE))
"""Smallest number of cases, 9, on which a gain can be sure.

Chance alone raises all of n cases once in `2**n` trials, so that no p value is below `0.5**n`.
"""

_BATCH_VALUES = 10_000_000
"""Values that are resampled at a time: 80 MB."""

Values = npt.NDArray[np.float64]
Statistic = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The gain of one setting over another on the same cases."""

    mean: float
    """Mean difference of the scores."""
    n_raised: int
    """Number of cases that score higher."""
    n_lowered: int
    """Number of cases that score lower."""
    p_value: float
    """One-sided p value of the Wilcoxon signed-rank test."""

    @property
    def is_sure(self) -> bool:
        """Whether the gain matters and is more than chance."""
        matters = self.mean >= SMALLEST_GAIN and self.n_raised > self.n_lowered
        return matters and self.p_value <= LARGEST_CHANCE


def bootstrap_interval(
    statistic: Statistic,
    values: Sequence[Values],
    rng: np.random.Generator,
    *,
    groups: Sequence[str] | None = None,
    n_resamples: int = N_RESAMPLES,
) -> tuple[Values, Values]:
    """Return the percentile bootstrap interval of a statistic over cases or patients.

    The arrays are resampled together, so that what belongs to one case stays together.

    Args:
        statistic: Called with as many arrays as there are `values`, each reduced over its last axis.
        values: Arrays `(..., n)` with one entry per case in their last axis.
        rng: Source of the resamples.
        groups: Patient of each case. Patients are then resampled, each with all of its cases.
        n_resamples: Number of resamples.

    Returns:
        The lower and the upper end, of shape `(...)`; where there is one patient, both are the statistic itself.

    Example:
        >>> dice = np.array([0.7, 0.8, 0.9, 0.8])
        >>> low, high = bootstrap_interval(
        ...     lambda values: values.mean(axis=-1), [dice], np.random.default_rng(0)
        ... )
        >>> bool(low < dice.mean() < high)
        True
    """
    n_cases = np.shape(values[0])[-1]
    names = np.asarray(range(n_cases) if groups is None else groups)
    members = [np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())]

    def of_groups(drawn: npt.NDArray[np.intp], **_axis: int) -> Values:
        if len(members) == n_cases:
            return np.asarray(statistic(*(array[..., drawn] for array in values)))
        resamples = (np.concatenate([members[group] for group in row]) for row in drawn)
        of_each = [statistic(*(array[..., rows] for array in values)) for rows in resamples]
        return np.stack(of_each, axis=-1)

    if len(members) == 1:
        whole = np.asarray(statistic(*values))
        return whole, whole
    ends = sp.stats.bootstrap(
        (np.arange(len(members)),),
        of_groups,
        method="percentile",
        vectorized=True,
        n_resamples=n_resamples,
        confidence_level=CONFIDENCE,
        batch=max(1, _BATCH_VALUES // sum(np.size(array) for array in values)),
        rng=rng,
    ).confidence_interval
    return np.asarray(ends.low), np.asarray(ends.high)


def permutation_p_value(
    statistic: Statistic,
    values: Values,
    rng: np.random.Generator,
    *,
    permutation_type: Literal["samples", "pairings"],
) -> float:
    """Return the p value of a statistic: the chance of one as large under permutations.

    Args:
        statistic: Called with an array `(..., n)`; returns `(...)`.
        values: Array `(n,)`.
        rng: Source of the permutations.
        permutation_type: `samples` flips signs, which exchanges the two sides of paired
            differences; `pairings` shuffles the values, for a statistic that compares them with
            others in a fixed order.

    Example:
        >>> gains = np.array([0.02, 0.01, 0.03])
        >>> permutation_p_value(
        ...     lambda values: values.sum(axis=-1),
        ...     gains,
        ...     np.random.default_rng(0),
        ...     permutation_type="samples",
        ... )
        0.125
    """
    if len(values) == 1:
        # scipy needs at least two values
        permuted = [values, -values] if permutation_type == "samples" else [values]
        return float(np.mean(statistic(np.array(permuted)) >= statistic(values)))
    test = sp.stats.permutation_test(
        (values,),
        lambda permuted, axis: statistic(permuted),
        permutation_type=permutation_type,
        vectorized=True,
        n_resamples=N_PERMUTATIONS,
        batch=max(1, _BATCH_VALUES // len(values)),
        alternative="greater",
        rng=rng,
    )
    return float(test.pvalue)


def signed_rank_p_value(
    differences: Values, alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    """Return the p value of the Wilcoxon signed-rank test of paired differences `(n,)`.

    Pairs without a difference are left out; without any difference the p value is 1.
    """
    pairs = differences[differences != 0]
    return float(sp.stats.wilcoxon(pairs, alternative=alternative).pvalue) if pairs.size else 1.0


def gain_of(before: Values, after: Values) -> Gain:
    """Return the gain of scores `(n,)` over others of the same cases."""
    differences = after - before
    return Gain(
        mean=float(differences.mean()),
        n_raised=int((differences > 0).sum()),
        n_lowered=int((differences < 0).sum()),
        p_value=signed_rank_p_value(differences, "greater"),
    )


def best_candidate(scores: Sequence[Values]) -> int:
    """Return the index of the scores `(n,)` with the largest sure gain over the first; 0 if none has one.

    The best of several candidates looks better than it is, most of all on few cases. So a candidate
    replaces the default, the first, only if its mean gain is large enough and the signed-rank test makes
    chance unlikely. Of equal candidates the first is returned.
    """
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index].mean())
    # a test takes long on few cases with ties: none of what is not better
    return next(i for i in ranked if i == 0 or gain_of(scores[0], scores[i]).is_sure)
