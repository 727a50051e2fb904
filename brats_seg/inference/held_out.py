"""Predict the held-out cases of a run, for `tune` and for pages, and measure the loss without some modalities.

The probabilities are kept on disk, cut to the box that holds the tumour and all voxels that could
become one, so that every threshold can be tried on them. The files lie in the run's folder, under a
key that changes with the weights and the cases.
"""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.data.fold import FoldData, open_split
from brats_seg.data.loader import whole_case
from brats_seg.data.store import read_case_manifest
from brats_seg.errors import CaseError, UsageError
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.evaluation.scores import SubsetScores
from brats_seg.files import remove_leftovers, whole_file
from brats_seg.inference.method import Field, input_of_crop
from brats_seg.inference.model import Model, assemble
from brats_seg.inference.probabilities import PredictionFallback, apply_model
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import MODALITIES, RegionMasks
from brats_seg.progress import Track
from brats_seg.runtime import weights
from brats_seg.runtime.device import Device
from brats_seg.voxels.box import Box, Triple, bounding_box, triple
from brats_seg.voxels.grids import Spacing
from brats_seg.voxels.regions import Decoding, decode_regions

FOLDER_NAME = "held-out"
"""Folder below that of the run."""
LOWEST_PROBABILITY = 0.2
"""Lowest threshold that is tried; boxes are cut to voxels above it."""
MOST_CASES = 20
"""Held-out cases of a run that are predicted from every subset of the modalities: their mean loss is
known to a quarter of its standard deviation, and five folds have a hundred of them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """A run and the prepared cases that were held out of its training."""

    run: Path
    trained: weights.TrainedModel
    data: FoldData

    @property
    def unfitted(self) -> weights.TrainedModel:
        """The network without what was fitted and measured since its training."""
        changes = {"fitted": weights.NOT_FITTED, "subset_scores": ()}
        return replace(self.trained, card=self.trained.card.model_copy(update=changes))

    def store(self, card: weights.ModelCard) -> None:
        """Store a card with the weights, unless it is there already."""
        if card != self.trained.card:
            weights.store_card(self.run / weights.BEST_NAME, card)


def open_held_out(run: Path, prepared: Path) -> HeldOut:
    """Find the held-out cases of a run among the prepared ones.

    `UsageError` is raised unless cases, contents and split have the fingerprint that training stored.
    """
    check_is_run(run)
    trained = weights.load_trained(run / weights.BEST_NAME)
    weights.require_task(trained, "segmentation", run)
    with suppress(CaseError):
        data = open_split(prepared, read_split(run / SPLIT_NAME))
        if data.fingerprint == trained.card.identity.fingerprint:
            return HeldOut(run=run, trained=trained, data=data)
    msg = f"{run} was not trained on the cases prepared in {prepared}: give --data or --prepared as in its training"
    raise UsageError(msg)


def check_is_run(run: Path) -> None:
    """Raise `UsageError` if a folder is not that of a run which has been validated."""
    is_exported = (run / weights.MODEL_NAME).exists()
    if is_exported or not (run / weights.BEST_NAME).is_file():
        actual = "an exported model" if is_exported else f"no {weights.BEST_NAME}"
        msg = f"{run}: found {actual}; expected the folder of a run that has been validated at least once"
        raise UsageError(msg)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Probabilities:
    """Probabilities and reference of a case, cut to the box where either may hold tumour."""

    values: Field
    """(3, x, y, z)"""
    reference: RegionMasks
    """(3, x, y, z)"""
    start: Triple
    """First voxel of the box in the prepared case."""
    spacing_mm: Spacing

    def regions(self, decoding: Decoding) -> RegionMasks:
        """Return nested region masks (3, x, y, z)."""
        return decode_regions(self.values, decoding, prod(self.spacing_mm))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutCase:
    """A case that was predicted by a network which was not trained on it."""

    case_id: str
    path: Path
    """File with its probabilities."""

    def read(self) -> Probabilities:
        """Read the file."""
        with np.load(self.path) as stored:
            return Probabilities(
                values=1 - stored["complement"].astype(np.float32),
                reference=stored["reference"],
                start=triple(stored["start"].tolist()),
                spacing_mm=triple(map(float, stored["spacing_mm"])),
            )


def predict_held_out(held_out: HeldOut, device: Device, track: Track) -> tuple[HeldOutCase, ...]:
    """Predict a run's held-out cases with its default window, unless they are stored already."""
    folder = _clean_folder(held_out, device)
    model = assemble([held_out.unfitted], device)
    case_ids = held_out.data.split.validation
    cases = [HeldOutCase(case_id=name, path=folder / f"{name}.npz") for name in case_ids]
    for case in track(cases, what=held_out.run.name, total=len(cases)):
        if not case.path.exists():
            _predict_and_store(case, held_out, model)
    return tuple(cases)


