"""Build scans, runs and models for tests of inference: small real ones, and ones of known output."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from brats_seg.cases.case import Case, load_case
from brats_seg.cases.find import find_inputs
from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.config import Config, ModelConfig, PatchConfig
from brats_seg.data.fold import open_split
from brats_seg.evaluation.scores import SubsetScores
from brats_seg.inference import batch
from brats_seg.inference.method import Scan, prepare_scan, standard_method
from brats_seg.inference.model import Member, Model
from brats_seg.inference.predict import Predictor
from brats_seg.inference.results import OutputFolder
from brats_seg.inference.settings import DEFAULT_SETTINGS, PredictionSettings
from brats_seg.labels import MODALITIES
from brats_seg.models.build import build_model, size_multiple
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import (
    NOT_FITTED,
    SCHEMA_VERSION,
    FittedPrediction,
    ModelCard,
    ModelIdentity,
    write_checkpoint,
)
from brats_seg.runtime.windows import Window
from brats_seg.training.state import Progress
from brats_seg.voxels.grids import Spacing
from brats_seg.voxels.regions import Decoding
from tests.builders import BRATS_AFFINE, write_nifti

DEFAULT = Decoding()
PLAIN_SETTINGS = PredictionSettings(preview=False)
CPU = Device(torch_device=torch.device("cpu"))
IDENTITY = ModelIdentity(conventions=("brats2017",), patch=(8, 8, 8), fingerprint="cases")
CONFIG = Config(model=ModelConfig(widths=(4, 8)), patch=PatchConfig(size=(8, 8, 8)))
CASES = tuple(f"BraTS2021_{number:05d}" for number in range(6))
"""Ids of the cases of `tiny_scans` and `tiny_prepared`."""
NAMES = dict(zip(MODALITIES, ("t1", "t1ce", "t2", "flair"), strict=True))
"""Ends of the names of the files of each modality."""


def write_scan(
    folder: Path,
    images: npt.NDArray[np.generic],
    affine: npt.NDArray[np.float64] = BRATS_AFFINE,
    codes: tuple[int, int] = (1, 1),
) -> Path:
    """Write the four files of a scan with those codes of qform and sform, and return their folder."""
    for name, image in zip(NAMES.values(), images, strict=True):
        path = write_nifti(folder / f"{folder.name}_{name}.nii.gz", image, affine)
        header = nib.load(path).header
        header["qform_code"], header["sform_code"] = codes
        nib.save(nib.Nifti1Image(image, None, header), path)
    return folder


def save_run(
    path: Path,
    weights: dict[str, Tensor],
    card: ModelCard,
    progress: Progress | None = None,
    **entries: Any,
) -> None:
    saved = {
        "schema_version": SCHEMA_VERSION,
        "card": card.model_dump(),
        "environment": {},
        "started_from": None,
        "progress": asdict(progress or Progress()),
        "model": weights,
    }
    write_checkpoint({**saved, **entries}, path)


def write_run(
    path: Path,
    *,
    seed: int = 0,
    identity: ModelIdentity = IDENTITY,
    config: Config = CONFIG,
    fitted: FittedPrediction = NOT_FITTED,
    notes: dict[str, Any] | None = None,
    remark: str = "",
    **entries: Any,
) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_model(config.model, identity.patch)
    given = {"fitted": fitted, "notes": notes or {}, "remark": remark}
    card = ModelCard(identity=identity, config=config, **given)
    save_run(path / "best.pt", network.state_dict(), card, **entries)
    return path


def write_fold(
    path: Path,
    prepared: Path,
    held_out: Sequence[str],
    *,
    subsets: tuple[tuple[str, ...], ...] = (),
    seed: int = 0,
    **entries: Any,
) -> Path:
    train = tuple(case_id for case_id in CASES if case_id not in held_out)
    split = Split(train=train, validation=tuple(held_out))
    fingerprint = open_split(prepared, split).fingerprint
    identity = replace(IDENTITY, fingerprint=fingerprint, subsets=subsets)
    write_run(path, seed=seed, identity=identity, **entries)
    write_split(split, path / SPLIT_NAME)
    return path


class Pointwise(nn.Module):
    """WT where FLAIR is bright, ET where T1 with contrast agent is, TC where it is dark as well.

    It looks one voxel towards the end of each axis, so that it matters how the axes run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steepness = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor) -> Tensor:
        moved = torch.roll(image, shifts=(-1, -1, -1), dims=(2, 3, 4))
        _, t1c, _, t2f = moved.unbind(1)
        return self.steepness * torch.stack([t2f - 1, t1c.abs() - 2, t1c - 2], dim=1)


def make_model(
    *networks: nn.Module,
    identity: ModelIdentity = IDENTITY,
    config: Config = CONFIG,
    window: Window | None = None,
    decoding: Decoding = DEFAULT,
    settings: PredictionSettings = DEFAULT_SETTINGS,
    subset_scores: tuple[SubsetScores, ...] = (),
) -> Model:
    """Return a model of the given networks, or of one pointwise network."""
    size = None if config.patch.size == "whole" else identity.patch
    members = tuple(
        Member(
            network=network.eval(),
            name=config.model.name,
            identity=identity,
            method=standard_method(identity.spacing_mm),
            window=window or Window(size=size, overlap=0.5),
            decoding=decoding,
            regions=(0, 1, 2),
            multiple=size_multiple(config.model, identity.patch),
        )
        for network in networks or (Pointwise(),)
    )
    return Model(
        members=members,
        fingerprint="model",
        device=CPU,
        settings=settings,
        subsets=identity.subsets,
        subset_scores=subset_scores,
        notes=({},),
    )


def predict_into(
    inputs: Path,
    output: Path,
    model: Model | None = None,
    settings: PredictionSettings = PLAIN_SETTINGS,
) -> tuple[batch.BatchOutcome, list[batch.CaseOutcome]]:
    folder, outcomes = OutputFolder(output), list[batch.CaseOutcome]()
    predictor = Predictor(model=replace(model or make_model(), settings=settings))
    cases = find_inputs([inputs])
    with folder.opened():
        made = batch.local_outcomes(cases, predictor, folder)
        done = batch.finish_batch(made, folder, len(cases), on_case=outcomes.append)
    return done, outcomes


def read_scan(case: Case | Path, spacing_mm: Spacing = (1.0, 1.0, 1.0)) -> Scan:
    if isinstance(case, Path):
        (case,) = find_inputs([case])
    return prepare_scan(load_case(case, with_label=False), spacing_mm)
