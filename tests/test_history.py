"""Test the history of a run as a table, a figure and a line of the log."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from brats_seg.errors import UsageError
from brats_seg.figures.history import LiveHistory, history_figure, read_history
from brats_seg.training.history import (
    epoch_line,
    phase_columns,
    write_history,
    write_picture,
)

OVERLAP = {
    "loss": 1.0,
    "dice": 0.722,
    "jaccard": 0.5,
    **{f"{what}_{region}": 0.5 for region in ("wt", "tc", "et") for what in ("dice", "jaccard")},
    "empty_et": 1,
}
ERRORS = {"loss": 0.8, "rmse": 0.9, **{f"rmse_{m}": 0.9 for m in ("t1n", "t1c", "t2w", "t2f")}}


def row(epoch: int, *, validated: bool, scores: dict[str, float] | None = None) -> dict[str, float]:
    scores = scores or OVERLAP
    return {
        "epoch": epoch,
        "step": epoch * 3,
        "lr": 0.1,
        "seconds": 1.0,
        "peak_memory_mb": 10.0,
        **phase_columns("train", scores),
        **(phase_columns("val", scores) if validated else {}),
    }


def test_history_csv_has_the_articles_columns_and_empty_cells_without_validation(
    tmp_path: Path,
) -> None:
    rows = [row(1, validated=False), row(2, validated=True)]

    write_history(rows, tmp_path)
    write_picture(rows, tmp_path)

    table = pd.read_csv(tmp_path / "history.csv")

    assert list(table.columns) == [
        *("epoch", "step", "train_loss", "val_loss", "train_dice", "val_dice"),
        *("train_jaccard", "val_jaccard"),
        *("train_dice_wt", "train_jaccard_wt", "train_dice_tc", "train_jaccard_tc"),
        *("train_dice_et", "train_jaccard_et", "train_empty_et"),
        *("val_dice_wt", "val_jaccard_wt", "val_dice_tc", "val_jaccard_tc"),
        *("val_dice_et", "val_jaccard_et", "val_empty_et"),
        *("lr", "seconds", "peak_memory_mb"),
    ]
    assert table["val_dice"].isna().tolist() == [True, False]
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_validation_so_far_has_the_columns_of_one(tmp_path: Path) -> None:
    write_history([row(1, validated=False)], tmp_path)

    assert pd.read_csv(tmp_path / "history.csv")["val_jaccard_wt"].isna().all()


def test_the_history_of_an_autoencoder_shows_loss_and_error_and_no_dice(tmp_path: Path) -> None:
    write_history([row(1, validated=True, scores=ERRORS)], tmp_path)

    table = read_history(tmp_path)

    assert list(table.columns)[:6] == [
        *("epoch", "step", "train_loss", "val_loss", "train_rmse", "val_rmse")
    ]
    assert "val_rmse_t2f" in table
    assert not [column for column in table if "dice" in column or "jaccard" in column]
    titles = [axes.get_ylabel() for axes in history_figure(table).axes]
    assert titles == ["loss", "RMSE in the brain"]


def entries_of(table: pd.DataFrame, place: int) -> list[str]:
    legend = history_figure(table).axes[place].get_legend()
    return [text.get_text() for text in legend.get_texts()]


def test_there_is_no_legend_entry_before_the_first_validation(tmp_path: Path) -> None:
    write_history([row(1, validated=False)], tmp_path)
    assert entries_of(read_history(tmp_path), 1) == ["training"]

    write_history([row(1, validated=True)], tmp_path)
    parts = ["validation WT", "validation TC", "validation ET"]
    assert entries_of(read_history(tmp_path), 1) == ["training", "validation", *parts]


def test_the_modalities_have_the_names_that_radiologists_use(tmp_path: Path) -> None:
    write_history([row(1, validated=True, scores=ERRORS)], tmp_path)

    parts = entries_of(read_history(tmp_path), 1)[2:]
    assert parts == ["validation T1", "validation T1c", "validation T2", "validation FLAIR"]


def test_one_epoch_is_drawn_at_its_whole_number(tmp_path: Path) -> None:
    write_history([row(1, validated=True)], tmp_path)

    figure = history_figure(read_history(tmp_path))

    ticks = figure.axes[-1].get_xticks()
    assert [tick for tick in ticks if 0.1 < tick < 1.9] == [1]
    assert {line.get_marker() for line in figure.axes[1].lines} == {"."}


def test_the_line_of_the_log_shows_the_values() -> None:
    assert epoch_line(row(1, validated=False), 5).startswith(
        "epoch 1/5 | training loss 1.0000 Dice"
    )
    assert "validation loss 1.0000 Dice 0.722 (WT 0.500 TC 0.500 ET 0.500) Jaccard 0.500 | lr" in (
        epoch_line(row(2, validated=True), 5)
    )
    assert "validation loss 0.8000 RMSE in the brain 0.900 (T1N 0.900 T1C" in (
        epoch_line(row(2, validated=True, scores=ERRORS), 5)
    )


def test_a_history_is_read_back_and_drawn(tmp_path: Path) -> None:
    write_history([{"epoch": 1, "train_loss": 0.5}, {"epoch": 2, "train_loss": 0.25}], tmp_path)

    loss = history_figure(read_history(tmp_path)).axes[0].lines[0]

    assert loss.get_ydata().tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "does not exist; expected the folder of a run"),
        ("epoch\n", "holds no epochs"),
        ("", "is not a table"),
    ],
)
def test_a_folder_without_history_is_said(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "history.csv").write_text(text)

    with pytest.raises(UsageError, match=expected):
        read_history(tmp_path)


class Shown:
    """Record what a cell of a notebook displays, in order."""

    def __init__(self) -> None:
        self.pictures: list[bytes] = []

    def display(self, picture: bytes, *, display_id: bool) -> "Shown":
        assert display_id
        self.pictures.append(picture)
        return self

    def update(self, picture: bytes) -> None:
        self.pictures.append(picture)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown, module = Shown(), ModuleType("IPython.display")
    module.Image = lambda data: data  # type: ignore[attr-defined]
    module.display = shown.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_the_picture_follows_the_epochs(tmp_path: Path, shown: Shown) -> None:
    live, path = LiveHistory(run_path=tmp_path), tmp_path / "history.png"

    found = []
    for epoch in range(3):
        found += live(range(2), what=f"epoch {epoch}", total=2)
        path.write_bytes(b"%d" % epoch)
        os.utime(path, ns=(epoch, epoch + 1))
        live(range(2), what="validation", total=2)
    live.show()

    assert found == [0, 1] * 3
    assert shown.pictures == [b"0", b"1", b"2"]


def test_nothing_is_shown_before_the_first_epoch_ends(tmp_path: Path, shown: Shown) -> None:
    assert list(LiveHistory(run_path=tmp_path)([1, 2], what="epoch 1", total=2)) == [1, 2]
    assert shown.pictures == []
