"""Test that every command prints JSON alone with `--json`, and that the schema describes it."""

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer

from brats_seg.cli import app
from brats_seg.cli.json_output import OUTPUTS, json_text
from brats_seg.errors import UsageError
from tests.builders import Run, check_json

ROOT = Path(__file__).parent.parent
TINY = (
    "--set folds.n_folds=2 --set training.n_epochs=1 --set patch.size=8,8,8 --set model.widths=4,8 "
    "--set training.n_workers=0 --precision fp32"
)
FLOW = (
    "index data",
    "prepare data --prepared ready --set folds.n_folds=2",
    "prepare data --prepared ready --verify",
    "phantom few --number 1",
    "settings training --preset demo",
    f"train --data data --prepared ready {TINY}",
    "predict data -o out --model runs/fold0 --set preview=false",
    "evaluate data out",
    "export runs/fold0 -o model",
    "figure bars scores.csv -o bars.png",
    "doctor data",
)
"""One after another, from a folder of scans."""
SLOW_FLOW = (
    f"crossval --data data --prepared ready {TINY}",
    "tune runs/fold0 runs/fold1 --data data --prepared ready",
    "evaluate data crossval/predictions",
    "evaluate data --compare crossval/predictions crossval/predictions -o tests.csv",
    "features data",
    "certify --run runs/fold0 --prepared ready --patches 2",
    f"train --data data --prepared ready {TINY} --network autoencoder --run runs/ae --patch 16,16,16",
    "reconstruct runs/ae data",
)
ELSEWHERE = {
    "convert": "test_convert.py",
    "plan": "test_memory_plan.py",
    "survival": "test_survival.py",
    "report": "test_write.py",
}
"""Commands whose output is checked in other files, where their cases are."""


def run_all(flow: tuple[str, ...], run: Run) -> None:
    for line in flow:
        code, shown, errors = run(*shlex.split(line), "--json")

        assert code == 0, f"{line}\n{errors}"
        check_json(line.split()[0], shown)


def test_what_the_commands_print_is_what_the_schema_says(brats_root: Path, run: Run) -> None:
    run_all(FLOW, run)


@pytest.mark.slow
def test_what_the_longer_commands_print_is_what_the_schema_says(brats_root: Path, run: Run) -> None:
    run_all(SLOW_FLOW, run)


def test_every_command_has_the_option_and_a_schema() -> None:
    group: Any = typer.main.get_command(app)

    assert OUTPUTS.keys() == group.commands.keys()
    for command in group.commands.values():
        assert "--json" in [flag for option in command.params for flag in option.opts]


def test_every_command_is_run_by_these_tests() -> None:
    here = {line.split()[0] for line in FLOW + SLOW_FLOW}

    assert here | ELSEWHERE.keys() == OUTPUTS.keys()
    for name, file in ELSEWHERE.items():
        assert f'check_json("{name}"' in (ROOT / "tests" / file).read_text()


def test_a_value_that_the_schema_does_not_know_is_refused() -> None:
    """The test of the tests."""
    with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
        check_json("phantom", '{"path": "few", "more": 1}')


def test_numbers_that_are_not_finite_become_null() -> None:
    assert json_text("predict", {"value": float("nan")}) == '{"value": null}'


def test_a_name_that_is_not_utf8_can_be_printed() -> None:
    text = json_text("figure", {"path": Path("caf\udce9")})

    assert json.loads(text)["path"] == "caf\udce9"
    assert text.isascii()


def test_messages_and_errors_go_to_standard_error(tmp_path: Path, run: Run) -> None:
    code, shown, errors = run("index", "nowhere", "--json")

    assert (code, shown) == (UsageError.exit_code, "")
    assert "nowhere does not exist" in errors
