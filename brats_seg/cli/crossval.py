"""Commands `tune` and `crossval`: fit settings of prediction, and cross-validate."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.evaluation import print_remarks, print_summaries
from brats_seg.cli.options import (
    ConfigOption,
    DataOption,
    DeviceOption,
    JsonOption,
    LabelFilesOption,
    LabelsOption,
    PrecisionOption,
    PreparedOption,
    PresetOption,
    ProtocolOption,
    SetOption,
    SkipBadOption,
    TaskOption,
    data_or_demo,
    importing,
    prepared_path,
    print_json,
    print_table,
    settings_of_run,
)
from brats_seg.cli.prediction import print_outcome
from brats_seg.errors import UsageError, counted
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.crossval import OutOfFoldResults
    from brats_seg.evaluation.subset_scores import SubsetScores
    from brats_seg.inference.tuning import Tuning
    from brats_seg.inference.window_choice import WindowTrial


def tune(
    runs: Annotated[list[Path], typer.Argument(help="Runs, such as the folds of one data set.")],
    metric: Annotated[str, typer.Option(help="Metric to tune for: dice or lesionwise.")] = "dice",
    task: TaskOption = "GLI",
    data: DataOption = None,
    prepared: PreparedOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Fit window, thresholds and smallest volumes on held-out cases, and store them with the model.

    Every case is predicted by the run that it was held out of. The window is the fastest whose mean
    Dice is within 0.001 of the best; other defaults are replaced only if the gain is statistically
    significant. Give all runs whose predictions are to be averaged together.
    """
    with importing():
        from brats_seg.inference.tuning import tune_runs

    tuning = tune_runs(
        runs,
        prepared_path=prepared_path(data, prepared),
        metric=metric,
        task=task,
        device=device,
        precision=precision,
        track=tracked,
    )
    if as_json:
        print_json(tuning)
    else:
        _print_tuning(tuning)


