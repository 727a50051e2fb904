"""Predict the held-out cases of a run and keep the probabilities on disk, for `tune`.

A network predicts each case once for each way of placing windows, and the time that it takes is
measured; every threshold is then tried on the stored probabilities. They are cut to the box that holds
the tumour and all voxels that could become one.
The files lie in the run's folder, under a key that changes with the weights and the cases.
"""

import hashlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.folds import SPLIT_NAME, Split, read_split
from brats_seg.data.fold import FoldData, open_split
from brats_seg.data.loader import whole_case
from brats_seg.data.store import open_case
from brats_seg.errors import CaseError, UsageError
from brats_seg.files import remove_leftovers, whole_file
from brats_seg.inference.model import Model, build_single
from brats_seg.inference.probabilities import PredictionFallback, crop_probabilities
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import RegionMasks
from brats_seg.models.build import size_words
from brats_seg.progress import Track
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import keep_freed_memory
from brats_seg.runtime.weights import (
    BEST_NAME,
    MODEL_NAME,
    NOT_FITTED,
    FittedPrediction,
    TrainedModel,
    Window,
    fingerprint_of,
    load_trained,
    require_task,
)
from brats_seg.voxels.box import Box, bounding_box

FOLDER_NAME = "out-of-fold"
"""Folder below that of the run."""
LOWEST_PROBABILITY = 0.2
"""Lowest threshold that is tried; boxes are cut to voxels above it."""
_CONTENT = "with seconds"
"""Content of the files: those of versions that measured no time are not kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSetting:
    """Window of a network, and the overlap of neighbouring ones."""

    window: Window | None = None
    """None is the default of the network."""
    overlap: float | None = None
    """Share that neighbouring windows have in common; None is the default."""

    @property
    def folder(self) -> str:
        """Name of the folder for predictions with it."""
        return self._words("-")

    def __str__(self) -> str:
        return self._words(", overlap ")

    def _words(self, between: str) -> str:
        if isinstance(self.window, str):
            return self.window
        size = "default" if self.window is None else size_words(self.window)
        return size if self.overlap is None else f"{size}{between}{self.overlap:g}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """A run and the prepared cases that were held out of its training."""

    run: Path
    trained: TrainedModel
    data: FoldData

    @property
    def checkpoint_path(self) -> Path:
        """Checkpoint with the weights, the identity and the fitted settings."""
        return self.run / BEST_NAME

    @property
    def key(self) -> str:
        """Hash of the weights and the training set, without what was fitted and measured since."""
        card = self.trained.card.model_copy(update={"fitted": NOT_FITTED, "subset_scores": ()})
        return fingerprint_of([replace(self.trained, card=card)])


def open_held_out(run: Path, prepared: Path) -> HeldOut:
    """Find the held-out cases of a run among the prepared ones.

    The fingerprint that training stored proves that cases, contents and split are the same.

    Raises:
        UsageError: The folder is not a run, or the run was not trained on the prepared cases.
        FoldError: The run has no record of the held-out cases.
        ResumeError: The checkpoint of the run is damaged.
    """
    check_is_run(run)
    trained = load_trained(run / BEST_NAME)
    require_task(trained, "segmentation", run)
    data = _opened(prepared, read_split(run / SPLIT_NAME))
    if data is not None and data.fingerprint == trained.identity.fingerprint:
        return HeldOut(run=run, trained=trained, data=data)
    found = "other cases" if data is None else f"cases of the fingerprint {data.fingerprint}"
    msg = (
        f"{run} was not trained on the cases prepared in {prepared}: found {found}, expected "
        f"{trained.identity.fingerprint}. Give --data or --prepared as in its training."
    )
    raise UsageError(msg)


def check_is_run(run: Path) -> None:
    """Raise `UsageError` if a folder is not that of a run which has been validated."""
    if (run / MODEL_NAME).exists():
        msg = (
            f"{run} is an exported model, which does not list its held-out cases. Give the runs "
            "that it was exported from, and export them again."
        )
        raise UsageError(msg)
    if not (run / BEST_NAME).is_file():
        msg = f"{run} has no {BEST_NAME}: give the folder of a run that has been validated at least once"
        raise UsageError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfFoldPrediction:
    """File with the probabilities of a case, from a network that was not trained on it."""

    case_id: str
    path: Path

    @property
    def seconds(self) -> float:
        """Time that the prediction took: CPU time on a CPU, so that other work does not count."""
        with np.load(self.path) as stored:
            return float(stored["seconds"])

    def read(self) -> "StoredPrediction":
        """Read the file."""
        with np.load(self.path) as stored:
            x, y, z = map(float, stored["spacing_mm"])
            return StoredPrediction(
                probabilities=stored["probabilities"].astype(np.float32),
                reference=stored["reference"],
                spacing_mm=(x, y, z),
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredPrediction:
    """Probabilities and reference of a case, cut to the box where either may hold tumour."""

    probabilities: npt.NDArray[np.float32]
    """(3, x, y, z)"""
    reference: RegionMasks
    """(3, x, y, z)"""
    spacing_mm: tuple[float, float, float]


def predict_held_out(
    held_out: HeldOut, windows: Sequence[WindowSetting], device: Device, track: Track
) -> dict[WindowSetting, tuple[OutOfFoldPrediction, ...]]:
    """Predict a run's held-out cases with each window, unless they are stored already.

    A window that does not fit in memory is left out.

    Raises:
        CaseError: A case cannot be predicted.
    """
    folder = _own_folder(held_out, device)
    if device.torch_device.type == "cpu":
        keep_freed_memory()
    # without the settings that were fitted before
    card = held_out.trained.card.model_copy(update={"fitted": NOT_FITTED})
    model = build_single(replace(held_out.trained, card=card), device)
    found = {}
    for window in windows:
        cases = [
            OutOfFoldPrediction(case_id=case_id, path=folder / window.folder / f"{case_id}.npz")
            for case_id in held_out.data.split.validation
        ]
        what = f"{held_out.run.name}, window {window}"
        fits = True
        for case in track(cases, what=what, total=len(cases)):
            fits = fits and (case.path.exists() or _predict(case, held_out, model, window))
        if fits:
            found[window] = tuple(cases)
    return found


def _opened(prepared: Path, split: Split) -> FoldData | None:
    """Return the prepared cases of a split, or None if one is not there."""
    try:
        return open_split(prepared, split)
    except CaseError:
        return None


def _own_folder(held_out: HeldOut, device: Device) -> Path:
    """Return the folder for these weights and cases, and remove the folders of others."""
    parts = f"{held_out.key} {held_out.data.fingerprint} {device.precision} {_CONTENT}"
    name = hashlib.sha256(parts.encode()).hexdigest()[:16]
    above = held_out.run / FOLDER_NAME
    for other in above.glob("*"):
        if other.name != name:
            shutil.rmtree(other)
    for inner in (above / name).glob("*"):
        remove_leftovers(inner)
    return above / name


def _predict(
    case: OutOfFoldPrediction, held_out: HeldOut, model: Model, window: WindowSetting
) -> bool:
    """Predict and store a case; return whether the window fitted in memory."""
    sample = whole_case(held_out.data.folder, case.case_id)
    fitted = FittedPrediction(window=window.window, overlap=window.overlap)
    settings = PredictionSettings().over(fitted)
    fallback = PredictionFallback(case.case_id, model.device)
    clock = time.process_time if model.device.torch_device.type == "cpu" else time.monotonic
    started_s = clock()
    probabilities = crop_probabilities(
        model, case.case_id, sample.image.float().numpy(), settings, fallback
    )
    seconds = clock() - started_s
    if fallback.mode.n_halvings:
        return False
    reference = sample.target.numpy().astype(np.bool_)
    near = np.any((probabilities > LOWEST_PROBABILITY) | reference, axis=0)
    box = bounding_box(near) or Box.at((0, 0, 0), (1, 1, 1))
    cut = (slice(None), *box.slices)
    with whole_file(case.path) as beside:
        np.savez_compressed(
            beside,
            probabilities=probabilities[cut].astype(np.float16),
            reference=reference[cut],
            spacing_mm=open_case(held_out.data.folder, case.case_id).geometry.spacing_mm,
            seconds=seconds,
        )
    return True
