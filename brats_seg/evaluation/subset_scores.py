"""Summarise how much Dice is lost when cases are predicted from a subset of their modalities.

Sums over cases are kept, so that the held-out cases of several runs are pooled exactly. Values are
those of WT, TC and ET, in the order of `REGIONS`.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from brats_seg.config import Section
from brats_seg.errors import counted
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS, REGIONS

PerRegion: TypeAlias = tuple[float, float, float]
_SMALLEST = 0.005
"""Change of Dice that is shown as 0.00."""
_SUMS = ("n_cases", "dice_sum", "loss_sum", "squared_loss_sum")


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
    def of_cases(
        cls,
        modalities: Sequence[str],
        dice: npt.NDArray[np.float64],
        dice_of_all: npt.NDArray[np.float64],
    ) -> Self:
        """Sum the Dice (n, 3) of cases predicted from a subset, and from all modalities."""
        loss = dice_of_all - dice
        sums = (values.sum(axis=0).tolist() for values in (dice, loss, loss**2))
        return cls(
            modalities=tuple(modalities), **dict(zip(_SUMS, (len(dice), *sums), strict=True))
        )

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
            f"{region.upper()} {abs(loss):.2f} {'higher' if loss < -_SMALLEST else 'lower'}"
            for region, loss in zip(REGIONS, self.mean_loss, strict=True)
        ]
        if self.std_loss is not None:
            spread = zip(parts, self.std_loss, strict=True)
            parts = [f"{part} (standard deviation {std:.2f})" for part, std in spread]
        return f"{', '.join(parts)} on {counted(self.n_cases, 'held-out case')}"


AllSubsetScores = Annotated[tuple[SubsetScores, ...], Field(max_length=len(MODALITY_SUBSETS))]


def pooled(scores: Iterable[SubsetScores]) -> tuple[SubsetScores, ...]:
    """Add the scores of several runs, whose held-out cases differ, in the order of `MODALITY_SUBSETS`."""
    groups = {subset: list[SubsetScores]() for subset in MODALITY_SUBSETS}
    for one in scores:
        groups[one.modalities].append(one)
    return tuple(
        SubsetScores(
            modalities=subset,
            **{
                name: np.sum([getattr(one, name) for one in group], axis=0).tolist()
                for name in _SUMS
            },
        )
        for subset, group in groups.items()
        if group
    )


def absent_from(modalities: Sequence[str]) -> tuple[str, ...]:
    """Return the modalities that a subset lacks, in the order of `MODALITIES`."""
    return tuple(modality for modality in MODALITIES if modality not in modalities)
