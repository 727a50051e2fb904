"""A loss, and what it says of how it adds up over patches.

- `reduces = "patches"`: the loss returns one number a patch, and that of the window is their mean.
- `reduces = "sums"`: the loss is a function of sums over all patches (batch Dice); see `SumsLoss`.
- anything else: a function of all outputs and targets at once, about which nothing is assumed.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from brats_seg.models.output import TrainingOutput

Output: TypeAlias = Tensor | TrainingOutput
Criterion: TypeAlias = Callable[[Output, Tensor], Tensor]
Measure: TypeAlias = Callable[[Output, Tensor], Tensor]
"""Output and target of a micro-batch to a tensor with a row per patch."""


def measure_nothing(output: Output, target: Tensor) -> Tensor:
    """Return a row of no columns for each patch."""
    return target.new_empty((len(target), 0))


@runtime_checkable
class SumsLoss(Protocol):
    """A loss that is a function of sums over all patches, such as batch Dice."""

    def sums(self, output: Output, target: Tensor) -> Tensor:
        """Return what adds up over patches, in any shape."""

    def of_sums(self, sums: Tensor, n_patches: int) -> Tensor:
        """Return the loss, a scalar."""


def whole_loss(criterion: Criterion, output: Output, target: Tensor) -> Tensor:
    """Return the loss of patches that are all in one batch, as a scalar."""
    if (by_sums := as_sums_loss(criterion)) is not None:
        return by_sums.of_sums(by_sums.sums(output, target), len(target))
    # the mean of one number is that number: only a loss of one number a patch has more
    return criterion(output, target).mean()


def is_mean_over_patches(criterion: object) -> bool:
    """Tell whether it says that the loss of many patches is the mean of theirs."""
    return getattr(criterion, "reduces", "") == "patches"


def as_sums_loss(criterion: object) -> SumsLoss | None:
    """Return it as what it says it is, or None if it does not."""
    return criterion if isinstance(criterion, SumsLoss) else None
