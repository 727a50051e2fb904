"""The command that fits the settings of prediction to a model."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.data import DataOption, prepared_path
from brats_seg.cli.settings import PreparedOption
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.inference.tuned import Fit, Tuning


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
    """Fit window, thresholds and smallest volumes on held-out cases, and store them with the model.

    Every case is predicted by the run that has never seen it. A default is left only where another
    value is better by more than chance. Give all runs that are to be averaged at once.
    """
    from brats_seg.inference.held_out import open_held_out
    from brats_seg.inference.tuned import store_tuning
    from brats_seg.inference.tuning import metric_named, tune
    from brats_seg.models.device import choose_device

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


def _outcome(fit: "Fit") -> str:
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
