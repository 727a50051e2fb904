"""The exact step: one optimizer update of many micro-batches, equal to that of the whole batch."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from brats_seg.errors import EnvironmentalError
from brats_seg.runtime.device import Device
from brats_seg.training.gradient import (
    BatchGradient,
    MicroBatch,
    RandomState,
    capture_buffers,
    restore_buffers,
)
from brats_seg.training.losses import Criterion, Measure, measure_nothing
from brats_seg.training.ranks import Ranks


class HalfUpdatedError(EnvironmentalError):
    """The optimizer failed midway: what the weights are now is nobody's."""


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
        ranks: Ranks | None = None,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.ranks = ranks or Ranks()
        self.compute_on(device or Device(torch_device=next(network.parameters()).device))

    def compute_on(self, device: Device) -> None:
        """Compute in another precision from now on, with a fresh loss scale if it needs one."""
        self.device = device
        self.scaler = torch.amp.GradScaler(device.torch_device.type, enabled=device.needs_scaler)

    def step(self, window: Iterable[MicroBatch], measure: Measure = measure_nothing) -> StepResult:
        """Update the weights once; micro-batches may differ in size.

        A loss that is a mean over patches goes through the window once, and holds none of it;
        others do so twice, and hold what an iterator gives, but not what a sequence does.

        Until the weights move, nothing has happened: whatever goes wrong before, memory that runs
        out among it, leaves weights, gradients, buffers and random state as they were, and the same
        window may be given again, cut otherwise.

        `measure` sees the output of each micro-batch once, without a graph. With several ranks
        each gives its share of the window, perhaps an empty one.

        Raises:
            ConfigError: The network has batch statistics, so that its output depends on how the
                window is cut.
            ReplayError: The network cannot be run twice, and the loss needs that.
            HalfUpdatedError: The optimizer failed, say because memory ran out, as weights moved.
        """
        random_state = RandomState.capture(self.device.torch_device)
        buffers = capture_buffers(self.network)
        try:
            loss, measured = self.backward(window, measure)
            self.ranks.sum_gradients(self.network)
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            random_state.restore()
            restore_buffers(self.network, buffers)
            raise
        norm = self._update()
        return StepResult(
            loss=loss,
            n_patches=int(self.ranks.sum(torch.tensor(len(measured)))),
            gradient_norm=norm,
            skipped=not isfinite(norm),
            measured=measured,
        )

    def backward(
        self, window: Iterable[MicroBatch], measure: Measure = measure_nothing
    ) -> tuple[float, Tensor]:
        """Give the parameters the gradient of the window's loss; return loss and measure."""
        self.optimizer.zero_grad(set_to_none=True)
        return BatchGradient(
            network=self.network,
            criterion=self.criterion,
            device=self.device,
            scale=self.scaler.scale,
            ranks=self.ranks,
        ).make(window, measure)

    def _update(self) -> float:
        """Unscale, clip and step, once; an infinite gradient leaves the weights alone."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        if self.clip_norm is None:
            norm = float(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        else:
            norm = float(clip_grad_norm_(parameters, self.clip_norm))
        if isfinite(norm):
            self._move_weights()
        self.scaler.update()
        return norm

    def _move_weights(self) -> None:
        try:
            self.scaler.step(self.optimizer)
        except (RuntimeError, MemoryError) as error:
            msg = (
                f"the optimizer's step failed, and the weights may be half updated: {error}. The "
                "last checkpoint is whole: go on from it, with an optimizer that keeps less (sgd) "
                "or a smaller network if memory ran out."
            )
            raise HalfUpdatedError(msg) from error
