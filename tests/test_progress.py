"""Test how far work is: shown where somebody can see it, and with the time that is left."""

import builtins
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from brats_seg import progress
from brats_seg.progress import (
    Pace,
    _Bar,
    _Cell,
    _LogLines,
    _Screen,
    close_display,
    part,
    say,
    tracked,
    untracked,
)


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


def terminal() -> Console:
    return Console(file=Terminal(), force_terminal=True, width=100)


def shown_by(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


@pytest.mark.parametrize("track", [tracked, untracked])
def test_items_pass_through_unchanged(track) -> None:
    assert list(track(iter("abc"), what="letters", total=3)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("file", "options", "display"),
    [
        (Terminal(), {"force_terminal": True}, _Bar),
        (io.StringIO(), {"force_terminal": False}, _LogLines),
        (io.StringIO(), {"force_terminal": True}, _LogLines),
        (io.StringIO(), {"force_jupyter": True}, _Cell),
    ],
    ids=["terminal", "log file", "log file with colours", "notebook"],
)
def test_work_is_shown_as_the_place_allows(
    monkeypatch: pytest.MonkeyPatch,
    screen: _Screen,
    file: io.StringIO,
    options: dict[str, bool],
    display: type,
) -> None:
    console = Console(file=file, **options)
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    monkeypatch.setenv("TERM", "xterm")

    for _ in tracked("a", what="letters", total=1):
        assert isinstance(screen._display, display)
    assert screen._display is None


def test_output_to_a_file_is_not_drawn_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `predict --json > results.jsonl` in a terminal."""
    file, console = io.StringIO(), terminal()
    monkeypatch.setattr("sys.stdout", file)
    bar = _Bar(console)
    bar.begin(progress._Work(what="predicting", total=3))
    try:
        sys.stdout.write("a result\n")
    finally:
        bar.end()

    assert file.getvalue() == "a result\n"
    assert "a result" not in shown_by(console)


def test_the_remaining_time_is_known_before_the_first_item_is_done(
    screen: _Screen, clock: Any
) -> None:
    for _ in tracked(range(4), what="predicting", total=4):
        with part("case, windows", 10) as after_window:
            for _ in range(5):
                clock.now += 6
                after_window()
            assert screen.work is not None
            assert screen.work.position == 0.5
            line = screen.work.line()
            break

    # half a case in 30 s, and 3.5 cases are left
    assert line == "predicting: 0 of 4 (case, windows: 5 of 10), about 4 min left"


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


def test_a_part_alone_shows_nothing(screen: _Screen) -> None:
    with part("windows", 4) as after_window:
        after_window()
    say(lambda: "loss 1")

    assert screen.work is None


def test_items_that_were_skipped_do_not_shorten_the_expectation() -> None:
    pace = Pace()
    for n in range(51):
        pace.note(n, 0.001 * n)
    for n in range(1, 4):
        pace.note(50 + n, 60.0 * n)

    assert pace.left_s(60, 180.0) == pytest.approx(7 * 60, rel=0.01)
    assert Pace().left_s(60, 0.0) is None


def test_the_remaining_time_falls_while_an_item_is_in_progress() -> None:
    pace = Pace()
    pace.note(0, 0.0)
    pace.note(1, 100.0)

    assert pace.left_s(3, 100.0) == 200
    assert pace.left_s(3, 130.0) == 170
    assert pace.left_s(3, 900.0) == 100


def test_a_log_has_few_lines_and_no_carriage_returns(
    screen: _Screen, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Six hours, in works of ten minutes: half a minute to the first line, at most ten between two."""
    with caplog.at_level(logging.INFO):
        for n in range(36):
            for _ in tracked(range(100), what=f"epoch {n + 1}", total=100):
                say(lambda: "loss 0.5")
                clock.now += 6

    assert caplog.messages[:2] == ["epoch 1: 5 of 100, loss 0.5", "epoch 1: 15 of 100, loss 0.5"]
    assert len(caplog.messages) <= 40
    assert not any("\r" in line for line in caplog.messages)


def test_short_work_leaves_no_line(screen: _Screen, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        list(tracked(range(100), what="index", total=100))

    assert not caplog.messages


class Output:
    """Stands for the output of a cell."""

    def __init__(self, content: dict[str, str]) -> None:
        self.contents = [content]

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        self.contents.append(content)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch, screen: _Screen) -> list[Output]:
    """The outputs of a notebook, in cell 1."""
    made: list[Output] = []

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        made.append(Output(content))
        return made[-1]

    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    shell = SimpleNamespace(execution_count=1)
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    console = Console(file=io.StringIO(), force_jupyter=True)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    return made


def test_a_cell_of_a_notebook_has_one_output_which_ends_empty(
    outputs: list[Output], clock: Any
) -> None:
    for n in range(3):
        for _ in tracked(range(4), what=f"epoch <{n + 1}>", total=4):
            clock.now += 2

    (output,) = outputs
    first = output.contents[0]["text/html"]
    assert "epoch &lt;1&gt;" in first
    assert '<progress value="1.000" max="4">' in first
    assert output.contents[0]["text/plain"] == "epoch <1>: 1 of 4, about 6 s left"
    assert output.contents[-1] == {"text/html": "", "text/plain": ""}


def test_work_of_a_cell_that_failed_is_not_shown_again(
    outputs: list[Output], screen: _Screen
) -> None:
    abandoned = iter(tracked(range(4), what="epoch", total=4))
    next(abandoned)
    assert screen.work is not None
    builtins.get_ipython().execution_count = 2  # type: ignore[attr-defined]

    assert screen.work is None
    with part("windows", 3) as after_window:
        after_window()
    assert len(outputs) == 0


def test_the_work_that_began_last_is_shown(screen: _Screen) -> None:
    outer = tracked(range(3), what="outer", total=3)
    next(outer)
    for _ in tracked(range(2), what="inner", total=2):
        assert screen.work is not None
        assert screen.work.what == "inner"
    assert screen.work is not None
    assert screen.work.what == "outer"
    assert list(outer) == [1, 2]
    assert screen.work is None


def test_a_terminal_shows_work_and_its_parts(clock: Any) -> None:
    work, console = progress._Work(what="predicting", total=8), terminal()
    one = work.begin_part("BraTS20_001, windows", 27)
    clock.now += 100
    for _ in range(9):
        one.advance()
    work.note_position()
    console.print(progress._drawn(work, 100))

    first, second = shown_by(console).splitlines()
    assert first.split()[0] == "predicting"
    assert first.rstrip().endswith("0/8 about 38 min left")
    assert second.startswith("  BraTS20_001, windows")
    assert second.rstrip().endswith(" 9/27")


@pytest.mark.parametrize(
    ("total", "n_done", "age_s", "is_drawn"),
    [
        (27, 0, 0.5, False),
        (27, 3, 2, True),
        (27, 26, 2, False),  # it is nearly done
        (2, 0, 2, False),
        (2, 1, 3, True),
        (1, 0, 3, False),
        (0, 0, 2, True),
    ],
)
def test_a_part_that_is_soon_done_does_not_flicker(
    clock: Any, total: int, n_done: int, age_s: float, *, is_drawn: bool
) -> None:
    work = progress._Work(what="epoch 1/44", total=45)
    one = work.begin_part("micro-batches of the step", total)
    for _ in range(n_done):
        one.advance()
    clock.now += age_s

    assert (one in work.running) == is_drawn


@pytest.mark.parametrize("width", [30, 60, 80])
def test_the_bar_gives_way_on_a_narrow_terminal(width: int) -> None:
    work = progress._Work(what="epoch 1/44", total=45)
    work.words = lambda: "3 h 20 min left"
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.print(progress._drawn(work, width))

    (line,) = shown_by(console).splitlines()
    assert len(line) <= width
    assert ("3 h 20 min left" in line) == (width > 30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_draws_nothing(monkeypatch: pytest.MonkeyPatch, screen: _Screen) -> None:
    """Its lock may be held by a thread of the parent, for ever."""
    file, console = Terminal(), terminal()
    monkeypatch.setattr("sys.stdout", file)
    monkeypatch.setattr("sys.stderr", console.file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    for _ in tracked("a", what="letters", total=1):
        child = os.fork()
        if child == 0:
            is_bare = progress._SCREEN.work is None and sys.stdout is file
            os._exit(0 if is_bare else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_left_on_the_terminal(monkeypatch: pytest.MonkeyPatch, screen: _Screen) -> None:
    """An error message must stand alone, and the cursor be there again."""
    console = terminal()
    monkeypatch.setattr("sys.stderr", console.file)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    monkeypatch.setenv("TERM", "xterm")
    abandoned = iter(tracked(range(4), what="epoch", total=4))
    next(abandoned)
    assert sys.stderr is not console.file
    close_display()

    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is shown again"
    assert written.rindex("\x1b[2K") > written.rindex("epoch"), "the line is cleared"
    assert sys.stderr is console.file
