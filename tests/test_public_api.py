"""What a user can import and call from outside."""

import os
import re
import subprocess
import sys
from importlib.resources import files

import pytest
from typer.testing import CliRunner

import brats_seg
from brats_seg.cli import COMMANDS as GROUPS
from brats_seg.cli import app
from tests.builders import ROOT, start
from tests.test_layering import FLOORS

COMMANDS = [command.__name__ for commands in GROUPS.values() for command in commands]


def test_all_names_what_can_be_imported_with_its_types() -> None:
    assert len(brats_seg.__all__) > 40
    for name in brats_seg.__all__:
        assert getattr(brats_seg, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = brats_seg.Trainr
    assert (files("brats_seg") / "py.typed").is_file()


def test_a_user_without_a_name_can_work_as_in_docker_run_with_user() -> None:
    """MONAI and torch ask for the name when they are imported."""
    program = "import pwd, getpass; pwd.getpwuid = {}.__getitem__; %s; getpass.getuser()"
    for first, error in (("import brats_seg", False), ("pass", True)):
        done = start([sys.executable, "-c", program % first], ROOT, {})
        assert ("KeyError" in done.stderr, bool(done.returncode)) == (error, error), done.stderr


def test_help_of_every_command_comes_at_once() -> None:
    """Importing torch and MONAI takes seconds, and numpy a tenth of one."""
    program = (
        "import sys; from brats_seg.cli import app\n"
        f"for command in {[[], *([command] for command in COMMANDS)]!r}:\n"
        "    app([*command, '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'monai', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = start([sys.executable, "-c", program], ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == 1 + len(COMMANDS)


def test_commands_are_listed_in_groups_and_the_version_is_printed() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    places = [shown.index(f"─ {group} ─") for group in ("Data", "Train", "Use", "Look")]
    assert places == sorted(places)
    assert CliRunner().invoke(app, ["--version"]).output == f"brats-seg {brats_seg.__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("tr", "train"), ("doct", "doctor"), ("train --preset kag", "kaggle-t4")],
)
def test_the_shell_completes_commands_and_values(words: str, expected: str) -> None:
    asked = {"_BRATS_SEG_COMPLETE": "complete_bash", "COMP_WORDS": f"brats-seg {words}"}
    asked["COMP_CWORD"] = str(len(words.split()))
    program = "import sys; sys.argv[0] = 'brats-seg'; from brats_seg.cli import app; app()"
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True).stdout
    assert shown.split() == [expected]


def test_the_tree_of_folders_in_contributing_is_true() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (tree,) = re.findall(r"```\n(brats_seg/ .*?)```", page, re.DOTALL)
    rows = [(line.split()[0], line.startswith(" ")) for line in tree.splitlines()]
    folders = [name for name, is_inner in rows if not is_inner]
    inner = {name for name, is_inner in rows[: rows.index(("tests/", False))] if is_inner}
    assert all((ROOT / name).is_dir() for name in folders)
    package = ROOT / "brats_seg"
    found = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    found |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")} | {"__init__.pyi"}
    assert inner == found
    floors = dict(re.findall(r"^  (\w+)\S* +(\d) ", tree, re.MULTILINE))
    assert floors
    assert {name: FLOORS[name] for name in floors} == {name: int(n) for name, n in floors.items()}
