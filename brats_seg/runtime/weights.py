"""A trained network on disk: its weights, what it was taught, and the settings it was built from.

A checkpoint is a dictionary of plain values and tensors, read with `weights_only=True`, so that
opening one runs no code. What prediction needs of it are the entries `model`, `identity`, `config`.
"""

import pickle
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from brats_seg.config import Config, TaskName, config_of
from brats_seg.errors import ResumeError, UsageError
from brats_seg.files import whole_file
from brats_seg.labels import MODALITIES, REGIONS

SCHEMA_VERSION = 2
_READABLE = (1, SCHEMA_VERSION)
"""Versions differ in entries that only resuming a run reads; `training.checkpoints` converts them."""
_AVERAGED = "module."
"""What torch puts before the names of averaged weights."""
_DAMAGE = (
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    ValueError,
    KeyError,
    zipfile.BadZipFile,
)
"""What torch and zipfile raise when a file is not what it should be."""

Window: TypeAlias = tuple[int, int, int] | Literal["whole"]
"""Voxels that a network is given at once; `whole` is the brain crop in one pass."""


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
    smallest_mm3: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Volume below which a component of WT, TC, ET is taken for a mistake."""
    smallest_et_mm3: float = 0.0
    """Volume of all ET together below which it is taken for necrosis."""
    window: Window | None = None
    """Window that scores best on unseen cases; none was looked for where it is None."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedModel:
    """One network, ready to be built."""

    weights: dict[str, Tensor]
    """State dict of the network."""
    identity: ModelIdentity
    config: Config
    """The settings of its run."""


def load_trained(path: Path) -> TrainedModel:
    """Read from a checkpoint what prediction needs: the averaged weights, if the run kept some.

    Raises `ResumeError` as `read_checkpoint`, and `ConfigError` if a setting of its run is unknown
    here.
    """
    content = read_checkpoint(path, torch.device("cpu"))
    weights = content["model"]
    if content["ema"] is not None:
        weights = {
            name.removeprefix(_AVERAGED): value
            for name, value in content["ema"].items()
            if name.startswith(_AVERAGED)
        }
    return TrainedModel(
        weights=weights,
        identity=ModelIdentity(**content["identity"]),
        config=config_of(content["config"]),
    )


def require_task(trained: TrainedModel, task: TaskName, path: Path) -> None:
    """Raise `UsageError` if what was read from `path` was taught something else."""
    found = trained.config.model
    if found.task != task:
        msg = (
            f"{path}: found a {found.task} run, model.name {found.name!r}; expected a {task} run. "
            f"{_INSTEAD[task]}"
        )
        raise UsageError(msg)


_INSTEAD: dict[TaskName, str] = {
    "segmentation": "An autoencoder gives no label maps: use it with `reconstruct` and `features`.",
    "reconstruction": "Train one with `brats-seg train --model autoencoder`.",
}
"""What to do where a run of that task is missing."""


def store_identity(path: Path, identity: ModelIdentity) -> None:
    """Rewrite a checkpoint with another identity, and all else as it was.

    What was fitted to weights lies in their file, so that the two cannot part. Raises `ResumeError`
    as `read_checkpoint`.
    """
    content = read_checkpoint(path, torch.device("cpu"))
    content["identity"] = asdict(identity)
    with whole_file(path) as beside:
        torch.save(content, beside)


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Read the entries of a checkpoint onto a device.

    Raises `ResumeError` naming the file if it is damaged, of another make, or of a newer schema.
    """
    try:
        _check_sums(path)
        content = torch.load(path, map_location=device, weights_only=True)
    except _DAMAGE as error:
        reason = f"{error}".partition("\n")[0] or "it ends too soon"
        msg = f"{path} is not a checkpoint that can be read: {reason}"
        raise ResumeError(msg) from None
    if not isinstance(content, dict) or content.get("schema_version") not in _READABLE:
        found = content.get("schema_version") if isinstance(content, dict) else type(content)
        msg = (
            f"{path}: found schema version {found}; expected {SCHEMA_VERSION}. "
            "Read it with the version of brats_seg that wrote it."
        )
        raise ResumeError(msg)
    return content


def _check_sums(path: Path) -> None:
    """Raise `BadZipFile` if a byte has changed: torch writes check sums and does not look at them."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        msg = f"its entry {damaged} is damaged"
        raise zipfile.BadZipFile(msg)
