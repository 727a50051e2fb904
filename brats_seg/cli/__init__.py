"""Command line: flags become settings, settings go into one call of a function of the package.

This is the only package that prints and sets exit codes. Modules that need torch or pandas are
imported inside the command that needs them, so that `--help` is fast.
"""

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated

import typer

from brats_seg.cli import (
    crossval,
    doctor,
    evaluation,
    figure,
    prediction,
    report,
    scans,
    survival,
    training,
)
from brats_seg.cli.options import Command, Commands, LogHandler
from brats_seg.errors import BratsError, EnvironmentalError, printable
from brats_seg.files import check_current_folder
from brats_seg.progress import close_display

_OUTPUT_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE})
"""Errors of a file or a pipe that the output is written to."""
_DATA, _TRAIN, _USE, _LOOK = "Data", "Train", "Use", "Look"
_COMMANDS: tuple[tuple[str, Callable[..., None], tuple[str, ...]], ...] = (
    (_DATA, scans.index, ("data", "data -o cases.csv --labels brats2017")),
    (_DATA, scans.prepare, ("data", "data --preset kaggle-t4 --set store.compressed=true")),
    (_DATA, scans.convert, ("dicom -o scans", "dicom -o scans --series t1c=5 --series t2f=FLAIR")),
    (_DATA, scans.phantom, ("scans --cases 6",)),
    (_TRAIN, training.plan, ("", "--device t4 --precision fp16", "--memory 15GiB --preset full")),
    (
        _TRAIN,
        training.train,
        (
            "--data data --fold 0 --preset kaggle-t4 --max-hours 11.5",
            "--data data --set optimizer.lr=1e-3 --set loss.batch_dice=true --run runs/batch-dice",
        ),
    ),
    (_TRAIN, training.settings, ("", "training", "--preset kaggle-t4")),
    (_TRAIN, training.certify, ("--run runs/fold0", "--preset demo --set loss.batch_dice=true")),
    (_TRAIN, crossval.tune, ("runs/fold0 runs/fold1 runs/fold2 --data data",)),
    (_TRAIN, crossval.crossval, ("--data data --preset kaggle-t4", "--data data --folds 0,1")),
    (
        _USE,
        prediction.predict,
        (
            "scans -o predictions --model runs/fold0",
            "dicom -o predictions --model model --series t1c=5",
            "--t1n a.nii.gz --t1c b.nii.gz --t2w c.nii.gz --t2f d.nii.gz -o out --model model",
        ),
    ),
    (_USE, prediction.export, ("runs/fold0 runs/fold1 -o model --license CC-BY-4.0",)),
    (_USE, survival.features, ("data -o features.csv", "data --autoencoder runs/autoencoder")),
    (_USE, survival.survival, ("features.csv --table survival_data.csv",)),
    (
        _LOOK,
        evaluation.evaluate,
        (
            "data predictions --protocol lesionwise2023",
            "data predictions --only-predicted",
            "data --compare predictions/first predictions/second -o tests.csv",
        ),
    ),
    (
        _LOOK,
        report.report,
        (
            "predictions --reference data",
            "data --prediction predictions --case BraTS2021_00000",
            "runs/fold0 --data data",
        ),
    ),
    (
        _LOOK,
        figure.figure,
        (
            "montage data --prediction predictions -o case.png",
            "scores scores.csv -o scores.png",
            "history runs/fold0 -o history.png",
        ),
    ),
    (_LOOK, doctor.doctor, ("", "data --json")),
    (_LOOK, prediction.reconstruct, ("runs/autoencoder data -o reconstructions",)),
)
"""Groups of commands in the order of the help, with the arguments of the examples of each."""


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
    for panel, command, arguments in _COMMANDS:
        epilog = _examples(command.__name__, arguments)
        app.command(cls=Command, rich_help_panel=panel, epilog=epilog)(command)
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
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
