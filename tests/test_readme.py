"""Every command and every program of the README does what it says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from brats_seg.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TINY = [
    *("--set", "patch.size=[8, 8, 8]"),
    *("--set", "model.widths=[4, 8]"),
    *("--set", "training.n_epochs=1"),
]
QUICK = {
    "plan": [*TINY, "--memory", "700MiB"],
    "train": TINY,
    "crossval": TINY,
}
"""What makes a command of the README quick on tiny cases."""


def run_make(*arguments: str) -> list[str]:
    """Run make as from a shell, also when make itself runs the tests, and return what it shows."""
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=alone, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = [line for block in blocks("") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(program)]


def test_the_commands_run_in_their_order(brats_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(brats_root.parent)
    Path("scans").symlink_to("data")
    found = commands("brats-seg")
    assert len(found) == 12

    for command in found:
        monkeypatch.setattr(sys, "argv", [*command, *QUICK.get(command[1], [])])
        with pytest.raises(SystemExit) as ended:
            main()

        assert not ended.value.code, command


@pytest.mark.parametrize("program", blocks("python"))
def test_the_programs_run(brats_root: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.chdir(brats_root.parent)

    exec(compile(program, "README.md", "exec"), {})


def test_make_only_calls_the_command_line() -> None:
    found = commands("make")
    assert found == [["make", "train", "FOLD=0"], ["make", "test"]]

    shown = run_make(
        "-n",
        "train",
        "FOLD=3",
        "DATA=scans",
        "RUN=r",
        "PRESET=full",
        "MODEL=notebook",
        "ARGS=--fresh",
    )

    assert shown[-1].split() == [
        ".venv/bin/brats-seg",
        "train",
        "--fold",
        "3",
        "--data",
        "scans",
        "--run",
        "r",
        "--preset",
        "full",
        "--model",
        "notebook",
        "--fresh",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["--model", "runs/fold0"]),
        (["FOLD=2"], ["--model", "runs/fold2"]),
        (["RUN=a"], ["--model", "a"]),
        (["RUN=runs/fold0 runs/fold1"], ["--model", "runs/fold0", "--model", "runs/fold1"]),
    ],
)
def test_make_predicts_with_one_run_or_several(arguments: list[str], expected: list[str]) -> None:
    shown = run_make("-n", "predict", "IN=scans", *arguments)

    assert shown[-1].split() == [
        ".venv/bin/brats-seg",
        "predict",
        "scans",
        "-o",
        "predictions",
        *expected,
    ]


def test_make_cross_validates() -> None:
    shown = run_make("-n", "crossval", "DATA=scans", "PRESET=full", "ARGS=--folds 0,1")

    assert shown[-1].split() == [
        *(".venv/bin/brats-seg", "crossval", "--data", "scans"),
        *("--preset", "full", "--folds", "0,1"),
    ]


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)

    shown = run_make()

    assert [line.split()[0] for line in shown[:-1]] == phony.split()


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)

    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


@pytest.mark.slow
def test_the_first_command_trains_the_demo_well(tmp_path: Path) -> None:
    """What `make train FOLD=0` calls, with nothing under data/: twelve phantoms, Dice above 0.7."""
    done = subprocess.run(
        [sys.executable, "-m", "brats_seg", "train", "--fold", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "training on 12 phantom cases" in done.stdout
    (best,) = re.findall(r"best val_dice ([\d.]+)", done.stdout)
    assert float(best) > 0.7
