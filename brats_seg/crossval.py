"""Cross-validate: train every fold, tune, predict and score the held-out cases, export the ensemble.

Each step keeps what an earlier call has finished, so that an interrupted cross-validation continues
where it was. The output folder holds

predictions/    label map of each case by the run that it was held out of; see `inference.output`
scores.csv      a row for each case and region
scored.json     key of the label maps and the protocol that the scores belong to
summary.json    means, intervals and counts by region
scores.png      figure of the scores
model/          all runs as one exported model
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.case_table import read_index
from brats_seg.cases.folds import read_folds
from brats_seg.config import Config
from brats_seg.data.fold import open_fold, prepared_path_of
from brats_seg.errors import UsageError
from brats_seg.evaluation.evaluate import Evaluation, Pair, Pairing, evaluate_pairs
from brats_seg.evaluation.protocols import Protocol
from brats_seg.evaluation.scores import (
    RegionSummary,
    read_scores,
    summarise_scores,
    write_scores,
    write_summary,
)
from brats_seg.files import whole_file
from brats_seg.inference.batch import (
    BatchOutcome,
    CaseOutcome,
    CaseWork,
    check_apart,
    finish_batch,
    local_outcomes,
)
from brats_seg.inference.export import check_replaceable, export_model
from brats_seg.inference.out_of_fold import HeldOut, open_held_out
from brats_seg.inference.output import OutputFolder
from brats_seg.inference.predict import Predictor
from brats_seg.inference.settings import PredictionSettings
from brats_seg.inference.tuning import Tuning, metric_named, tune_runs
from brats_seg.progress import Track, untracked
from brats_seg.training.trainer import Outcome

SCORES_NAME = "scores.csv"
_KEY_NAME = "scored.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidationSettings:
    """Settings of a cross-validation."""

    protocol: Protocol
    """Protocol of the scores, as `protocol_named` returns it."""
    config: Config
    """Settings of training; device and precision are those of prediction too."""
    folds: tuple[int, ...] | None = None
    """Folds to hold out; None for all of the fold table."""
    metric: str | None = None
    """Metric to tune for, `dice` or `lesionwise`; None for that of the protocol."""
    max_hours: float | None = None
    """Hours after which training stops; the next call continues it."""

    @property
    def tuned_metric(self) -> str:
        """Metric to tune for."""
        return self.metric or ("dice" if self.protocol.lesions is None else "lesionwise")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfFoldResults:
    """Predictions and scores of the cases by the runs that they were held out of."""

    tuning: Tuning
    batch: BatchOutcome
    evaluation: Evaluation | None
    """None if an earlier call has scored the same label maps."""
    summaries: tuple[RegionSummary, ...]
    fingerprint: str
    """Fingerprint of the exported model."""

    @property
    def n_failed(self) -> int:
        """Cases that could not be predicted or scored."""
        return len(self.batch.failures) + (len(self.evaluation.failures) if self.evaluation else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidation:
    """How a cross-validation ended."""

    runs: tuple[Path, ...]
    """Folder of the run of each fold."""
    trainings: tuple[Outcome, ...]
    """How the training of each fold ended; the last one may have been stopped."""
    results: OutOfFoldResults | None
    """None if training was stopped; the same call continues it."""


def _ignore(outcome: CaseOutcome) -> None:
    pass


def cross_validate(
    data: Path,
    settings: CrossValidationSettings,
    *,
    output: Path,
    runs: Path,
    prepared_path: Path | None = None,
    on_case: Callable[[CaseOutcome], None] = _ignore,
    track: Track = untracked,
) -> CrossValidation:
    """Train every fold, and predict, score and export with the runs.

    Runs that have begun or finished are continued or kept. Window and decoding are tuned on the same
    held-out cases that are scored.

    Args:
        data: Folder of scans with label maps.
        settings: Folds, settings of training, protocol and metric.
        output: Folder to write to.
        runs: Folder of the runs `fold0`, `fold1` and so on.
        prepared_path: Folder of prepared cases; by default the one that training uses.
        on_case: Called with the outcome of each held-out case that is predicted.
        track: Shows the progress.

    Raises:
        UsageError: A setting or a folder cannot be used; this is found before anything is trained.
        CaseProblemsError: Cases cannot be used.
        EnvironmentalError: A folder cannot be written to, or memory or the device fails.
    """
    config = settings.config
    if config.model.task != "segmentation":
        msg = f"model.name {config.model.name!r} gives no label maps: train it with `train`"
        raise UsageError(msg)
    metric_named(settings.tuned_metric, settings.protocol.task)
    check_replaceable(output / "model")
    folder = prepared_path or prepared_path_of(data)
    with OutputFolder(output / "predictions").opened() as predictions:
        paths, trainings = _train(data, settings, runs, folder, track)
        if not trainings[-1].finished:
            return CrossValidation(runs=paths, trainings=trainings, results=None)
        tuning = tune_runs(
            paths,
            prepared_path=folder,
            metric=settings.tuned_metric,
            task=settings.protocol.task,
            device=config.training.device,
            precision=config.training.precision,
            track=track,
        )
        held_out = [open_held_out(path, folder) for path in paths]
        cases = held_out_cases(held_out, read_index(folder / "cases.csv", data))
        batch = _predict(cases, predictions, config, on_case, track)
        evaluation, summaries = _score(cases, predictions.path, settings.protocol, track)
        exported = export_model(paths, output / "model", replace=True)
    results = OutOfFoldResults(
        tuning=tuning,
        batch=batch,
        evaluation=evaluation,
        summaries=summaries,
        fingerprint=exported.fingerprint,
    )
    return CrossValidation(runs=paths, trainings=trainings, results=results)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutCases:
    """Cases that were held out of one run, with their scans."""

    run: Path
    cases: tuple[Case, ...]


def held_out_cases(held_out: Sequence[HeldOut], index: CaseIndex) -> tuple[HeldOutCases, ...]:
    """Find the scans of held-out cases in the index of their data folder."""
    by_id: dict[str, Case] = {case.case_id: case for case in index.cases}
    root = index.root.absolute()
    return tuple(
        HeldOutCases(
            run=own.run,
            cases=tuple(
                replace(by_id[case_id], root=root) for case_id in own.data.split.validation
            ),
        )
        for own in held_out
    )


def out_of_fold_outcomes(
    parts: Sequence[HeldOutCases], settings: PredictionSettings, output: OutputFolder
) -> Generator[CaseOutcome]:
    """Predict the held-out cases of one run after another.

    Cases that an earlier call finished with the same scans, weights and settings are kept.
    """
    for part in parts:
        predictor = Predictor.load([part.run], settings)
        work = CaseWork(predictor=predictor, output=output, earlier=output.records())
        yield from local_outcomes(part.cases, work)


def reference_pairs(parts: Sequence[HeldOutCases], predictions: Path) -> Pairing:
    """Pair the label map of every held-out case with its prediction, if there is one."""
    pairs = []
    for case in (case for part in parts for case in part.cases):
        prediction = predictions / f"{case.case_id}.nii.gz"
        if case.label is not None:
            pairs.append(
                Pair(
                    case_id=case.case_id,
                    reference=case.path_of(case.label),
                    prediction=prediction if prediction.exists() else None,
                )
            )
    return Pairing(pairs=tuple(sorted(pairs, key=lambda pair: pair.case_id)), without_reference=())


def score_predictions(
    pairing: Pairing, protocol: Protocol, folder: Path, *, n_workers: int, track: Track
) -> Evaluation | None:
    """Write the scores of all pairs, or return None if they are there already.

    Raises:
        EnvironmentalError: A process was killed, or the folder cannot be written to.
    """
    key = _key(pairing, protocol)
    if (folder / SCORES_NAME).exists() and _stored_key(folder) == key:
        return None
    evaluation = evaluate_pairs(pairing, protocol, n_workers=n_workers, track=track)
    # no key in between: killed here, the scores are computed again
    (folder / _KEY_NAME).unlink(missing_ok=True)
    write_scores(evaluation.scores, folder / SCORES_NAME)
    if not evaluation.failures:
        with whole_file(folder / _KEY_NAME) as beside:
            beside.write_text(json.dumps({"key": key}) + "\n")
    return evaluation


def _train(
    data: Path, settings: CrossValidationSettings, runs: Path, folder: Path, track: Track
) -> tuple[tuple[Path, ...], tuple[Outcome, ...]]:
    """Train the folds until one is stopped, and return the runs and how they ended."""
    started_s = time.monotonic()
    # all cases at once, so that a problem is found before the first fold is trained
    first = settings.folds[0] if settings.folds else 0
    open_fold(data, fold=first, config=settings.config, prepared_path=folder, track=track)
    table = read_folds(folder / "folds.csv")
    folds = sorted(set(table.folds if settings.folds is None else settings.folds))
    for fold in folds:
        table.split(fold)
    paths = tuple(runs / f"fold{fold}" for fold in folds)
    outcomes: list[Outcome] = []
    for fold, path in zip(folds, paths, strict=True):
        hours = settings.max_hours
        if hours is not None:
            hours = max(hours - (time.monotonic() - started_s) / 3600, 0.0)
        outcomes.append(
            _train_fold(
                data,
                fold,
                config=settings.config,
                run_path=path,
                prepared_path=folder,
                max_hours=hours,
                track=track,
            )
        )
        if not outcomes[-1].finished:
            break
    return paths, tuple(outcomes)


# TODO: replace by brats_seg.training.trainer.train_fold
def _train_fold(
    data: Path,
    fold: int,
    *,
    config: Config,
    run_path: Path,
    prepared_path: Path,
    max_hours: float | None,
    track: Track,
) -> Outcome:
    from brats_seg.training.ranks import joined_ranks
    from brats_seg.training.trainer import StopRequest, Trainer

    with joined_ranks() as ranks:
        with ranks.first_alone():
            fold_data = open_fold(
                data, fold=fold, config=config, prepared_path=prepared_path, track=track
            )
        trainer = Trainer(data=fold_data, config=config, run_path=run_path, ranks=ranks)
        return trainer.run(fresh=False, stop=StopRequest(max_hours), track=track)


def _predict(
    parts: Sequence[HeldOutCases],
    predictions: OutputFolder,
    config: Config,
    on_case: Callable[[CaseOutcome], None],
    track: Track,
) -> BatchOutcome:
    cases = [case for part in parts for case in part.cases]
    check_apart(cases, predictions)
    training = config.training
    settings = PredictionSettings(device=training.device, precision=training.precision)
    outcomes = out_of_fold_outcomes(parts, settings, predictions)
    return finish_batch(outcomes, predictions, len(cases), on_case=on_case, track=track)


def _score(
    parts: Sequence[HeldOutCases], predictions: Path, protocol: Protocol, track: Track
) -> tuple[Evaluation | None, tuple[RegionSummary, ...]]:
    """Score the predictions, and write the scores, their summary and their figure."""
    # matplotlib takes long to import
    from brats_seg.report.charts import score_figure
    from brats_seg.report.style import write_figure

    output = predictions.parent
    pairing = reference_pairs(parts, predictions)
    evaluation = score_predictions(
        pairing, protocol, output, n_workers=os.cpu_count() or 1, track=track
    )
    scores = read_scores(output / SCORES_NAME)
    summaries = summarise_scores(scores, np.random.default_rng(0))
    write_summary(summaries, output / "summary.json")
    column = "dice" if protocol.lesions is None else "lesionwise_dice"
    write_figure(score_figure(scores, column=column), output / "scores.png")
    return evaluation, tuple(summaries)


def _key(pairing: Pairing, protocol: Protocol) -> str:
    digest = hashlib.sha256(f"{protocol.name} {protocol.task}".encode())
    for pair in pairing.pairs:
        digest.update(f"\n{pair.case_id}".encode())
        for path in (pair.reference, pair.prediction):
            content = path.read_bytes() if path is not None and path.exists() else b""
            digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:32]


def _stored_key(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / _KEY_NAME).read_bytes())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
