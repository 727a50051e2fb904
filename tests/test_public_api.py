"""What a user can import and call from outside."""

import os
import resource
import shlex
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import brats_seg
from brats_seg.cli import _COMMANDS, app

EXAMPLES = [
    (command.__name__, arguments)
    for commands in _COMMANDS.values()
    for command, examples in commands.items()
    for arguments in examples
]

COMMANDS = [
    "index",
    "prepare",
    "plan",
    "train",
    "settings",
    "certify",
    "tune",
    "crossval",
    "predict",
    "export",
    "reconstruct",
    "evaluate",
    "features",
    "survival",
    "figure",
    "report",
    "phantom",
    "doctor",
]


def test_all_names_what_can_be_imported() -> None:
    assert len(brats_seg.__all__) > 40
    for name in brats_seg.__all__:
        assert getattr(brats_seg, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = brats_seg.Trainr


def test_types_are_shipped() -> None:
    assert (files("brats_seg") / "py.typed").is_file()


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)])
def test_help_comes_at_once(command: list[str]) -> None:
    """Importing torch and MONAI takes seconds, and numpy a tenth of one."""
    program = (
        "import sys; from brats_seg.cli import app; "
        f"app({[*command, '--help']!r}, standalone_mode=False); "
        "heavy = {'torch', 'monai', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def help_texts(command: Any) -> list[str]:
    """Return the help of every option of a command and of those below it."""
    own = [getattr(option, "help", None) or "" for option in command.params]
    below = getattr(command, "commands", {}).values()
    return own + [text for one in below for text in help_texts(one)]


def test_help_has_no_words_in_square_brackets() -> None:
    """They are taken for markup, and left out without a word."""
    texts = help_texts(typer.main.get_command(app))

    assert "Folds to hold out. (default: all)" in texts
    assert not [text for text in texts if "[" in text]


def test_help_has_no_words_in_angle_brackets() -> None:
    """They are taken for HTML, and left out as well."""
    texts = help_texts(typer.main.get_command(app))

    assert not [text for text in texts if "<" in text]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_no_type_beside_flags_and_an_example(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).output

    assert "<bool>" not in shown
    assert f"brats-seg {command}" in shown


@pytest.mark.parametrize(("command", "arguments"), EXAMPLES)
def test_the_options_of_every_example_exist(command: Any, arguments: str) -> None:
    group = typer.main.get_command(app)

    context = group.commands[command].make_context(command, shlex.split(arguments))

    assert context.params


def test_commands_are_listed_in_groups() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output

    places = [shown.index(f"─ {group} ─") for group in ("Data", "Train", "Use", "Look")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("tr", "train"), ("doct", "doctor"), ("train --preset kag", "kaggle-t4")],
)
def test_the_shell_completes_commands_and_values(words: str, expected: str) -> None:
    """As the script of `--install-completion` asks for them in bash."""
    asked = {"_BRATS_SEG_COMPLETE": "complete_bash", "COMP_WORDS": f"brats-seg {words}"}
    asked["COMP_CWORD"] = str(len(words.split()))
    program = "import sys; sys.argv[0] = 'brats-seg'; from brats_seg.cli import app; app()"

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.split() == [expected]


def test_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"brats-seg {brats_seg.__version__}\n"


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "brats_seg", "--help"], capture_output=True, text=True, check=True
    )

    assert all(command in done.stdout for command in COMMANDS)


def test_help_takes_less_than_half_a_second_of_the_processor() -> None:
    """Start of Python included; the best of three, because the first fills the disk's cache."""
    times_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "brats_seg", "--help"], capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert min(times_s) < 0.5
