"""The gradient of a window of accumulation, equal to that of the whole batch.

How it is made depends on what the loss says of itself:

- `reduces = "patches"`: the loss returns one number a patch, and that of the window is their mean.
  One pass; the sum of the gradients is divided by the patches that the window really held.
- `reduces = "sums"`: the loss is a function of sums over all patches (batch Dice). Two passes: the
  first adds up the sums, the second lets the derivative by the sums flow back.
- anything else: the loss of all outputs at once. Two passes: the first keeps the outputs, the loss
  is taken once over the window, and the second lets its derivative by each output flow back (the
  idea of Gao 2021, arXiv 2101.06983, there for contrastive losses).

The graph of the last micro-batch of a first pass is kept for the second, so that a window of n
costs 2n - 1 forward passes at most and a window of one costs one. Only one graph is ever alive.

N patches, R regions, X Y Z voxels.
"""

# DOC training/head: The loss of a window, and its derivative by what the first of two passes kept of each micro-batch.
#
# What is kept is as little as the loss allows: the sums that it is a function of, or else every output
# with its target.
#
# DOC training/replay: Running a micro-batch a second time exactly as the first: random state and buffers.

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
    is_mean_over_patches,
    measure_nothing,
)
from brats_seg.training.ranks import Ranks

Carried: TypeAlias = tuple[Tensor, ...]
"""What is kept of a micro-batch."""
Gradients: TypeAlias = list[Sequence[Tensor | None]]
"""Of each micro-batch, the derivative by each tensor of what was kept; None where there is none."""


class LossReduction(Protocol):
    """The end of a loss: what comes after the network."""

    def carry(self, output: Output, target: Tensor) -> Carried:
        """Return what is kept of a micro-batch."""

    def gather(self, carried: Sequence[Carried]) -> Any:
        """Bring together what all ranks kept, in one exchange."""

    def differentiate(
        self, gathered: Any, carried: Sequence[Carried], n_patches: int
    ) -> tuple[float, Gradients]:
        """Return the loss of the window and its derivative by what this rank kept."""


