"""Define options that several commands share, and turn flags into settings.

Without `--data`, a command uses the scans under `data/`, or else phantom cases that it writes once.
"""

import gc
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from brats_seg.errors import ConfigError
from brats_seg.files import alone_at, whole_folder
from brats_seg.presets import PRESETS, ConventionName

if TYPE_CHECKING:
    from brats_seg.config import Config
    from brats_seg.runtime.device import Gpu

DEMO_CASES = 12
"""Number of phantom cases in the demo."""
DEFAULT_PATH = Path("data")
"""Default folder of scans."""
DEMO_PATH = Path("prepared/demo-scans")
"""Folder of the phantom cases of the demo."""

SCANS_PANEL = "Scans"
SETTINGS_PANEL = "Settings"
SHORTCUTS_PANEL = "Short forms of settings"
DICOM_PANEL = "DICOM"

_RESULTS: ContextVar[TextIO] = ContextVar("results")
"""Standard output of a command with `--json`."""

DEVICES = "Device: auto, cpu, cuda, cuda:1 or mps."
PRECISIONS = "Precision: auto, fp32, fp16 or bf16."


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Return a function that completes an option to one of the given values."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


COMPLETE_DEVICE = one_of("auto", "cpu", "cuda", "mps")
COMPLETE_PRECISION = one_of("auto", "fp32", "fp16", "bf16")
_CONVENTIONS: tuple[str, ...] = get_args(ConventionName)
COMPLETE_CONVENTION = one_of(*_CONVENTIONS)

DataOption = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=SCANS_PANEL,
        help="Folder of scans of any layout, or a .csv or .json table of their paths. (default: data/, "
        "or phantom cases if it is empty)",
    ),
]
PreparedOption = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=SCANS_PANEL,
        help="Folder of prepared cases. (default: NAME-prepared beside the data folder NAME, or below "
        "~/.cache/brats_seg if nothing can be written there)",
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=SETTINGS_PANEL,
        autocompletion=one_of(*PRESETS),
        help=f"Settings to start from: {', '.join(PRESETS)}. (default: what suits the device)",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=SETTINGS_PANEL, help="YAML file with settings, applied over the preset."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        rich_help_panel=SETTINGS_PANEL,
        help="One setting; may be repeated. `brats-seg settings` lists the keys.",
    ),
]
LabelsOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=SCANS_PANEL,
        autocompletion=COMPLETE_CONVENTION,
        help="Label convention of all cases, instead of the detected one: "
        f"{', '.join(_CONVENTIONS)}.",
    ),
]
LabelFilesOption = Annotated[
    str | None,
    typer.Option(
        "--label-files",
        metavar="PATTERN",
        rich_help_panel=SCANS_PANEL,
        help="Pattern of label maps that are not found by their names: `'*_tumour.nii.gz'`, or "
        "`'drawn/*'` for a folder.",
    ),
]
DeviceOption = Annotated[str, typer.Option(autocompletion=COMPLETE_DEVICE, help=DEVICES)]
PrecisionOption = Annotated[str, typer.Option(autocompletion=COMPLETE_PRECISION, help=PRECISIONS)]
ProtocolOption = Annotated[
    str,
    typer.Option(
        autocompletion=one_of("legacy", "lesionwise2023", "lesionwise2024"),
        help="Scoring protocol: legacy, lesionwise2023 or lesionwise2024.",
    ),
]
TaskOption = Annotated[
    str,
    typer.Option(
        autocompletion=one_of("GLI", "SSA", "MEN", "MET", "PED"),
        help="Challenge task of the lesion-wise parameters: GLI, SSA, MEN, MET or PED.",
    ),
]
SkipBadOption = Annotated[
    bool,
    typer.Option("--skip-bad", rich_help_panel=SCANS_PANEL, help="Skip cases with problems."),
]

SeriesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--series",
        metavar="MODALITY=SERIES",
        rich_help_panel=DICOM_PANEL,
        help="DICOM series that is a modality: its number, or a part of its description. May be "
        "repeated.",
    ),
]
IdentifiersOption = Annotated[
    bool,
    typer.Option(
        "--identifiers",
        rich_help_panel=DICOM_PANEL,
        help="Write the patient's name and number to the DICOM segmentation, and keep the names of "
        "folders that are called after the patient.",
    ),
]
PreprocessOption = Annotated[
    bool,
    typer.Option(
        "--preprocess",
        rich_help_panel=DICOM_PANEL,
        help="Register, resample to 1 mm and skull-strip DICOM scans where needed, by greedy and "
        "HD-BET.",
    ),
]


def _result_alone(context: typer.Context, wanted: bool) -> bool:
    """With `--json`, keep standard output for the result, and print all else to standard error."""
    if wanted:
        _RESULTS.set(sys.stdout)
        context.with_resource(redirect_stdout(sys.stderr))
    return wanted


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_result_alone,
        help="Print the result as JSON, for programs; messages go to standard error.",
    ),
]


