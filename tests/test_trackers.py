"""Test what trackers are sent; MLflow and W&B only where they are installed."""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from brats_seg.config import Config, TrackingConfig
from brats_seg.errors import EnvironmentalError
from brats_seg.training.history import IDS_NAME, check_trackers, recorded
from tests.builders import Run

ROWS: tuple[Mapping[str, float], ...] = (
    {"epoch": 1, "step": 4, "lr": 0.01, "train_loss": 1.5, "seconds": 1, "peak_memory_mb": 700.0},
    {"epoch": 2, "step": 8, "lr": 0.01, "train_loss": 1.0, "val_dice": 0.5, "val_dice_et": 0.25},
)


def config_of(*names: str) -> Config:
    return Config(tracking=TrackingConfig.model_validate({"to": names}))


def track(config: Config, run_path: Path, rows: tuple[Mapping[str, float], ...]) -> None:
    run_path.mkdir(exist_ok=True)
    history: list[Mapping[str, float]] = []
    with recorded(config, run_path, history) as send:
        for row in rows:
            history.append(row)
            send(row)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves in the event files of a folder: epochs and values by name."""
    from tensorboardX.proto.event_pb2 import Event

    curves: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        place = 0
        while place < len(content):
            # length, its check sum of four bytes, the event, and its check sum
            length = int.from_bytes(content[place : place + 8], "little")
            event = Event.FromString(content[place + 12 : place + 12 + length])
            place += 16 + length
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    track(Config(), tmp_path, ROWS)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.csv", "history.png"]


def test_tensorboard_gets_every_value_by_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")

    track(config_of("tensorboard"), tmp_path, ROWS)

    curves = events(tmp_path / "tensorboard")
    assert curves["train/loss"] == [(1, 1.5), (2, 1.0)]
    assert curves["val/dice_et"] == [(2, 0.25)]
    assert curves["peak_memory_mb"] == [(1, 700.0)]
    assert "step" not in curves


def test_a_training_is_tracked_and_continues_its_curves(
    brats_root: Path, tmp_path: Path, run: Run
) -> None:
    pytest.importorskip("tensorboardX")
    tiny = ("--preset", "demo", "--patch", "16,16,16", "--set", "model.widths=4,8")
    command = ("train", "--data", brats_root, *tiny, "--set", "tracking.to=tensorboard")
    command += ("--set", "schedule.name=constant")

    assert run(*command, "--epochs", "1")[0] == 0
    assert run(*command, "--epochs", "2")[0] == 0

    curves = events(tmp_path / "runs/fold0/tensorboard")
    assert [epoch for epoch, _ in curves["train/loss"]] == [1, 2]


# its database library warns of itself
@pytest.mark.filterwarnings("default")
def test_mlflow_continues_the_run_of_an_interrupted_training(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
    pytest.importorskip("sqlalchemy")
    path = tmp_path / "fold0"

    for row in ROWS:
        track(config_of("mlflow"), path, (row,))

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("brats_seg").experiment_id])
    assert found.info.run_name == "fold0"
    assert found.info.status == "FINISHED"
    assert found.data.params["training.n_epochs"] == "100"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.5), (2, 1.0)]


def test_wandb_writes_offline_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)

    for row in ROWS:
        track(config_of("wandb"), tmp_path, (row,))

    run_id = json.loads((tmp_path / IDS_NAME).read_text())["wandb"]
    found = [path for path in (tmp_path / "wandb").rglob("*.wandb") if not path.is_symlink()]
    assert found
    assert {path.name for path in found} == {f"run-{run_id}.wandb"}
    assert b"train/loss" in b"".join(path.read_bytes() for path in found)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_ends_the_command_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("brats_seg.training.history.find_spec", lambda module: None)

    with pytest.raises(EnvironmentalError, match=rf"pip install 'brats_seg\[{name}\]'"):
        check_trackers(TrackingConfig.model_validate({"to": (name,)}))
    code, _, errors = run("train", "--data", "nowhere", "--set", f"tracking.to={name}")
    assert code == 3
    assert "is not installed" in errors


def test_a_tracker_that_cannot_write_ends_the_command_before_training(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").write_text("in the way")

    with (
        pytest.raises(
            EnvironmentalError, match="tensorboard cannot be written: NotADirectoryError"
        ),
        recorded(config_of("tensorboard"), tmp_path, []),
    ):
        pass


def test_a_tracker_that_fails_later_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Writer:
        def __init__(self, logdir: str, filename_suffix: str) -> None:
            pass

        def add_text(self, name: str, text: str) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int) -> None:
            msg = "no space"
            raise OSError(msg)

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr("brats_seg.training.history.find_spec", lambda module: module)

    with caplog.at_level(logging.WARNING, "brats_seg"):
        track(config_of("tensorboard"), tmp_path, ROWS)

    assert caplog.text.count("tensorboard failed and gets no more values (OSError: no space)") == 1
