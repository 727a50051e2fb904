"""Commands that fit settings of prediction, and that cross-validate."""

import signal
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
from brats_seg.cli.prediction import print_outcome
from brats_seg.errors import UsageError
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.crossval import OutOfFoldResults
    from brats_seg.inference.tuning import FittedSetting, Tuning


def tune(
    runs: Annotated[list[Path], typer.Argument(help="Runs, such as the folds of one data set.")],
    metric: Annotated[str, typer.Option(help="Metric to tune for: dice or lesionwise.")] = "dice",
    task: Annotated[
        str, typer.Option(help="GLI, SSA, MEN, MET or PED: the parameters of lesionwise.")
    ] = "GLI",
    data: DataOption = None,
    prepared: PreparedOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, fp16, bf16.")] = "auto",
) -> None:
    """Fit window, thresholds and smallest volumes on held-out cases, and store them with the model.

    Every case is predicted by the run that it was held out of. A default is replaced only where
    another value is better by more than chance. Give all runs that are to be averaged at once.
    """
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
    protocol: Annotated[
        str, typer.Option(help="legacy, lesionwise2023 or lesionwise2024.")
    ] = "legacy",
    task: Annotated[str, typer.Option(help="GLI, SSA, MEN, MET or PED, of a protocol.")] = "GLI",
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to tune for: dice or lesionwise. (default: as the protocol)"),
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    device: Annotated[str | None, typer.Option(help="training.device")] = None,
    precision: Annotated[str | None, typer.Option(help="training.precision")] = None,
    max_hours: Annotated[
        float | None,
        typer.Option(min=0, help="Stop training in time; the same command continues it."),
    ] = None,
    settings: SetOption = None,
    labels: LabelsOption = None,
    skip_bad: SkipBadOption = False,
    prepared: PreparedOption = None,
) -> None:
    """Train every fold, predict and score its held-out cases, and export the ensemble.

    Runs that `train` has begun or finished are continued or kept. Whenever it is stopped, the same
    command continues. Exit code 1: some cases could not be predicted or scored.
    """
    from brats_seg.crossval import cross_validate
    from brats_seg.evaluation.protocols import protocol_named

    scoring = protocol_named(protocol, task)
    scans, preset = data_or_demo(data, preset)
    flags = {
        "training.device": device,
        "training.precision": precision,
        "cases.labels": labels,
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
            config=settings_of(preset, config, settings, flags),
            prepared_path=prepared,
            max_hours=max_hours,
            track=tracked,
            on_case=print_outcome,
        )
    except KeyboardInterrupt:
        print("interrupted. The same command continues.")
        raise typer.Exit(128 + signal.SIGINT) from None
    if done.results is None:
        stopped_by = done.trainings[-1].signal
        raise typer.Exit(0 if stopped_by is None else 128 + stopped_by)
    _print_results(done.results, len(done.runs), output)
    if done.results.n_failed:
        raise typer.Exit(1)


def _print_tuning(tuning: "Tuning") -> None:
    """Print what was fitted, and how much of the gain may be chance."""
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


def _print_results(results: "OutOfFoldResults", n_networks: int, output: Path) -> None:
    _print_tuning(results.tuning)
    batch = results.batch
    n_failed = len(batch.failures)
    n_cases = batch.n_predicted + batch.n_skipped + n_failed
    print(f"{n_cases} held-out cases, {n_failed} failed: {output / 'predictions'}")
    if results.evaluation is not None:
        print_remarks(results.evaluation, output / "predictions")
    print_summaries(results.summaries)
    print(f"{n_networks} networks in {output / 'model'}, fingerprint {results.fingerprint}")
    print(f"scores.csv, summary.json, scores.png: {output}. Research use only.")


def _numbers(folds: str | None) -> tuple[int, ...] | None:
    if folds is None:
        return None
    parts = [part.strip() for part in folds.split(",")]
    if not all(part.isdecimal() for part in parts):
        msg = f"--folds is {folds!r}; expected numbers from 0, such as 0,1,2"
        raise UsageError(msg)
    return tuple(int(part) for part in parts)
