"""Test the history of a run: table, figure, line of the log, and what TensorBoard is sent."""

import logging
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from brats_seg.config import Config, TrackingConfig
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.figures.charts import LiveHistory, history_figure, read_history
from brats_seg.training import history

OVERLAP = {
    "loss": 1.0,
    "dice": 0.722,
    "jaccard": 0.5,
    **{f"{what}_{region}": 0.5 for region in ("wt", "tc", "et") for what in ("dice", "jaccard")},
    "empty_et": 1,
}
ERRORS = {"loss": 0.8, "rmse": 0.9, **{f"rmse_{m}": 0.9 for m in ("t1n", "t1c", "t2w", "t2f")}}


def row(epoch: int, *, validated: bool, scores: dict[str, float] = OVERLAP) -> dict[str, float]:
    return {
        "epoch": epoch,
        "step": epoch * 3,
        "lr": 0.1,
        "seconds": 1.0,
        "peak_memory_mb": 10.0,
        **history.phase_columns("train", scores),
        **(history.phase_columns("val", scores) if validated else {}),
    }


def test_history_csv_has_empty_cells_without_validation(tmp_path: Path) -> None:
    rows = [row(1, validated=False), row(2, validated=True)]
    history.write_history(rows, tmp_path)
    history.write_picture(rows, tmp_path)
    table = pd.read_csv(tmp_path / "history.csv")
    names = ["loss", "dice", "jaccard"]
    names += [f"{name}_{r}" for r in ("wt", "tc", "et") for name in ("dice", "jaccard")]
    assert list(table.columns) == [
        *("epoch", "step"),
        *(f"{phase}_{name}" for name in (*names, "empty_et") for phase in ("train", "val")),
        *("lr", "seconds", "peak_memory_mb"),
    ]
    assert table["val_dice"].isna().tolist() == [True, False]
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    for content in ("epoch\n", "", "epoch,train_loss,val_loss\nx,1,2\n"):
        (tmp_path / "history.csv").write_text(content)
        with pytest.raises(UsageError, match="holds no epochs"):
            read_history(tmp_path / "history.csv")
    with pytest.raises(UsageError, match="expected the folder of a run"):
        read_history(tmp_path / "absent")


PARTS = ["validation WT", "validation TC", "validation ET"]
# the names that radiologists use
ERROR_PARTS = ["validation T1", "validation T1c", "validation T2", "validation FLAIR"]


@pytest.mark.parametrize(
    ("validated", "scores", "entries"),
    [
        (False, OVERLAP, ["training"]),
        (True, OVERLAP, ["training", "validation", *PARTS]),
        (True, ERRORS, ["training", "validation", *ERROR_PARTS]),
    ],
)
def test_one_epoch_has_a_tick_and_entries_of_what_is_known(tmp_path, validated, scores, entries):
    history.write_history([row(1, validated=validated, scores=scores)], tmp_path)
    table = read_history(tmp_path)
    figure = history_figure(table)
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == entries
    assert [tick for tick in figure.axes[-1].get_xticks() if 0.1 < tick < 1.9] == [1]
    assert {line.get_marker() for line in figure.axes[1].lines} == {"."}
    assert figure.axes[0].lines[0].get_ydata().tolist() == [scores["loss"]]
    if scores is ERRORS:
        assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "RMSE in the brain"]
        assert list(table.columns)[4:6] == ["train_rmse", "val_rmse"]
        assert not [column for column in table if "dice" in column or "jaccard" in column]


def test_a_column_that_a_history_lacks_is_not_drawn() -> None:
    values = {"epoch": 1, "train_loss": 2.0, "val_loss": 3.0, "train_dice": 0.5, "lr": 3e-4}
    figure = history_figure(pd.DataFrame([values]), with_rate=True)
    assert [len(axes.lines) for axes in figure.axes] == [2, 1, 1]
    FigureCanvasAgg(figure).draw()
    assert all(axes.yaxis.label.get_window_extent().x0 > 0 for axes in figure.axes)


def test_the_picture_follows_the_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[bytes] = []

    def display(picture: bytes, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        pictures.append(picture)
        return SimpleNamespace(update=pictures.append)

    notebook = SimpleNamespace(Image=lambda data: data, display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=notebook))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    live, path = LiveHistory(run_path=tmp_path), tmp_path / "history.png"
    assert list(live([1, 2], what="epoch 1", total=2)) == [1, 2]
    assert pictures == []
    found = []
    for epoch in range(3):
        found += live(range(2), what=f"epoch {epoch}", total=2)
        path.write_bytes(b"%d" % epoch)
        os.utime(path, ns=(epoch, epoch + 1))
        live(range(2), what="validation", total=2)
    live.show()
    assert found == [0, 1] * 3
    assert pictures == [b"0", b"1", b"2"]


ROWS: tuple[Mapping[str, float], ...] = (
    {"epoch": 1, "step": 4, "lr": 0.01, "train_loss": 1.5, "seconds": 1, "peak_memory_mb": 700.0},
    {"epoch": 2, "step": 8, "lr": 0.01, "train_loss": 1.0, "val_dice": 0.5, "val_dice_et": 0.25},
)
TENSORBOARD = Config(tracking=TrackingConfig(to=("tensorboard",)))


def track(config: Config, run_path: Path, rows: tuple[Mapping[str, float], ...]) -> None:
    run_path.mkdir(exist_ok=True)
    done: list[Mapping[str, float]] = []
    with history.recording(config, run_path, done) as send:
        for row in rows:
            done.append(row)
            send(row)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
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


def test_tensorboard_gets_every_value_by_epoch(tmp_path: Path) -> None:
    track(Config(), tmp_path, ROWS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.csv", "history.png"]
    pytest.importorskip("tensorboardX")
    for row in ROWS:
        # a training that is continued
        track(TENSORBOARD, tmp_path, (row,))
    curves = events(tmp_path / "tensorboard")
    assert curves["train/loss"] == [(1, 1.5), (2, 1.0)]
    assert curves["val/dice_et"] == [(2, 0.25)]
    assert curves["peak_memory_mb"] == [(1, 700.0)]
    assert "step" not in curves


def test_unwritable_events_end_it(monkeypatch, run, tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    if find_spec("tensorboardX"):
        with pytest.raises(EnvironmentalError, match="tensorboard cannot be written"):
            track(TENSORBOARD, tmp_path, ())
    monkeypatch.setattr("brats_seg.training.history.find_spec", lambda module: None)
    code, _, errors = run("train", "--data", tmp_path, "--set", "tracking.to=tensorboard")
    assert code == 3
    # a run that is resumed has it in its own settings
    assert "pip install 'brats_seg[tensorboard]', or --set tracking.to=[]" in errors


def test_events_that_fail_later_do_not_end_the_training(tmp_path, monkeypatch, caplog):
    writer = Mock()
    writer.SummaryWriter.return_value.add_scalar.side_effect = OSError("no space")
    monkeypatch.setitem(sys.modules, "tensorboardX", writer)
    monkeypatch.setattr("brats_seg.training.history.find_spec", lambda module: module)
    with caplog.at_level(logging.WARNING, "brats_seg"):
        track(TENSORBOARD, tmp_path, ROWS)
    assert caplog.text.count("TensorBoard gets no more values (OSError: no space)") == 1
