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

from brats_seg.files import alone_at, whole_folder
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


_CONVENTIONS: tuple[str, ...] = get_args(ConventionName)
_VALUES: dict[str, Sequence[str]] = {
    "preset": tuple(PRESETS),
    "network": NETWORKS,
    "device": ("auto", "cpu", "cuda", "mps", *GPU_NAMES),
    "precision": ("auto", "fp32", "fp16", "bf16"),
    "labels": _CONVENTIONS,
    "protocol": ("legacy", "lesionwise2023", "lesionwise2024"),
    "task": ("GLI", "SSA", "MEN", "MET", "PED"),
    "layout": ("plain", "bids"),
    "modality": ("t1n", "t1c", "t2w", "t2f"),
    "kind": KINDS,
}
"""Values that the shell completes."""
_ARGUMENTS = {
    "scans": "Folder of scans of any layout, or a .csv or .json table of their paths.",
    "inputs": "Folders of scans of any layout or of DICOM files, or .csv or .json tables of paths.",
    "dicom": "Folder with DICOM files of MR examinations.",
    "folder": "Folder to write to.",
    "section": "Part of the keys to list, such as training or loss.",
    "trained": "Runs, such as the folds of one data set; for `export` also checkpoints or models.",
    "autoencoder_run": "Run with model.name autoencoder.",
    "features": "Table that `features` wrote.",
    "references": "References: a folder of CASE.nii.gz or of case folders, or one label map.",
    "predictions": "Predictions in the same form, in any label convention.",
    "kind": f"Kind: {', '.join(KINDS)}.",
    "source": "Folder of scans; for scores and bars the table of `evaluate`; for history a run.",
    "results": "Folders that `predict` wrote, or of scans, or tables of paths; or runs.",
}
_OPTIONS = {
    "output": "File or folder to write to.",
    # scans and prepared cases
    "data": "Folder of scans, or a table of their paths. (default: data/, or phantom cases)",
    "prepared": "Folder of prepared cases. (default: NAME-prepared beside the data folder NAME)",
    "labels": f"Label convention: {', '.join(_CONVENTIONS)}. (default: the detected one)",
    "verify": "Only compare prepared cases with their check sums.",
    "repair": "Also prepare cases again that are damaged.",
    "number": "Number of cases.",
    "seed": "The same seed gives the same cases.",
    "series": "DICOM series of a modality: its number, or a part of its description; repeatable.",
    "identifiers": "Keep the patient's name and number in DICOM segmentations and names of folders.",
    "preprocess": "Register, resample to 1 mm and skull-strip DICOM scans, by greedy and HD-BET.",
    # training
    "fold": "Index of the fold that is held out.",
    "folds": "Folds to hold out. (default: all)",
    "run": "Run folder; use -r under torchrun. (default of train: runs/foldN)",
    "runs": "Folder of the runs fold0, fold1, ...",
    "session_hours": "Hours of this session; the same command resumes.",
    "fresh": "Rename an earlier run and start anew.",
    "patches": "Number of patches in the batch, each a micro-batch.",
    "device": f"{SHORT['--device'][1]}.",
    "precision": f"{SHORT['--precision'][1]}.",
    # prediction
    "model": "Run, checkpoint or exported folder, several are averaged; or one of nnU-Net or MONAI.",
    **dict.fromkeys(("t1n", "t1c", "t2w", "t2f"), "One case by its files."),
    "case": "Id of a case. (default: all; of a figure the first)",
    "tta": "Average over 8 mirror images.",
    "window": "Voxels of a window, or whole for one pass. (default: the window that tune chose)",
    "probabilities": "Write probability maps too.",
    "uncertainty": "Write a map of the entropy too.",
    "report": "Write a page of each case too: reports/CASE.html, for any browser.",
    "layout": "Names of the files: plain (CASE.nii.gz) or bids (a BIDS derivative).",
    "changes": "One setting: overlap, thresholds, smallest_mm3, smallest_et_mm3 or preview.",
    "workers": "Processes (dask) to distribute the cases to, or the address of a dask cluster.",
    "license_name": "Licence of the weights, for the model card.",
    "name_cases": "Name the cases in the model card, or count them. (default: named if public)",
    "file_format": "safetensors alone, or a MONAI bundle or ONNX files beside them.",
    # scores and survival
    "protocol": "Scoring protocol: legacy, lesionwise2023 or lesionwise2024.",
    "task": "Challenge task of the lesion-wise parameters: GLI, SSA, MEN, MET or PED.",
    "compare": "Compare two sets of predictions, case by case.",
    "only_predicted": "Leave out references without a prediction.",
    "autoencoder": "Run of an autoencoder, for latent vectors.",
    "predict_all": "Ignore reference label maps and predict all cases.",
    "clinical": "Table of ages, survival or ids (name_mapping.csv); repeatable.",
    "fold_table": "Fold table to use, such as folds-5-seed55.csv. (default: new folds)",
    "repeats": "Number of cross-validations to average.",
    "submit": "Table of the cases to submit, such as survival_evaluation.csv. (default: all)",
    # figures and pages
    "prediction": "Predictions: a folder that `predict` wrote, or a label map.",
    "reference": "Label maps to compare with. (default: those beside the scans)",
    "column": "Score to draw: a column of the table. (default: dice)",
    "modality": "Modality of a montage: t1n, t1c, t2w or t2f. (default: t2f)",
    "scores": "Table of `evaluate` for the page of all predictions, instead of --reference.",
    "no_case_pages": "Write the page of all predictions alone.",
    # settings and output
    "preset": f"Settings to start from: {', '.join(PRESETS)}. (default: what suits the device)",
    "config": "YAML file with settings, applied over the preset.",
    "assignments": "One setting; repeatable. `brats-seg settings` lists the keys.",
    "as_json": "Print the result as JSON, for programs; messages go to standard error.",
}
"""Help of every option by the name of its parameter: an option means the same in all commands."""
_FLAGS = {
    "output": ("-o", "--output"),
    # torchrun under Python 3.11 takes --run for an abbreviation of its own options
    "run": ("-r", "--run"),
    "changes": ("--set",),
    "assignments": ("--set",),
    "license_name": ("--license",),
    "name_cases": ("--name-cases/--count-cases",),
    "file_format": ("--format",),
    "as_json": ("--json",),
}
_METAVARS = {
    **dict.fromkeys(("changes", "assignments"), "KEY=VALUE"),
    "series": "MODALITY=SERIES",
    "folds": "0,1,...",
    "window": "X,Y,Z",
    "workers": "N",
    "compare": "A B",
}
_LEAST = {"fold": 0, "session_hours": 0, "number": 1, "repeats": 1, "patches": 2}


