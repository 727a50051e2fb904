"""Command line: flags become settings, settings go into one call of a function of the package.

This is the only package that prints and sets exit codes. Modules that need torch or pandas are
imported inside the command that needs them, so that `--help` is fast.
"""

import logging
import signal
import sys
from io import TextIOWrapper

import typer

from brats_seg.cli import crossval, evaluation, figure, prediction, scans, survival, training
from brats_seg.errors import BratsError, EnvironmentalError, printable

app = typer.Typer(
    name="brats-seg",
    help="Train and use brain-tumour segmentation. Research use only.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in (
    scans.index,
    scans.prepare,
    training.plan,
    training.train,
    training.certify,
    crossval.tune,
    crossval.crossval,
    prediction.predict,
    prediction.export,
    prediction.reconstruct,
    evaluation.evaluate,
    survival.features,
    survival.survival,
    scans.phantom,
):
    app.command()(command)
app.add_typer(figure.app, name="figure")


def main() -> None:
    """Run the command line; an error of the package ends it with a message and its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        # file names need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    log = logging.getLogger("brats_seg")
    log.handlers = [logging.StreamHandler(sys.stdout)]
    log.setLevel(logging.INFO)
    try:
        app()
    except BratsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # of a file or folder whose name the user gave: too long, not allowed, on a broken disk
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(EnvironmentalError.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
