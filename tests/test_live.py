"""The history of a run in a notebook: shown when it has changed, and only then."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from brats_seg.report.history import LiveHistory


class Shown:
    """A cell of a notebook: what was displayed there, one after the other."""

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

    seen = []
    for epoch in range(3):
        seen += live(range(2), what=f"epoch {epoch}", total=2)
        path.write_bytes(b"%d" % epoch)
        os.utime(path, ns=(epoch, epoch + 1))
        live(range(2), what="validation", total=2)
    live.show()

    assert seen == [0, 1] * 3
    assert shown.pictures == [b"0", b"1", b"2"]


def test_nothing_is_shown_before_the_first_epoch_ends(tmp_path: Path, shown: Shown) -> None:
    assert list(LiveHistory(run_path=tmp_path)([1, 2], what="epoch 1", total=2)) == [1, 2]
    assert shown.pictures == []
