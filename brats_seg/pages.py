"""Gather what the pages of many cases show, from the folders that other commands have written.

The pages themselves are made in `report`, from values; this module reads the folders of `predict`
and `train`, which `report` knows nothing of.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import cast
from urllib.parse import quote

import numpy as np
import pandas as pd
import torch

from brats_seg.cases.folds import SPLIT_NAME, Split, read_split
from brats_seg.cases.many import Failure
from brats_seg.config import Config
from brats_seg.config_text import LONGEST_YAML, differing_settings, load_config
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.loader import whole_case
from brats_seg.errors import EnvironmentalError, UsageError, counted
from brats_seg.evaluation.evaluate import evaluate_folders
from brats_seg.evaluation.overlap import count_regions, dice
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.evaluation.scores import Score, read_scores
from brats_seg.files import is_locked, read_bounded
from brats_seg.inference.out_of_fold import (
    HeldOut,
    OutOfFoldPrediction,
    StoredPrediction,
    open_held_out,
    predict_held_out,
    window_text,
)
from brats_seg.inference.output import MANIFEST_NAME, OutputFolder, Record
from brats_seg.inference.postprocess import decode_regions
from brats_seg.inference.result_files import result_files
from brats_seg.inference.settings import PredictionSettings
from brats_seg.inference.tuning import window_kinds
from brats_seg.labels import REGIONS, RegionMasks, convention_named
from brats_seg.progress import Track, duration_text, untracked
from brats_seg.report.case_page import Fact
from brats_seg.report.cohort_page import Cohort, CohortCase, dice_by_case, write_cohort_page
from brats_seg.report.html import check_page_name
from brats_seg.report.run_page import HeldOutPicture, HeldOutScore, RunReport, write_run_page
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.weights import BEST_NAME, RUN_LOCK_NAME, Decoding, run_locked
from brats_seg.training.checkpoints import (
    CONFIG_NAME,
    ENVIRONMENT_NAME,
    Checkpoint,
    load_checkpoint,
)
from brats_seg.training.history import read_history
from brats_seg.voxels.box import Box, Triple, bounding_box
from brats_seg.voxels.resampling import MM3_PER_ML

COHORT_PAGE = "cohort.html"
"""Page of a folder of predictions, in that folder."""
RUN_PAGE = "report.html"
"""Page of a run, in its folder."""
_N_WORST = 3
"""Held-out cases of a run that are drawn."""
_MOST_LISTED = 5
"""Values that are listed at most where the cases differ."""


def write_cohort(
    results: Path,
    *,
    output: Path | None = None,
    reference: Path | None = None,
    scores: Path | None = None,
    pages: Mapping[str, Path] | None = None,
    track: Track = untracked,
) -> Path:
    """Write the page of a folder of predictions, and return its path.

    Args:
        results: Folder that `predict` wrote.
        output: The page; by default `cohort.html` in that folder.
        reference: Folder of label maps, or of scans with label maps, to score the predictions against.
        scores: Table of scores of these predictions, which saves scoring them.
        pages: Page of each case that has one, to link to.
        track: Shows the progress.

    Raises:
        UsageError: The folder has no record of predictions, a table is not one of scores, or both
            references and scores are given.
        LayoutError: No case of the references is in the folder.
        EnvironmentalError: The page cannot be written.
    """
    page = output or results / COHORT_PAGE
    found = cohort_of(results, reference=reference, scores=scores, track=track)
    linked = _linked(found, pages or {}, page)
    write_cohort_page(linked, page, title=f"Predictions in {results.resolve().name}", track=track)
    return page


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
        output: The page; by default `report.html` in that folder.
        prepared: Folder of the prepared cases that the run was trained on: its held-out cases are
            predicted, unless that is stored from an earlier call or from `tune`, and the worst are
            drawn. None leaves them out.
        device: Device that predicts them.
        precision: Precision that predicts them.
        track: Shows the progress.

    Raises:
        UsageError: The folder is not a run with a finished epoch, or the run was not trained on
            those prepared cases, or is being trained.
        CaseError: A held-out case cannot be predicted.
        EnvironmentalError: The device is not available, or the page cannot be written.
    """
    page = output or run / RUN_PAGE
    check_page_name(page)
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


def cohort_of(
    results: Path,
    *,
    reference: Path | None = None,
    scores: Path | None = None,
    track: Track = untracked,
) -> Cohort:
    """Gather what is known of the cases in a folder of predictions.

    The arguments and errors are those of `write_cohort`.
    """
    records = OutputFolder(results).records()
    if not records:
        msg = (
            f"{results} has no record of predictions; expected a folder with {MANIFEST_NAME}, as "
            "`brats-seg predict` writes it"
        )
        raise UsageError(msg)
    done = {name: record for name, record in records.items() if record.status == "done"}
    scored, remarks = _scores(results, reference, scores, track)
    scored = tuple(score for score in scored if score.case_id in done)
    dice = dice_by_case(scored)
    return Cohort(
        cases=tuple(_cohort_case(results, one, dice.get(name, ())) for name, one in done.items()),
        failures=tuple(
            Failure(case_id=one.case_id, error=one.error, message=one.message)
            for one in records.values()
            if one.status == "failed"
        ),
        scores=scored,
        facts=tuple(_facts(done.values())),
        remarks=remarks,
    )


