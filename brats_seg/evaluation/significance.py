"""When a fitted value takes the place of the default: where its gain is more than chance.

The best of several values looks better than it is, most of all on few cases. So a value must gain
something that matters on the mean, and win in so many cases and so clearly that a signed-rank test
all but excludes chance; or else the default stays. Of twelve values that are no better than the
default, one passes for better in 3 of 100 trials, on ten cases as on a hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

SMALLEST_GAIN = 0.001
"""Mean score below which a gain is not worth a setting."""
LARGEST_CHANCE = 0.002
"""That a value which is no better wins like this; on eight cases it is larger even if all win."""

PerCase = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What one value gains over another on the same cases."""

    mean: float
    n_raised: int
    """Cases that score higher."""
    n_lowered: int
    p_value: float
    """Of Wilcoxon's signed-rank test, one-sided: the chance of it where nothing is gained."""

    @property
    def is_sure(self) -> bool:
        """Whether it is more than chance."""
        return (
            self.mean >= SMALLEST_GAIN
            and self.p_value <= LARGEST_CHANCE
            and self.n_raised > self.n_lowered
        )


def gain_of(before: PerCase, after: PerCase) -> Gain:
    """Return what scores `(n,)` gain over others of the same cases."""
    differences = after - before
    changed = differences[differences != 0]
    p_value = stats.wilcoxon(changed, alternative="greater").pvalue if len(changed) else 1.0
    return Gain(
        mean=float(differences.mean()),
        n_raised=int((differences > 0).sum()),
        n_lowered=int((differences < 0).sum()),
        p_value=float(p_value),
    )


def best_candidate(default: PerCase, candidates: Sequence[PerCase]) -> int | None:
    """Return the place of the candidate with the largest sure gain, the first of equals, or None.

    Args:
        default: Score `(n,)` of each case with the default.
        candidates: The same with each candidate.
    """
    gains = [gain_of(default, scores) for scores in candidates]
    sure = [place for place, gain in enumerate(gains) if gain.is_sure]
    return max(sure, key=lambda place: gains[place].mean, default=None)
