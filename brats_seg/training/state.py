"""Build the state of a run from the settings: everything that changes while it runs."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

import torch
from pydantic import Field
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from brats_seg.config import Config, OptimizerConfig
from brats_seg.models.build import build_model
from brats_seg.models.norm import check_in_place
from brats_seg.runtime.device import Device
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.losses import Criterion, parameters_of
from brats_seg.training.muon import Muon
from brats_seg.training.out_of_memory import OutOfMemoryFallback
from brats_seg.training.ranks import Ranks
from brats_seg.training.schedule import Schedule, build_schedule
from brats_seg.training.start_weights import StartedFrom
from brats_seg.training.tasks import RunningSums

log = logging.getLogger(__name__)

Count: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Progress of a run."""

    epoch: Count = 0
    """Index of the current epoch."""
    n_batches: Count = 0
    """Batches of the current epoch that are done."""
    n_steps: Count = 0
    """Optimizer steps of the run that updated the weights."""


@dataclass(kw_only=True, slots=True)
class RunState:
    """Weights, everything that updates them, and the progress of the run."""

    network: nn.Module
    accumulator: Accumulator
    fallback: OutOfMemoryFallback
    """Cuts batches into micro-batches, and uses the next memory mode when memory runs out."""
    schedule: Schedule
    ema: AveragedModel | None
    """Moving average of the weights, if the settings ask for one."""
    position: Position = field(default_factory=Position)
    sums: RunningSums = field(default_factory=RunningSums)
    """Sums over the patches of the current epoch."""
    history: list[Mapping[str, float]] = field(default_factory=list)
    """A row for each finished epoch."""
    best: float | None = None
    """Best watched value so far."""
    started_from: StartedFrom | None = None
    """The weights that the run started from; None if all were drawn from the seed."""
    spent_s: float = 0.0
    """Seconds that the run has taken in all its sessions, when its state was last saved."""

    @property
    def evaluated(self) -> nn.Module:
        """Network that is validated and saved as the best: the average of the weights, if kept."""
        return self.network if self.ema is None else self.ema.module

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, if it is a module, which may have parameters and buffers."""
        criterion = self.accumulator.criterion
        return criterion if isinstance(criterion, nn.Module) else None

    def after_batch(self, result: StepResult) -> None:
        """Count a batch, and update schedule, average and sums unless its step was skipped."""
        n_steps = self.position.n_steps
        if not result.skipped:
            n_steps += 1
            self.schedule.after_step()
            if self.ema is not None:
                self.ema.update_parameters(self.network)
            self.sums.loss_sum += result.loss * result.n_patches
            self.sums.n_patches += result.n_patches
        self.position = replace(
            self.position, n_batches=self.position.n_batches + 1, n_steps=n_steps
        )


def build_network(config: Config, patch: tuple[int, int, int]) -> nn.Module:
    """Return the network of the settings, with weights drawn from the seed of the run."""
    torch.manual_seed(config.training.seed)
    return build_model(config.model, patch)


def build_state(
    network: nn.Module,
    criterion: Criterion,
    config: Config,
    *,
    device: Device,
    ranks: Ranks,
    n_steps: int,
) -> RunState:
    """Return the state of a new run of `n_steps` optimizer steps.

    The optimizer updates the network and the parameters that the loss has, by the same settings.
    """
    network.to(device.torch_device)
    check_in_place(network)
    if isinstance(criterion, nn.Module):
        criterion.to(device.torch_device)
    optimizer = build_optimizer(
        [*network.parameters(), *parameters_of(criterion)], config.optimizer
    )
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


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimizer of the settings, for the given parameters."""
    lr, decay = config.lr, config.weight_decay
    if config.name == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=decay)
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
    if config.name == "muon":
        return Muon(parameters, lr=lr, weight_decay=decay)
    return torch.optim.SGD(
        parameters,
        lr=lr,
        weight_decay=decay,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
    )
