"""Everything of a run that changes while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from brats_seg.config import Config, OptimizerConfig, TrainingConfig
from brats_seg.errors import ConfigError, ResumeError
from brats_seg.models.build import build_model, has_batch_statistics
from brats_seg.models.device import Device
from brats_seg.models.norm import check_in_place
from brats_seg.models.trained import ModelIdentity
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.checkpoint import Checkpoint, Position
from brats_seg.training.criterion import Criterion
from brats_seg.training.ladder import Ladder
from brats_seg.training.ranks import Ranks
from brats_seg.training.schedule import Schedule, build_schedule
from brats_seg.training.tally import Tally


@dataclass(kw_only=True, slots=True)
class RunState:
    """Weights, what moves them, and how far the run is."""

    network: nn.Module
    accumulator: Accumulator
    ladder: Ladder
    """Cuts windows into micro-batches, and goes down when memory runs out."""
    schedule: Schedule
    ema: AveragedModel | None
    """Moving average of the weights, where the settings ask for one."""
    position: Position = field(default_factory=Position)
    tally: Tally = field(default_factory=Tally)
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
            self.tally.loss_sum += result.loss * result.n_patches
            self.tally.n_patches += result.n_patches
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
        ladder=Ladder(accumulator, config.training),
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


def checkpoint_of(
    state: RunState, identity: ModelIdentity, config: Config, environment: dict[str, str]
) -> Checkpoint:
    """Return all that a later start needs."""
    return Checkpoint(
        model=state.network.state_dict(),
        identity=identity,
        config=config.model_dump(mode="json"),
        position=state.position,
        tally=state.tally,
        history=tuple(dict(row) for row in state.history),
        best=state.best,
        optimizer=state.accumulator.optimizer.state_dict(),
        schedule=state.schedule.state_dict(),
        ladder=state.ladder.state_dict(),
        scaler=state.accumulator.scaler.state_dict(),
        ema=None if state.ema is None else state.ema.state_dict(),
        environment=environment,
    )


def restore(state: RunState, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's values into a state that was built from the same settings."""
    if checkpoint.optimizer is None or checkpoint.schedule is None:
        msg = "the checkpoint is for prediction alone; a run goes on from last.pt"
        raise ResumeError(msg)
    _load(state.network, checkpoint.model)
    state.accumulator.optimizer.load_state_dict(checkpoint.optimizer)
    state.schedule.load_state_dict(checkpoint.schedule)
    if checkpoint.ladder is not None:
        # first, because it may change the precision, which the loss scale belongs to
        state.ladder.load_state_dict(checkpoint.ladder)
    if checkpoint.scaler:  # empty when the run computed without one
        state.accumulator.scaler.load_state_dict(checkpoint.scaler)
    if state.ema is not None and checkpoint.ema is not None:
        _load(state.ema, checkpoint.ema)
    state.position = checkpoint.position
    state.tally = checkpoint.tally
    state.history = list(checkpoint.history)
    state.best = checkpoint.best


def _load(network: nn.Module, weights: dict[str, Any]) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        msg = f"the checkpoint holds another network than the one given: {error}"
        raise ResumeError(msg) from None
