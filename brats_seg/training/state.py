"""Build the state of a run from the settings: everything that changes while it runs."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, TypeAlias

import torch
from pydantic import Field
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from brats_seg.config import Config, Size
from brats_seg.errors import ConfigError
from brats_seg.labels import MODALITIES
from brats_seg.models.build import build_model
from brats_seg.models.norm import check_in_place
from brats_seg.runtime.device import SMALL_PATCH, Device
from brats_seg.runtime.memory import Fallback
from brats_seg.runtime.memory_format import (
    CHANNELS_LAST,
    CONTIGUOUS,
    LEAST_GAIN,
    HasMemoryFormat,
    channels_last_gain,
    memory_format_of,
    set_memory_format,
)
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.batches import Batch
from brats_seg.training.losses import Criterion, Measure, parameters_of
from brats_seg.training.memory import MemoryMode, make_step, step_fallback
from brats_seg.training.optimisation import Schedule, build_optimizer
from brats_seg.training.ranks import Ranks
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
    fallback: Fallback[MemoryMode]
    """How batches are cut into micro-batches; the next mode is used when memory runs out."""
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
    def memory_format(self) -> str:
        """Name of the order in which features lie in memory."""
        return memory_format_of(self.network)

    def use_memory_format(self, name: str) -> bool:
        """Compute in a memory format from now on; return whether the network can."""
        if self.ema is not None:
            set_memory_format(self.ema.module, name)
        return set_memory_format(self.network, name)

    @property
    def loss_module(self) -> nn.Module | None:
        """The loss, if it is a module, which may have parameters and buffers."""
        criterion = self.accumulator.criterion
        return criterion if isinstance(criterion, nn.Module) else None

    def step(self, batch: Batch, measure: Measure) -> StepResult:
        """Make one optimizer step, see `training.memory.make_step`."""
        return make_step(self.accumulator, self.fallback, batch, measure)

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
        fallback=step_fallback(accumulator, config.training.micro_batch),
        schedule=Schedule(optimizer, config.schedule, n_steps),
        ema=None
        if decay is None
        else AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(decay)),
    )


def choose_memory_format(state: RunState, config: Config, patch: Size) -> None:
    """Let a new run compute in the memory format of the settings; `auto` measures which one is faster.

    All ranks compute in that of the first. Patches that one CPU thread computes are too small to gain.

    Raises:
        ConfigError: The network of the settings does not compute in the format that they ask for.
    """
    accumulator, setting = state.accumulator, config.training.memory_format
    name: str = CONTIGUOUS if setting == "auto" else setting
    network, is_small = state.network, prod(patch) <= SMALL_PATCH
    if setting == "auto" and isinstance(network, HasMemoryFormat) and not is_small:
        own = channels_last_gain(network, len(MODALITIES), patch, accumulator.device)
        gain = accumulator.ranks.gather(own)[0]
        name = CHANNELS_LAST if gain >= LEAST_GAIN else CONTIGUOUS
        words = (
            f"{gain:.2f} times as fast" if gain else "not computed: memory or kernels are missing"
        )
        log.info("memory format %s: channels_last is %s here", name, words)
    if not state.use_memory_format(name):
        msg = (
            f"training.memory_format is {name!r}, and model.name {config.model.name!r} computes in its "
            "own format; expected auto or contiguous"
        )
        raise ConfigError(msg)
