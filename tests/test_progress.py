"""Test how far work is: shown where somebody can see it, and with the time that is left."""

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from brats_seg import progress
from brats_seg.progress import _Screen, close_display, part, say, tracked, untracked


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(progress, "_SCREEN", _Screen())
    monkeypatch.setattr("sys.stderr", io.StringIO())
    return progress._SCREEN


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A clock that stands still unless `clock.now` is set."""
    stopped = SimpleNamespace(now=1000.0, monotonic=lambda: stopped.now)
    monkeypatch.setattr(progress, "time", stopped)
    yield stopped
    # a bar that is still drawn would use it
    close_display()


def draw_to(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, **options: bool) -> None:
    """Draw bars to a file from now on: pytest replaces those of fixtures."""
    console = Console(file=file, stderr=True, width=100, **options)
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    monkeypatch.setenv("TERM", "xterm")


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    file = Terminal()
    draw_to(monkeypatch, file, force_terminal=True)
    return file


@pytest.mark.parametrize(
    ("file", "options", "has_bar"),
    [
        (Terminal(), {"force_terminal": True}, True),
        (io.StringIO(), {"force_terminal": False}, False),
        (io.StringIO(), {"force_terminal": True}, False),
        (Terminal(), {"force_jupyter": True}, False),
        (None, {}, False),
    ],
    ids=["terminal", "log file", "log file with colours", "notebook", "closed"],
)
def test_a_bar_is_drawn_only_where_output_allows_it(monkeypatch, screen, file, options, has_bar):
    draw_to(monkeypatch, file, **options)
    for _ in tracked("a", what="letters", total=1):
        live = screen.work.bar.live
        assert live.is_started == has_bar
    assert not live.is_started


def test_output_to_a_file_stays_there(monkeypatch: pytest.MonkeyPatch, screen: Any) -> None:
    file, terminal = io.StringIO(), use_terminal(monkeypatch)
    monkeypatch.setattr("sys.stdout", file)
    for _ in tracked(range(3), what="predicting", total=3):
        sys.stdout.write("a result\n")
    assert file.getvalue() == 3 * "a result\n"
    assert "a result" not in terminal.shown()


def test_remaining_time_is_known_before_the_first_item(screen: Any, clock: Any) -> None:
    for _ in tracked(range(4), what="predicting", total=4):
        with part("case, windows", 10) as after_window:
            for _ in range(5):
                clock.now += 6
                after_window()
            assert screen.work.position == 0.5
            # half a case in 30 s, and 3.5 cases are left
            assert screen.work.label == "predicting (case, windows: 5 of 10)"
            assert screen.work.status == "0 of 4, about 4 min left"
            break


def test_a_part_that_fails_does_not_count(screen: Any) -> None:
    for n, _ in enumerate(tracked(range(2), what="predicting", total=2)):
        with suppress(MemoryError), part("windows", 4) as after_window:
            after_window()
            assert screen.work.position == n + 0.25
            raise MemoryError
        assert screen.work.position == n
        with part("windows", 4) as after_window:
            for _ in range(7):  # more than were expected
                after_window()
        assert screen.work.position == n + 1


def test_skipped_items_do_not_shorten_the_expectation(screen: Any, clock: Any) -> None:
    items = tracked(range(60), what="predicting", total=60)
    for n in range(54):
        next(items)
        clock.now += 0.001 if n < 50 else 60
    work = screen.work
    assert work.left_s() == pytest.approx(6 * 60, rel=0.01)
    clock.now += 600  # of one item in progress, which may take longer
    assert work.left_s() == pytest.approx(6 * 60, rel=0.01)


def test_a_log_has_few_lines(screen: Any, clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Six hours, in works of ten minutes: half a minute to the first line, at most ten between two."""
    with caplog.at_level(logging.INFO):
        list(tracked(range(100), what="short work", total=100))
        for n in range(36):
            for _ in tracked(range(100), what=f"epoch {n + 1}", total=100):
                say(lambda: "loss 0.5")
                clock.now += 6
    assert caplog.messages[:2] == ["epoch 1: 5 of 100, loss 0.5", "epoch 1: 15 of 100, loss 0.5"]
    assert len(caplog.messages) <= 40
    assert not any("\r" in line for line in caplog.messages)


def test_the_work_that_began_last_is_shown(screen: Any) -> None:
    outer = tracked(range(3), what="outer", total=3)
    next(outer)
    for _ in tracked(range(2), what="inner", total=2):
        assert screen.work.what == "inner"
    assert screen.work.what == "outer"
    assert list(outer) == [1, 2]
    # a part alone shows nothing
    with part("windows", 4) as after_window:
        after_window()
    say(lambda: "loss 1")
    assert screen.work is None
    assert list(untracked("ab", what="letters", total=2)) == ["a", "b"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_draws_nothing(monkeypatch: pytest.MonkeyPatch, screen: Any) -> None:
    """A thread of the parent may hold the lock of the progress bar for ever."""
    file, _ = Terminal(), use_terminal(monkeypatch)
    monkeypatch.setattr("sys.stdout", file)
    for _ in tracked("a", what="letters", total=1):
        child = os.fork()
        if child == 0:
            is_bare = progress._SCREEN.work is None and sys.stdout is file
            os._exit(0 if is_bare else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_left_on_the_terminal(monkeypatch: pytest.MonkeyPatch, screen: Any) -> None:
    """An error message stands alone on its line, and the cursor is visible again."""
    terminal = use_terminal(monkeypatch)
    # it may be closed
    monkeypatch.setattr("sys.stdout", None)
    abandoned = iter(tracked(range(4), what="epoch", total=4))
    next(abandoned)
    assert sys.stderr is not terminal
    close_display()
    written = terminal.getvalue()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is shown again"
    assert written.rindex("\x1b[2K") > written.rindex("epoch"), "the line is cleared"
    assert sys.stderr is terminal
