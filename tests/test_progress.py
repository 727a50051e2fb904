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
def screen(monkeypatch: pytest.MonkeyPatch) -> _Screen:
    """A screen of its own, in a process without a terminal."""
    monkeypatch.setattr(progress, "_SCREEN", _Screen())
    monkeypatch.setattr("sys.stderr", io.StringIO())
    return progress._SCREEN


class Terminal(io.StringIO):
    """Text that is written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A clock that stands still unless `clock.now` is set."""
    own = SimpleNamespace(now=1000.0, monotonic=lambda: own.now)
    monkeypatch.setattr(progress, "time", own)
    yield own
    # a bar that is still drawn would use it
    close_display()


def use_terminal(
    monkeypatch: pytest.MonkeyPatch, file: io.StringIO | None = None, **options: bool
) -> Console:
    """Return a terminal on which a bar is drawn, from now on: pytest replaces those of fixtures."""
    options = {"force_terminal": True} | options
    console = Console(file=file or Terminal(), width=100, **options)
    monkeypatch.setattr("sys.stderr", console.file)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    monkeypatch.setenv("TERM", "xterm")
    return console


def shown_by(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


@pytest.mark.parametrize("place", ["terminal", "log file", "log file with colours", "notebook"])
def test_a_bar_is_drawn_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, screen: _Screen, place: str
) -> None:
    file = io.StringIO() if "log" in place else Terminal()
    use_terminal(
        monkeypatch,
        file,
        force_terminal=place != "log file",
        force_jupyter=place == "notebook",
    )

    for _ in tracked("a", what="letters", total=1):
        assert (screen._bar is not None) == (place == "terminal")
    assert screen._bar is None


def test_output_to_a_file_is_not_drawn_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, screen: _Screen
) -> None:
    """As `predict --json > results.jsonl` in a terminal."""
    file, bar = io.StringIO(), use_terminal(monkeypatch)
    monkeypatch.setattr("sys.stdout", file)

    for _ in tracked(range(3), what="predicting", total=3):
        sys.stdout.write("a result\n")

    assert file.getvalue() == 3 * "a result\n"
    assert "a result" not in shown_by(bar)


def test_the_remaining_time_is_known_before_the_first_item_is_done(
    screen: _Screen, clock: Any
) -> None:
    for _ in tracked(range(4), what="predicting", total=4):
        with part("case, windows", 10) as after_window:
            for _ in range(5):
                clock.now += 6
                after_window()
            work = screen.work
            assert work is not None
            assert work.position == 0.5
            # half a case in 30 s, and 3.5 cases are left
            assert work.label == "predicting (case, windows: 5 of 10)"
            assert work.status == "0 of 4, about 4 min left"
            break


def test_a_part_that_fails_does_not_count(screen: _Screen) -> None:
    for n, _ in enumerate(tracked(range(2), what="predicting", total=2)):
        work = screen.work
        assert work is not None
        with suppress(MemoryError), part("windows", 4) as after_window:
            after_window()
            assert work.position == n + 0.25
            raise MemoryError
        assert work.position == n
        with part("windows", 4) as after_window:
            for _ in range(7):  # more than were expected
                after_window()
        assert work.position == n + 1


def test_items_that_were_skipped_do_not_shorten_the_expectation(
    screen: _Screen, clock: Any
) -> None:
    items = tracked(range(60), what="predicting", total=60)
    for n in range(54):
        next(items)
        clock.now += 0.001 if n < 50 else 60
    work = screen.work

    assert work is not None
    assert work.left_s() == pytest.approx(6 * 60, rel=0.01)
    clock.now += 600  # of one item in progress, which may take longer
    assert work.left_s() == pytest.approx(6 * 60, rel=0.01)


def test_a_log_has_few_lines_and_no_carriage_returns(
    screen: _Screen, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_the_work_that_began_last_is_shown(screen: _Screen) -> None:
    outer = tracked(range(3), what="outer", total=3)
    next(outer)
    for _ in tracked(range(2), what="inner", total=2):
        assert screen.work is not None
        assert screen.work.what == "inner"
    assert screen.work is not None
    assert screen.work.what == "outer"
    assert list(outer) == [1, 2]
    # a part alone shows nothing
    with part("windows", 4) as after_window:
        after_window()
    say(lambda: "loss 1")
    assert screen.work is None
    assert list(untracked("ab", what="letters", total=2)) == ["a", "b"]


def test_a_terminal_shows_work_and_its_part(
    clock: Any, monkeypatch: pytest.MonkeyPatch, screen: _Screen
) -> None:
    bar = use_terminal(monkeypatch)
    for _ in tracked(range(8), what="predicting", total=8):
        with part("BraTS20_001, windows", 27) as after_window:
            clock.now += 100
            for _ in range(9):
                after_window()
            assert screen._bar is not None
            screen._bar.refresh()
            break

    shown = shown_by(bar)
    assert "predicting (BraTS20_001, windows: 9 of 27)" in shown
    assert "0 of 8, about 38 min left" in shown


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_draws_nothing(monkeypatch: pytest.MonkeyPatch, screen: _Screen) -> None:
    """Its lock may be held by a thread of the parent, for ever."""
    file = Terminal()
    monkeypatch.setattr("sys.stdout", file)
    use_terminal(monkeypatch)
    for _ in tracked("a", what="letters", total=1):
        child = os.fork()
        if child == 0:
            is_bare = progress._SCREEN.work is None and sys.stdout is file
            os._exit(0 if is_bare else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_left_on_the_terminal(monkeypatch: pytest.MonkeyPatch, screen: _Screen) -> None:
    """An error message must stand alone, and the cursor be there again."""
    bar = use_terminal(monkeypatch)
    abandoned = iter(tracked(range(4), what="epoch", total=4))
    next(abandoned)
    assert sys.stderr is not bar.file
    close_display()

    written = bar.file.getvalue()  # type: ignore[attr-defined]
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is shown again"
    assert written.rindex("\x1b[2K") > written.rindex("epoch"), "the line is cleared"
    assert sys.stderr is bar.file
