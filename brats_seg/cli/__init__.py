"""Command line: flags become settings, settings go into one call of a function of the package.

This is the only package that prints and sets exit codes. Modules that need torch or pandas are
imported inside the command that needs them, so that `--help` is fast.
"""

import errno
import logging
import os
import sys
from collections.abc import Callable
from inspect import cleandoc
from io import TextIOWrapper
from typing import Annotated

import typer

from brats_seg.cli import data, look, train, use
from brats_seg.cli.options import Command, Commands, LogHandler, shared
from brats_seg.errors import MORE_MEMORY, BratsError, EnvironmentalError, UsageError, printable
from brats_seg.files import check_current_folder
from brats_seg.progress import close_display

_OUTPUT_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE})
"""Errors of a file or a pipe that the output is written to."""
COMMANDS: dict[str, tuple[Callable[..., int | None], ...]] = {
    "Data": (data.index, data.prepare, data.convert, data.phantom, data.doctor),
    "Train": (
        *(train.plan, train.train, train.settings),
        *(train.certify, train.tune, train.crossval),
    ),
    "Use": (use.predict, use.fuse, use.export, use.features, use.survival),
    "Look": (look.evaluate, look.figure, look.report, look.reconstruct),
}
"""Commands in the groups and the order of the help."""
READ_SETTINGS = {
    *(data.index, data.prepare, data.doctor),
    *(train.plan, train.train, train.settings, train.certify, train.crossval),
}
"""Commands with the options of settings."""


_TRUST_CODE = typer.Option(metavar="NAME", help="Run this code if a model asks for it; repeatable.")


def _general_options(
    context: typer.Context,
    trust_code: Annotated[list[str] | None, _TRUST_CODE] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train and use brain-tumour segmentation. Research use only."""
    if version:
        from brats_seg import __version__

        print(f"brats-seg {__version__}")
        raise typer.Exit
    if trust_code:
        from brats_seg.presets import trusting

        context.with_resource(trusting(*trust_code))


def _app() -> typer.Typer:
    app = typer.Typer(
        name="brats-seg",
        cls=Commands,
        callback=_general_options,
        # for --version
        invoke_without_command=True,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        # lines of a paragraph are joined and fitted to the terminal
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    for panel, commands in COMMANDS.items():
        for command in commands:
            about, _, examples = cleandoc(command.__doc__ or "").partition("\n\nExamples:\n")
            # each example is a paragraph, because lines of one paragraph are joined
            epilog = "\n\n".join(["Examples:", *examples.splitlines()])
            add = app.command(cls=Command, rich_help_panel=panel, help=about, epilog=epilog)
            add(shared(command, with_settings=command in READ_SETTINGS))
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
            if "" in sys.argv[1:]:
                # as a path, it would be the current folder
                msg = "an argument is empty, as a variable of the shell that is not set; expected a value"
                raise UsageError(msg)
            app()
        finally:
            # a message must not be mixed with a progress bar, nor leave the cursor hidden
            close_display()
            # standard output may be closed
            print(end="", flush=True)
    except BratsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except MemoryError:
        print(f"error: memory ran out. {MORE_MEMORY}", file=sys.stderr)
        sys.exit(EnvironmentalError.exit_code)
    except OSError as error:
        if error.filename is None and error.errno in _OUTPUT_FAILS:
            # Python flushes once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"error: the output of the command is lost: {error.strerror}", file=sys.stderr)
        else:
            # of a file or folder whose name the user gave: too long, not allowed, on a broken disk
            print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(EnvironmentalError.exit_code)
