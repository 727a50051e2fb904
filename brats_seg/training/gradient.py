"""Compute the gradient of an effective batch from its micro-batches, equal to that of the whole batch.

The number of passes depends on the loss (see `losses.reduction_of`):

- a mean over patches takes one pass: the gradients of all patches are added, and the sum is divided
  by the number of patches in the batch.
- a function of sums over patches (batch Dice) takes two: the first adds up the sums, the second
  propagates the derivative of the loss with respect to them.
- any other loss takes two as well: the first keeps the outputs, the loss is computed once for the
  whole batch, and the second propagates its derivative with respect to each output (the idea of Gao
  2021, arXiv 2101.06983, there for contrastive losses).

The graph of the last micro-batch of a first pass is kept for the second, so n micro-batches take
2n - 1 forward passes at most. Only one graph exists at a time, and with a loss of the first two
kinds the device holds one micro-batch at a time, whatever the effective batch.

N patches, C channels, R regions, X Y Z voxels.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from brats_seg.errors import BratsError, ConfigError
from brats_seg.models.build import has_batch_statistics
from brats_seg.models.output import output_from, tensors_of
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import is_out_of_memory
from brats_seg.training.losses import (
    Criterion,
    Measure,
    Output,
    SumsLoss,
    as_sums_loss,
    measure_nothing,
    reduction_of,
)
from brats_seg.training.ranks import Ranks

Value = TypeVar("Value")
Carried: TypeAlias = tuple[Tensor, ...]
"""The tensors of a micro-batch that the loss of the batch is computed from."""
Gradients: TypeAlias = list[Sequence[Tensor | None]]
"""For each micro-batch, the derivative with respect to each carried tensor, or None without one."""

REPLAY_TOLERANCE = 1e3
"""Largest difference between the two passes over a micro-batch, in units of the type's precision."""


class ReplayError(BratsError):
    """A network returned another output for the same micro-batch."""


class MicroBatch(NamedTuple):
    """The patches of one forward pass.

    Example:
        >>> import torch
        >>> image = torch.zeros(1, 4, 8, 8, 8, dtype=torch.float16)
        >>> part = MicroBatch(image, torch.zeros(1, 3, 8, 8, 8, dtype=torch.uint8))
        >>> part.to(torch.device("cpu")).image.dtype
        torch.float32
    """

    image: Tensor
    """`(N, C, X, Y, Z)` of any floating type."""
    target: Tensor
    """Target of the loss; its first axis counts patches too."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the micro-batch on a device, in the types that networks and losses compute with.

        The image becomes float32 unless it is float64. The target becomes float32, as losses of
        torch and MONAI expect, if it is uint8 or in half precision.
        """
        # moved first, because fewer bytes cross to the device that way
        image, target = self.image.to(device), self.target.to(device)
        image = image if image.dtype == torch.float64 else image.float()
        return MicroBatch(image, target.float() if target.dtype in _STORED_TYPES else target)


