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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from brats_seg.errors import ConfigError
from brats_seg.models.build import has_batch_statistics
from brats_seg.models.device import Device
from brats_seg.models.memory import is_out_of_memory
from brats_seg.training.criterion import (
    Criterion,
    Measure,
    Output,
    is_mean_over_patches,
    measure_nothing,
)
from brats_seg.training.head import Carried, Head, head_of
from brats_seg.training.ranks import Ranks
from brats_seg.training.replay import (
    RandomState,
    capture_buffers,
    check_replay,
    restore_buffers,
)

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
class WindowGradient:
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
        head = head_of(self.criterion, self.device, self.scale, self.ranks)
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
        self, head: Head, micro_batch: MicroBatch, measure: Measure, rows: list[Tensor]
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
