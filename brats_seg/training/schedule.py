"""Set the learning rate over a run.

A rise over a share of the steps and a fall along a cosine (`schedule.warmup` 0.3 with `cosine`) is what
`torch.optim.lr_scheduler.OneCycleLR` does to the learning rate, so that it has no schedule of its own.
That one also moves the momentum, and ends with an error when a run takes one step more than expected.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from brats_seg.config import ScheduleConfig


class Schedule(Protocol):
    """The interface between the trainer and a schedule."""

    def after_step(self) -> None:
        """Count an optimizer step that updated the weights."""

    def after_validation(self, value: float) -> None:
        """Take the watched value of a validation."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""


class PlateauSchedule:
    """Lower the learning rate when the watched value stops improving."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig) -> None:
        self._plateau = ReduceLROnPlateau(
            optimizer,
            mode="min" if config.watch == "val_loss" else "max",
            patience=config.patience,
            factor=config.factor,
            min_lr=config.minimum_lr,
        )

    def after_step(self) -> None:
        """Do nothing: this schedule does not depend on steps."""

    def after_validation(self, value: float) -> None:
        """Lower the learning rate after more than `patience` validations without improvement."""
        self._plateau.step(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the validations without improvement and the learning rates."""
        return self._plateau.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._plateau.load_state_dict(state)


class StepSchedule:
    """Set the learning rate from the number of optimizer steps."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, n_steps: int) -> None:
        base = float(optimizer.param_groups[0]["lr"])
        floor = min(config.minimum_lr / base, 1.0)
        n_warmup = config.warmup_steps or round(config.warmup * n_steps)

        def factor(step: int) -> float:
            if step < n_warmup:
                return (step + 1) / (n_warmup + 1)
            progress = (step - n_warmup) / max(n_steps - n_warmup, 1)
            return max(_CURVES[config.name](min(progress, 1.0)), floor)

        self._by_step = LambdaLR(optimizer, factor)

    def after_step(self) -> None:
        """Set the learning rate of the next step."""
        self._by_step.step()

    def after_validation(self, value: float) -> None:
        """Do nothing: this schedule does not depend on values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the learning rates."""
        return self._by_step.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._by_step.load_state_dict(state)


_CURVES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    # the exponent of nnU-Net (Isensee 2021)
    "polynomial": lambda progress: (1 - progress) ** 0.9,
}


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, n_steps: int) -> Schedule:
    """Return the schedule of the settings for a run of `n_steps` optimizer steps."""
    if config.name == "plateau":
        return PlateauSchedule(optimizer, config)
    return StepSchedule(optimizer, config, n_steps)
