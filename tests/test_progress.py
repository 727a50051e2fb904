"""How far work is: shown where somebody can see it, and nowhere else."""

import io

import pytest
from rich.console import Console

from brats_seg.progress import _bar, tracked, untracked


@pytest.mark.parametrize("track", [tracked, untracked])
def test_items_pass_through_unchanged(track) -> None:
    assert list(track(iter("abc"), what="letters", total=3)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("console", "shown"),
    [
        ({"force_terminal": True}, True),
        ({"force_terminal": False}, False),
        ({"force_terminal": False, "force_jupyter": True}, False),
    ],
    ids=["terminal", "log file", "notebook without widgets"],
)
def test_a_bar_is_shown_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, console: dict[str, bool], *, shown: bool
) -> None:
    """Without widgets, rich would print a warning for every bar."""
    monkeypatch.setattr("brats_seg.progress.find_spec", lambda name: None)

    with _bar(Console(file=io.StringIO(), **console)) as bar:
        assert bar.disable is not shown
