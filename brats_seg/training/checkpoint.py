"""The state of a run on disk: all that a later start needs to go on as if nothing had happened.

A checkpoint is a dictionary of plain values and tensors, read with `weights_only=True`, so that
opening one runs no code. Its entry `model` is the plain state dict of the network.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from brats_seg.files import whole_file
from brats_seg.models.trained import SCHEMA_VERSION, ModelIdentity, read_checkpoint
from brats_seg.training.tally import Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a run is: `n_windows` windows of `epoch` are done."""

    epoch: int = 0
    n_windows: int = 0
    n_steps: int = 0
    """Optimizer steps that moved the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One moment of a run."""

    model: dict[str, Tensor]
    """State dict of the network."""
    identity: ModelIdentity
    config: dict[str, Any]
    """The settings, as `Config` dumps them."""
    position: Position
    tally: Tally = field(default_factory=Tally)
    """Sums of the unfinished epoch."""
    history: tuple[dict[str, float], ...] = ()
    """Rows of `history.csv`."""
    best: float | None = None
    """Best watched value so far."""
    optimizer: dict[str, Any] | None = None
    """None in a checkpoint that is for prediction alone, as are the next four."""
    schedule: dict[str, Any] | None = None
    ladder: dict[str, Any] | None = None
    """How windows were cut and computed when it was made."""
    scaler: dict[str, Any] | None = None
    ema: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and device that the checkpoint was made with."""
    schema_version: int = SCHEMA_VERSION

    def for_prediction(self, model: dict[str, Tensor]) -> Self:
        """Return it with those weights, and without what only training needs."""
        return replace(
            self, model=model, optimizer=None, schedule=None, ladder=None, scaler=None, ema=None
        )


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write the checkpoint; a reader, and a power cut, see the old file or the new one whole."""
    content = {entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)}
    content["identity"] = asdict(checkpoint.identity)
    content["position"] = asdict(checkpoint.position)
    content["tally"] = asdict(checkpoint.tally)
    with whole_file(path) as beside:
        torch.save(content, beside)


def load_checkpoint(path: Path, device: torch.device) -> Checkpoint:
    """Read a checkpoint onto a device.

    Raises `ResumeError` naming the file if it is damaged, of another make, or of a newer schema.
    """
    content = read_checkpoint(path, device)
    content["identity"] = ModelIdentity(**content["identity"])
    content["position"] = Position(**content["position"])
    content["tally"] = Tally(**content["tally"])
    return Checkpoint(**content)