def crossval(
    data: DataOption = None,
    folds: Annotated[
        str | None, typer.Option(metavar="0,1,...", help="Folds to hold out. (default: all)")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")] = Path(
        "crossval"
    ),
    runs: Annotated[Path, typer.Option(help="Folder of the runs fold0, fold1, ...")] = Path("runs"),
    protocol: ProtocolOption = "legacy",
    task: TaskOption = "GLI",
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric to tune for: dice or lesionwise. (default: that of the protocol)"
        ),
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    device: Annotated[str | None, typer.Option(help="Set training.device.")] = None,
    precision: Annotated[str | None, typer.Option(help="Set training.precision.")] = None,
    max_hours: Annotated[
        float | None,
        typer.Option(min=0, help="Stop training after this time; the same command continues."),
    ] = None,
    settings: SetOption = None,
    labels: LabelsOption = None,
    label_files: LabelFilesOption = None,
    skip_bad: SkipBadOption = False,
    prepared: PreparedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train every fold, predict and score its held-out cases, and export the ensemble.

    Runs that `train` has begun or finished are continued or kept. If it is interrupted, the same
    command continues it. Exit code 1: some cases could not be predicted or scored.
    """
    with importing():
        from brats_seg.crossval import cross_validate
        from brats_seg.evaluation.protocols import protocol_named

    scoring = protocol_named(protocol, task)
    scans, preset = data_or_demo(data, preset)
    flags = {
        "training.device": device,
        "training.precision": precision,
        "cases.labels": labels,
        "cases.label_files": label_files,
        "cases.skip_bad": skip_bad or None,
    }
    try:
        done = cross_validate(
            scans,
            folds=_numbers(folds),
            output=output,
            runs=runs,
            protocol=scoring,
            metric=metric,
            config=settings_of_run(preset, config, settings, flags, run_paths=_begun(runs)),
            prepared_path=prepared,
            max_hours=max_hours,
            track=tracked,
            on_case=print_outcome,
        )
    except KeyboardInterrupt:
        print("interrupted. The same command continues.")
        raise typer.Exit(128 + signal.SIGINT) from None
    if as_json:
        from brats_seg.json_results import cross_validated

        print_json(cross_validated(done, output))
    if done.results is None:
        stopped_by = done.trainings[-1].signal
        raise typer.Exit(0 if stopped_by is None else 128 + stopped_by)
    _print_results(done.results, len(done.runs), output)
    if done.results.n_failed:
        raise typer.Exit(1)


def _print_tuning(tuning: "Tuning") -> None:
    """Print the fitted settings with their gain, the windows, and the scores before and after."""
    print(
        f"tuned on {counted(tuning.n_cases, 'held-out case')} of {counted(len(tuning.runs), 'run')}, "
        "for the mean "
        f"{'lesion-wise ' if tuning.metric != 'legacy' else ''}Dice of WT, TC and ET"
    )
    print_table(
        ("setting", "default", "best", "gain", "better", "worse", "p", "stored"),
        [
            (
                fit.setting,
                fit.default,
                fit.best,
                f"{fit.gain.mean:+.4f}",
                fit.gain.n_raised,
                fit.gain.n_lowered,
                f"{fit.gain.p_value:.2g}",
                fit.chosen,
            )
            for fit in tuning.fits
        ],
    )
    _print_windows(tuning.windows)
    before, after = (
        ", ".join(f"{score:.4f}" for score in scores) for scores in (tuning.before, tuning.after)
    )
    print(f"WT, TC, ET: {before} before, {after} after.")
    if tuning.before != tuning.after:
        print("Fitted and scored on the same cases: expect a smaller gain on new cases.")
    if tuning.subset_scores:
        _print_subsets(tuning.subset_scores)
    from brats_seg.quality.expected_dice import dice_lines

    for line in dice_lines([tuning.notes]):
        print(
            f"predicted Dice of {line.region.upper()}: off by {line.mean_error:.3f} on average "
            f"({counted(line.n_cases, 'held-out case')})"
        )
    print(f"Stored with the weights of {', '.join(tuning.runs)}. Research use only.")


def _print_windows(trials: "Sequence[WindowTrial]") -> None:
    """Print the Dice and the time of each window that was tried."""
    print_table(
        ("window", "WT", "TC", "ET", "seconds a case"),
        [
            (trial.name, *(f"{score:.4f}" for score in trial.score), f"{trial.seconds:.1f}")
            for trial in trials
        ],
    )


def _print_subsets(scores: "Sequence[SubsetScores]") -> None:
    """Print the Dice of held-out cases without some modalities, and its change by their absence."""
    from brats_seg.labels import REGIONS

    n_cases = counted(scores[0].n_cases, "held-out case")
    print(f"without some modalities, on {n_cases}: mean Dice (change against all four modalities)")
    print_table(
        ("predicted from", *(region.upper() for region in REGIONS)),
        [(", ".join(one.modalities), *one.texts()) for one in scores],
    )


def _print_results(results: "OutOfFoldResults", n_networks: int, output: Path) -> None:
    _print_tuning(results.tuning)
    batch = results.batch
    n_failed = len(batch.failures)
    n_cases = batch.n_predicted + batch.n_skipped + n_failed
    print(f"{counted(n_cases, 'held-out case')}, {n_failed} failed: {output / 'predictions'}")
    if results.evaluation is not None:
        print_remarks(results.evaluation, output / "predictions")
    print_summaries(results.summaries, results.predicted_summaries)
    print(
        f"{counted(n_networks, 'network')} in {output / 'model'}, fingerprint {results.fingerprint}"
    )
    print(f"scores.csv, summary.json, scores.png: {output}. Research use only.")


def _begun(runs: Path) -> list[Path]:
    """Return the folders of the folds that may have begun; a run that was set aside is `fold0.1`."""
    return [path for path in sorted(runs.glob("fold*")) if path.name[4:].isdecimal()]


def _numbers(folds: str | None) -> tuple[int, ...] | None:
    if folds is None:
        return None
    parts = [part.strip() for part in folds.split(",")]
    if not all(part.isdecimal() for part in parts):
        msg = f"--folds is {folds!r}; expected numbers from 0, such as 0,1,2"
        raise UsageError(msg)
    return tuple(int(part) for part in parts)
