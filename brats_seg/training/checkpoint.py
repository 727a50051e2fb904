"""The state of a run on disk: all that a later start needs to go on as if nothing had happened.

A checkpoint is a dictionary of plain values and tensors, read with `weights_only=True`, so that
opening one runs no code. Its entry `model` is the plain state dict of the network.
"""

import pickle
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brats_seg.errors import ResumeError
from brats_seg.files import whole_file
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.training.history import Tally

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """What a network was taught, so that it is never fed anything else unawares."""

    conventions: tuple[str, ...]
    """Label conventions of the training cases; regions were made by each case's own."""
    patch: tuple[int, int, int]
    """Voxels that the network learnt on."""
    fingerprint: str
    """Hash of the training set: ids and prepared contents."""
    modalities: tuple[str, ...] = MODALITIES
    regions: tuple[str, ...] = REGIONS
    normalisation: str = "z-score of each modality inside the brain, background 0"
    spacing_mm: tuple[float, float, float] = (1.0, 1.0, 1.0)
    thresholds: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Probability above which a voxel belongs to WT, TC, ET."""


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
    """None in a checkpoint that is for prediction alone, as are the next three."""
    schedule: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    ema: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and device that the checkpoint was made with."""
    schema_version: int = SCHEMA_VERSION


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
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        reason = f"{error}".partition("\n")[0] or "it ends too soon"
        msg = f"{path} is not a checkpoint that can be read: {reason}"
        raise ResumeError(msg) from None
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        found = content.get("schema_version") if isinstance(content, dict) else type(content)
        msg = (
            f"{path}: found schema version {found}; expected {SCHEMA_VERSION}. "
            "Read it with the version of brats_seg that wrote it."
        )
        raise ResumeError(msg)
    content["identity"] = ModelIdentity(**content["identity"])
    content["position"] = Position(**content["position"])
    content["tally"] = Tally(**content["tally"])
    return Checkpoint(**content)
