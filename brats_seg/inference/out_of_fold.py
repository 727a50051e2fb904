"""What a run's network makes of the cases that it has never seen, kept on disk.

A network is asked once for each case and window; every threshold is then tried on what it said. Of
a case only the box is kept that holds its tumour and whatever could become one. The files lie in
the run's folder, under a key that changes with the weights and the cases.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.data.box import Box, bounding_box
from brats_seg.data.dataset import whole_case
from brats_seg.data.store import open_case
from brats_seg.files import remove_leftovers, whole_file
from brats_seg.inference.held_out import HeldOut
from brats_seg.inference.ladder import Ladder
from brats_seg.inference.model import Model, build_single
from brats_seg.inference.predict import crop_probabilities
from brats_seg.inference.settings import InferenceConfig
from brats_seg.labels import RegionMasks
from brats_seg.models.device import Device
from brats_seg.models.trained import Window
from brats_seg.progress import Track

FOLDER_NAME = "out-of-fold"
"""Of a run's folder."""
LOWEST_PROBABILITY = 0.2
"""Below it nothing is kept: the lowest threshold that is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfFoldCase:
    """A case and what a network said that never saw it."""

    case_id: str
    path: Path

    def read(self) -> "Said":
        """Read it from the disk."""
        with np.load(self.path) as stored:
            x, y, z = map(float, stored["spacing_mm"])
            return Said(
                probabilities=stored["probabilities"].astype(np.float32),
                reference=stored["reference"],
                spacing_mm=(x, y, z),
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Said:
    """Probabilities and reference of a case, cut to where either may hold tumour."""

    probabilities: npt.NDArray[np.float32]
    """(3, x, y, z)"""
    reference: RegionMasks
    """(3, x, y, z)"""
    spacing_mm: tuple[float, float, float]


def predict_held_out(
    held_out: HeldOut, windows: Sequence[Window], device: Device, track: Track
) -> dict[Window, tuple[OutOfFoldCase, ...]]:
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
            OutOfFoldCase(case_id=case_id, path=folder / words(window) / f"{case_id}.npz")
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


def _predict(case: OutOfFoldCase, held_out: HeldOut, model: Model, window: Window) -> bool:
    """Predict a case and keep it; return whether memory sufficed for the window."""
    sample = whole_case(held_out.data.folder, case.case_id)
    if window == "whole":
        settings = InferenceConfig(windows="whole")
    else:
        settings = InferenceConfig(windows="sliding", window=window)
    ladder = Ladder(case.case_id, model.device)
    probabilities = crop_probabilities(model, case.case_id, sample.image.numpy(), settings, ladder)
    if ladder.rung.n_halvings:
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
