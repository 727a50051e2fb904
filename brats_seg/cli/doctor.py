"""The command that checks installation, machine, scans and runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.options import (
    DEFAULT_PATH,
    ConfigOption,
    JsonOption,
    PreparedOption,
    PresetOption,
    SetOption,
    holds_scans,
    print_json,
    print_table,
    settings_of,
)
from brats_seg.errors import EnvironmentalError, counted

if TYPE_CHECKING:
    from brats_seg.doctor import Diagnosis


def doctor(
    data: Annotated[
        Path | None,
        typer.Argument(help="Folder of scans, or a table of their paths. (default: data/)"),
    ] = None,
    prepared: PreparedOption = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check packages, GPU, memory, disk, scans and runs, and name the command that mends each problem.

    Nothing is changed. Exit code 3: something prevents work here.
    """
    from brats_seg.doctor import diagnose

    if data is None and holds_scans(DEFAULT_PATH):
        data = DEFAULT_PATH
    chosen = settings_of(preset, config, settings, {})
    diagnosis = diagnose(data, prepared_path=prepared, runs=runs, config=chosen)
    if as_json:
        print_json(diagnosis)
    else:
        _print_diagnosis(diagnosis)
    if not diagnosis.can_work:
        raise typer.Exit(EnvironmentalError.exit_code)


def _print_diagnosis(diagnosis: "Diagnosis") -> None:
    print(f"brats_seg {diagnosis.version}")
    print_table(
        ("check", "status", "found"),
        [(one.check, one.status, one.found) for one in diagnosis.findings],
        wrapped=("found",),
    )
    wrong = [one for one in diagnosis.findings if one.status != "ok"]
    for one in wrong:
        # on a line of its own, to be copied
        if one.remedy:
            print(f"{one.check}, {one.status}:\n    {one.remedy}")
    n_problems = sum(one.status == "problem" for one in wrong)
    print(f"{counted(n_problems, 'problem')}, {counted(len(wrong) - n_problems, 'warning')}")
