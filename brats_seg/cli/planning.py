"""The command that tells what fits in memory."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.settings import ConfigOption, PresetOption, SetOption, settings_of
from brats_seg.errors import EnvironmentalError
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.training.plan import Plan

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
    from brats_seg.models.device import choose_device
    from brats_seg.models.memory import MEGABYTE
    from brats_seg.training.plan import count_plan, try_plan
    from brats_seg.training.room import free_memory, parse_memory

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
        _print_table(found)
    if found.suggested is None:
        raise EnvironmentalError(found.what_to_lower())


def _print_table(found: "Plan") -> None:
    from brats_seg.training.plan import size_words

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
