"""Cross-validate: train every fold, tune, predict and score the held-out cases, export the ensemble.

Each step but the scores keeps the results of an earlier call, so that an interrupted cross-validation
continues. The output folder holds

predictions/    label map of each case by the run that it was held out of; see `inference.results`
scores.csv      a row for each case and region
summary.json    means, intervals and counts by region
scores.png      figure of the scores
model/          all runs as one exported model
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import pandas as pd

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.folds import check_fold
from brats_seg.cases.many import Failure
from brats_seg.config import Config
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.fold import prepare_data, prepared_path_of
from brats_seg.errors import UsageError
from brats_seg.evaluation import evaluate
from brats_seg.evaluation.evaluate import Evaluation, LabelFile, Pair, Pairing
from brats_seg.evaluation.protocols import ScoringProtocol, protocol_named
from brats_seg.evaluation.scores import join_scores, write_scores, write_summary
from brats_seg.files import remove_leftovers
from brats_seg.inference import batch
from brats_seg.inference.export import CrossValidationScores, check_replaceable, export_model
from brats_seg.inference.held_out import HeldOut, open_held_out
from brats_seg.inference.predict import Predictor
from brats_seg.inference.results import OutputFolder
from brats_seg.inference.settings import PredictionSettings
from brats_seg.inference.tuning import Tuning, tune_runs
from brats_seg.presets import trusting
from brats_seg.progress import Track, untracked
from brats_seg.training.ranks import check_one_process
from brats_seg.training.run_folder import RunFolder
from brats_seg.training.trainer import Outcome, train_fold

LEGACY = protocol_named("legacy")
DEFAULT_CONFIG = Config()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOutResults:
    """Predictions and scores of cases, each by the run that it was held out of."""

    tuning: Tuning
    batch: batch.BatchOutcome
    evaluation: Evaluation
    """Scores, a row for each case and region, and cases that could not be scored."""
    fingerprint: str
    """Fingerprint of the exported model."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Cases that could not be predicted or scored."""
        return (*self.batch.failures, *self.evaluation.failures)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CrossValidation:
    """Result of a cross-validation."""

    runs: tuple[Path, ...]
    """Folder of the run of each fold."""
    trainings: tuple[Outcome, ...]
    """Result of the training of each fold; the last one may have been stopped."""
    results: HeldOutResults | None
    """None if training was stopped; the same call continues it."""

    @property
    def scores(self) -> pd.DataFrame:
        """A row for each case and region; none if training was stopped."""
        return self.results.evaluation.scores if self.results else join_scores(())


def cross_validate(  # noqa: PLR0913 - the options of a cross-validation
    data: Path,
    *,
    folds: Sequence[int] | None = None,
    output: Path = Path("crossval"),
    runs: Path = Path("runs"),
    protocol: ScoringProtocol = LEGACY,
    config: Config = DEFAULT_CONFIG,
    prepared_path: Path | None = None,
    max_hours: float | None = None,
    track: Track = untracked,
    on_case: Callable[[batch.CaseOutcome], None] = lambda _: None,
) -> CrossValidation:
    """Train every fold, then predict, score and export with the runs.

    Runs that have begun or finished are continued or kept. Thresholds and smallest volumes are tuned on
    the held-out cases that are scored.

    Args:
        data: Folder of scans with label maps.
        folds: Folds to hold out; by default all of the fold table.
        output: Folder to write to.
        runs: Folder of the runs `fold0`, `fold1` and so on.
        protocol: Scoring protocol, as `protocol_named` returns it.
        config: Settings of training; its device and precision are used for prediction too.
        prepared_path: Folder of prepared cases; by default the one that training uses.
        max_hours: Hours after which training stops; the next call continues it.
        track: Shows the progress.
        on_case: Called with the outcome of each held-out case that is predicted.

    Raises:
        UsageError: A setting or a folder cannot be used; raised before anything is trained.
        CaseProblemsError: Cases cannot be used.
        EnvironmentalError: A folder cannot be written to, or memory or the device fails.
    """
    if config.model.task != "segmentation":
        msg = f"model.name {config.model.name!r} gives no label maps: train it with `train`"
        raise UsageError(msg)
    check_one_process("crossval")
    if folds is not None and not folds:
        msg = "no fold is chosen; expected at least one, or None for all"
        raise UsageError(msg)
    device, precision = config.training.device, config.training.precision
    settings = PredictionSettings(device=device, precision=precision)
    check_replaceable(output / "model")
    folder = prepared_path or prepared_path_of(data)
    for fold in folds or ():
        check_fold(fold, folder, config.folds)
    # whose settings these are has typed the name
    with trusting(config.model.name), OutputFolder(output / "predictions").opened() as predictions:
        remove_leftovers(output)
        remove_leftovers(output, folders=True)
        # all cases are prepared, so that a problem is found before a fold is trained
        prepared = prepare_data(data, config=config, prepared_path=folder, track=track)
        chosen = sorted(set(prepared.folds.folds if folds is None else folds))
        paths = tuple(runs / f"fold{fold}" for fold in chosen)
        for path in paths:
            RunFolder(path=path).check(data, config)
        train = partial(train_fold, data, config=config, prepared_path=folder, track=track)
        trainings = tuple(_train(train, zip(chosen, paths, strict=True), max_hours))
        if not trainings[-1].finished:
            return CrossValidation(runs=paths, trainings=trainings, results=None)
        tuning = tune_runs(
            paths, prepared_path=folder, device=device, precision=precision, track=track
        )
        cases = held_out_cases([open_held_out(path, folder) for path in paths], prepared.index)
        batch.check_apart(list(chain(*cases.values())), predictions.path)
        outcomes = held_out_outcomes(cases, settings, predictions)
        n_cases = sum(map(len, cases.values()))
        predicted = batch.finish_batch(outcomes, predictions, n_cases, on_case=on_case, track=track)
        pairing = reference_pairs(chain(*cases.values()), predictions.path)
        evaluation = score_predictions(pairing, protocol, output, track=track)
        # those of patients that the first weights of a run learnt from are too good
        held_out = evaluation.held_out_summaries
        scores = CrossValidationScores(protocol=protocol.name, summaries=held_out)
        exported = export_model(paths, output / "model", replace=True, scores=scores)
    results = HeldOutResults(
        tuning=tuning, batch=predicted, evaluation=evaluation, fingerprint=exported.fingerprint
    )
    return CrossValidation(runs=paths, trainings=trainings, results=results)


