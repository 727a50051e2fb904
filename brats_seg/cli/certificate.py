"""The command that measures how exact the accumulated gradient is."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.data import DataOption, prepared_path
from brats_seg.cli.settings import (
    ConfigOption,
    PreparedOption,
    PresetOption,
    SetOption,
    settings_of,
)
from brats_seg.errors import UsageError
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.training.certificate import Certificate


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
    from brats_seg.models.device import choose_device
    from brats_seg.training.certificate import certificate_of, write_certificate
    from brats_seg.training.probe import probe_run, probe_settings

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
        _print_table(certificate)
    if not certificate.exact:
        raise typer.Exit(1)


def _print_table(certificate: "Certificate") -> None:
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