class Command(TyperCommand):
    """Command whose help shows no type beside a flag that takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return without_flag_types(super().get_params(ctx))


class Commands(TyperGroup):
    """Group of commands that say when they were interrupted.

    Their help shows no type beside a flag that takes no value.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run a command; typer would end it without a word after Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(128 + signal.SIGINT) from None

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return without_flag_types(super().get_params(ctx))


def without_flag_types(parameters: list[Any]) -> list[Any]:
    """Remove `<bool>` from the help of flags that take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the log where standard output is at that moment: above a progress bar."""

    def __init__(self) -> None:
        # not that of `StreamHandler`, which would set the stream
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard output, or with `--json` standard error."""
        return sys.stdout


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries without the garbage collector, which would take a third of the time.

    The objects of torch and MONAI stay until the end, and are not examined later either.
    """
    n_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > n_modules:
            gc.freeze()
        gc.enable()


def print_json(value: object, *, is_line: bool = False) -> None:
    """Print a result as JSON to the standard output of the program, on one line or on several."""
    from brats_seg.json_results import json_text

    print(json_text(value, is_line=is_line), file=_RESULTS.get(), flush=True)


def command_again() -> str:
    """Return the command that is running, as it would be typed again."""
    program = "brats-seg" if Path(sys.argv[0]).name != "__main__.py" else "python -m brats_seg"
    return f"{program} {shlex.join(sys.argv[1:])}"


def settings_of(
    preset: str | None, path: Path | None, assignments: list[str] | None, flags: dict[str, Any]
) -> "Config":
    """Return the settings; flags override `--set`, which overrides the file, then the preset."""
    try:
        text = "" if path is None else _start_of(path)
    except OSError as error:
        msg = f"the configuration file {path} cannot be read: {error.strerror}"
        raise ConfigError(msg) from None
    except UnicodeDecodeError as error:
        msg = f"the configuration file {path} is no text: {error.reason} at byte {error.start}"
        raise ConfigError(msg) from None
    from brats_seg.config_text import load_config

    return load_config(
        preset=preset,
        text=text,
        assignments=assignments or [],
        values={key: value for key, value in flags.items() if value is not None},
    )


def settings_of_run(
    preset: str | None,
    path: Path | None,
    assignments: list[str] | None,
    flags: dict[str, Any],
    *,
    run_paths: Sequence[Path] = (),
    gpu: "Gpu | None" = None,
) -> "Config":
    """Return the settings of a run, which are chosen where neither a preset nor a file is given.

    Then they are those of the first of the runs that was begun already, and otherwise those that suit
    the device, or a GPU that is planned for; why is printed.
    """
    if preset is not None or path is not None:
        return settings_of(preset, path, assignments, flags)
    with importing():
        from brats_seg.training.memory_plan import choose_settings

    given = {key: value for key, value in flags.items() if value is not None}
    chosen = choose_settings(
        assignments=assignments or [], values=given, run_paths=run_paths, gpu=gpu
    )
    # of several processes under torchrun the first one prints
    if os.environ.get("RANK", "0") == "0":
        print(chosen.reason)
    return chosen.config


def data_or_demo(data: Path | None, preset: str | None) -> tuple[Path, str | None]:
    """Return the folder of scans and the preset; those of the demo if there are no scans."""
    if data is not None:
        return data, preset
    if holds_scans(DEFAULT_PATH):
        return DEFAULT_PATH, preset
    print(f"no --data, and nothing under {DEFAULT_PATH}/: training on {DEMO_CASES} phantom cases")
    if not DEMO_PATH.exists():
        from brats_seg.cases.phantom import write_phantom_cases

        with alone_at(DEMO_PATH, wait=True):
            if not DEMO_PATH.exists():
                with whole_folder(DEMO_PATH) as beside:
                    write_phantom_cases(beside, n_cases=DEMO_CASES, seed=0)
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


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, wrapped: Sequence[str] = ()
) -> None:
    """Print rows of cells under their headings; numbers are right-aligned.

    On a terminal the table is fitted to its width; elsewhere no cell is cut or wrapped.

    Args:
        columns: Headings.
        rows: Cells of each row.
        wrapped: Headings of columns of sentences, which are wrapped instead of cut on a terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, heading in enumerate(columns):
        is_number = any(isinstance(row[place], int | float) for row in cells)
        table.add_column(
            heading, justify="right" if is_number else "left", no_wrap=heading not in wrapped
        )
    for row in cells:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    console.print(table)


def _start_of(path: Path) -> str:
    """Return the text of a file, cut off where it is too long to be accepted."""
    from brats_seg.config_text import LONGEST_YAML

    # it may be a pipe of the shell, as in --config <(command)
    with path.open(encoding="utf-8") as file:
        return file.read(LONGEST_YAML + 1)


def holds_scans(folder: Path) -> bool:
    """Return whether a folder holds anything besides the page that comes with it."""
    return folder.is_dir() and any(path.name != "README.md" for path in folder.iterdir())
