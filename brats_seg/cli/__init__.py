"""Command line: flags become settings, settings go into one call of a function of the package.

This is the only package that prints and sets exit codes. Modules that need torch or pandas are
imported inside the command that needs them, so that `--help` is fast.
"""

import errno
import logging
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated

import typer

from brats_seg.cli import data, evaluate, look, predict, survival, train
from brats_seg.cli.options import Command, Commands, LogHandler, shared
from brats_seg.errors import BratsError, EnvironmentalError, printable
from brats_seg.files import check_current_folder
from brats_seg.progress import close_display

_OUTPUT_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE})
"""Errors of a file or a pipe that the output is written to."""
_COMMANDS: dict[str, dict[Callable[..., None], tuple[str, ...]]] = {
    "Data": {
        data.index: ("data", "data -o cases.csv --labels brats2017"),
        data.prepare: ("data", "data --preset kaggle-t4 --skip-bad"),
        data.convert: ("dicom -o scans", "dicom -o scans --series t1c=5 --series t2f=FLAIR"),
        data.phantom: ("scans --number 6",),
        data.doctor: ("", "data --json"),
    },
    "Train": {
        train.plan: ("", "--device t4 --precision fp16", "--device 15GiB --preset full"),
        train.train: (
            "--data data --fold 0 --preset kaggle-t4 --session-hours 11.5",
            "--data data --set optimizer.lr=1e-3 --set loss.batch_dice=true --run runs/batch-dice",
        ),
        train.settings: ("", "training", "--preset kaggle-t4"),
        train.certify: ("--run runs/fold0", "--preset demo --set loss.batch_dice=true"),
        train.tune: ("runs/fold0 runs/fold1 runs/fold2 --data data",),
        train.crossval: ("--data data --preset kaggle-t4", "--data data --folds 0,1"),
    },
    "Use": {
        predict.predict: (
            "scans -o predictions --model runs/fold0",
            "dicom -o predictions --model model --series t1c=5",
            "--t1n a.nii.gz --t1c b.nii.gz --t2w c.nii.gz --t2f d.nii.gz -o out --model model",
        ),
        predict.export: ("runs/fold0 runs/fold1 -o model --license CC-BY-4.0",),
        survival.features: ("data -o features.csv", "data --autoencoder runs/autoencoder"),
        survival.survival: ("features.csv --clinical survival_data.csv",),
    },
    "Look": {
        evaluate.evaluate: (
            "data predictions --protocol lesionwise2023",
            "data predictions --only-predicted",
            "data --compare predictions/first predictions/second -o tests.csv",
        ),
        look.figure: (
            "preview data --prediction predictions -o preview.png",
            "scores scores.csv -o scores.png",
        ),
        look.report: (
            "predictions --reference data",
            "data --prediction predictions --case BraTS2021_00000",
            "runs/fold0 --data data",
        ),
        predict.reconstruct: ("runs/autoencoder data -o reconstructions",),
    },
}
"""Commands in the groups and the order of the help, with the arguments of the examples of each."""
_READ_SETTINGS = {
    *(data.index, data.prepare, data.doctor),
    *(train.plan, train.train, train.settings, train.certify, train.crossval),
}
"""Commands with the options of settings."""


def _examples(name: str, arguments: tuple[str, ...]) -> str:
    # each example is a paragraph, because lines of one paragraph are joined
    return "\n\n".join(
        ["Examples:", *(f"    brats-seg {name} {line}".rstrip() for line in arguments)]
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        from brats_seg import __version__

        print(f"brats-seg {__version__}")
        raise typer.Exit


def _general_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train and use brain-tumour segmentation. Research use only."""


def _app() -> typer.Typer:
    app = typer.Typer(
        name="brats-seg",
        cls=Commands,
        callback=_general_options,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        # lines of a paragraph are joined and fitted to the terminal
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    for panel, commands in _COMMANDS.items():
        for command, arguments in commands.items():
            epilog = _examples(command.__name__, arguments)
            add = app.command(cls=Command, rich_help_panel=panel, epilog=epilog)
            add(shared(command, with_settings=command in _READ_SETTINGS))
    return app


app = _app()


def main() -> None:
    """Run the command line; an error of the package ends it with a message and its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        # file names need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    log = logging.getLogger("brats_seg")
    log.handlers = [LogHandler()]
    log.setLevel(logging.INFO)
    try:
        try:
            check_current_folder()
            app()
        finally:
            # a message must not be mixed with a progress bar, nor leave the cursor hidden
            close_display()
            sys.stdout.flush()
    except BratsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno in _OUTPUT_FAILS:
            # Python flushes once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"error: the output of the command is lost: {error.strerror}", file=sys.stderr)
        else:
            # of a file or folder whose name the user gave: too long, not allowed, on a broken disk
            print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(EnvironmentalError.exit_code)
