"""Define options that several commands share, and turn flags into settings.

Without `--data`, a command uses the scans under `data/`, or else phantom cases that it writes once.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from brats_seg.config import PRESETS, Config, load_config
from brats_seg.errors import ConfigError

DEMO_CASES = 12
"""Number of phantom cases in the demo."""
DEFAULT_PATH = Path("data")
"""Default folder of scans."""
DEMO_PATH = Path("prepared/demo-scans")
"""Folder of the phantom cases of the demo."""

DEVICES = "Device: auto, cpu, cuda, cuda:1 or mps."
PRECISIONS = "Precision: auto, fp32, fp16 or bf16."

DataOption = Annotated[
    Path | None,
    typer.Option(help="Folder of scans. (default: data/, or phantom cases if it is empty)"),
]
PreparedOption = Annotated[
    Path | None, typer.Option(help="Folder of prepared cases. (default: prepared/<data name>)")
]
PresetOption = Annotated[
    str | None, typer.Option(help=f"Settings to start from: {', '.join(PRESETS)}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="YAML file with settings, applied over the preset.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting; may be repeated."),
]
LabelsOption = Annotated[
    str | None, typer.Option(help="Label convention of all cases, instead of the detected one.")
]
DeviceOption = Annotated[str, typer.Option(help=DEVICES)]
PrecisionOption = Annotated[str, typer.Option(help=PRECISIONS)]
ProtocolOption = Annotated[
    str, typer.Option(help="Scoring protocol: legacy, lesionwise2023 or lesionwise2024.")
]
TaskOption = Annotated[
    str,
    typer.Option(help="Challenge task of the lesion-wise parameters: GLI, SSA, MEN, MET or PED."),
]
SkipBadOption = Annotated[bool, typer.Option("--skip-bad", help="Skip cases with problems.")]


def settings_of(
    preset: str | None, path: Path | None, assignments: list[str] | None, flags: dict[str, Any]
) -> Config:
    """Return the settings; flags override `--set`, which overrides the file, then the preset."""
    try:
        text = "" if path is None else path.read_text()
    except OSError as error:
        msg = f"the configuration file {path} cannot be read: {error.strerror}"
        raise ConfigError(msg) from None
    return load_config(
        preset=preset,
        text=text,
        assignments=assignments or [],
        values={key: value for key, value in flags.items() if value is not None},
    )


def data_or_demo(data: Path | None, preset: str | None) -> tuple[Path, str | None]:
    """Return the folder of scans and the preset; those of the demo if there are no scans."""
    if data is not None:
        return data, preset
    if _holds_scans(DEFAULT_PATH):
        return DEFAULT_PATH, preset
    print(f"no --data, and nothing under {DEFAULT_PATH}/: training on {DEMO_CASES} phantom cases")
    if not DEMO_PATH.exists():
        from brats_seg.cases.phantom import write_phantom_cases

        beside = DEMO_PATH.with_name(f".{os.getpid()}-{DEMO_PATH.name}")
        write_phantom_cases(beside, n_cases=DEMO_CASES, seed=0)
        beside.rename(DEMO_PATH)
    return DEMO_PATH, preset or "demo"


def prepared_path(data: Path | None, prepared: Path | None) -> Path:
    """Return the folder of prepared cases that `train` uses with the same flags."""
    from brats_seg.data.fold import prepared_path_of

    if prepared is not None:
        return prepared
    if data is not None:
        return prepared_path_of(data)
    usual = prepared_path_of(DEFAULT_PATH)
    return usual if usual.exists() else prepared_path_of(DEMO_PATH)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows of cells under their headings; numbers are right-aligned.

    On a terminal the table is fitted to its width; elsewhere no cell is cut or wrapped.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, heading in enumerate(columns):
        is_number = any(isinstance(row[place], int | float) for row in cells)
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    console.print(table)


def _holds_scans(folder: Path) -> bool:
    return folder.is_dir() and any(path.name != "README.md" for path in folder.iterdir())
