"""The exact step: one optimizer update of many micro-batches, equal to that of the whole batch.

A window of accumulation is the sequence of micro-batches behind one update. How its gradient is
made depends on what the loss says of itself:

- `reduces = "patches"`: the loss returns one number a patch, and that of the window is their mean.
  One pass; each backward is divided by the patches that the window really holds.
- `reduces = "sums"`: the loss is a function of sums over all patches (batch Dice). Two passes: the
  first adds up the sums, the second lets the derivative by the sums flow back.
- anything else: the loss of all outputs at once. Two passes: the first keeps the outputs, the loss
  is taken once over the window, and the second lets its derivative by each output flow back (the
  idea of Gao 2021, arXiv 2101.06983, there for contrastive losses).

The graph of the last micro-batch of a first pass is kept for the second, so that a window of n
costs 2n - 1 forward passes at most and a window of one costs one. Only one graph is ever alive.

N patches, R regions, X Y Z voxels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from brats_seg.errors import ConfigError
from brats_seg.models.build import has_batch_statistics
from brats_seg.models.device import Device
from brats_seg.models.output import TrainingOutput, output_from, tensors_of
from brats_seg.training.replay import (
    RandomState,
    capture_buffers,
    check_replay,
    restore_buffers,
)

Output: TypeAlias = Tensor | TrainingOutput
Criterion: TypeAlias = Callable[[Output, Tensor], Tensor]
Measure: TypeAlias = Callable[[Output, Tensor], Tensor]
"""Output and target of a micro-batch to a tensor with a row per patch."""
Carried: TypeAlias = tuple[Tensor, ...]
"""What the first of two passes keeps of a micro-batch."""


def measure_nothing(output: Output, target: Tensor) -> Tensor:
    """Return a row of no columns for each patch."""
    return target.new_empty((len(target), 0))


class MicroBatch(NamedTuple):
    """The patches of one forward pass."""

    image: Tensor
    """`(N, C, X, Y, Z)`."""
    target: Tensor
    """What the loss compares with; its first axis counts patches too."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on that device."""
        return MicroBatch(self.image.to(device), self.target.to(device))


@runtime_checkable
class SumsLoss(Protocol):
    """A loss that is a function of sums over all patches, such as batch Dice."""

    def sums(self, output: Output, target: Tensor) -> Tensor:
        """Return what adds up over patches, in any shape."""

    def of_sums(self, sums: Tensor, n_patches: int) -> Tensor:
        """Return the loss, a scalar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    """Of the window: the number that the whole batch would give."""
    n_patches: int
    gradient_norm: float
    """Before clipping, over the whole window."""
    skipped: bool
    """Whether the gradient was not finite, so that the weights were left alone."""
    measured: Tensor
    """`(n_patches, ...)`, what the step was asked to measure of each patch's output."""


def whole_loss(criterion: Criterion, output: Output, target: Tensor) -> Tensor:
    """Return the loss of patches that are all in one batch, as a scalar."""
    if (by_sums := _as_sums_loss(criterion)) is not None:
        return by_sums.of_sums(by_sums.sums(output, target), len(target))
    # the mean of one number is that number: only a loss of one number a patch has more
    return criterion(output, target).mean()