def measure_subsets(held_out: HeldOut, device: Device, track: Track) -> tuple[SubsetScores, ...]:
    """Measure and store how much Dice a run loses without some modalities, unless it is stored already.

    Every case is predicted from all modalities, and from each subset that the run was trained for;
    a run that was trained without modality dropout has none. Windows overlap as in its validation, so
    that a run for a few processors does not take days here.
    """
    trained = held_out.trained
    if trained.card.subset_scores or not trained.card.identity.subsets:
        return trained.card.subset_scores
    settings = PredictionSettings(overlap=trained.card.config.validation.overlap)
    model = assemble([trained], device, settings)
    subsets = (MODALITIES, *trained.card.identity.subsets)
    ids = sorted(held_out.data.split.validation)
    indices = np.linspace(0, len(ids) - 1, min(len(ids), MOST_CASES)).round().astype(int)
    # evenly spread over the ids
    cases = [ids[index] for index in indices]
    tracked = track(cases, what=f"{held_out.run.name}, subsets of modalities", total=len(cases))
    rows = np.stack([_measure_dice(subsets, held_out, model, case_id) for case_id in tracked])
    scores = tuple(
        SubsetScores.of_cases(subset, rows[:, i], rows[:, 0])
        for i, subset in enumerate(trained.card.identity.subsets, start=1)
    )
    held_out.store(trained.card.model_copy(update={"subset_scores": scores}))
    return scores


def _clean_folder(held_out: HeldOut, device: Device) -> Path:
    """Return the folder for these weights and cases, and remove the folders of others."""
    # another first word for files of another content
    parts = f"boxes {weights.fingerprint_of([held_out.unfitted])} {held_out.data.fingerprint} {device.precision}"
    name = hashlib.sha256(parts.encode()).hexdigest()[:16]
    above = held_out.run / FOLDER_NAME
    for folder in above.glob("*/"):
        if folder.name != name:
            shutil.rmtree(folder)
    if (above / name).is_dir():
        remove_leftovers(above / name)
    return above / name


def _read_sample(held_out: HeldOut, case_id: str) -> tuple[Field, RegionMasks, Spacing]:
    """Return the image (4, x, y, z) and the reference (3, x, y, z) of a case, and its voxel size."""
    sample = whole_case(held_out.data.folder, case_id)
    spacing_mm = read_case_manifest(held_out.data.folder, case_id).geometry.spacing_mm
    return sample.image.float().numpy(), sample.target.numpy().astype(np.bool_), spacing_mm


def _predict_and_store(case: HeldOutCase, held_out: HeldOut, model: Model) -> None:
    image, reference, spacing_mm = _read_sample(held_out, case.case_id)
    probabilities = _predict(model, case.case_id, image)
    foreground = np.any((probabilities > LOWEST_PROBABILITY) | reference, axis=0)
    box = bounding_box(foreground) or Box.at((0, 0, 0), (1, 1, 1))
    cut = (slice(None), *box.slices)
    with whole_file(case.path) as new_file:
        np.savez_compressed(
            new_file,
            # in half precision, 1 - 1e-6 is 1
            complement=(1 - probabilities[cut]).astype(np.float16),
            reference=reference[cut],
            start=box.start,
            spacing_mm=spacing_mm,
        )


def _measure_dice(
    subsets: Sequence[Sequence[str]], held_out: HeldOut, model: Model, case_id: str
) -> npt.NDArray[np.float64]:
    """Return the Dice (subsets, 3) of a case."""
    image, reference, spacing_mm = _read_sample(held_out, case_id)
    rows = []
    for subset in subsets:
        kept = np.array([modality in subset for modality in MODALITIES])
        probabilities = _predict(model, case_id, np.where(kept[:, None, None, None], image, 0))
        regions = decode_regions(probabilities, model.decoding, prod(spacing_mm))
        rows.append(dice(count_regions(regions, reference, case_id)))
    return np.stack(rows)


def _predict(model: Model, case_id: str, image: Field) -> Field:
    """Return the probabilities (3, x, y, z) of a prepared case."""
    return apply_model(model, input_of_crop(image), PredictionFallback(case_id, model.device))
