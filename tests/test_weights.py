"""Test the entries of a checkpoint that prediction reads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from brats_seg.config import Config, TaskName, load_config
from brats_seg.errors import ConfigError, ResumeError, UsageError
from brats_seg.runtime.weights import (
    NOT_FITTED,
    Decoding,
    FittedPrediction,
    ModelIdentity,
    TrainedModel,
    load_trained,
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

    fitted = FittedPrediction(window="whole", decoding=Decoding(thresholds=(0.4, 0.5, 0.6)))
    store_fitted(path, fitted)

    after = torch.load(path, weights_only=True)
    assert load_trained(path).fitted == fitted
    assert torch.equal(after.pop("model")["weight"], before.pop("model")["weight"])
    del after["prediction"]
    assert before == after
    assert [entry.name for entry in tmp_path.iterdir()] == ["best.pt"]
    assert load_checkpoint(path, torch.device("cpu")).identity == CHECKPOINT.identity


@pytest.mark.parametrize(
    ("stored", "fitted"),
    [
        ({}, NOT_FITTED),
        (
            {"window": (16, 8, 8), "thresholds": (0.4, 0.5, 0.6), "smallest_et_mm3": 25.0},
            FittedPrediction(
                window=(16, 8, 8),
                decoding=Decoding(thresholds=(0.4, 0.5, 0.6), smallest_et_mm3=25.0),
            ),
        ),
    ],
)
def test_a_checkpoint_of_before_keeps_fitted_settings_in_its_identity(
    tmp_path: Path, stored: dict, fitted: FittedPrediction
) -> None:
    path = tmp_path / "best.pt"
    save_checkpoint(CHECKPOINT, path)
    content = torch.load(path, weights_only=True)
    defaults = {
        "thresholds": (0.5, 0.5, 0.5),
        "smallest_mm3": (0.0, 0.0, 0.0),
        "smallest_et_mm3": 0.0,
        "window": None,
    }
    content["identity"] |= {**defaults, **stored}
    torch.save(content, path)

    trained = load_trained(path)

    assert trained.identity == CHECKPOINT.identity
    assert trained.fitted == fitted
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
