"""What a run's network makes of the cases that it has never seen, kept on disk.

A network is asked once for each case and window; every threshold is then tried on what it said. Of
a case only the box is kept that holds its tumour and whatever could become one. The files lie in
the run's folder, under a key that changes with the weights and the cases.
"""

# DOC inference/held_out: The cases that a run has never seen: what the settings of its predictions are fitted on.

import hashlib
import shutil
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
from brats_seg.inference.export import MODEL_NAME
from brats_seg.inference.model import BEST_NAME, Model, build_single, fingerprint_of
from brats_seg.inference.predict import PredictionFallback, crop_probabilities
from brats_seg.inference.settings import InferenceConfig
from brats_seg.labels import RegionMasks
from brats_seg.progress import Track
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import (
    ModelIdentity,
    TrainedModel,
    Window,
    load_trained,
    require_task,
)
from brats_seg.voxels.box import Box, bounding_box


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """A run, and the prepared cases that were held out of it."""

    run: Path
    trained: TrainedModel
    """With the identity that it has now; `untuned` is the one that training gave it."""
    data: FoldData

    @property
    def checkpoint_path(self) -> Path:
        """Where weights and identity lie."""
        return self.run / BEST_NAME

    @property
    def untuned(self) -> TrainedModel:
        """The network as training left it."""
        return replace(self.trained, identity=untuned(self.trained.identity))

    @property
    def key(self) -> str:
        """Changes with the weights and the training set, and not with what is fitted."""
        return fingerprint_of([self.untuned])


def untuned(identity: ModelIdentity) -> ModelIdentity:
    """Return an identity without what was fitted."""
    own = ("conventions", "patch", "fingerprint", "modalities", "regions", "normalisation")
    return ModelIdentity(
        **{name: getattr(identity, name) for name in own}, spacing_mm=identity.spacing_mm
    )


def open_held_out(run: Path, prepared: Path) -> HeldOut:
    """Find the cases that a run has never seen among the prepared ones.

    The fingerprint that training left vouches for cases, contents and split.

    Raises:
        UsageError: It is no run, or the prepared cases are not those that it was trained on.
        FoldError: The run does not say what was held out.
        ResumeError: Its checkpoint is damaged.
    """
    if (run / MODEL_NAME).exists():
        msg = (
            f"{run} is an exported model, which does not say what it has never seen. Give the runs "
            "that it was made of, and export them again."
        )
        raise UsageError(msg)
    if not (run / BEST_NAME).is_file():
        msg = f"{run} has no {BEST_NAME}: give the folder of a run, trained to its first validation"
        raise UsageError(msg)
    trained = load_trained(run / BEST_NAME)
    require_task(trained, "segmentation", run)
    data = _opened(prepared, read_split(run / SPLIT_NAME))
    if data is not None and data.fingerprint == trained.identity.fingerprint:
        return HeldOut(run=run, trained=trained, data=data)
    found = "other cases" if data is None else f"cases of the fingerprint {data.fingerprint}"
    msg = (
        f"{run} was not trained on what is prepared in {prepared}: found {found}, expected "
        f"{trained.identity.fingerprint}. Give --data or --prepared as in its training."
    )
    raise UsageError(msg)


def _opened(prepared: Path, split: Split) -> FoldData | None:
    """Return the prepared cases of a split, or None if one is not there."""
    try:
        return open_split(prepared, split)
    except CaseError:
        return None


FOLDER_NAME = "out-of-fold"
"""Of a run's folder."""
LOWEST_PROBABILITY = 0.2
"""Below it nothing is kept: the lowest threshold that is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfFoldPrediction:
    """A case and what a network said that never saw it."""

    case_id: str
    path: Path

    def read(self) -> "StoredPrediction":
        """Read it from the disk."""
        with np.load(self.path) as stored:
            x, y, z = map(float, stored["spacing_mm"])
            return StoredPrediction(
                probabilities=stored["probabilities"].astype(np.float32),
                reference=stored["reference"],
                spacing_mm=(x, y, z),
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredPrediction:
    """Probabilities and reference of a case, cut to where either may hold tumour."""

    probabilities: npt.NDArray[np.float32]
    """(3, x, y, z)"""
    reference: RegionMasks
    """(3, x, y, z)"""
    spacing_mm: tuple[float, float, float]


def predict_held_out(
    held_out: HeldOut, windows: Sequence[Window], device: Device, track: Track
) -> dict[Window, tuple[OutOfFoldPrediction, ...]]:
    """Predict a run's held-out cases with each window, where that has not been done before.

    A window that memory does not suffice for is left out.

    Raises:
        CaseError: A case cannot be predicted.
    """
    folder = _own_folder(held_out, device)
    model = build_single(held_out.untuned, device)
    found = {}
    for window in windows:
        cases = [
            OutOfFoldPrediction(case_id=case_id, path=folder / words(window) / f"{case_id}.npz")
            for case_id in held_out.data.split.validation
        ]
        what = f"{held_out.run.name}, window {words(window)}"
        fits = True
        for case in track(cases, what=what, total=len(cases)):
            fits = fits and (case.path.exists() or _predict(case, held_out, model, window))
        if fits:
            found[window] = tuple(cases)
    return found


def words(window: Window) -> str:
    """Return a window in words."""
    return window if window == "whole" else "x".join(map(str, window))


def _own_folder(held_out: HeldOut, device: Device) -> Path:
    """Return the folder of these weights and cases, and remove those of others."""
    parts = f"{held_out.key} {held_out.data.fingerprint} {device.precision}"
    name = hashlib.sha256(parts.encode()).hexdigest()[:16]
    above = held_out.run / FOLDER_NAME
    for other in above.glob("*"):
        if other.name != name:
            shutil.rmtree(other)
    for inner in (above / name).glob("*"):
        remove_leftovers(inner)
    return above / name


def _predict(case: OutOfFoldPrediction, held_out: HeldOut, model: Model, window: Window) -> bool:
    """Predict a case and keep it; return whether memory sufficed for the window."""
    sample = whole_case(held_out.data.folder, case.case_id)
    if window == "whole":
        settings = InferenceConfig(windows="whole")
    else:
        settings = InferenceConfig(windows="sliding", window=window)
    fallback = PredictionFallback(case.case_id, model.device)
    probabilities = crop_probabilities(
        model, case.case_id, sample.image.float().numpy(), settings, fallback
    )
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
        )
    return True