def loss_reduction(
    criterion: Criterion, device: Device, scale: Callable[[Tensor], Tensor], ranks: Ranks
) -> LossReduction:
    """Return the end of a loss that does not reduce to patches."""
    if (by_sums := as_sums_loss(criterion)) is not None:
        return _SumsReduction(loss=by_sums, scale=scale, ranks=ranks)
    return _OutputsReduction(loss=criterion, device=device, scale=scale, ranks=ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SumsReduction:
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


class ReplayError(BratsError):
    """A network gave another output for the same micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """The generators that random layers draw from."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> Self:
        """Note where the generators of the CPU and of a GPU stand."""
        on_gpu = device.type == "cuda"
        cuda = torch.cuda.get_rng_state(device) if on_gpu else None
        return cls(cpu=torch.get_rng_state(), cuda=cuda, device=device)

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def capture_buffers(network: nn.Module) -> tuple[Tensor, ...]:
    """Copy what a forward pass may change beside the gradients, such as running statistics."""
    return tuple(buffer.detach().clone() for buffer in network.buffers())


def restore_buffers(network: nn.Module, buffers: Sequence[Tensor]) -> None:
    """Put the copies back."""
    for buffer, copy in zip(network.buffers(), buffers, strict=True):
        buffer.copy_(copy)


def check_replay(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Raise `ReplayError` unless both passes over a micro-batch gave the same.

    Kernels that add in no fixed order (cuDNN's, say) differ in the last digits between passes, so
    equality is meant to `REPLAY_TOLERANCE` of the type's precision; a dropout mask that is drawn
    anew differs by far more.
    """
    for before, after in zip(first, second, strict=True):
        # a value that is not finite makes the step be left out, with a word of its own
        finite = before.isfinite()
        if not finite.any():
            continue
        epsilon = torch.finfo(before.dtype).eps
        error = float((before - after.detach())[finite].abs().max())
        scale = float(before[finite].abs().max())
        if not error <= REPLAY_TOLERANCE * epsilon * max(scale, 1.0):
            msg = (
                f"the network gave another output for the same micro-batch: they differ by "
                f"{error:.3g} where values reach {scale:.3g}. Expected random layers to draw from "
                "torch's default generators only, and no state that a forward pass changes. Give "
                "the layer torch's generator, or use a loss that is a mean over patches, which "
                "needs one pass."
            )
            raise ReplayError(msg)


REPLAY_TOLERANCE = 1e3


Value = TypeVar("Value")


class MicroBatch(NamedTuple):
    """The patches of one forward pass."""

    image: Tensor
    """`(N, C, X, Y, Z)`."""
    target: Tensor
    """What the loss compares with; its first axis counts patches too."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on that device."""
        return MicroBatch(self.image.to(device), self.target.to(device))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGradient:
    """What makes the gradient of a window."""

    network: nn.Module
    criterion: Criterion
    device: Device
    scale: Callable[[Tensor], Tensor]
    """Multiplies a loss before it flows back, so that float16 gradients do not underflow."""
    ranks: Ranks
    """The processes that share the windows."""

    def make(self, window: Iterable[MicroBatch], measure: Measure) -> tuple[float, Tensor]:
        """Give parameters, which have no gradient yet, this rank's part; return loss and measure.

        `window` is this rank's share, perhaps empty; the loss is that of all ranks' patches, and
        the sum of the ranks' gradients is its gradient. What was measured is of this share. A
        sequence that makes its micro-batches when asked is never held as a whole.
        """
        make = self._one_pass if is_mean_over_patches(self.criterion) else self._two_passes
        loss, rows = make(window, measure)
        return loss, torch.cat(rows) if rows else torch.empty(0)

    def _one_pass(
        self, window: Iterable[MicroBatch], measure: Measure
    ) -> tuple[float, list[Tensor]]:
        rows: list[Tensor] = []

        def work() -> float:
            total = torch.zeros((), device=self.device.torch_device)
            for place, micro_batch in enumerate(window):
                self._check_cut(place)
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
        """Return the losses of the patches, added up; what else was computed is let go."""
        here = micro_batch.to(self.device.torch_device)
        with self.device.autocast():
            output = self.network(here.image)
            losses = self.criterion(output, here.target)
        _check_per_patch(losses, len(here.image))
        rows.append(_measured(measure, output, here.target))
        return losses.sum()

    def _two_passes(
        self, window: Iterable[MicroBatch], measure: Measure
    ) -> tuple[float, list[Tensor]]:
        window = window if isinstance(window, Sequence) else tuple(window)
        head = loss_reduction(self.criterion, self.device, self.scale, self.ranks)
        states: list[RandomState] = []
        rows: list[Tensor] = []

        def first_pass() -> list[Carried]:
            carried = []
            for place, micro_batch in enumerate(window):
                self._check_cut(place)
                states.append(RandomState.capture(self.device.torch_device))
                with torch.set_grad_enabled(place == len(window) - 1):
                    carried.append(self._carried(head, micro_batch, measure, rows))
            return carried

        carried = self._together(first_pass)
        after = RandomState.capture(self.device.torch_device)
        buffers = capture_buffers(self.network)
        gathered = head.gather(carried)
        n_patches = int(self.ranks.sum(torch.tensor(_n_patches(rows))))
        loss, gradients = self._together(lambda: head.differentiate(gathered, carried, n_patches))

        def second_pass() -> None:
            if carried:
                _backward(carried.pop(), gradients[-1])
            # the last micro-batch, whose turn is over, is not made again
            for place, first in enumerate(carried):
                states[place].restore()
                # made in the call, so that nothing holds it while the gradient flows back
                second = self._carried(head, window[place], measure_nothing, [])
                check_replay(first, second)
                _backward(second, gradients[place])

        self._together(second_pass)
        after.restore()
        restore_buffers(self.network, buffers)
        return loss, rows

    def _carried(
        self, head: LossReduction, micro_batch: MicroBatch, measure: Measure, rows: list[Tensor]
    ) -> Carried:
        here = micro_batch.to(self.device.torch_device)
        with self.device.autocast():
            output = self.network(here.image)
            rows.append(_measured(measure, output, here.target))
            return head.carry(output, here.target)

    def _check_cut(self, place: int) -> None:
        if place == 1 and has_batch_statistics(self.network):
            msg = (
                "the network normalises over the batch, so a window of several micro-batches "
                "cannot equal the whole batch; use instance or group norm, or one micro-batch"
            )
            raise ConfigError(msg)

    def _together(self, work: Callable[[], Value]) -> Value:
        """Do this rank's work; where memory runs out on one rank, it has run out on all."""
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


def _n_patches(rows: Sequence[Tensor]) -> int:
    return sum(len(row) for row in rows)


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
