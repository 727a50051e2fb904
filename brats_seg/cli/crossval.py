"""The command that cross-validates: from a folder of scans to honest scores and an ensemble."""

# DOC cli/tuning: The command that fits the settings of prediction to a model.

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.evaluation import print_remarks, print_summaries
from brats_seg.cli.options import (
    ConfigOption,
    DataOption,
    LabelsOption,
    PreparedOption,
    PresetOption,
    SetOption,
    SkipBadOption,
    data_or_demo,
    prepared_path,
    settings_of,
)
from brats_seg.cli.prediction import print_ending
from brats_seg.config import Config
from brats_seg.errors import UsageError
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.crossval import HeldOutCases
    from brats_seg.evaluation.protocols import Protocol
    from brats_seg.inference.out_of_fold import HeldOut
    from brats_seg.inference.output import OutputFolder
    from brats_seg.inference.tuning import FittedSetting, Tuning


def tune(
    runs: Annotated[list[Path], typer.Argument(help="Runs, such as the folds of one data set.")],
    metric: Annotated[str, typer.Option(help="What to fit to: dice or lesionwise.")] = "dice",
    task: Annotated[
        str, typer.Option(help="GLI, SSA, MEN, MET or PED: the parameters of lesionwise.")
    ] = "GLI",
    data: DataOption = None,
    prepared: PreparedOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, fp16, bf16.")] = "auto",
) -> None:
    """FittedSetting window, thresholds and smallest volumes on held-out cases, and store them with the model.

    Every case is predicted by the run that has never seen it. A default is left only where another
    value is better by more than chance. Give all runs that are to be averaged at once.
    """
    from brats_seg.inference.out_of_fold import open_held_out
    from brats_seg.inference.tuning import metric_named, store_tuning, tune
    from brats_seg.runtime.device import choose_device

    protocol = metric_named(metric, task)
    where = choose_device(device, precision)
    folder = prepared_path(data, prepared)
    held_out = [open_held_out(run, folder) for run in dict.fromkeys(runs)]
    tuning = tune(held_out, protocol, where, n_workers=os.cpu_count() or 1, track=tracked)
    store_tuning(tuning, held_out)
    print_tuning(tuning)


def print_tuning(tuning: "Tuning") -> None:
    """Tell what was fitted, and how much of it to believe."""
    print(
        f"tuned on {tuning.n_cases} held-out cases of {len(tuning.runs)} runs, for the mean "
        f"{'lesion-wise ' if tuning.metric != 'legacy' else ''}Dice of WT, TC and ET"
    )
    for fit in tuning.fits:
        print(f"  {fit.setting}: {_outcome(fit)}")
    before, after = (
        ", ".join(f"{score:.4f}" for score in scores) for scores in (tuning.before, tuning.after)
    )
    print(f"WT, TC, ET: {before} before, {after} after.")
    if tuning.before != tuning.after:
        print("It was fitted to these very cases: on new ones expect less of the gain.")
    print(f"Stored with the weights of {', '.join(tuning.runs)}. Research use only.")


def _outcome(fit: "FittedSetting") -> str:
    gain = fit.gain
    what = (
        f"{gain.mean:+.4f}, {gain.n_raised} cases better and {gain.n_lowered} worse, "
        f"p {gain.p_value:.2g}"
    )
    if fit.chosen != fit.default:
        return f"{fit.chosen} instead of {fit.default}, {what}"
    if fit.best == fit.default:
        return f"{fit.default} stays, nothing is better"
    return f"{fit.default} stays, the gain of {fit.best} may be chance: {what}"


_GOES_ON = "The same command goes on."


