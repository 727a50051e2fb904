"""The command that trains."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.data import DataOption, data_or_demo
from brats_seg.cli.settings import (
    ConfigOption,
    LabelsOption,
    PreparedOption,
    PresetOption,
    SetOption,
    SkipBadOption,
    settings_of,
)
from brats_seg.config import Config
from brats_seg.progress import tracked, untracked
from brats_seg.training.stopping import StopRequest

if TYPE_CHECKING:
    from brats_seg.training.trainer import Outcome


def train(
    data: DataOption = None,
    fold: Annotated[int, typer.Option(min=0, help="The fold that is held out.")] = 0,
    run: Annotated[
        # torchrun of Python 3.11 takes --run for a beginning of options of its own
        Path | None, typer.Option("-r", "--run", help="Folder to write to. (default: runs/fold<K>)")
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    model: Annotated[str | None, typer.Option(help="model.name")] = None,
    epochs: Annotated[int | None, typer.Option(help="training.n_epochs")] = None,
    effective_batch: Annotated[
        str | None, typer.Option(help="training.effective_batch: 8, or by epoch '{0: 8, 40: 16}'")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(help="training.micro_batch")] = None,
    patch: Annotated[
        str | None, typer.Option(metavar="X,Y,Z", help="patch.size, or 'whole'")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="training.seed")] = None,
    device: Annotated[str | None, typer.Option(help="training.device")] = None,
    precision: Annotated[str | None, typer.Option(help="training.precision")] = None,
    max_hours: Annotated[
        float | None, typer.Option(min=0, help="Stop in time; the same command then goes on.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set an earlier run aside.")] = False,
    settings: SetOption = None,
    labels: LabelsOption = None,
    skip_bad: SkipBadOption = False,
    prepared: PreparedOption = None,
) -> None:
    """Train a fold, or go on with it."""
    scans, preset = data_or_demo(data, preset)
    flags = {
        "model.name": model,
        "training.n_epochs": epochs,
        "training.effective_batch": effective_batch,
        "training.micro_batch": micro_batch,
        "patch.size": patch,
        "training.seed": seed,
        "training.device": device,
        "training.precision": precision,
        "cases.labels": labels,
        "cases.skip_bad": skip_bad or None,
    }
    chosen = settings_of(preset, config, settings, flags)
    stop = StopRequest(max_hours)
    run_path = run or Path(f"runs/fold{fold}")
    train_fold(scans, fold, run_path, chosen, prepared=prepared, stop=stop, fresh=fresh)
    if stop.signal is not None:
        raise typer.Exit(128 + stop.signal)


def train_fold(
    data: Path,
    fold: int,
    run_path: Path,
    config: Config,
    *,
    prepared: Path | None,
    stop: StopRequest,
    fresh: bool = False,
) -> "Outcome":
    """Train a fold, or go on with it, and tell how it went."""
    from brats_seg.data.fold import open_fold
    from brats_seg.training.ranks import joined_ranks
    from brats_seg.training.trainer import Trainer

    with joined_ranks() as ranks:
        if not ranks.is_first:
            logging.getLogger("brats_seg").setLevel(logging.ERROR)
        track = tracked if ranks.is_first else untracked
        with ranks.first_alone():
            fold_data = open_fold(
                data, fold=fold, config=config, prepared_path=prepared, track=track
            )
        trainer = Trainer(data=fold_data, config=config, run_path=run_path, ranks=ranks)
        if ranks.is_first:
            n_train, n_held_out = len(fold_data.split.train), len(fold_data.split.validation)
            print(f"fold {fold}: {n_train} cases to train on, {n_held_out} held out")
        outcome = trainer.run(fresh=fresh, stop=stop, track=track)
        if ranks.is_first:
            _tell(outcome, config.validation.watch, run_path)
    return outcome


def _tell(outcome: "Outcome", watched: str, run_path: Path) -> None:
    if outcome.best is not None:
        print(f"best {watched} {outcome.best:.4f}, weights in {run_path / 'best.pt'}")
    if outcome.finished:
        print(f"finished after {len(outcome.history)} epochs: {run_path}. Research use only.")
    else:
        print(f"stopped: {outcome.reason}. The same command goes on from {run_path / 'last.pt'}.")