_STORED_TYPES = (torch.uint8, torch.float16, torch.bfloat16)
"""Types in which targets are held on the host to save memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGradient:
    """Computes the gradient of a batch that is given as micro-batches."""

    network: nn.Module
    criterion: Criterion
    device: Device
    scale: Callable[[Tensor], Tensor]
    """Multiplies a loss before the backward pass, so that float16 gradients do not underflow."""
    ranks: Ranks
    """The processes that share each batch."""

    def make(self, micro_batches: Iterable[MicroBatch], measure: Measure) -> tuple[float, Tensor]:
        """Add this rank's part of the gradient to the parameters; return loss and measurements.

        Args:
            micro_batches: This rank's share of the batch, perhaps empty. Each is moved to the
                device for its forward pass; a loss that takes two passes keeps them all.
            measure: Called with the output of each micro-batch.

        Returns:
            The loss of the patches of all ranks, and what was measured of this rank's patches. The
            sum of the ranks' gradients is the gradient of that loss.
        """
        one_pass = reduction_of(self.criterion) == "patches"
        make = self._one_pass if one_pass else self._two_passes
        loss, rows = make(micro_batches, measure)
        return loss, torch.cat(rows) if rows else torch.empty(0)

    def _one_pass(
        self, micro_batches: Iterable[MicroBatch], measure: Measure
    ) -> tuple[float, list[Tensor]]:
        rows: list[Tensor] = []

        def work() -> float:
            total = torch.zeros((), device=self.device.torch_device)
            for place, micro_batch in enumerate(micro_batches):
                self._check_normalisation(place)
                loss = self._summed_loss(micro_batch, measure, rows)
                self.scale(loss).backward()
                total = total + loss.detach()
            return float(total)

        total = torch.tensor(self._together(work), dtype=torch.float64)
        n_patches = int(self.ranks.sum(torch.tensor(_n_patches(rows))))
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                parameter.grad /= n_patches
        return float(self.ranks.sum(total)) / n_patches, rows

    def _summed_loss(self, micro_batch: MicroBatch, measure: Measure, rows: list[Tensor]) -> Tensor:
        """Return the sum of the patches' losses, holding nothing else of the forward pass."""
        here = micro_batch.to(self.device.torch_device)
        with self.device.autocast():
            output = self.network(here.image)
            losses = self.criterion(output, here.target)
        _check_per_patch(losses, len(here.image))
        rows.append(_measured(measure, output, here.target))
        return losses.sum()

    def _two_passes(
        self, micro_batches: Iterable[MicroBatch], measure: Measure
    ) -> tuple[float, list[Tensor]]:
        held = tuple(micro_batches)
        reduction = loss_reduction(self.criterion, self.device, self.scale, self.ranks)
        states: list[RandomState] = []
        rows: list[Tensor] = []

        def first_pass() -> list[Carried]:
            carried = []
            for place, micro_batch in enumerate(held):
                self._check_normalisation(place)
                states.append(RandomState.capture(self.device.torch_device))
                with torch.set_grad_enabled(place == len(held) - 1):
                    carried.append(self._carried(reduction, micro_batch, measure, rows))
            return carried

        carried = self._together(first_pass)
        after = RandomState.capture(self.device.torch_device)
        buffers = capture_buffers(self.network)
        gathered = reduction.gather(carried)
        n_patches = int(self.ranks.sum(torch.tensor(_n_patches(rows))))
        loss, gradients = self._together(
            lambda: reduction.differentiate(gathered, carried, n_patches)
        )

        def second_pass() -> None:
            if carried:
                # the graph of the last micro-batch is still there
                _backward(carried.pop(), gradients[-1])
            for place, first in enumerate(carried):
                states[place].restore()
                second = self._carried(reduction, held[place], measure_nothing, [])
                check_replay(first, second)
                _backward(second, gradients[place])

        self._together(second_pass)
        after.restore()
        restore_buffers(self.network, buffers)
        return loss, rows

    def _carried(
        self,
        reduction: "LossReduction",
        micro_batch: MicroBatch,
        measure: Measure,
        rows: list[Tensor],
    ) -> Carried:
        here = micro_batch.to(self.device.torch_device)
        with self.device.autocast():
            output = self.network(here.image)
            rows.append(_measured(measure, output, here.target))
            return reduction.carry(output, here.target)

    def _check_normalisation(self, place: int) -> None:
        if place == 1 and has_batch_statistics(self.network):
            msg = (
                "the network normalises over the batch, so several micro-batches cannot equal the "
                "whole batch; use instance or group norm, or one micro-batch"
            )
            raise ConfigError(msg)

    def _together(self, work: Callable[[], Value]) -> Value:
        """Return the result of this rank's work; if memory runs out on any rank, all raise."""
        error: Exception | None = None
        try:
            value = work()
        except (RuntimeError, MemoryError) as caught:
            if not is_out_of_memory(caught):
                raise
            error = caught
        if self.ranks.any(error is not None):
            raise error or torch.OutOfMemoryError("memory ran out on another rank")
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """The state of the generators that random layers draw from."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> Self:
        """Return the current state of torch's generators, on the CPU and on a GPU."""
        on_gpu = device.type == "cuda"
        cuda = torch.cuda.get_rng_state(device) if on_gpu else None
        return cls(cpu=torch.get_rng_state(), cuda=cuda, device=device)

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def capture_buffers(network: nn.Module) -> tuple[Tensor, ...]:
    """Copy the buffers of a network, such as running statistics."""
    return tuple(buffer.detach().clone() for buffer in network.buffers())