def crossval(
    data: DataOption = None,
    folds: Annotated[
        str | None, typer.Option(metavar="0,1,...", help="Which. (default: all there are)")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")] = Path(
        "crossval"
    ),
    runs: Annotated[Path, typer.Option(help="Folder of the runs fold0, fold1, ...")] = Path("runs"),
    protocol: Annotated[
        str, typer.Option(help="legacy, lesionwise2023 or lesionwise2024.")
    ] = "legacy",
    task: Annotated[str, typer.Option(help="GLI, SSA, MEN, MET or PED, of a protocol.")] = "GLI",
    metric: Annotated[
        str | None, typer.Option(help="To fit to: dice or lesionwise. (default: as the protocol)")
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    device: Annotated[str | None, typer.Option(help="training.device")] = None,
    precision: Annotated[str | None, typer.Option(help="training.precision")] = None,
    max_hours: Annotated[
        float | None, typer.Option(min=0, help="Stop training in time; the same command goes on.")
    ] = None,
    settings: SetOption = None,
    labels: LabelsOption = None,
    skip_bad: SkipBadOption = False,
    prepared: PreparedOption = None,
) -> None:
    """Train every fold, predict and score its held-out cases, and export the ensemble.

    Runs that `train` has begun or finished are taken as they are. Whenever it is stopped, the same
    command goes on. Exit code 1: some cases could not be predicted or scored.
    """
    from brats_seg.crossval import check_free
    from brats_seg.evaluation.protocols import protocol_named
    from brats_seg.inference.output import OutputFolder
    from brats_seg.inference.tuning import metric_named

    scoring = protocol_named(protocol, task)
    fitted = metric or ("dice" if scoring.lesions is None else "lesionwise")
    fitting = metric_named(fitted, task)
    scans, preset = data_or_demo(data, preset)
    flags = {
        "training.device": device,
        "training.precision": precision,
        "cases.labels": labels,
        "cases.skip_bad": skip_bad or None,
    }
    chosen = settings_of(preset, config, settings, flags)
    if chosen.model.task != "segmentation":
        msg = f"model.name {chosen.model.name!r} gives no label maps: train it with `train`"
        raise UsageError(msg)
    results = OutputFolder(output / "predictions")
    # a place that cannot be used is found before nights of training
    check_free(output / "model")
    try:
        with results.opened():
            run_paths, folder = _train(scans, _numbers(folds), runs, chosen, prepared, max_hours)
            held_out = _tune(run_paths, folder, fitting, chosen)
            cases = _cases(held_out, scans, folder)
            n_failed = _predict(cases, results, chosen)
            n_failed += _score(cases, results, scoring)
            _export(run_paths, output)
    except KeyboardInterrupt:
        print(f"interrupted. {_GOES_ON}")
        raise typer.Exit(128 + signal.SIGINT) from None
    if n_failed:
        raise typer.Exit(1)


def _train(
    scans: Path,
    wanted: Sequence[int] | None,
    runs: Path,
    config: Config,
    prepared: Path | None,
    max_hours: float | None,
) -> tuple[list[Path], Path]:
    """Return the finished runs and the folder of prepared cases; exit where the training stops."""
    from brats_seg.cases.folds import read_folds
    from brats_seg.data.fold import open_fold, prepared_path_of

    folder = prepared or prepared_path_of(scans)
    # all cases at once, so that nothing is found wrong after nights of training
    first = wanted[0] if wanted else 0
    open_fold(scans, fold=first, config=config, prepared_path=folder, track=tracked)
    table = read_folds(folder / "folds.csv")
    folds = sorted(set(table.folds if wanted is None else wanted))
    for fold in folds:
        table.split(fold)
    from brats_seg.training.trainer import train_fold

    ends_s = None if max_hours is None else time.monotonic() + 3600 * max_hours
    paths = [runs / f"fold{fold}" for fold in folds]
    for fold, path in zip(folds, paths, strict=True):
        left = None if ends_s is None else max(ends_s - time.monotonic(), 0) / 3600
        outcome = train_fold(
            scans, fold, config=config, run_path=path, prepared_path=folder, max_hours=left
        )
        if not outcome.finished:
            raise typer.Exit(0 if outcome.signal is None else 128 + outcome.signal)
    return paths, folder


def _tune(
    run_paths: Sequence[Path], folder: Path, fitting: "Protocol", config: Config
) -> "list[HeldOut]":
    from brats_seg.inference.out_of_fold import open_held_out
    from brats_seg.inference.tuning import store_tuning, tune
    from brats_seg.runtime.device import choose_device

    device = choose_device(config.training.device, config.training.precision)
    held_out = [open_held_out(path, folder) for path in run_paths]
    tuning = tune(held_out, fitting, device, n_workers=os.cpu_count() or 1, track=tracked)
    store_tuning(tuning, held_out)
    print_tuning(tuning)
    return held_out


def _cases(held_out: "Sequence[HeldOut]", scans: Path, folder: Path) -> "tuple[HeldOutCases, ...]":
    from brats_seg.cases.case_table import read_index
    from brats_seg.crossval import held_out_cases

    return held_out_cases(held_out, read_index(folder / "cases.csv", scans))


def _predict(cases: "Sequence[HeldOutCases]", results: "OutputFolder", config: Config) -> int:
    """Return how many cases failed."""
    from brats_seg.crossval import out_of_fold_endings
    from brats_seg.inference.batch import check_apart, finish_batch
    from brats_seg.inference.settings import InferenceConfig
    from brats_seg.runtime.device import choose_device

    inputs = [one for part in cases for one in part.inputs]
    check_apart(inputs, results)
    training = config.training
    settings = InferenceConfig(device=training.device, precision=training.precision)
    device = choose_device(training.device, training.precision)
    endings = out_of_fold_endings(cases, settings, results, device)
    outcome = finish_batch(endings, results, len(inputs), report=print_ending, track=tracked)
    print(f"{len(inputs)} held-out cases, {len(outcome.failures)} failed: {results.path}")
    return len(outcome.failures)


def _score(cases: "Sequence[HeldOutCases]", results: "OutputFolder", protocol: "Protocol") -> int:
    """Return how many cases could not be scored."""
    import numpy as np

    from brats_seg.crossval import SCORES_NAME, reference_pairs, score_predictions
    from brats_seg.evaluation.scores import read_scores, summarise_scores, write_summary
    from brats_seg.report.charts import score_figure
    from brats_seg.report.style import write_figure

    output = results.path.parent
    pairing = reference_pairs(cases, results.path)
    evaluation = score_predictions(
        pairing, protocol, output, n_workers=os.cpu_count() or 1, track=tracked
    )
    if evaluation is not None:
        print_remarks(evaluation, results.path)
    scores = read_scores(output / SCORES_NAME)
    summaries = summarise_scores(scores, np.random.default_rng(0))
    write_summary(summaries, output / "summary.json")
    column = "dice" if protocol.lesions is None else "lesionwise_dice"
    write_figure(score_figure(scores, column=column), output / "scores.png")
    print_summaries(summaries)
    return 0 if evaluation is None else len(evaluation.failures)


def _export(run_paths: Sequence[Path], output: Path) -> None:
    from brats_seg.crossval import export_ensemble

    fingerprint = export_ensemble(run_paths, output / "model")
    print(f"{len(run_paths)} networks in {output / 'model'}, fingerprint {fingerprint}")
    print(f"scores.csv, summary.json, scores.png: {output}. Research use only.")


def _numbers(folds: str | None) -> list[int] | None:
    if folds is None:
        return None
    parts = [part.strip() for part in folds.split(",")]
    if not all(part.isdecimal() for part in parts):
        msg = f"--folds is {folds!r}; expected numbers from 0, such as 0,1,2"
        raise UsageError(msg)
    return [int(part) for part in parts]
