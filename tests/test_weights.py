"""Test the entries of a checkpoint that prediction reads."""

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from brats_seg.config import Config, TaskName
from brats_seg.config_text import load_config
from brats_seg.errors import ConfigError, ResumeError, UsageError
from brats_seg.runtime.weights import (
    Decoding,
    FittedPrediction,
    ModelIdentity,
    TrainedModel,
    load_trained,
    read_trained,
    require_task,
    store_fitted,
)
from brats_seg.training.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from brats_seg.training.state import Position

CHECKPOINT = Checkpoint(
    model={"weight": torch.arange(300.0)},
    identity=ModelIdentity(conventions=("brats2017",), patch=(8, 8, 8), fingerprint="f"),
    config=Config().model_dump(mode="json"),
    position=Position(),
)


def test_weights_identity_and_settings_are_read(tmp_path: Path) -> None:
    save_checkpoint(CHECKPOINT, tmp_path / "best.pt")

    trained = load_trained(tmp_path / "best.pt")

    assert torch.equal(trained.weights["weight"], torch.arange(300.0))
    assert trained.identity == CHECKPOINT.identity
    assert trained.config == Config()


def test_averaged_weights_are_taken_where_the_run_kept_them(tmp_path: Path) -> None:
    network = nn.Linear(2, 1)
    averaged = AveragedModel(network)
    averaged.update_parameters(network)
    with torch.no_grad():
        averaged.module.weight.fill_(7)
    checkpoint = replace(CHECKPOINT, model=network.state_dict(), ema=averaged.state_dict())
    save_checkpoint(checkpoint, tmp_path / "last.pt")

    trained = load_trained(tmp_path / "last.pt")

    assert trained.weights.keys() == network.state_dict().keys()
    assert bool((trained.weights["weight"] == 7).all())


def test_fitted_settings_are_stored_and_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    save_checkpoint(CHECKPOINT, path)
    before = torch.load(path, weights_only=True)

    fitted = FittedPrediction(decoding=Decoding(thresholds=(0.4, 0.5, 0.6)))
    store_fitted(path, fitted)

    after = torch.load(path, weights_only=True)
    assert load_trained(path).fitted == fitted
    assert torch.equal(after.pop("model")["weight"], before.pop("model")["weight"])
    del after["prediction"]
    assert before == after
    assert [entry.name for entry in tmp_path.iterdir()] == ["best.pt"]
    assert load_checkpoint(path, torch.device("cpu")).identity == CHECKPOINT.identity


@pytest.mark.parametrize("place", [0.2, 0.5, 0.7, 0.9])
def test_a_flipped_byte_is_found(tmp_path: Path, place: float) -> None:
    """Torch itself loads such weights without an error."""
    path = tmp_path / "best.pt"
    save_checkpoint(CHECKPOINT, path)
    content = bytearray(path.read_bytes())
    start = content.index(torch.arange(300.0).numpy().tobytes())
    content[start + int(1200 * place)] ^= 1
    path.write_bytes(content)

    assert not torch.equal(torch.load(path)["model"]["weight"], torch.arange(300.0))
    with pytest.raises(ResumeError, match=r"best\.pt is not a checkpoint .* is damaged"):
        load_trained(path)


def test_a_setting_of_another_version_is_named(tmp_path: Path) -> None:
    save_checkpoint(replace(CHECKPOINT, config={"model": {"depth": 7}}), tmp_path / "best.pt")

    with pytest.raises(ConfigError, match=r"setting model\.depth is unknown"):
        load_trained(tmp_path / "best.pt")


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("autoencoder", "segmentation", r"run: found a reconstruction run.* gives no label maps"),
        (
            "unet",
            "reconstruction",
            r"run: found a segmentation run, model\.name 'unet'; expected a",
        ),
    ],
)
def test_a_run_of_another_task_is_refused(name: str, asked: TaskName, message: str) -> None:
    config = load_config(assignments=[f"model.name={name}"])
    trained = TrainedModel(weights={}, identity=CHECKPOINT.identity, config=config)

    require_task(trained, config.model.task, Path("run"))
    with pytest.raises(UsageError, match=message):
        require_task(trained, asked, Path("run"))


def changed(tmp_path: Path, **entries: object) -> Path:
    """Write a checkpoint with other entries."""
    path = tmp_path / "best.pt"
    save_checkpoint(CHECKPOINT, path)
    torch.save({**torch.load(path, weights_only=True), **entries}, path)
    return path


def nested(n_levels: int, n_values: int) -> list:
    """Return lists of references to one list: few bytes, and any number of values."""
    value: list = ["x"] * n_values
    for _ in range(n_levels):
        value = [value] * n_values
    return value


IDENTITY = {"conventions": ("brats2017",), "patch": (8, 8, 8), "fingerprint": "f"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"prediction": {"decoding": {"thresholds": (float("nan"), 0.5, 0.5)}}},
            r"thresholds\.0: .*finite",
        ),
        (
            {"prediction": {"decoding": {"thresholds": (-0.1, 0.5, 0.5)}}},
            r"thresholds\.0: .*greater than 0",
        ),
        (
            {"prediction": {"decoding": {"thresholds": (0.5, 0.5, 1.0)}}},
            r"thresholds\.2: .*less than 1",
        ),
        (
            {"prediction": {"decoding": {"smallest_et_mm3": float("inf")}}},
            "smallest_et_mm3: .*finite",
        ),
        (
            {"identity": {**IDENTITY, "thresholds": (2.0, 0.5, 0.5)}},
            r"thresholds\.0: .*less than 1",
        ),
        ({"identity": {**IDENTITY, "patch": (10**9, 8, 8)}}, r"patch\.0: .*equal to 1024"),
        (
            {"identity": {**IDENTITY, "spacing_mm": (0.0, 1.0, 1.0)}},
            r"spacing_mm\.0: .*equal to 0\.01",
        ),
        ({"identity": {**IDENTITY, "spacing_mm": (float("nan"),) * 3}}, r"spacing_mm\.0: .*finite"),
        ({"identity": {**IDENTITY, "other": 1}}, "other: Unexpected"),
        ({"identity": 7}, "not iterable"),
        ({"model": [1]}, "found list in place of the weights"),
        ({"model": {"weight": "text"}}, "the weight 'weight' is no tensor"),
        (
            {"model": {"weight": torch.zeros(1).expand(10**6, 10**6)}},
            "more values than the file holds",
        ),
        ({"ema": {"module.weight": 7}}, "is no tensor"),
        ({"history": nested(9, 9)}, "it has too many values"),
        ({"history": nested(40, 1)}, "nested too deeply"),
    ],
)
def test_entries_that_are_absurd_are_refused_with_a_next_step(
    tmp_path: Path, entries: dict[str, object], message: str
) -> None:
    path = changed(tmp_path, **entries)

    with pytest.raises(UsageError, match=rf"best\.pt .*{message}.* Copy the file again; .*--fresh"):
        load_trained(path)


def test_a_compressed_checkpoint_is_not_unpacked(tmp_path: Path) -> None:
    path = changed(tmp_path, model={"weight": torch.zeros(100_000)})
    with zipfile.ZipFile(path) as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries.items():
            packed.writestr(name, content)

    with pytest.raises(ResumeError, match="its entries are compressed or overlap"):
        load_trained(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_checkpoint(tmp_path: Path, make) -> None:
    make(tmp_path / "last.pt")

    with pytest.raises(ResumeError, match=r"can be read: it is a .*\. Copy .*--fresh"):
        load_trained(tmp_path / "last.pt")


def test_a_name_that_is_too_long_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        read_trained(tmp_path / ("n" * 300))