def _scores(
    results: Path, reference: Path | None, table: Path | None, track: Track
) -> tuple[tuple[Score, ...], tuple[str, ...]]:
    """Return the scores of the predictions, and remarks on those that have none."""
    if reference is not None and table is not None:
        msg = f"both references ({reference}) and scores ({table}) are given; expected one of them"
        raise UsageError(msg)
    if table is not None:
        return read_scores(table), ()
    if reference is None:
        return (), ()
    found = evaluate_folders(
        reference,
        results,
        protocol_named("legacy"),
        only_predicted=True,
        n_workers=available_cpus(),
        track=track,
    )
    unscored = (f"not scored: {failure.message}" for failure in found.failures)
    return found.scores, (*found.remarks, *unscored)


def _cohort_case(results: Path, record: Record, dice: tuple[float, ...]) -> CohortCase:
    ml = {part.name: part.ml for part in record.volumes}
    convention = convention_named(record.convention)
    preview = result_files(record.settings.layout, record.case_id, convention).preview
    return CohortCase(
        case_id=record.case_id,
        ml=tuple(ml[region] for region in REGIONS),
        warnings=record.warnings,
        dice=dice,
        preview=results / preview if preview in record.outputs else None,
    )


def _facts(records: Iterable[Record]) -> Iterator[Fact]:
    """Yield what the predictions were made with; several values with their numbers of cases."""
    every = list(records)
    values = {
        "Model": (record.model for record in every),
        "Version of brats_seg": (record.version for record in every),
        "Device": (record.device for record in every),
        "Label convention": (record.convention for record in every),
        "Settings": (_settings_text(record) for record in every),
    }
    for name, found in values.items():
        counts = Counter(found).most_common()
        words = [f"{value} ({counted(n, 'case')})" for value, n in counts[:_MOST_LISTED]]
        more = [f"{len(counts) - _MOST_LISTED} more"] if len(counts) > _MOST_LISTED else []
        if counts:
            yield Fact(
                name=name, words="; ".join([counts[0][0]] if len(counts) == 1 else [*words, *more])
            )
    if every:
        seconds = median(record.seconds for record in every)
        yield Fact(name="Time of a case", words=f"{seconds:.1f} s (median)")


def _settings_text(record: Record) -> str:
    """Return the settings that are not the defaults."""
    usual = PredictionSettings().model_dump()
    given = record.settings.model_dump().items()
    return ", ".join(f"{key} {value}" for key, value in given if value != usual[key]) or "defaults"


def _linked(cohort: Cohort, pages: Mapping[str, Path], output: Path) -> Cohort:
    """Return a cohort whose cases have the links to their pages, relative to that of the cohort."""
    folder = output.absolute().parent
    links = {
        case_id: quote(Path(os.path.relpath(page.absolute(), folder)).as_posix())
        for case_id, page in pages.items()
    }
    cases = tuple(replace(case, page=links.get(case.case_id, "")) for case in cohort.cases)
    return replace(cohort, cases=cases)


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
    score = "" if best.best is None else f", {config.validation.watch} {best.best:.3f}"
    yield Fact(name="Best weights", words=f"epoch {best.position.epoch}{score}")
    yield Fact(name="Training set", words=best.identity.fingerprint, is_code=True)
    yield Fact(name="Label conventions", words=", ".join(best.identity.conventions))
    if best.started_from is not None:
        yield Fact(name="Started from", words=best.started_from.path, is_code=True)


def _with_scores(report: RunReport, held_out: HeldOut, device: Device, track: Track) -> RunReport:
    """Return a report with the scores of the held-out cases, and the worst of them as pictures."""
    fitted = held_out.trained.fitted
    window = fitted.window or window_kinds([held_out])[0].windows[0]
    cases = predict_held_out(held_out, [window], device, track).get(window)
    if cases is None:
        msg = (
            f"memory ran out with windows of {window_text(window)} voxels on the held-out cases of "
            f"{held_out.run}. Give a device with more memory, or no --data for a page without scores."
        )
        raise EnvironmentalError(msg)
    decoded = partial(_decoded, decoding=fitted.decoding)
    scored = {case.case_id: _held_out_score(case.case_id, *decoded(case)) for case in cases}
    report = replace(report, scores=tuple(scored.values()))
    worst = [one.case_id for one in report.worst_first[:_N_WORST]]
    by_id = {case.case_id: case for case in cases}
    pictures = (_picture(scored[name], held_out, *decoded(by_id[name])) for name in worst)
    return replace(report, pictures=tuple(filter(None, pictures)))


def _decoded(case: OutOfFoldPrediction, decoding: Decoding) -> tuple[StoredPrediction, RegionMasks]:
    stored = case.read()
    return stored, decode_regions(stored.probabilities, decoding, prod(stored.spacing_mm))


def _held_out_score(
    case_id: str, stored: StoredPrediction, prediction: RegionMasks
) -> HeldOutScore:
    counts = count_regions(prediction, stored.reference, case_id)
    voxel_ml = prod(stored.spacing_mm) / MM3_PER_ML
    return HeldOutScore(
        case_id=case_id,
        dice=tuple(dice(counts).tolist()),
        reference_ml=tuple((counts.in_reference * voxel_ml).tolist()),
        prediction_ml=tuple((counts.in_prediction * voxel_ml).tolist()),
    )


def _picture(
    score: HeldOutScore, held_out: HeldOut, stored: StoredPrediction, prediction: RegionMasks
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
    try:
        found = json.loads(_text(run / ENVIRONMENT_NAME))
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in dict(found).items()}


def _text(path: Path) -> str:
    """Return the text of a file of a run, which is short."""
    try:
        return read_bounded(path, LONGEST_YAML).decode()
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); expected the folder of a run, as `train` writes it"
        raise UsageError(msg) from None