class Accumulator:
    """Make one optimizer step of many micro-batches, equal to that of the whole batch.

    Takes the place of `loss.backward(); optimizer.step()` in a loop:

        accumulator = Accumulator(network, criterion, optimizer)
        result = accumulator.step([MicroBatch(image, target), ...])
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        *,
        device: Device | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.optimizer = optimizer
        self.device = device or Device(torch_device=next(network.parameters()).device)
        self.clip_norm = clip_norm
        self.scaler = torch.amp.GradScaler(
            self.device.torch_device.type, enabled=self.device.needs_scaler
        )

    def step(self, window: Sequence[MicroBatch], measure: Measure = measure_nothing) -> StepResult:
        """Update the weights once; micro-batches may differ in size.

        `measure` sees the output of each micro-batch once, without a graph. Raises `ConfigError`
        for a network with batch statistics, whose output depends on how the window is cut, and
        `ReplayError` for one that cannot be run twice when the loss needs it.
        """
        if len(window) > 1 and has_batch_statistics(self.network):
            msg = (
                "the network normalises over the batch, so a window of several micro-batches "
                "cannot equal the whole batch; use instance or group norm, or one micro-batch"
            )
            raise ConfigError(msg)
        self.optimizer.zero_grad(set_to_none=True)
        loss, measured = self.backward(window, measure)
        norm = self._update()
        return StepResult(
            loss=loss,
            n_patches=_n_patches(window),
            gradient_norm=norm,
            skipped=not isfinite(norm),
            measured=measured,
        )

    def backward(
        self, window: Sequence[MicroBatch], measure: Measure = measure_nothing
    ) -> tuple[float, Tensor]:
        """Add the gradient of the window's loss to the parameters'.

        Returns the loss, and what was measured.
        """
        one_pass = getattr(self.criterion, "reduces", "") == "patches"
        loss, rows = (self._one_pass if one_pass else self._two_passes)(window, measure)
        return loss, torch.cat(rows)

    def _one_pass(
        self, window: Sequence[MicroBatch], measure: Measure
    ) -> tuple[float, list[Tensor]]:
        n_patches, rows = _n_patches(window), []
        total = torch.zeros((), device=self.device.torch_device)
        for micro_batch in window:
            here = micro_batch.to(self.device.torch_device)
            with self.device.autocast():
                output = self.network(here.image)
                losses = self.criterion(output, here.target)
            _check_per_patch(losses, len(here.image))
            self.scaler.scale(losses.sum() / n_patches).backward()
            total = total + losses.detach().sum()
            rows.append(_measured(measure, output, here.target))
        return float(total) / n_patches, rows

    def _two_passes(
        self, window: Sequence[MicroBatch], measure: Measure
    ) -> tuple[float, list[Tensor]]:
        states: list[RandomState] = []
        firsts: list[Carried] = []
        rows: list[Tensor] = []
        for micro_batch in window[:-1]:
            states.append(RandomState.capture(self.device.torch_device))
            with torch.no_grad():
                firsts.append(self._carry(micro_batch, measure, rows))
        last = self._carry(window[-1], measure, rows)
        after = RandomState.capture(self.device.torch_device)
        buffers = capture_buffers(self.network)
        loss, gradients = self._head([*firsts, last], window)
        _backward(last, gradients[-1])
        del last
        for micro_batch, state, first, gradient in zip(
            window[:-1], states, firsts, gradients[:-1], strict=True
        ):
            state.restore()
            second = self._carry(micro_batch, measure_nothing, [])
            check_replay(first, second)
            _backward(second, gradient)
        after.restore()
        restore_buffers(self.network, buffers)
        return loss, rows

    def _carry(self, micro_batch: MicroBatch, measure: Measure, rows: list[Tensor]) -> Carried:
        """Run the network, and keep what the loss of the window needs: sums, or the output."""
        here = micro_batch.to(self.device.torch_device)
        with self.device.autocast():
            output = self.network(here.image)
            rows.append(_measured(measure, output, here.target))
            if (by_sums := _as_sums_loss(self.criterion)) is not None:
                return (by_sums.sums(output, here.target),)
        return tensors_of(output)

    def _head(
        self, carried: Sequence[Carried], window: Sequence[MicroBatch]
    ) -> tuple[float, list[tuple[Tensor | None, ...]]]:
        """Return the loss of the window and its derivative by all that was carried."""
        if (by_sums := _as_sums_loss(self.criterion)) is not None:
            # the sums of many patches are added in float64: the loss is a ratio of them
            (sums,) = _as_leaves(
                (torch.stack([part.detach().double() for (part,) in carried]).sum(0),)
            )
            loss = by_sums.of_sums(sums, _n_patches(window))
            (gradient,) = torch.autograd.grad(self.scaler.scale(loss), (sums,))
            return float(loss.detach()), [(gradient.to(part.dtype),) for (part,) in carried]
        leaves = _as_leaves(tuple(torch.cat(parts) for parts in zip(*carried, strict=True)))
        target = torch.cat([micro_batch.target for micro_batch in window])
        with self.device.autocast():
            loss = self.criterion(output_from(leaves), target.to(self.device.torch_device))
        # a loss may look at some outputs only, at the finest level say
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            self.scaler.scale(loss), leaves, allow_unused=True
        )
        sizes = [len(micro_batch.image) for micro_batch in window]
        parts = [
            [None] * len(sizes) if gradient is None else gradient.split(sizes)
            for gradient in gradients
        ]
        return float(loss.detach()), list(zip(*parts, strict=True))

    def _update(self) -> float:
        """Unscale, clip and step, once; an infinite gradient leaves the weights alone."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        if self.clip_norm is None:
            norm = float(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        else:
            norm = float(clip_grad_norm_(parameters, self.clip_norm))
        if isfinite(norm):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm


def _as_sums_loss(criterion: object) -> SumsLoss | None:
    return criterion if isinstance(criterion, SumsLoss) else None


def _n_patches(window: Sequence[MicroBatch]) -> int:
    return sum(len(micro_batch.image) for micro_batch in window)


def _as_leaves(tensors: Carried) -> Carried:
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def _backward(carried: Carried, gradients: Sequence[Tensor | None]) -> None:
    """Let derivatives flow back from what the loss depends on; the rest stays without a gradient."""
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
            f"the loss says that it reduces to patches, but returned the shape "
            f"{tuple(losses.shape)} for {n_patches} patches; expected ({n_patches},)"
        )
        raise ConfigError(msg)
