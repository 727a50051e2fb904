"""Define options that several commands share, and turn flags into settings.

A command that reads settings is given `--preset`, `--config`, `--set` and the short forms of
`presets.SHORT` by `shared`, and asks for the result with `settings` or `run_settings`. Every command
is given `--json` in the same way, and passes its result to `emit`.
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
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from brats_seg.errors import ConfigError
from brats_seg.files import alone_at, whole_folder
from brats_seg.presets import GPU_NAMES, NETWORKS, PRESETS, SHORT, ConventionName

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
DICOM_PANEL = "DICOM"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """Settings that the command line gives."""

    preset: str | None = None
    config: Path | None = None
    assignments: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Values of short forms by their keys."""


_GIVEN: ContextVar[_Given] = ContextVar("given")
_OUTPUT: ContextVar[tuple[str, TextIO] | None] = ContextVar("output", default=None)
"""Name of the command and its standard output, where `--json` is given."""


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Return a function that completes an option to one of the given values."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


COMPLETE_CONVENTION = one_of(*get_args(ConventionName))
_COMPLETE_DEVICE = one_of("auto", "cpu", "cuda", "mps", *GPU_NAMES)
_COMPLETE_PRECISION = one_of("auto", "fp32", "fp16", "bf16")
_COMPLETE = {
    "--network": one_of(*NETWORKS),
    "--device": _COMPLETE_DEVICE,
    "--precision": _COMPLETE_PRECISION,
    "--labels": COMPLETE_CONVENTION,
}

DataArgument = Annotated[
    Path,
    typer.Argument(help="Folder of scans of any layout, or a .csv or .json table of their paths."),
]
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
ModelOption = Annotated[
    list[Path],
    typer.Option(
        "--model",
        help="Run, checkpoint or exported folder; several are averaged. Or one model of nnU-Net v2 or "
        "MONAI bundle.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option(autocompletion=_COMPLETE_DEVICE, help=f"{SHORT['--device'][1]}.")
]
PrecisionOption = Annotated[
    str, typer.Option(autocompletion=_COMPLETE_PRECISION, help=f"{SHORT['--precision'][1]}.")
]
LabelsOption = Annotated[
    str | None,
    typer.Option(
        autocompletion=COMPLETE_CONVENTION,
        help=f"{SHORT['--labels'][1]}. (default: the detected one)",
    ),
]
ClinicalOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Table of ages, survival or ids, besides those among the scans; may be repeated."
    ),
]
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
SessionHoursOption = Annotated[
    float | None,
    typer.Option(min=0, help="Hours of this session; the same command resumes."),
]
SeriesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--series",
        metavar="MODALITY=SERIES",
        rich_help_panel=DICOM_PANEL,
        help="DICOM series of a modality: its number, or a part of its description; may be repeated.",
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


def _option(name: str, kind: Any, default: Any, *flags: str, **options: Any) -> Parameter:
    annotation = Annotated[kind, typer.Option(*flags, **options)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _short_option(flag: str) -> Parameter:
    key, text = SHORT[flag]
    is_switch = flag == "--skip-bad"
    return _option(
        key.replace(".", "_"),
        bool if is_switch else str | None,
        False if is_switch else None,
        flag,
        rich_help_panel="Short forms of settings",
        autocompletion=_COMPLETE.get(flag),
        help=f"{text} ({key}).",
    )


_SETTINGS_OPTIONS = (
    _option(
        "preset",
        str | None,
        None,
        rich_help_panel=SETTINGS_PANEL,
        autocompletion=one_of(*PRESETS),
        help=f"Settings to start from: {', '.join(PRESETS)}. (default: what suits the device)",
    ),
    _option(
        "config",
        Path | None,
        None,
        rich_help_panel=SETTINGS_PANEL,
        help="YAML file with settings, applied over the preset.",
    ),
    _option(
        "assignments",
        list[str] | None,
        None,
        "--set",
        metavar="KEY=VALUE",
        rich_help_panel=SETTINGS_PANEL,
        help="One setting; may be repeated. `brats-seg settings` lists the keys.",
    ),
    *map(_short_option, SHORT),
)
_JSON_OPTION = _option(
    "as_json",
    bool,
    False,
    "--json",
    help="Print the result as JSON, for programs; messages go to standard error.",
)


def shared(command: Callable[..., None], *, with_settings: bool) -> Callable[..., None]:
    """Return a command with `--json`, and with the options of settings if it reads them."""
    options = (*(_SETTINGS_OPTIONS if with_settings else ()), _JSON_OPTION)
    names = {option.name for option in options}

    @wraps(command)
    def run(**given: Any) -> None:
        own = {name: value for name, value in given.items() if name not in names}
        if with_settings:
            _GIVEN.set(_settings_given(given))
        with _result_alone(command.__name__, wanted=given["as_json"]):
            command(**own)

    parameters = [*signature(command).parameters.values(), *options]
    run.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
        parameters=[option.replace(kind=Parameter.KEYWORD_ONLY) for option in parameters]
    )
    return run


def _settings_given(options: dict[str, Any]) -> _Given:
    values = {key: options[key.replace(".", "_")] for key, _ in SHORT.values()}
    return _Given(
        preset=options["preset"],
        config=options["config"],
        assignments=options["assignments"] or [],
        # a switch that is not given is False
        values={key: value for key, value in values.items() if value not in (None, False)},
    )


