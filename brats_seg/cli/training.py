"""Commands that train a fold, plan its memory and certify its gradient."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.options import (
    COMPLETE_DEVICE,
    COMPLETE_PRECISION,
    DEVICES,
    PRECISIONS,
    SHORTCUTS_PANEL,
    ConfigOption,
    DataOption,
    JsonOption,
    LabelFilesOption,
    LabelsOption,
    PreparedOption,
    PresetOption,
    SetOption,
    SkipBadOption,
    data_or_demo,
    importing,
    one_of,
    prepared_path,
    print_json,
    print_table,
    settings_of,
    settings_of_run,
)
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.presets import GPU_NAMES, NETWORKS
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.config import Config
    from brats_seg.training.certificate import Certificate
    from brats_seg.training.memory_plan import MemoryPlan


def train(
    data: DataOption = None,
    fold: Annotated[int, typer.Option(min=0, help="Index of the fold that is held out.")] = 0,
    run: Annotated[
        # -r, because torchrun under Python 3.11 takes --run for an abbreviation of its own options
        Path | None,
        typer.Option(
            "-r", "--run", help="Folder to write to; under torchrun, -r. (default: runs/foldN)"
        ),
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SHORTCUTS_PANEL,
            autocompletion=one_of(*NETWORKS),
            help=f"model.name: {', '.join(NETWORKS)}, or a dotted name.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(rich_help_panel=SHORTCUTS_PANEL, help="training.n_epochs.")
    ] = None,
    effective_batch: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SHORTCUTS_PANEL,
            help="training.effective_batch: 8, or by epoch '{0: 8, 40: 16}'.",
        ),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(rich_help_panel=SHORTCUTS_PANEL, help="training.micro_batch.")
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y,Z", rich_help_panel=SHORTCUTS_PANEL, help="patch.size; may be 'whole'."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(rich_help_panel=SHORTCUTS_PANEL, help="training.seed.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SHORTCUTS_PANEL,
            autocompletion=COMPLETE_DEVICE,
            help="training.device: auto, cpu, cuda, cuda:1 or mps.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SHORTCUTS_PANEL,
            autocompletion=COMPLETE_PRECISION,
            help="training.precision: auto, fp32, fp16 or bf16.",
        ),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=SHORTCUTS_PANEL,
            help="start.path: run, exported model, checkpoint or .safetensors file to take weights from.",
        ),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(
            help="Hours of the whole run, in all its sessions: as many epochs as they hold are trained."
        ),
    ] = None,
    max_hours: Annotated[
        float | None,
        typer.Option(min=0, help="Hours of this session; the same command continues."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Rename an earlier run and start anew.")
    ] = False,
    labels: LabelsOption = None,
    label_files: LabelFilesOption = None,
    skip_bad: SkipBadOption = False,
    prepared: PreparedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a fold, or resume it."""
    from brats_seg.config_text import parse_yaml

    if epochs is not None and hours is not None:
        msg = f"--epochs {epochs} and --hours {hours:g} are given; expected one of them"
        raise UsageError(msg)
    scans, preset = data_or_demo(data, preset)
    flags = {
        "model.name": model,
        "training.n_epochs": epochs,
        "training.hours": hours,
        "start.path": None if start_from is None else str(start_from),
        "training.effective_batch": None
        if effective_batch is None
        else parse_yaml(effective_batch, "--effective-batch"),
        "training.micro_batch": micro_batch,
        "patch.size": patch,
        "training.seed": seed,
        "training.device": device,
        "training.precision": precision,
        "cases.labels": labels,
        "cases.label_files": label_files,
        "cases.skip_bad": skip_bad or None,
    }
    run_path = run or Path(f"runs/fold{fold}")
    begun = () if fresh else (run_path,)
    chosen = settings_of_run(preset, config, settings, flags, run_paths=begun)
    with importing():
        from brats_seg.training.trainer import train_fold

    outcome = train_fold(
        scans,
        fold,
        config=chosen,
        run_path=run_path,
        prepared_path=prepared,
        max_hours=max_hours,
        fresh=fresh,
        track=tracked,
    )
    if as_json:
        from brats_seg.json_results import trained_run

        print_json(trained_run(run_path, outcome))
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


