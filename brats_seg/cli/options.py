"""Define options that several commands share, and turn flags into settings.

A command that reads settings is given `--preset`, `--config`, `--set` and the short forms of
`presets.SHORT` by `shared`, and asks for the result with `given_settings` or `run_settings`. Every command
is given `--json` in the same way, and passes its result to `emit`.
"""

import gc
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from brats_seg.errors import UsageError, unknown_name
from brats_seg.files import alone_at, table_beside, whole_folder
from brats_seg.presets import GPU_NAMES, KINDS, NETWORKS, PRESETS, SHORT, ConventionName

if TYPE_CHECKING:
    from brats_seg.config import Config
    from brats_seg.runtime.device import Gpu

DEMO_CASES = 12
"""Number of phantom cases in the demo."""
DEFAULT_PATH = Path("data")
"""Default folder of scans."""
DEMO_PATH = Path("prepared/demo-scans")
"""Folder of the phantom cases of the demo."""


_CONTEXT: ContextVar[typer.Context] = ContextVar("context")
"""Command that is running, with its options; with `--json`, its `obj` is the standard output."""


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Return a function that completes an option to one of the given values."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


_TABLE = table_beside(__file__)
ABOUT: dict[str, dict[str, Any]] = _TABLE["options"]
"""Help, flags and values of every argument and option by the name of its parameter."""
_VALUES: dict[str, Sequence[str]] = {
    **{name: about["values"] for name, about in ABOUT.items() if "values" in about},
    "preset": tuple(PRESETS),
    "network": NETWORKS,
    "device": ("auto", "cpu", "cuda", "mps", *GPU_NAMES),
    "convention": get_args(ConventionName),
    "kind": KINDS,
}
"""Values that the shell completes, and that there are."""
_OPEN = ("network", "modality", "atlas")
"""Options that take other values too."""
_ANY_CASE = ("device", "task")
"""Options whose values may be in capitals or not, and have a number after a colon, as `cuda:1`."""
_N_DEVICES = 4
"""Number of devices that any command takes; the others are GPUs that `plan` takes."""


def _check(context: typer.Context) -> None:
    """Raise `UsageError` if a path that is read does not exist, or a value is none of those there are."""
    for parameter in context.command.params:
        flag, value = parameter.opts[-1], context.params[str(parameter.name)]
        # a short form of a setting has the name of the setting
        name = parameter.name if parameter.name in ABOUT else flag.removeprefix("--")
        about, values = ABOUT.get(name, {}), _VALUES.get(name, ())
        if name == "device" and context.info_name != "plan":
            values = values[:_N_DEVICES]
        for item in value if isinstance(value, list | tuple) else [value]:
            if about.get("is_read") and item is not None:
                is_empty = item.is_dir() and not any(item.iterdir())
                may_be_empty = context.info_name == "doctor" or context.params.get("watch")
                if not item.exists() or (is_empty and not may_be_empty):
                    wrong = "is an empty folder" if is_empty else "does not exist"
                    msg = f"{item} {wrong}; expected {flag}: {about['help'].partition('. ')[0]}"
                    raise UsageError(msg)
            # a network may be a dotted name, an atlas a file, and a modality have an older name
            if not values or item is None or name in _OPEN:
                continue
            kind = item.partition(":")[0].lower() if name in _ANY_CASE else item
            is_memory = name == "device" and item[:1].isdigit()
            if kind not in {*values, *map(str.lower, values)} and not is_memory:
                raise UsageError(unknown_name(f"{flag} {item!r}", item, values))


def _annotated(parameter: Parameter, arguments: Sequence[str] = ()) -> Parameter:
    """Return a parameter of a command as one that typer shows with its flags, help and values."""
    name = parameter.name
    about, values = ABOUT[name], _VALUES.get(name, ())
    options: dict[str, Any] = {
        "help": about["help"].format(values=", ".join(values)),
        "autocompletion": one_of(*values) if values else None,
    }
    if name in arguments:
        info: object = typer.Argument(**options)
    else:
        flags = about.get("flags", (f"--{name.replace('_', '-')}",))
        options |= {key: about[key] for key in ("metavar", "min", "max") if key in about}
        info = typer.Option(*flags, **options)
    return parameter.replace(annotation=Annotated[parameter.annotation, info])