@contextmanager
def _result_alone(command: str, *, wanted: bool) -> Iterator[None]:
    """With `--json`, keep standard output for the result, and print all else to standard error."""
    token = _OUTPUT.set((command, sys.stdout) if wanted else None)
    try:
        if wanted:
            with redirect_stdout(sys.stderr):
                yield
        else:
            yield
    finally:
        _OUTPUT.reset(token)


def emit(value: object = None, **fields: object) -> None:
    """Print the result of the command, or a line of it, as JSON if `--json` is given.

    Args:
        value: The result, where it is a single value.
        fields: The parts of the result otherwise.
    """
    output = _OUTPUT.get()
    if output is not None:
        from brats_seg.cli.json_output import json_text

        command, stream = output
        print(json_text(command, fields if value is None else value), file=stream, flush=True)


class Command(TyperCommand):
    """Command whose help shows no type beside a flag that takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_flag_types(super().get_params(ctx))


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
        return _without_flag_types(super().get_params(ctx))


def _without_flag_types(parameters: list[Any]) -> list[Any]:
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


def command_again() -> str:
    """Return the command that is running, as it would be typed again."""
    program = "brats-seg" if Path(sys.argv[0]).name != "__main__.py" else "python -m brats_seg"
    return f"{program} {shlex.join(sys.argv[1:])}"


def given_value(key: str) -> str | None:
    """Return the value that the short form of a setting was given, as text."""
    return _GIVEN.get().values.get(key)


def has_settings(*ignored: str) -> bool:
    """Return whether the command line gives settings, besides the short forms of some keys."""
    given = _GIVEN.get()
    is_plain = given.preset is None and given.config is None and not given.assignments
    return not is_plain or bool(given.values.keys() - set(ignored))


def settings(*, default_preset: str | None = None, without: str = "") -> "Config":
    """Return the settings; flags override `--set`, which overrides the file, then the preset.

    Args:
        default_preset: Preset to take if none is given.
        without: Key of a setting whose short form is not applied.
    """
    given = _GIVEN.get()
    text = "" if given.config is None else _settings_text(given.config)
    from brats_seg.config_text import load_config

    return load_config(
        preset=given.preset or default_preset,
        text=text,
        assignments=given.assignments,
        values=_values(given, without),
    )


def run_settings(
    *,
    run_paths: Sequence[Path] = (),
    gpu: "Gpu | None" = None,
    default_preset: str | None = None,
) -> "Config":
    """Return the settings of a run, which are chosen where neither a preset nor a file is given.

    Then they are those of the first of the runs that was begun already, and otherwise those that suit
    the device, or a GPU that is planned for; why is printed.
    """
    given = _GIVEN.get()
    without = "" if gpu is None else "training.device"
    if given.preset or given.config or default_preset:
        return settings(default_preset=default_preset, without=without)
    with importing():
        from brats_seg.training.memory_plan import choose_settings

    chosen = choose_settings(
        assignments=given.assignments,
        values=_values(given, without),
        run_paths=run_paths,
        gpu=gpu,
    )
    # of several processes under torchrun the first one prints
    if os.environ.get("RANK", "0") == "0":
        print(chosen.reason)
    return chosen.config


def _values(given: _Given, without: str) -> dict[str, Any]:
    """Return the values of the short forms; the one of `--effective-batch` may be a mapping in YAML."""
    from brats_seg.config_text import parse_yaml

    flags = {key: flag for flag, (key, _) in SHORT.items()}
    return {
        key: parse_yaml(value, flags[key]) if str(value).startswith("{") else value
        for key, value in given.values.items()
        if key != without
    }


def _settings_text(path: Path) -> str:
    """Return the text of a file of settings, cut off where it is too long to be accepted."""
    from brats_seg.config_text import LONGEST_YAML

    try:
        # it may be a pipe of the shell, as in --config <(command)
        with path.open(encoding="utf-8") as file:
            return file.read(LONGEST_YAML + 1)
    except OSError as error:
        msg = f"the configuration file {path} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        msg = f"the configuration file {path} is not a text file: {error.reason} at byte {error.start}"
    raise ConfigError(msg)


def data_or_demo(data: Path | None) -> tuple[Path, str | None]:
    """Return the folder of scans, and the default preset: those of the demo if there are no scans."""
    if data is not None:
        return data, None
    if holds_scans(DEFAULT_PATH):
        return DEFAULT_PATH, None
    print(f"no --data, and nothing under {DEFAULT_PATH}/: training on {DEMO_CASES} phantom cases")
    if not DEMO_PATH.exists():
        from brats_seg.cases.phantom import write_phantom_cases

        with alone_at(DEMO_PATH, wait=True):
            if not DEMO_PATH.exists():
                with whole_folder(DEMO_PATH) as beside:
                    write_phantom_cases(beside, n_cases=DEMO_CASES, seed=0)
    return DEMO_PATH, "demo"


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
    for index, heading in enumerate(columns):
        is_number = any(isinstance(row[index], int | float) for row in cells)
        table.add_column(
            heading, justify="right" if is_number else "left", no_wrap=heading not in wrapped
        )
    for row in cells:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    console.print(table)


def holds_scans(folder: Path) -> bool:
    """Return whether a folder holds anything besides the page that comes with it."""
    return folder.is_dir() and any(path.name != "README.md" for path in folder.iterdir())
