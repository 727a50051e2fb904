"""The state of a run on disk: all that a later start needs to go on as if nothing had happened.

A checkpoint is a dictionary of plain values and tensors, read with `weights_only=True`, so that
opening one runs no code. Its entry `model` is the plain state dict of the network.
"""

# DOC training/state: Everything of a run that changes while it runs.

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from brats_seg.config import Config, OptimizerConfig, TrainingConfig
from brats_seg.errors import ConfigError
from brats_seg.models.build import build_model, has_batch_statistics
from brats_seg.models.norm import check_in_place
from brats_seg.runtime.device import Device
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.losses import Criterion
from brats_seg.training.out_of_memory import OutOfMemoryFallback
from brats_seg.training.ranks import Ranks
from brats_seg.training.schedule import Schedule, build_schedule
from brats_seg.training.tasks import RunningSums


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a run is: `n_windows` windows of `epoch` are done."""

    epoch: int = 0
    n_windows: int = 0
    n_steps: int = 0
    """Optimizer steps that moved the weights."""


@dataclass(kw_only=True, slots=True)
class RunState:
    """Weights, what moves them, and how far the run is."""

    network: nn.Module
    accumulator: Accumulator
    fallback: OutOfMemoryFallback
    """Cuts windows into micro-batches, and goes down when memory runs out."""
    schedule: Schedule
    ema: AveragedModel | None
    """Moving average of the weights, where the settings ask for one."""
    position: Position = field(default_factory=Position)
    sums: RunningSums = field(default_factory=RunningSums)
    history: list[Mapping[str, float]] = field(default_factory=list)
    best: float | None = None

    @property
    def evaluated(self) -> nn.Module:
        """The network that is validated and handed out: the averaged one, if there is one."""
        return self.network if self.ema is None else self.ema.module

    def after_window(self, result: StepResult) -> None:
        """Move everything that follows a window, and what counts optimizer steps if it was one."""
        n_steps = self.position.n_steps
        if not result.skipped:
            n_steps += 1
            self.schedule.after_step()
            if self.ema is not None:
                self.ema.update_parameters(self.network)
            self.sums.loss_sum += result.loss * result.n_patches
            self.sums.n_patches += result.n_patches
        self.position = replace(
            self.position, n_windows=self.position.n_windows + 1, n_steps=n_steps
        )


def build_network(config: Config, patch: tuple[int, int, int]) -> nn.Module:
    """Return the network of the settings, its weights drawn from the run's seed."""
    torch.manual_seed(config.training.seed)
    return build_model(config.model, patch)


def check_network(network: nn.Module, config: TrainingConfig) -> None:
    """Refuse a network that normalises over the batch where windows are cut into micro-batches."""
    batches = config.effective_batch
    largest = batches if isinstance(batches, int) else max(batches.values())
    if config.micro_batch < largest and has_batch_statistics(network):
        msg = (
            f"the network normalises over the batch, and training.micro_batch is "
            f"{config.micro_batch} of an effective batch of {largest}: it would learn something "
            "else than from the whole batch. Use a network with instance or group norm, or a "
            "micro-batch as large as the effective batch."
        )
        raise ConfigError(msg)


def build_state(
    network: nn.Module,
    criterion: Criterion,
    config: Config,
    *,
    device: Device,
    ranks: Ranks,
    n_steps: int,
) -> RunState:
    """Return the state of a run of `n_steps` optimizer steps that has not begun."""
    network.to(device.torch_device)
    check_in_place(network)
    optimizer = build_optimizer(network, config.optimizer)
    decay = config.optimizer.ema
    accumulator = Accumulator(
        network,
        criterion,
        optimizer,
        device=device,
        clip_norm=config.optimizer.clip_norm,
        ranks=ranks,
    )
    return RunState(
        network=network,
        accumulator=accumulator,
        fallback=OutOfMemoryFallback(accumulator, config.training),
        schedule=build_schedule(optimizer, config.schedule, n_steps),
        ema=None
        if decay is None
        else AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(decay)),
    )


def build_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of that name over all parameters."""
    parameters, lr, decay = network.parameters(), config.lr, config.weight_decay
    if config.name == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=decay)
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
    return torch.optim.SGD(
        parameters,
        lr=lr,
        weight_decay=decay,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
    )