def _annotated(parameter: Parameter) -> Parameter:
    """Return a parameter of a command as one that typer shows with its flags, help and values."""
    name, values = parameter.name, _VALUES.get(parameter.name)
    options: dict[str, Any] = {"autocompletion": one_of(*values)} if values else {}
    if name in _ARGUMENTS:
        about: object = typer.Argument(help=_ARGUMENTS[name], **options)
    else:
        about = typer.Option(
            *_FLAGS.get(name, (f"--{name.replace('_', '-')}",)),
            help=_OPTIONS[name],
            metavar=_METAVARS.get(name),
            min=_LEAST.get(name),
            **options,
        )
    return parameter.replace(annotation=Annotated[parameter.annotation, about])


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


def shared(command: Callable[..., None], *, with_settings: bool) -> Callable[..., None]:
    """Return a command with `--json`, and with the options of settings if it reads them."""
    options = (*(_SETTINGS_OPTIONS if with_settings else ()), _JSON_OPTION)
    own = signature(command).parameters

    @wraps(command)
    def run(context: typer.Context, **given: Any) -> None:
        _CONTEXT.set(context)
        is_json = given["as_json"]
        context.obj = sys.stdout if is_json else None
        try:
            # standard output is for the result
            with redirect_stdout(sys.stderr) if is_json else nullcontext():
                command(**{name: given[name] for name in own})
        # typer would end it without a word
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(128 + signal.SIGINT) from None

    context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    run.__signature__ = Signature([context, *map(_annotated, own.values()), *options])  # type: ignore[attr-defined]
    return run


def emit(value: object = None, **extra: object) -> None:
    """Print the result of the command, or a line of it, as JSON if `--json` is given.

    Printed are the fields in `json_output.OUTPUTS`; `extra` has those that the value has not, or that
    are printed instead of its own.
    """
    context = _CONTEXT.get()
    if context.obj is not None:
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
    value: str | None = _CONTEXT.get().params[key.replace(".", "_")]
    return value


def has_settings(*ignored: str) -> bool:
    """Return whether the command line gives settings, besides the short forms of some keys."""
    names = [key.replace(".", "_") for key, _ in SHORT.values() if key not in ignored]
    given = _CONTEXT.get().params
    return any(given[name] for name in ("preset", "config", "assignments", *names))


def given_settings(*, default_preset: str | None = None, without: str = "") -> "Config":
    """Return the settings; flags override `--set`, which overrides the file, then the preset.

    The short form of the setting `without` is not applied.
    """
    given = _CONTEXT.get().params
    from brats_seg.config_text import load_config, read_yaml

    text = "" if given["config"] is None else read_yaml(given["config"])
    return load_config(
        preset=given["preset"] or default_preset,
        text=text,
        assignments=given["assignments"] or (),
        values=_short_values(without),
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
    given = _CONTEXT.get().params
    without = "" if gpu is None else "training.device"
    if given["preset"] or given["config"] or default_preset:
        return given_settings(default_preset=default_preset, without=without)
    with importing():
        from brats_seg.training.memory_plan import choose_settings

    chosen = choose_settings(
        assignments=given["assignments"] or (),
        values=_short_values(without),
        run_paths=run_paths,
        gpu=gpu,
    )
    # of several processes under torchrun the first one prints
    if os.environ.get("RANK", "0") == "0":
        print(chosen.reason)
    return chosen.config


def _short_values(without: str) -> dict[str, Any]:
    """Return the values of the short forms; the one of `--effective-batch` may be a mapping in YAML."""
    from brats_seg.config_text import parse_yaml

    given = _CONTEXT.get().params
    values = ((flag, key, given[key.replace(".", "_")]) for flag, (key, _) in SHORT.items())
    return {
        key: parse_yaml(value, flag) if str(value).startswith("{") else value
        for flag, key, value in values
        # a switch that is not given is False
        if value not in (None, False) and key != without
    }


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
