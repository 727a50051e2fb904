"""The loss of a window, and its derivative by what the first of two passes kept of each micro-batch.

What is kept is as little as the loss allows: the sums that it is a function of, or else every output
with its target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from brats_seg.models.device import Device
from brats_seg.models.output import output_from, tensors_of
from brats_seg.training.criterion import Criterion, Output, SumsLoss, as_sums_loss
from brats_seg.training.ranks import Ranks

Carried: TypeAlias = tuple[Tensor, ...]
"""What is kept of a micro-batch."""
Gradients: TypeAlias = list[Sequence[Tensor | None]]
"""Of each micro-batch, the derivative by each tensor of what was kept; None where there is none."""


class Head(Protocol):
    """The end of a loss: what comes after the network."""

    def carry(self, output: Output, target: Tensor) -> Carried:
        """Return what is kept of a micro-batch."""

    def gather(self, carried: Sequence[Carried]) -> Any:
        """Bring together what all ranks kept, in one exchange."""

    def differentiate(
        self, gathered: Any, carried: Sequence[Carried], n_patches: int
    ) -> tuple[float, Gradients]:
        """Return the loss of the window and its derivative by what this rank kept."""


def head_of(
    criterion: Criterion, device: Device, scale: Callable[[Tensor], Tensor], ranks: Ranks
) -> Head:
    """Return the end of a loss that does not reduce to patches."""
    if (by_sums := as_sums_loss(criterion)) is not None:
        return _SumsHead(loss=by_sums, scale=scale, ranks=ranks)
    return _OutputsHead(loss=criterion, device=device, scale=scale, ranks=ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SumsHead:
    loss: SumsLoss
    scale: Callable[[Tensor], Tensor]
    ranks: Ranks

    def carry(self, output: Output, target: Tensor) -> Carried:
        return (self.loss.sums(output, target),)

    def gather(self, carried: Sequence[Carried]) -> Tensor:
        # the sums of many patches are added in float64: the loss is a ratio of them
        own = [part.detach().double() for (part,) in carried]
        rows, _ = self.ranks.gather_rows(torch.stack(own) if own else None)
        return rows.sum(0)

    def differentiate(
        self, gathered: Tensor, carried: Sequence[Carried], n_patches: int
    ) -> tuple[float, Gradients]:
        sums = gathered.requires_grad_()
        loss = self.loss.of_sums(sums, n_patches)
        (gradient,) = torch.autograd.grad(self.scale(loss), (sums,))
        return float(loss.detach()), [(gradient.to(part.dtype),) for (part,) in carried]


@dataclass(frozen=True, kw_only=True, slots=True)
class _OutputsHead:
    loss: Criterion
    device: Device
    scale: Callable[[Tensor], Tensor]
    ranks: Ranks

    def carry(self, output: Output, target: Tensor) -> Carried:
        return (*tensors_of(output), target)

    def gather(self, carried: Sequence[Carried]) -> tuple[list[Tensor], slice]:
        n_tensors = max(self.ranks.gather(len(carried[0]) if carried else 0))
        columns = [[parts[place].detach() for parts in carried] for place in range(n_tensors)]
        gathered = [self.ranks.gather_rows(torch.cat(c) if c else None) for c in columns]
        return [rows for rows, _ in gathered], gathered[0][1]

    def differentiate(
        self, gathered: tuple[list[Tensor], slice], carried: Sequence[Carried], n_patches: int
    ) -> tuple[float, Gradients]:
        (*outputs, target), own = gathered
        leaves = tuple(output.requires_grad_() for output in outputs)
        with self.device.autocast():
            loss = self.loss(output_from(leaves), target)
        # a loss may look at some outputs only, at the finest level say
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            self.scale(loss), leaves, allow_unused=True
        )
        sizes = [len(parts[-1]) for parts in carried]
        nothing: list[None] = [None] * len(sizes)
        columns = [nothing if grad is None else grad[own].split(sizes) for grad in found]
        return float(loss.detach()), list(zip(*columns, nothing, strict=True))
