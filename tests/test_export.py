"""Test that an exported model predicts as its runs do, and that damaged ones are refused."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.files import alone_at
from brats_seg.inference.export import export_model
from brats_seg.inference.model import load_model
from brats_seg.runtime.weights import Decoding, FittedPrediction
from tests.builders import limited_files
from tests.inference_builders import CPU, write_run


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Export two networks with their own settings to one folder."""
    decoding = Decoding(thresholds=(0.4, 0.5, 0.6))
    runs = [
        write_run(tmp_path / f"run{n}", seed=n, fitted=FittedPrediction(decoding=decoding))
        for n in range(2)
    ]
    export_model(runs, tmp_path / "model")
    return tmp_path / "model"


def test_an_exported_model_is_its_runs(exported: Path) -> None:
    runs = [exported.parent / "run0", exported.parent / "run1"]

    model, original = load_model([exported], CPU), load_model(runs, CPU)

    assert model.fingerprint == original.fingerprint
    assert model.identity == original.identity
    assert model.decoding == original.decoding == Decoding(thresholds=(0.4, 0.5, 0.6))
    for one, other in zip(model.members, original.members, strict=True):
        assert (one.name, one.window, one.multiple) == (other.name, other.window, other.multiple)
        for name, value in one.network.state_dict().items():
            assert torch.equal(value, other.network.state_dict()[name])


def test_it_holds_weights_tables_and_a_card_and_no_pickle(exported: Path) -> None:
    description = json.loads((exported / "model.json").read_text())
    card = (exported / "README.md").read_text()

    assert sorted(path.name for path in exported.iterdir()) == [
        "README.md",
        "card.json",
        "member0.safetensors",
        "member1.safetensors",
        "model.json",
    ]
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1
    assert description["labels"]["brats2017"]["meanings"] == {"1": "NCR/NET", "2": "ED", "4": "ET"}
    assert "Research use only." in card
    assert description["fingerprint"] in card
    assert "| ET | enhancing tumour | 0.6 | 0 |" in card


def test_it_can_be_exported_again(exported: Path, tmp_path: Path) -> None:
    fingerprint = export_model([exported], tmp_path / "again").fingerprint

    assert load_model([tmp_path / "again"], CPU).fingerprint == fingerprint
    assert fingerprint == load_model([exported], CPU).fingerprint


@pytest.mark.parametrize("place", [3, 1000, -1])
def test_a_flipped_byte_of_the_weights_is_found(exported: Path, place: int) -> None:
    path = exported / "member1.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)

    with pytest.raises(UsageError, match=r"member1\.safetensors is damaged: found the check sum"):
        load_model([exported], CPU)


def test_a_changed_setting_is_found(exported: Path) -> None:
    """A threshold was edited, or damaged on disk."""
    path = exported / "model.json"
    path.write_text(path.read_text().replace("0.6", "0.7"))

    with pytest.raises(UsageError, match=r"model\.json is not what was exported: found finger"):
        load_model([exported], CPU)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"members"', '"member"', r"model\.json cannot be read as a model"),
        ("{", "[", r"model\.json cannot be read as a model"),
        ('"format_version": 2', '"format_version": 3', "found format version 3; expected 2"),
        (
            "member0.safetensors",
            "member9.safetensors",
            r"member9\.safetensors is damaged.*No such",
        ),
    ],
)
def test_a_description_that_is_damaged_is_refused(
    exported: Path, old: str, new: str, message: str
) -> None:
    path = exported / "model.json"
    path.write_text(path.read_text().replace(old, new, 1))

    with pytest.raises(UsageError, match=message):
        load_model([exported], CPU)


def test_every_flipped_bit_of_the_description_is_found_or_changes_nothing(exported: Path) -> None:
    path = exported / "model.json"
    content = path.read_bytes()
    fingerprint = load_model([exported], CPU).fingerprint
    n_found = 0

    for place in range(0, len(content), 97):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        try:
            assert load_model([exported], CPU).fingerprint == fingerprint
        except UsageError:
            n_found += 1

    assert n_found > 10


def test_a_file_outside_of_the_folder_is_not_read(exported: Path) -> None:
    path = exported / "model.json"
    path.write_text(path.read_text().replace("member0.safetensors", "../run0/best.pt"))

    with pytest.raises(UsageError, match=r"model/best\.pt is damaged"):
        load_model([exported], CPU)


