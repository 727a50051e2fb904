"""Make one optimizer step of many micro-batches, equal to that of the whole batch.

A smaller micro-batch and activation checkpointing give the same gradient to rounding, so that a run goes
on with them when memory runs out. The effective batch, the patch and the precision never change.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from brats_seg.errors import ConfigError, EnvironmentalError
from brats_seg.models import interface
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import Fallback
from brats_seg.training.gradient import BatchGradient, Leaves, MicroBatch
from brats_seg.training.independence import PassState
from brats_seg.training.losses import Criterion, Measure, measure_nothing, parameters_of
from brats_seg.training.ranks import Ranks
from brats_seg.training.run_plan import Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The outcome of one optimizer step."""

    loss: float
    """Loss of the effective batch."""
    n_patches: int
    gradient_norm: float
    """Norm of the gradient of the whole batch, before clipping."""
    skipped: bool
    """Whether the gradient was not finite, so that weights and buffers are as before."""
    measured: Tensor
    """`(n_patches, ...)`, the result of `measure` for each patch."""


class Accumulator:
    """Make one optimizer step of many micro-batches, equal to that of the whole batch.

    It takes the place of `loss.backward(); optimizer.step()` in a training loop.

    Example:
        >>> from brats_seg.training.gradient import MicroBatch
        >>> network = nn.Conv3d(4, 3, 1)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> accumulator = Accumulator(network, nn.BCEWithLogitsLoss(), optimizer)
        >>> image, target = torch.zeros(1, 4, 8, 8, 8), torch.zeros(1, 3, 8, 8, 8)
        >>> accumulator.step([MicroBatch(image, target), MicroBatch(image, target)]).n_patches
        2
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
        n_at_once: int = 1,
    ) -> None:
        """Set up the step.

        Args:
            network: Network, already on its device.
            criterion: Loss; see `losses` for the attribute by which it declares how it reduces.
            optimizer: Any optimizer of parameters of the network, and of those that the loss has.
            device: Device and precision; by default those of the network, in float32.
            clip_norm: Largest norm of the gradient of an effective batch.
            ranks: The processes that share each batch.
            n_at_once: Micro-batches that are computed at the same time, each in a thread, where the loss
                is a mean over patches. The update is the same, for a network and a loss that change
                nothing when they compute and draw no random numbers.

        Raises:
            ConfigError: The optimizer has no parameter of the network.
        """
        self.network = network
        self.criterion = criterion
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.ranks = ranks or Ranks()
        self.device = device or Device(torch_device=next(network.parameters()).device)
        self.leaves = Leaves(network, criterion, optimizer)
        self._gradient = BatchGradient(self.leaves, self.device, self.ranks, n_at_once)
        self.scaler = torch.amp.GradScaler(
            self.device.torch_device.type, enabled=self.device.needs_scaler
        )
        if not {*network.parameters()} & {*self.leaves.updated}:
            msg = "the optimizer has no parameter of the network: make it for this network"
            raise ConfigError(msg)
        learnable = {p for p in parameters_of(criterion) if p.requires_grad}
        if left_out := learnable.difference(self.leaves.updated):
            message = "the loss %s has parameters that the optimizer was not given: %d"
            log.warning(message, type(criterion).__name__, len(left_out))

    def step(
        self, micro_batches: Iterable[MicroBatch], measure: Measure = measure_nothing
    ) -> StepResult:
        """Update the weights once, by the gradient of all micro-batches together.

        Until the weights are updated, every failure, running out of memory included, leaves weights,
        gradients, buffers and random state as they were: the same patches can be given again, cut
        into other micro-batches.

        Args:
            micro_batches: Any iterable of micro-batches, of equal size or not. Each is moved to the
                device for its forward pass. A loss that is a mean over patches iterates over them
                once and keeps none; other losses keep them all, for a second pass. With several
                ranks each gives its share of the batch, perhaps an empty one.
            measure: Called once with the output of each micro-batch, without a graph.

        Raises:
            ConfigError: The batch holds no patch; the output of the network for a patch depends on
                how the batch is cut, see `independence`; or the loss does not do what it declares.
            ReplayError: The loss needs two passes, and the network gave different outputs in them.
            EnvironmentalError: The optimizer failed, for example because memory ran out, so that some
                weights may be updated and others not.
        """
        before = PassState.capture(self.device.torch_device, *self.leaves.modules)
        try:
            loss, measured = self.backward(micro_batches, measure)
            self.ranks.sum_gradients(self.leaves.all)
        except BaseException:
            self.leaves.drop_gradients()
            before.restore()
            raise
        norm = self._update()
        if skipped := not math.isfinite(norm):
            # running statistics may not be finite either, and would stay so
            before.restore()
        return StepResult(
            loss=loss,
            n_patches=int(self.ranks.sum(torch.tensor(len(measured)))),
            gradient_norm=norm,
            skipped=skipped,
            measured=measured,
        )

    def backward(
        self, micro_batches: Iterable[MicroBatch], measure: Measure = measure_nothing
    ) -> tuple[float, Tensor]:
        """Set the gradient of the batch's loss without a step; return loss and measurements."""
        self.leaves.drop_gradients()
        return self._gradient.make(micro_batches, measure, self.scaler.scale)

    def _update(self) -> float:
        """Unscale, clip and step once, and return the norm of the gradient.

        Only the parameters that the optimizer updates count for the norm.
        """
        self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.leaves.updated if p.grad is not None]
        largest = math.inf if self.clip_norm is None else self.clip_norm
        norm = float(clip_grad_norm_(parameters, largest))
        if math.isfinite(norm):
            try:
                self.scaler.step(self.optimizer)
            except (RuntimeError, MemoryError) as error:
                problem = f"the weights may be half updated: the optimizer failed: {error}"
                msg = f"{problem}. Resume from the last checkpoint, with optimizer.name sgd if memory ran out."
                raise EnvironmentalError(msg) from error
        self.scaler.update()
        return norm


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMode:
    """One way to compute a batch; modes differ in the memory that they need."""

    micro_batch: int
    """Patches in one forward pass."""
    checkpointing: interface.ActivationCheckpointing = interface.ActivationCheckpointing.NONE

    def __str__(self) -> str:
        kind = self.checkpointing.value
        more = "" if kind == "none" else f", checkpointing {kind}"
        return f"micro-batch {self.micro_batch}{more}"


def memory_modes(network: nn.Module, micro_batch: int) -> tuple[MemoryMode, ...]:
    """Return the modes of a network, from that of the settings to the one that needs least memory."""
    sizes = [micro_batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    modes = [MemoryMode(micro_batch=size) for size in sizes]
    kinds = interface.supported_checkpointing(network)[1:]
    return (*modes, *(MemoryMode(micro_batch=1, checkpointing=kind) for kind in kinds))


def step_fallback(accumulator: Accumulator, micro_batch: int) -> Fallback[MemoryMode]:
    """Return the fallback of the steps of a run."""
    return Fallback(
        memory_modes(accumulator.network, micro_batch),
        accumulator.device.torch_device,
        lambda message: EnvironmentalError(f"{message}. Lower patch.size or model.widths"),
    )


def make_step(
    accumulator: Accumulator, fallback: Fallback[MemoryMode], batch: Batch, measure: Measure
) -> StepResult:
    """Make one optimizer step; if memory runs out, repeat it in the next mode."""

    def step(mode: MemoryMode) -> StepResult:
        interface.set_activation_checkpointing(accumulator.network, mode.checkpointing)
        return accumulator.step(batch.micro_batches(mode.micro_batch), measure)

    return fallback.run(step)