def _short_option(flag: str) -> Parameter:
    key, text = SHORT[flag]
    values = _VALUES.get(flag.removeprefix("--"))
    about = typer.Option(
        flag,
        rich_help_panel="Short forms of settings",
        autocompletion=one_of(*values) if values else None,
        help=f"{text} ({key}).",
    )
    kind, default = (bool, False) if flag == "--skip-bad" else (str | None, None)
    return _keyword(key.replace(".", "_"), Annotated[kind, about], default)


def _keyword(name: str, kind: Any, default: object = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


_SETTINGS_OPTIONS = (
    _annotated(_keyword("preset", str | None)),
    _annotated(_keyword("config", Path | None)),
    _annotated(_keyword("assignments", list[str] | None)),
    *map(_short_option, SHORT),
)
_JSON_OPTION = _annotated(_keyword("as_json", bool, default=False))


def shared(command: Callable[..., int | None], *, with_settings: bool) -> Callable[..., None]:
    """Return a command with `--json`, and with the options of settings if it reads them.

    A command returns its exit code; None is 0.
    """
    options = (*(_SETTINGS_OPTIONS if with_settings else ()), _JSON_OPTION)
    parameters = signature(command).parameters

    @wraps(command)
    def run(context: typer.Context, **given: Any) -> None:
        # releases of typer before 0.29 keep paths as text there
        context.params.update(given)
        context.obj = sys.stdout if given["as_json"] else None
        _CONTEXT.set(context)
        try:
            # standard output is for the result
            with redirect_stdout(sys.stderr) if context.obj else nullcontext():
                # before torch is imported
                _check(context)
                if with_settings:
                    given_settings()
                code = command(**{name: given[name] for name in parameters})
        # typer would end it without a word
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 128 + signal.SIGINT
        raise typer.Exit(code or 0)

    context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    arguments = _TABLE["arguments"].get(command.__name__, ())
    shown = [_annotated(parameter, arguments) for parameter in parameters.values()]
    run.__signature__ = Signature([context, *shown, *options])  # type: ignore[attr-defined]
    return run


def emit(value: object = None, **extra: object) -> None:
    """Print the result of the command, or a line of it, as JSON if `--json` is given.

    Its fields are those in `json_output.OUTPUTS`; `extra` has those that the value lacks, and those that
    replace fields of the value.
    """
    context = _CONTEXT.get()
    if context.obj is not None and _is_first_process():
        from brats_seg.cli.json_output import json_text

        print(json_text(str(context.info_name), value, extra), file=context.obj, flush=True)


class _PlainFlags:
    """Commands whose help shows no type beside a flag that takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_PlainFlags, TyperCommand):
    """A command."""


class Commands(_PlainFlags, TyperGroup):
    """All commands."""


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the log where standard output is at that moment: above a progress bar."""

    def __init__(self) -> None:
        # not that of `StreamHandler`, which would set the stream
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard output, or with `--json`, or where it is closed, standard error."""
        return sys.stdout or sys.stderr


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


def short_forms(*ignored: str) -> dict[str, Any]:
    """Return the values of the settings that short forms give, besides some keys.

    That of `--effective-batch` may be a mapping in YAML.
    """
    from brats_seg.config import parse_yaml

    given = _CONTEXT.get().params
    values = ((flag, key, given[key.replace(".", "_")]) for flag, (key, _) in SHORT.items())
    return {
        key: parse_yaml(value, flag) if str(value).startswith("{") else value
        for flag, key, value in values
        # a switch that is not given is False
        if value not in (None, False) and key not in ignored
    }


def has_settings(*ignored: str) -> bool:
    """Return whether the command line gives settings, besides the short forms of some keys."""
    given = _CONTEXT.get().params
    return bool(given["preset"] or given["config"] or given["assignments"] or short_forms(*ignored))


def given_settings(*, default_preset: str | None = None, without: str = "") -> "Config":
    """Return the settings; flags override `--set`, which overrides the file, then the preset.

    The short form of the setting `without` is not applied.
    """
    from brats_seg.config import load_config, read_yaml

    context = _CONTEXT.get()
    given = context.params
    if given["config"] and "text" not in context.meta:
        # a pipe of the shell is empty when it is read again
        context.meta["text"] = read_yaml(given["config"])
    return load_config(
        preset=given["preset"] or default_preset,
        text=context.meta.get("text", ""),
        assignments=given["assignments"] or (),
        values=short_forms(without),
    )


def run_settings(
    *, run_paths: Sequence[Path] = (), gpu: "Gpu | None" = None, default_preset: str | None = None
) -> "Config":
    """Return the settings of a run, which are chosen where neither a preset nor a file is given.

    Then they are those of the first of the runs that was begun already, and otherwise those that suit
    the device, or a GPU that is planned for; why is printed.
    """
    given = _CONTEXT.get().params
    without = "" if gpu is None else "training.device"
    if given["preset"] or given["config"] or default_preset:
        config = given_settings(default_preset=default_preset, without=without)
    else:
        with importing():
            from brats_seg.training.memory_plan import choose_settings

        chosen = choose_settings(
            assignments=given["assignments"] or (),
            values=short_forms(without),
            run_paths=run_paths,
            gpu=gpu,
        )
        if _is_first_process():
            print(chosen.reason)
        config = chosen.config
    epochs, hours = given["training_n_epochs"], config.training.hours
    if epochs and hours:
        # those of a file, or of the run, would make the epochs count for nothing
        msg = f"--epochs {epochs} and training.hours {hours:g} are given; expected one of them"
        raise UsageError(msg)
    return config


def _is_first_process() -> bool:
    """Return whether this process prints: the first of those that `torchrun` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def data_or_demo(data: Path | None) -> tuple[Path, str | None]:
    """Return the folder of scans, and the default preset: those of the demo if there are no scans."""
    if data is not None or holds_scans(DEFAULT_PATH):
        return data or DEFAULT_PATH, None
    print(f"no --data, and nothing under {DEFAULT_PATH}/: training on {DEMO_CASES} phantom cases")
    from brats_seg.cases.phantom import write_phantom_cases

    with alone_at(DEMO_PATH, wait=True):
        if not DEMO_PATH.exists():
            with whole_folder(DEMO_PATH) as folder:
                write_phantom_cases(folder, n_cases=DEMO_CASES, seed=0)
    return DEMO_PATH, "demo"


def prepared_path(data: Path | None, prepared: Path | None) -> Path:
    """Return the folder of prepared cases that `train` uses with the same flags."""
    from brats_seg.data.fold import prepared_path_of

    if data is None:
        data = DEFAULT_PATH if prepared_path_of(DEFAULT_PATH).exists() else DEMO_PATH
    return prepared or prepared_path_of(data)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, wrapped: Sequence[str] = ()
) -> None:
    """Print rows of cells under their headings; numbers are right-aligned.

    On a terminal the table is fitted to its width: columns of sentences are wrapped, the others cut.
    Elsewhere no cell is cut or wrapped.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, heading in enumerate(columns):
        table.add_column(heading, no_wrap=heading not in wrapped)
        if any(isinstance(row[index], int | float) for row in cells):
            table.columns[index].justify = "right"
    for row in cells:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=10_000)).print(table)


def print_failures(messages: Sequence[str]) -> int:
    """Print what failed, and return the exit code of the command."""
    for message in messages:
        print(f"FAILED  {message}")
    return int(bool(messages))


def holds_scans(folder: Path) -> bool:
    """Return whether a folder holds anything besides the page that comes with it."""
    return folder.is_dir() and any(path.name != "README.md" for path in folder.iterdir())
