"""A trained network on disk: its weights, its identity, and what was fitted to it afterwards.

A checkpoint is a dictionary of plain values and tensors, read with `weights_only=True`, so that
opening one runs no code. Prediction reads four of its entries:

model         state dict of the network
identity      what the network learnt from; never changes
config        settings of its run
prediction    settings of prediction that `tune` fitted; missing before that
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from brats_seg.config import Config, Fraction, PositiveInt, Section, TaskName, config_of
from brats_seg.errors import ResumeError, UsageError
from brats_seg.files import whole_file
from brats_seg.labels import MODALITIES, REGIONS

SCHEMA_VERSION = 1
PREDICTION = "prediction"
"""Entry of a checkpoint, and of a network in `model.json`, with what `tune` fitted."""
_AVERAGED = "module."
"""Prefix that torch gives the names of averaged weights."""
_DAMAGE = (
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    ValueError,
    KeyError,
    zipfile.BadZipFile,
)
"""Errors that torch and zipfile raise for a damaged file."""

Window: TypeAlias = tuple[PositiveInt, PositiveInt, PositiveInt] | Literal["whole"]
"""Voxels that a network is given at once; `whole` is the brain crop in one pass."""
CubicMillimetres = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """Data that a network was trained on and how they were prepared; it never changes.

    Example:
        >>> identity = ModelIdentity(
        ...     conventions=("brats2023",), patch=(64, 64, 64), fingerprint="my training set"
        ... )
        >>> identity.regions
        ('wt', 'tc', 'et')
    """

    conventions: tuple[str, ...]
    """Label conventions of the training cases; each case's regions were made by its own."""
    patch: tuple[int, int, int]
    """Voxels of a training patch."""
    fingerprint: str
    """Hash of the training set: ids and prepared contents."""
    modalities: tuple[str, ...] = MODALITIES
    """Input channels, in order."""
    regions: tuple[str, ...] = REGIONS
    """Output channels, in order."""
    normalisation: str = "z-score of each modality inside the brain, background 0"
    """Normalisation of the intensities."""
    spacing_mm: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Voxel size of the training cases."""


class Decoding(Section):
    """Settings that turn probabilities into region masks."""

    thresholds: tuple[Fraction, Fraction, Fraction] = (0.5, 0.5, 0.5)
    """Probability above which a voxel belongs to WT, TC, ET."""
    smallest_mm3: tuple[CubicMillimetres, CubicMillimetres, CubicMillimetres] = (0.0, 0.0, 0.0)
    """Volume below which a component of WT, TC, ET is removed."""
    smallest_et_mm3: CubicMillimetres = 0.0
    """Volume of all ET together below which it becomes necrosis."""


class FittedPrediction(Section):
    """Settings of prediction that `tune` fitted to a network on its held-out cases."""

    window: Window | None = None
    """Window with the best score; None where no window was fitted."""
    decoding: Decoding = Decoding()


NOT_FITTED = FittedPrediction()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedModel:
    """Weights of one network, with all that is needed to build it and to predict with it."""

    weights: dict[str, Tensor]
    """State dict of the network."""
    identity: ModelIdentity
    config: Config
    """Settings of its run."""
    fitted: FittedPrediction = NOT_FITTED


def load_trained(path: Path) -> TrainedModel:
    """Read the weights of a checkpoint, averaged if the run kept an average, and what goes with them.

    Raises:
        ResumeError: As `read_checkpoint`.
        ConfigError: A setting of the run is unknown to this version.
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
        fitted=FittedPrediction.model_validate(content.get(PREDICTION, {})),
    )


def require_task(trained: TrainedModel, task: TaskName, path: Path) -> None:
    """Raise `UsageError` if the network read from `path` was trained for another task."""
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
"""Advice where a run of the task is missing."""


def store_fitted(path: Path, fitted: FittedPrediction) -> None:
    """Store with the weights of a checkpoint what was fitted to them; nothing else changes.

    Raises:
        ResumeError: As `read_checkpoint`.
        EnvironmentalError: The file cannot be written.
    """
    content = read_checkpoint(path, torch.device("cpu"))
    content[PREDICTION] = fitted.model_dump()
    with whole_file(path) as beside:
        torch.save(content, beside)


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Read the entries of a checkpoint onto a device.

    Raises:
        ResumeError: The file is damaged, is no checkpoint, or has another schema version.
    """
    try:
        _check_sums(path)
        content = torch.load(path, map_location=device, weights_only=True)
    except _DAMAGE as error:
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
    return separate_fitted(content)


def separate_fitted(content: Mapping[str, Any]) -> dict[str, Any]:
    """Move fitted settings from the entry `identity`, where they once were, to `prediction`.

    Args:
        content: The entries of a checkpoint, or of a network in `model.json`.
    """
    identity = dict(content["identity"])
    decoding = {name: identity.pop(name) for name in Decoding.model_fields if name in identity}
    found = FittedPrediction.model_validate(
        {"window": identity.pop("window", None), "decoding": decoding}
    )
    separated = {**content, "identity": identity}
    if found != NOT_FITTED:
        separated[PREDICTION] = found.model_dump()
    return separated


def _check_sums(path: Path) -> None:
    """Raise `BadZipFile` if a byte has changed: torch writes check sums but does not verify them."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        msg = f"its entry {damaged} is damaged"
        raise zipfile.BadZipFile(msg)
