"""Gather what the page of a training run shows, from its folder and from its held-out cases."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import torch

from brats_seg.cases.folds import SPLIT_NAME, Split, read_split
from brats_seg.config import Config
from brats_seg.config_text import LONGEST_YAML, differing_settings, load_config
from brats_seg.data.loader import whole_case
from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.figures.history import read_history
from brats_seg.files import is_locked, read_bounded
from brats_seg.inference.decode import decode_regions
from brats_seg.inference.held_out import (
    HeldOut,
    HeldOutCase,
    Probabilities,
    open_held_out,
    predict_held_out,
)
from brats_seg.labels import RegionMasks
from brats_seg.pages.case import Fact
from brats_seg.pages.html import PAGE_SUFFIX
from brats_seg.pages.run_page import HeldOutPicture, HeldOutScore, RunReport, write_run_page
from brats_seg.progress import Track, duration_text, untracked
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.weights import BEST_NAME, RUN_LOCK_NAME, Decoding, run_locked
from brats_seg.training.checkpoints import (
    CONFIG_NAME,
    ENVIRONMENT_NAME,
    Checkpoint,
    load_checkpoint,
)
from brats_seg.voxels.box import Box, Triple, bounding_box
from brats_seg.voxels.grids import MM3_PER_ML

RUN_PAGE = "report.html"
"""Page of a run, in its folder."""
_WATCHED = {"val_dice": "validation Dice", "val_loss": "validation loss"}
"""Words for the value that the best weights are chosen by."""
_N_WORST = 3
"""Held-out cases of a run that are drawn."""


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (path / CONFIG_NAME).is_file() and (path / SPLIT_NAME).is_file()


def write_run(
    run: Path,
    *,
    output: Path | None = None,
    prepared: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    track: Track = untracked,
) -> Path:
    """Write the page of a run, and return its path.

    Args:
        run: Folder of the run.
        output: The page, or its folder; by default `report.html` in the folder of the run.
        prepared: Folder of the prepared cases that the run was trained on. Its held-out cases are
            predicted, unless `tune` or an earlier call has, and the worst are drawn. None leaves
            them out.
        device: Device that predicts them.
        precision: Precision that predicts them.
        track: Shows the progress.

    Raises:
        UsageError: The folder is not a run with a finished epoch, or the run was not trained on
            the prepared cases, or is being trained.
        CaseError: A held-out case cannot be predicted.
        EnvironmentalError: The device is not available, or the page cannot be written.
    """
    above = output or run
    page = above if above.suffix.lower() == PAGE_SUFFIX else above / RUN_PAGE
    report = run_report(run)
    if prepared is not None:
        where = choose_device(device, precision)
        with run_locked(run):
            report = _with_scores(report, open_held_out(run, prepared), where, track)
    write_run_page(report, page)
    return page


def run_report(run: Path) -> RunReport:
    """Gather what the folder of a run says of it, without scores of single cases.

    Raises:
        UsageError: The folder is not a run with a finished epoch.
        ConfigError: Its settings cannot be read.
        FoldError: Its split cannot be read.
        ResumeError: Its checkpoint is damaged.
    """
    history = read_history(run)
    config = load_config(text=_text(run / CONFIG_NAME))
    split = read_split(run / SPLIT_NAME)
    path = run / BEST_NAME
    best = load_checkpoint(path, torch.device("cpu")) if path.exists() else None
    n_done, n_epochs = int(history["epoch"].iloc[-1]), config.training.n_epochs
    is_busy = is_locked(run / RUN_LOCK_NAME)
    remarks = []
    if n_done < n_epochs:
        state = "it is being trained now" if is_busy else "training was stopped"
        remarks.append(f"{n_done} of {n_epochs} epochs are done; {state}.")
    if best is None:
        remarks.append(
            "The run has not been validated yet, so that it has no weights to predict with."
        )
    return RunReport(
        name=run.resolve().name,
        history=history,
        best_epoch=best.position.epoch if best else None,
        facts=tuple(_run_facts(history, config, split, best)),
        settings=differing_settings(Config(), config),
        settings_text=config.to_yaml(),
        environment=_environment(run),
        train=split.train,
        validation=split.validation,
        remarks=tuple(remarks),
    )


def _run_facts(
    history: pd.DataFrame, config: Config, split: Split, best: Checkpoint | None
) -> Iterator[Fact]:
    n_done = int(history["epoch"].iloc[-1])
    yield Fact(name="Network", words=config.model.name)
    yield Fact(name="Epochs", words=f"{n_done} of {config.training.n_epochs}")
    yield Fact(
        name="Cases", words=f"{len(split.train)} to train on, {len(split.validation)} held out"
    )
    yield Fact(name="Optimizer steps", words=str(int(history["step"].iloc[-1])))
    yield Fact(name="Time of the epochs", words=duration_text(float(history["seconds"].sum())))
    yield Fact(name="Peak memory", words=f"{history['peak_memory_mb'].max():.0f} MB")
    if best is None:
        return
    watched = _WATCHED[config.validation.watch]
    score = "" if best.best is None else f", {watched} {best.best:.3f}"
    yield Fact(name="Best weights", words=f"epoch {best.position.epoch}{score}")
    yield Fact(name="Training set", words=best.identity.fingerprint, is_code=True)
    yield Fact(name="Label conventions", words=", ".join(best.identity.conventions))
    if best.started_from is not None:
        yield Fact(name="Started from", words=best.started_from.path, is_code=True)


def _with_scores(report: RunReport, held_out: HeldOut, device: Device, track: Track) -> RunReport:
    """Return a report with the scores of the held-out cases, and the worst of them as pictures."""
    cases = predict_held_out(held_out, device, track)
    decoded = partial(_decoded, decoding=held_out.trained.fitted.decoding)
    scored = {case.case_id: _held_out_score(case.case_id, *decoded(case)) for case in cases}
    report = replace(report, scores=tuple(scored.values()))
    worst = [one.case_id for one in report.worst_first[:_N_WORST]]
    by_id = {case.case_id: case for case in cases}
    pictures = (_picture(scored[name], held_out, *decoded(by_id[name])) for name in worst)
    return replace(report, pictures=tuple(filter(None, pictures)))


def _decoded(case: HeldOutCase, decoding: Decoding) -> tuple[Probabilities, RegionMasks]:
    stored = case.read()
    return stored, decode_regions(stored.values, decoding, prod(stored.spacing_mm))


def _held_out_score(case_id: str, stored: Probabilities, prediction: RegionMasks) -> HeldOutScore:
    counts = count_regions(prediction, stored.reference, case_id)
    voxel_ml = prod(stored.spacing_mm) / MM3_PER_ML
    return HeldOutScore(
        case_id=case_id,
        dice=tuple(dice(counts).tolist()),
        reference_ml=tuple((counts.in_reference * voxel_ml).tolist()),
        prediction_ml=tuple((counts.in_prediction * voxel_ml).tolist()),
    )


def _picture(
    score: HeldOutScore, held_out: HeldOut, stored: Probabilities, prediction: RegionMasks
) -> HeldOutPicture | None:
    """Return a held-out case to draw; None if its reference is empty, by which it is placed."""
    sample = whole_case(held_out.data.folder, score.case_id)
    reference = sample.target.numpy().astype(np.bool_)
    there, cut = bounding_box(reference[0]), bounding_box(stored.reference[0])
    if there is None or cut is None:
        return None
    x, y, z = (one - other for one, other in zip(there.start, cut.start, strict=True))
    box = Box.at((x, y, z), cast("Triple", prediction.shape[1:]))
    shape = cast("Triple", reference.shape[1:])
    return HeldOutPicture(
        score=score,
        image=sample.image.float().numpy(),
        reference=reference,
        prediction=np.stack([box.placed(region, shape) for region in prediction]),
        spacing_mm=stored.spacing_mm,
    )


def _environment(run: Path) -> dict[str, str]:
    """Return the versions and the device of a run; none if their file is missing or damaged."""
    try:
        found = json.loads(_text(run / ENVIRONMENT_NAME))
    except (UsageError, ValueError):
        return {}
    return {str(name): str(value) for name, value in dict(found).items()}


def _text(path: Path) -> str:
    """Return the text of a file of a run, which is short."""
    try:
        return read_bounded(path, LONGEST_YAML).decode()
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); expected the folder of a run, as `train` writes it"
        raise UsageError(msg) from None
