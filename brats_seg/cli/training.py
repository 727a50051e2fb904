"""The command that trains."""

# DOC cli/planning: The command that tells what fits in memory.
# DOC cli/certificate: The command that measures how exact the accumulated gradient is.

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

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
from brats_seg.config import Config
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.progress import tracked, untracked

if TYPE_CHECKING:
    from brats_seg.training.certificate import Certificate
    from brats_seg.training.memory_plan import MemoryPlan
    from brats_seg.training.trainer import Outcome, StopRequest


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
        "training.effective_batch": None
        if effective_batch is None
        else yaml.safe_load(effective_batch),
        "training.micro_batch": micro_batch,
        "patch.size": patch,
        "training.seed": seed,
        "training.device": device,
        "training.precision": precision,
        "cases.labels": labels,
        "cases.skip_bad": skip_bad or None,
    }
    chosen = settings_of(preset, config, settings, flags)
    from brats_seg.training.trainer import StopRequest

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
    stop: "StopRequest",
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


_LEFT_MIB = 512
"""Of a given memory: the context of a GPU, or Python and torch as they are before a run begins."""


def plan(
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="15GiB, 15GB, 900MB. (default: what is free on the device now)"
        ),
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Tell which patch, micro-batch, precision and checkpointing fit in memory.

    Counted for the network, loss and optimizer of the settings; the largest patch that fits is
    tried for real. Exit code 3: nothing fits.
    """
    chosen = settings_of(preset, config, settings, {})
    from brats_seg.runtime.device import choose_device
    from brats_seg.runtime.memory import MEGABYTE, free_memory, parse_memory
    from brats_seg.training.memory_plan import count_plan, try_plan

    training = chosen.training
    device = choose_device(training.device, training.precision).torch_device
    if memory is None:
        available = free_memory(device)
    else:
        available = max(parse_memory(memory) - _LEFT_MIB * MEGABYTE, 0)
    found = try_plan(count_plan(chosen, available, tracked), chosen)
    if as_json:
        print(json.dumps([asdict(row) for row in found.rows], indent=2))
    else:
        left = "" if memory is None else f", beside {_LEFT_MIB} MiB for torch itself"
        print(f"{chosen.model.name} on {device}: {found.memory_mib} MiB{left}")
        _print_plan(found)
    if found.suggested is None:
        raise EnvironmentalError(found.what_to_lower())


def _print_plan(found: "MemoryPlan") -> None:
    from brats_seg.training.memory_plan import size_words

    print(f"{'patch':13}  micro-batch  precision  checkpointing  predicted MiB  measured MiB  fits")
    for row in found.rows:
        measured = "-" if row.measured_mib is None else row.measured_mib
        print(
            f"{size_words(row.patch):13}  {row.micro_batch:11}  {row.precision:9}  "
            f"{row.checkpointing:13}  {row.predicted_mib:13}  {measured:>12}  "
            f"{'yes' if row.fits else 'no'}"
        )
    best = found.suggested
    if best is not None:
        print(
            f"largest patch: --patch {','.join(map(str, best.patch))} --micro-batch 1 "
            f"--precision {best.precision}, with checkpointing {best.checkpointing}"
        )


def certify(
    run: Annotated[
        Path | None, typer.Option(help="A run: its weights, loss, precision and cases.")
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    patches: Annotated[int, typer.Option(min=2, help="In the window; each a micro-batch.")] = 4,
    data: DataOption = None,
    prepared: PreparedOption = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, fp16, bf16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Measure how far accumulated gradients are from those of the whole batch, ours and ordinary.

    With --run the table is also written to certificate.json there. Without it, the network of the
    settings is trained for a moment on phantom patches. Exit code 1: ours is not exact.
    """
    if (run is None) == (preset is None and config is None and settings is None):
        msg = "give either --run, or settings by --preset, --config or --set"
        raise UsageError(msg)
    from brats_seg.runtime.device import choose_device
    from brats_seg.training.certificate import (
        certificate_of,
        probe_run,
        probe_settings,
        write_certificate,
    )

    if run is not None:
        probe = probe_run(run, prepared_path(data, prepared), patches)
        own = probe.config.training
        where = choose_device(device or own.device, precision or own.precision)
    else:
        flags = {"training.device": device, "training.precision": precision}
        chosen = settings_of(preset, config, settings, flags)
        where = choose_device(chosen.training.device, chosen.training.precision)
        probe = probe_settings(chosen, patches, where, tracked)
    certificate = certificate_of(probe, where)
    if run is not None:
        write_certificate(certificate, run / "certificate.json")
    if as_json:
        print(json.dumps([asdict(row) for row in certificate.rows], indent=2))
    else:
        _print_certificate(certificate)
    if not certificate.exact:
        raise typer.Exit(1)


def _print_certificate(certificate: "Certificate") -> None:
    print(f"{certificate.network}, on {certificate.patches}")
    print(f"{'loss':30}  precision  patches  method    relative error  angle, degrees")
    for row in certificate.rows:
        loss = f"{row.loss} (yours)" if row.own else row.loss
        print(
            f"{loss:30}  {row.precision:9}  {row.n_patches:7}  {row.method:8}  "
            f"{row.relative_error:14.1e}  {row.angle_deg:14.2g}"
        )
    if certificate.exact:
        print("exact: the accumulated gradient is that of the whole batch, to rounding")
    else:
        print("NOT exact: the accumulated gradient misses that of the whole batch")
