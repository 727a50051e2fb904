"""Summarise how much Dice is lost when cases are predicted from a subset of their modalities.

Sums over cases are kept, so that the held-out cases of several runs are pooled exactly. Values are
those of WT, TC and ET, in the order of `REGIONS`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Annotated, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from brats_seg.config import Section
from brats_seg.errors import counted
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS, REGIONS

OfRegions: TypeAlias = tuple[float, float, float]
_SMALLEST = 0.005
"""Change of Dice that is shown as 0.00."""


class SubsetScores(Section):
    """Dice of held-out cases that were predicted from a subset of their modalities, and from all.

    Example:
        >>> scores = SubsetScores.of_cases(
        ...     ("t1c", "t2f"), np.array([[0.8, 0.7, 0.6]]), np.array([[0.9, 0.7, 0.8]])
        ... )
        >>> [round(loss, 3) for loss in scores.mean_loss]
        [0.1, 0.0, 0.2]
    """

    modalities: tuple[str, ...]
    """The subset."""
    n_cases: Annotated[int, Field(gt=0)]
    dice_sum: OfRegions
    """Sum over cases of the Dice from the subset."""
    loss_sum: OfRegions
    """Sum over cases of the loss: the Dice from all modalities minus that from the subset."""
    squared_loss_sum: OfRegions

    @classmethod
    def of_cases(
        cls,
        modalities: Sequence[str],
        dice: npt.NDArray[np.float64],
        dice_of_all: npt.NDArray[np.float64],
    ) -> Self:
        """Sum the Dice (n, 3) of cases predicted from a subset, and from all modalities."""
        loss = dice_of_all - dice
        return cls(
            modalities=tuple(modalities),
            n_cases=len(dice),
            dice_sum=_of_regions(dice.sum(axis=0)),
            loss_sum=_of_regions(loss.sum(axis=0)),
            squared_loss_sum=_of_regions((loss**2).sum(axis=0)),
        )

    @property
    def mean_dice(self) -> OfRegions:
        """Mean Dice from the subset."""
        return _of_regions([total / self.n_cases for total in self.dice_sum])

    @property
    def mean_loss(self) -> OfRegions:
        """Mean loss of Dice, which is what to expect for a new case."""
        return _of_regions([total / self.n_cases for total in self.loss_sum])

    @property
    def std_loss(self) -> OfRegions | None:
        """Standard deviation of the loss over cases; None with a single case."""
        if self.n_cases == 1:
            return None
        pairs = zip(self.mean_loss, self.squared_loss_sum, strict=True)
        spread = [max(0.0, square - self.n_cases * mean**2) for mean, square in pairs]
        return _of_regions([sqrt(one / (self.n_cases - 1)) for one in spread])

    def texts(self) -> tuple[str, ...]:
        """Return the mean Dice of each region and its change, such as `0.812 (-0.043)`."""
        pairs = zip(self.mean_dice, self.mean_loss, strict=True)
        return tuple(f"{dice:.3f} ({-loss:+.3f})" for dice, loss in pairs)

    def __str__(self) -> str:
        """Return the mean loss and its spread as words."""
        loss = ", ".join(map(loss_text, REGIONS, self.mean_loss, self.std_loss or (None,) * 3))
        return f"{loss} on {counted(self.n_cases, 'held-out case')}"


AllSubsetScores = Annotated[tuple[SubsetScores, ...], Field(max_length=len(MODALITY_SUBSETS))]


def pooled(scores: Iterable[SubsetScores]) -> tuple[SubsetScores, ...]:
    """Add the scores of several runs, whose held-out cases differ, for each subset.

    The subsets have the order of `MODALITY_SUBSETS`.
    """
    groups: defaultdict[tuple[str, ...], list[SubsetScores]] = defaultdict(list)
    for one in scores:
        groups[one.modalities].append(one)
    return tuple(
        SubsetScores(
            modalities=subset,
            n_cases=sum(one.n_cases for one in groups[subset]),
            dice_sum=_added([one.dice_sum for one in groups[subset]]),
            loss_sum=_added([one.loss_sum for one in groups[subset]]),
            squared_loss_sum=_added([one.squared_loss_sum for one in groups[subset]]),
        )
        for subset in MODALITY_SUBSETS
        if subset in groups
    )


def absent_from(modalities: Sequence[str]) -> tuple[str, ...]:
    """Return the modalities that a subset lacks, in the order of `MODALITIES`."""
    return tuple(modality for modality in MODALITIES if modality not in modalities)


def loss_text(region: str, loss: float, std: float | None = None) -> str:
    """Return the loss of Dice of a region as words.

    Example:
        >>> loss_text("wt", 0.123, 0.04), loss_text("et", -0.01)
        ('WT 0.12 lower (standard deviation 0.04)', 'ET 0.01 higher')
    """
    words = f"{region.upper()} {abs(loss):.2f} {'higher' if loss < -_SMALLEST else 'lower'}"
    return words if std is None else f"{words} (standard deviation {std:.2f})"


def _added(rows: Sequence[OfRegions]) -> OfRegions:
    return _of_regions([sum(column) for column in zip(*rows, strict=True)])


def _of_regions(values: Iterable[float]) -> OfRegions:
    wt, tc, et = map(float, values)
    return wt, tc, et