def held_out_cases(held_out: Sequence[HeldOut], index: CaseIndex) -> dict[Path, list[Case]]:
    """Find the held-out cases of each run in the index of their data folder."""
    root = index.root.absolute()
    by_id = {case.case_id: replace(case, root=root) for case in index.cases}
    return {part.run: [by_id[name] for name in part.data.split.validation] for part in held_out}


def held_out_outcomes(
    cases: Mapping[Path, Sequence[Case]], settings: PredictionSettings, output: OutputFolder
) -> Generator[batch.CaseOutcome]:
    """Predict the held-out cases of one run after another.

    Cases that an earlier call finished with the same scans, weights and settings are kept.
    """
    for run, held_out in cases.items():
        yield from batch.local_outcomes(held_out, Predictor.load([run], settings), output)


def reference_pairs(cases: Iterable[Case], predictions: Path) -> Pairing:
    """Pair the label map of every held-out case with its prediction, if there is one."""
    rows, pairs = evaluate.recorded(predictions), []
    for case in sorted(cases, key=lambda case: case.case_id):
        if case.label is not None:
            # without the scans, which the index has compared it with
            reference = LabelFile(path=case.path_of(case.label), convention=case.convention)
            path = predictions / f"{case.case_id}.nii.gz"
            row = rows.get(case.case_id, {})
            prediction = evaluate.recorded_file(path, row, predictions) if path.exists() else None
            pairs.append(Pair(case.case_id, reference, prediction))
    return Pairing(pairs=tuple(pairs), rows=rows)


def score_predictions(
    pairing: Pairing, protocol: ScoringProtocol, folder: Path, *, track: Track = untracked
) -> Evaluation:
    """Score all pairs, and write the scores, their summary and their figure."""
    # matplotlib takes long to import
    from brats_seg.figures.charts import score_figure
    from brats_seg.figures.sections import write_figure

    evaluation = evaluate.evaluate_pairs(pairing, protocol, n_workers=available_cpus(), track=track)
    write_scores(evaluation.scores, folder / "scores.csv")
    write_summary(evaluation.summaries, folder / "summary.json")
    column = "dice" if protocol.lesions is None else "lesionwise_dice"
    write_figure(score_figure(evaluation.scores, column=column), folder / "scores.png")
    return evaluation


def _train(
    train: Callable[..., Outcome], runs: Iterable[tuple[int, Path]], max_hours: float | None
) -> Iterator[Outcome]:
    """Train the folds until one is stopped."""
    ends_s = None if max_hours is None else time.monotonic() + 3600 * max_hours
    for fold, path in runs:
        left_h = None if ends_s is None else max(ends_s - time.monotonic(), 0) / 3600
        outcome = train(fold, run_path=path, max_hours=left_h)
        yield outcome
        if not outcome.finished:
            return