def restore_buffers(network: nn.Module, buffers: Sequence[Tensor]) -> None:
    """Set the buffers of a network to the copies."""
    for buffer, copy in zip(network.buffers(), buffers, strict=True):
        buffer.copy_(copy)


def check_replay(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Raise `ReplayError` unless both passes over a micro-batch gave the same values.

    Kernels that add in no fixed order (some of cuDNN) differ in the last digits between passes, so
    values may differ by `REPLAY_TOLERANCE`; another dropout mask makes them differ by far more.
    """
    for before, after in zip(first, second, strict=True):
        # a value that is not finite makes the whole step be skipped, with a warning of its own
        finite = before.isfinite()
        if not finite.any():
            continue
        epsilon = torch.finfo(before.dtype).eps
        error = float((before - after.detach())[finite].abs().max())
        scale = float(before[finite].abs().max())
        if not error <= REPLAY_TOLERANCE * epsilon * max(scale, 1.0):
            msg = (
                f"the network returned another output for the same micro-batch: they differ by "
                f"{error:.3g}, with values up to {scale:.3g}. Expected random layers to draw from "
                "torch's default generators only, and no state that changes in a forward pass. "
                "Give the layer torch's generator, or use a loss that is a mean over patches, "
                "which needs one pass."
            )
            raise ReplayError(msg)


class LossReduction(Protocol):
    """Computes the loss of a batch from tensors that were carried over from its micro-batches."""

    def carry(self, output: Output, target: Tensor) -> Carried:
        """Return the tensors of a micro-batch that the loss is computed from."""

    def gather(self, carried: Sequence[Carried]) -> Any:
        """Collect the carried tensors of all ranks, in one exchange."""

    def differentiate(
        self, gathered: Any, carried: Sequence[Carried], n_patches: int
    ) -> tuple[float, Gradients]:
        """Return the loss of the batch and its derivatives with respect to this rank's tensors."""


def loss_reduction(
    criterion: Criterion, device: Device, scale: Callable[[Tensor], Tensor], ranks: Ranks
) -> LossReduction:
    """Return the reduction of a loss that takes two passes."""
    if (by_sums := as_sums_loss(criterion)) is not None:
        return _SumsReduction(loss=by_sums, scale=scale, ranks=ranks)
    return _OutputsReduction(loss=criterion, device=device, scale=scale, ranks=ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SumsReduction:
    """Carries the sums of each micro-batch."""

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
class _OutputsReduction:
    """Carries every output with its target."""

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
        # a loss may use some outputs only, for example those of the finest level
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            self.scale(loss), leaves, allow_unused=True
        )
        sizes = [len(parts[-1]) for parts in carried]
        nothing: list[None] = [None] * len(sizes)
        columns = [nothing if grad is None else grad[own].split(sizes) for grad in found]
        return float(loss.detach()), list(zip(*columns, nothing, strict=True))


def _n_patches(rows: Sequence[Tensor]) -> int:
    return sum(len(row) for row in rows)


def _backward(carried: Carried, gradients: Sequence[Tensor | None]) -> None:
    """Propagate the derivatives with respect to the carried tensors that have one."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(carried, gradients, strict=True)
        if gradient is not None
    ]
    torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def _measured(measure: Measure, output: Output, target: Tensor) -> Tensor:
    with torch.no_grad():
        return measure(output, target)


def _check_per_patch(losses: Tensor, n_patches: int) -> None:
    if losses.shape != (n_patches,):
        msg = (
            f"the loss declares reduces = 'patches', but returned the shape {tuple(losses.shape)} "
            f"for {n_patches} patches; expected ({n_patches},)"
        )
        raise ConfigError(msg)