def plan(
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory, such as 15GiB or 900MB. (default: free memory of the device)",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("auto", "cpu", "cuda", "mps", *GPU_NAMES),
            help="Device of this machine (auto, cpu, cuda, cuda:1, mps), or a GPU that it need not have: "
            f"{', '.join(GPU_NAMES)}, or its memory, such as 8GiB.",
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(autocompletion=COMPLETE_PRECISION, help=PRECISIONS)
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print which patch, micro-batch, precision and checkpointing fit in memory.

    Memory is predicted for the network, loss and optimizer of the settings, also for a GPU that this
    machine need not have, such as --device t4. Exit code 3: nothing fits.
    """
    with importing():
        from brats_seg.runtime.device import gpu_named
        from brats_seg.runtime.memory import parse_memory
        from brats_seg.training.memory_plan import plan_memory

    gpu = None if device is None else gpu_named(device)
    flags = {
        "training.device": None if gpu is not None else device,
        "training.precision": precision,
    }
    chosen = settings_of_run(preset, config, settings, flags, gpu=gpu)
    size = None if memory is None else parse_memory(memory)
    found = plan_memory(chosen, size, tracked, gpu=gpu)
    if as_json:
        print_json(found.rows)
    else:
        _print_plan(found, chosen, is_given=gpu is not None or memory is not None)
    if found.suggested is None:
        raise EnvironmentalError(found.what_to_lower())


def _print_plan(found: "MemoryPlan", config: "Config", *, is_given: bool) -> None:
    from brats_seg.models.build import size_words
    from brats_seg.training.memory_plan import RESERVED_MIB

    left = f", beside {RESERVED_MIB} MiB for torch itself" if is_given else ""
    device = found.device.torch_device if found.gpu is None else found.gpu.name
    print(f"{config.model.name} on {device}: {found.memory_mib} MiB{left}")
    columns = ("patch", "micro-batch", "precision", "checkpointing", "predicted MiB", "fits")
    print_table(
        columns,
        [
            (
                size_words(row.patch),
                row.micro_batch,
                row.precision,
                row.checkpointing,
                row.predicted_mib,
                "yes" if row.fits else "no",
            )
            for row in found.rows
        ],
    )
    _print_advice(found)


def _print_advice(found: "MemoryPlan") -> None:
    """Print the flags of the largest patch that fits."""
    best = found.suggested
    if best is not None:
        print(
            f"largest patch: --patch {','.join(map(str, best.patch))} --micro-batch 1 "
            f"--precision {best.precision}, with checkpointing {best.checkpointing}"
        )
    if found.gpu is not None:
        print(
            f"prediction for {found.gpu.name}: the tensors of a step were counted without a GPU, and a "
            "share added for the workspaces of its kernels. Nothing was computed on it."
        )


def settings(
    section: Annotated[
        str, typer.Argument(help="Part of the keys to list, such as training or loss.")
    ] = "",
    preset: PresetOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the settings: keys, values, what is allowed, and what they do.

    The values are those that `train` would begin a run with, given the same options.
    """
    from brats_seg.config_text import describe_settings

    listed = tuple(
        setting
        for setting in describe_settings(settings_of_run(preset, config, assignments, {}))
        if section in setting.key
    )
    if not listed:
        msg = f"no setting has {section!r} in its key; `brats-seg settings` lists all of them"
        raise UsageError(msg)
    if as_json:
        print_json(listed)
        return
    print_table(
        ("key", "value", "allowed", "meaning"),
        [(one.key, one.value, one.allowed, one.meaning) for one in listed],
        wrapped=("allowed", "meaning"),
    )


def certify(
    run: Annotated[
        Path | None,
        typer.Option(help="Folder of a run; its weights, loss, precision and cases are used."),
    ] = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    patches: Annotated[
        int, typer.Option(min=2, help="Number of patches in the batch, each a micro-batch.")
    ] = 4,
    data: DataOption = None,
    prepared: PreparedOption = None,
    device: Annotated[
        str | None, typer.Option(autocompletion=COMPLETE_DEVICE, help=DEVICES)
    ] = None,
    precision: Annotated[
        str | None, typer.Option(autocompletion=COMPLETE_PRECISION, help=PRECISIONS)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how far accumulated gradients, exact and ordinary, are from that of the whole batch.

    With --run the table is also written to certificate.json there. Without it, the network of the
    settings is first trained on phantom patches for a few steps. Exit code 1: it is not exact.
    """
    if (run is None) == (preset is None and config is None and settings is None):
        msg = "give either --run, or settings by --preset, --config or --set"
        raise UsageError(msg)
    with importing():
        from brats_seg.training.certificate import certify_run, certify_settings

    if run is not None:
        certificate = certify_run(
            run,
            prepared_path(data, prepared),
            n_patches=patches,
            device=device,
            precision=precision,
            track=tracked,
        )
    else:
        flags = {"training.device": device, "training.precision": precision}
        chosen = settings_of(preset, config, settings, flags)
        certificate = certify_settings(chosen, n_patches=patches, track=tracked)
    if as_json:
        print_json(certificate.rows)
    else:
        _print_certificate(certificate)
    if not certificate.exact:
        raise typer.Exit(1)


def _print_certificate(certificate: "Certificate") -> None:
    print(f"{certificate.network}, on {certificate.patches}")
    columns = ("loss", "precision", "patches", "method", "relative error", "angle, degrees")
    print_table(
        columns,
        [
            (
                f"{row.loss} (yours)" if row.own else row.loss,
                row.precision,
                row.n_patches,
                row.method,
                f"{row.relative_error:.1e}",
                f"{row.angle_deg:.2g}",
            )
            for row in certificate.rows
        ],
    )
    if certificate.exact:
        print("exact: the accumulated gradient is that of the whole batch, to rounding")
    else:
        print("NOT exact: the accumulated gradient differs from that of the whole batch")