def test_a_folder_that_holds_something_is_left_alone(exported: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        export_model([exported.parent / "run0"], exported)


def test_a_place_that_cannot_be_written_to_is_said(exported: Path) -> None:
    with pytest.raises(EnvironmentalError, match="cannot be written"):
        export_model([exported], exported / "README.md" / "model")


def test_reading_it_imports_no_pickled_code(exported: Path) -> None:
    program = (
        "import sys, pickle\n"
        "def refuse(*a, **k): raise AssertionError('pickle was used')\n"
        "import torch; from pathlib import Path\n"
        "from brats_seg.inference.model import read_trained\n"
        "torch.load = pickle.load = pickle.loads = refuse\n"
        f"print(len(read_trained(Path({str(exported)!r}))))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.stdout.strip() == "2", done.stderr


def test_a_setting_that_a_later_version_adds_does_not_make_the_model_another(
    exported: Path,
) -> None:
    """Such a file lacks the setting: the default was in force when it was written."""
    path = exported / "model.json"
    description = json.loads(path.read_text())
    for member in description["members"]:
        # as if this version had added these
        del member["card"]["fitted"]["decoding"]["smallest_mm3"]
        del member["card"]["config"]["model"]["name"]
    path.write_text(json.dumps(description))

    assert len(load_model([exported], CPU).members) == 2


def test_a_run_that_was_not_tuned_is_exported_without_fitted_settings(tmp_path: Path) -> None:
    export_model([write_run(tmp_path / "run")], tmp_path / "model")

    (member,) = json.loads((tmp_path / "model" / "model.json").read_text())["members"]

    assert member["card"]["fitted"] == FittedPrediction().model_dump(mode="json")
    assert load_model([tmp_path / "model"], CPU).decoding == Decoding()


def test_an_export_that_does_not_fit_leaves_nothing_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    runs = [write_run(tmp_path / f"run{n}", seed=n) for n in range(2)]
    model = tmp_path / "model"

    with (
        limited_files(2000),
        pytest.raises(EnvironmentalError, match=r"member0.safetensors could not be .*ulimit -f"),
    ):
        export_model(runs, model)

    assert not model.exists()
    assert len(export_model(runs, model).networks) == 2


@pytest.mark.parametrize("name", ["README.md", "notes.txt", "model.json"])
def test_a_folder_with_other_files_is_not_exported_to(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("mine")

    with pytest.raises(UsageError, match="exists already"):
        export_model([write_run(tmp_path / "run")], tmp_path / "model")

    assert (tmp_path / "model" / name).read_text() == "mine"


def test_two_processes_do_not_export_to_one_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")

    with (
        alone_at(tmp_path / "model"),
        pytest.raises(UsageError, match=r"another process is writing .*model"),
    ):
        export_model([run], tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(members=d["members"] * 4000), "at most 64 items"),
        (lambda d: d.update(members=[]), "at least 1 item"),
        (
            lambda d: d["members"][0]["card"]["identity"].update(patch=[10**9] * 3),
            "less than or equal to 1024",
        ),
        (lambda d: d["members"][0]["card"]["identity"].update(spacing_mm=[-1, 1, 1]), "spacing_mm"),
        (
            lambda d: d["members"][0]["card"]["config"]["model"].update(widths=[10**9]),
            "equal to 4096",
        ),
        (lambda d: d["members"][0].update(weights="n" * 300), "File name too long"),
        (lambda d: d["members"][0].update(weights="a\0b"), "null byte"),
        (
            lambda d: d["members"][0]["card"].update(
                fitted={"decoding": {"thresholds": [-1, 0.5, 0.5]}}
            ),
            "greater than 0",
        ),
        (
            lambda d: d["members"][0]["card"].update(
                fitted={"decoding": {"thresholds": [math.nan] * 3}}
            ),
            "finite",
        ),
    ],
)
def test_a_description_with_absurd_numbers_is_refused(
    exported: Path, change: Callable[[dict], None], message: str
) -> None:
    path = exported / "model.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))

    with pytest.raises(UsageError, match=rf"{message}.* Copy or export the model again"):
        load_model([exported], CPU)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"", bytes(range(256)), b"[1]", b"{}"],
)
def test_a_description_that_is_no_description_is_refused(exported: Path, content: bytes) -> None:
    (exported / "model.json").write_bytes(content)

    with pytest.raises(UsageError, match=r"model\.json cannot be read as a model: "):
        load_model([exported], CPU)


def test_a_description_that_is_a_named_pipe_is_not_opened(exported: Path) -> None:
    (exported / "model.json").unlink()
    os.mkfifo(exported / "model.json")

    with pytest.raises(UsageError, match="it is a named pipe"):
        load_model([exported], CPU)
