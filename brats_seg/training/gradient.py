"""The gradient of a window of accumulation, equal to that of the whole batch.

How it is made depends on what the loss says of itself:

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
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from brats_seg.errors import ConfigError
from brats_seg.models.device import Device
from brats_seg.models.memory import is_out_of_memory
from brats_seg.models.output import TrainingOutput, output_from, tensors_of
from brats_seg.training.ranks import Ranks
from brats_seg.training.replay import (
    RandomState,
    capture_buffers,
    check_replay,
    restore_buffers,
)

Value = TypeVar("Value")
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


def whole_loss(criterion: Criterion, output: Output, target: Tensor) -> Tensor:
    """Return the loss of patches that are all in one batch, as a scalar."""
    if (by_sums := _as_sums_loss(criterion)) is not None:
        return by_sums.of_sums(by_sums.sums(output, target), len(target))
    # the mean of one number is that number: only a loss of one number a patch has more
    return criterion(output, target).mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowGradient:
    """What makes the gradient of a window."""

    network: nn.Module
    criterion: Criterion
    device: Device
    scale: Callable[[Tensor], Tensor]
    """Multiplies a loss before it flows back, so that float16 gradients do not underflow."""
    ranks: Ranks
    """The processes that share the windows."""

    def add(self, window: Sequence[MicroBatch], measure: Measure) -> tuple[float, Tensor]:
        """Add this rank's part of the gradient to the parameters', and return loss and measure.

        `window` is this rank's share, perhaps empty; the loss is that of all ranks' patches, and
        the sum of the ranks' gradients is its gradient. What was measured is of this share.
        """
        n_patches = int(self.ranks.sum(torch.tensor(_n_patches(window))))
        one_pass = getattr(self.criterion, "reduces", "") == "patches"
        make = self._one_pass if one_pass else self._two_passes
        loss, rows = make(window, measure, n_patches)
        return loss, torch.cat(rows) if rows else torch.empty(0)

    def _one_pass(
        self, window: Sequence[MicroBatch], measure: Measure, n_patches: int
    ) -> tuple[float, list[Tensor]]:
        rows: list[Tensor] = []

        def work() -> float:
            total = torch.zeros((), device=self.device.torch_device)
            for micro_batch in window:
                here = micro_batch.to(self.device.torch_device)
                with self.device.autocast():
                    output = self.network(here.image)
                    losses = self.criterion(output, here.target)
                _check_per_patch(losses, len(here.image))
                self.scale(losses.sum() / n_patches).backward()
                total = total + losses.detach().sum()
                rows.append(_measured(measure, output, here.target))
            return float(total)

        total = torch.tensor(self._together(work), dtype=torch.float64)
        return float(self.ranks.sum(total)) / n_patches, rows

    def _two_passes(
        self, window: Sequence[MicroBatch], measure: Measure, n_patches: int
    ) -> tuple[float, list[Tensor]]:
        states: list[RandomState] = []
        rows: list[Tensor] = []

        def first_pass() -> list[Carried]:
            carried = []
            for place, micro_batch in enumerate(window):
                states.append(RandomState.capture(self.device.torch_device))
                with torch.set_grad_enabled(place == len(window) - 1):
                    carried.append(self._carry(micro_batch, measure, rows))
            return carried

        carried = self._together(first_pass)
        after = RandomState.capture(self.device.torch_device)
        buffers = capture_buffers(self.network)
        loss, gradients = self._head(carried, window, n_patches)

        def second_pass() -> None:
            if carried:
                _backward(carried.pop(), gradients[-1])
            for micro_batch, state, first, gradient in zip(
                window, states, carried, gradients, strict=False
            ):
                state.restore()
                second = self._carry(micro_batch, measure_nothing, [])
                check_replay(first, second)
                _backward(second, gradient)

        self._together(second_pass)
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
        self, carried: Sequence[Carried], window: Sequence[MicroBatch], n_patches: int
    ) -> tuple[float, list[Sequence[Tensor | None]]]:
        """Return the loss of the window and its derivative by all that was carried."""
        if (by_sums := _as_sums_loss(self.criterion)) is not None:
            # the sums of many patches are added in float64: the loss is a ratio of them
            own = [part.detach().double() for (part,) in carried]
            rows, _ = self.ranks.gather_rows(torch.stack(own) if own else None)
            (sums,) = _as_leaves([rows.sum(0)])
            loss = by_sums.of_sums(sums, n_patches)
            (gradient,) = torch.autograd.grad(self.scale(loss), (sums,))
            return float(loss.detach()), [(gradient.to(part.dtype),) for (part,) in carried]
        return self._head_of_outputs(carried, window)

    def _head_of_outputs(
        self, carried: Sequence[Carried], window: Sequence[MicroBatch]
    ) -> tuple[float, list[Sequence[Tensor | None]]]:
        n_outputs = max(self.ranks.gather(len(carried[0]) if carried else 0))
        columns = [[parts[place].detach() for parts in carried] for place in range(n_outputs)]
        gathered = [self.ranks.gather_rows(torch.cat(c) if c else None) for c in columns]
        targets = [micro_batch.target.to(self.device.torch_device) for micro_batch in window]
        target, own = self.ranks.gather_rows(torch.cat(targets) if targets else None)
        leaves = _as_leaves([rows for rows, _ in gathered])
        with self.device.autocast():
            loss = self.criterion(output_from(leaves), target)
        # a loss may look at some outputs only, at the finest level say
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            self.scale(loss), leaves, allow_unused=True
        )
        sizes = [len(micro_batch.image) for micro_batch in window]
        parts = [
            [None] * len(sizes) if gradient is None else gradient[own].split(sizes)
            for gradient in gradients
        ]
        return float(loss.detach()), list(zip(*parts, strict=True))

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


def _as_sums_loss(criterion: object) -> SumsLoss | None:
    return criterion if isinstance(criterion, SumsLoss) else None


def _n_patches(window: Sequence[MicroBatch]) -> int:
    return sum(len(micro_batch.image) for micro_batch in window)


def _as_leaves(tensors: Sequence[Tensor]) -> Carried:
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
