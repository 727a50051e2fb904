"""Show the progress of work: as a bar on a terminal, in the output of a notebook, or as lines of the log.

A function that works through many items is given `tracked` (or `untracked`) as its `track`. Work
within an item, such as the windows of a case, is counted by `part` as a share of the item, so that
the remaining time is known before the first item is done. A process has one screen, hence one piece
of work is shown at a time, the one that began last.
"""

import builtins
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from threading import RLock
from typing import Any, Protocol, TypeVar

from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

log = logging.getLogger(__name__)

Item = TypeVar("Item")

_PART_SHOWN_S, _SLOW_PART_S = 1.0, 5.0
"""Age from which a part has a line of its own, and the time that it must be expected to take: the
line of a faster one would flicker."""
_NO_ESTIMATE_S = 5.0
"""Time after which the time so far is shown where the remaining time is not known."""
_CELL_S = 1.0
"""Shortest time between two updates of the output of a notebook."""
_FIRST_LINE_S, _LONGEST_PAUSE_S = 30.0, 600.0
"""Pause before the first line of the log; it doubles with every line, up to the longest."""
_RECENT_S = 20.0
"""Shortest time that a pace is taken over; otherwise it is the second half of the time so far."""
_MOST_SAMPLES = 200
_BAR_WIDTH = 20
_LEAST_LEFT_S = 5.0


class Track(Protocol):
    """Interface of `tracked` and `untracked`."""

    def __call__(self, items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
        """Yield the items unchanged and show how many of `total` are done."""


def untracked(items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
    """Return the items and show nothing: for tests and for calls from other programs."""
    return items


def tracked(items: Iterable[Item], *, what: str, total: int) -> Iterator[Item]:
    """Yield the items, and show how many are done and how long the others will take.

    Where there is neither a terminal nor a notebook, the log has a line after half a minute, and
    then ever fewer.
    """
    with _SCREEN.showing(_Work(what=what, total=total)) as work:
        for item in items:
            yield item
            _SCREEN.advance(work)


@contextmanager
def part(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Count a part of the item of `tracked` that is in progress, such as the windows of a case.

    Provides a function to call whenever one of `total` is done. With a total of 0 the part is
    only named. Nothing is shown if no work is shown. May be used in several threads at once.
    """
    whole = _SCREEN.work
    if whole is None:
        yield _nothing
        return
    own = whole.begin_part(what, total)

    def advance() -> None:
        own.advance()
        whole.note_position()
        _SCREEN.refresh(whole)

    try:
        yield advance
    finally:
        whole.end_part(own)


def say(words: Callable[[], str]) -> None:
    """Show a text behind the work that is shown, in place of its remaining time.

    Args:
        words: Returns the text; called whenever it is drawn.
    """
    if (work := _SCREEN.work) is not None:
        work.words = words


def close_display() -> None:
    """Remove what is shown, for example before the message of an error is printed."""
    _SCREEN.close()


def duration_text(seconds: float) -> str:
    """Return a duration in words, rounded as an expectation deserves.

    Example:
        >>> [duration_text(s) for s in (0.42, 3, 82, 1500, 12_100, 100_000, 300_000)]
        ['0.4 s', '3 s', '80 s', '25 min', '3 h 20 min', '28 h', '3 days 11 h']
    """
    if seconds < 10:
        return f"{seconds:.1g} s"
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(5 * round(minutes / 5), 60)
    if hours < 10:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    hours = round(seconds / 3600)
    if hours < 48:
        return f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h" if hours else f"{days} days"


def left_text(seconds: float) -> str:
    """Return an expected time in words; the last seconds are not counted down.

    Example:
        >>> left_text(12_100), left_text(0.2)
        ('about 3 h 20 min left', 'about 5 s left')
    """
    return f"about {duration_text(max(seconds, _LEAST_LEFT_S))} left"


@dataclass(kw_only=True, slots=True)
class Pace:
    """Speed of work, of which the later part counts: items may be skipped or slow at first."""

    _samples: list[tuple[float, float]] = field(default_factory=list)
    """Moments and the positions then, the earliest first."""

    def note(self, position: float, now_s: float) -> None:
        """Take the position of the work at a moment."""
        self._samples.append((now_s, position))
        if len(self._samples) > _MOST_SAMPLES:
            self._samples = [*self._samples[:-1:2], self._samples[-1]]

    @property
    def item_s(self) -> float | None:
        """Seconds for one more position, or None if that is not known yet."""
        if len(self._samples) < 2:
            return None
        (begun_s, _), (last_s, position) = self._samples[0], self._samples[-1]
        since_s = last_s - max((last_s - begun_s) / 2, _RECENT_S)
        # the last sample before the recent ones, which span the whole of that time
        before = [sample for sample in self._samples[:-1] if sample[0] <= since_s]
        from_s, start = before[-1] if before else self._samples[0]
        return (last_s - from_s) / (position - start) if position > start else None

    def left_s(self, total: float, now_s: float) -> float | None:
        """Return the seconds until the position is `total`, or None if that is not known yet."""
        item_s = self.item_s
        if item_s is None:
            return None
        last_s, position = self._samples[-1]
        # the time since the last sample is a part of the item in progress, and no more than that
        return max((total - position) * item_s - min(now_s - last_s, item_s), 0.0)


@dataclass(kw_only=True, slots=True, eq=False)
class _Work:
    """A piece of work: the items that are done, and the parts of those in progress."""

    what: str
    total: int
    n_done: int = 0
    words: Callable[[], str] | None = None
    """Text in place of the remaining time."""
    started_s: float = field(init=False)
    cell: int = field(default_factory=lambda: _cell_number())
    """Cell of the notebook in which it began."""
    parts: list["_Work"] = field(default_factory=list)
    """Parts in progress, and finished parts of items that are in progress."""
    _pace: Pace = field(default_factory=Pace)
    _lock: RLock = field(default_factory=RLock)

    def __post_init__(self) -> None:
        self.started_s = time.monotonic()
        self._pace.note(0, self.started_s)

    @property
    def position(self) -> float:
        """Items that are done, and the shares of those in progress."""
        shares = sum(one.n_done / max(one.total, 1) for one in tuple(self.parts))
        return min(self.n_done + shares, self.total)

    @property
    def is_running(self) -> bool:
        """Whether items are left; of a part without any this is not known."""
        return self.n_done < self.total or self.total == 0

    @property
    def running(self) -> list["_Work"]:
        """Parts in progress for some time."""
        return [one for one in tuple(self.parts) if one.is_running and one.is_slow]

    @property
    def is_slow(self) -> bool:
        """Whether it has taken some time already, and is expected to take more."""
        age_s = time.monotonic() - self.started_s
        expected_s = age_s * self.total / max(self.n_done, 1) if self.total else _SLOW_PART_S
        return age_s > _PART_SHOWN_S and expected_s >= _SLOW_PART_S

    def advance(self) -> None:
        """Count an item as done."""
        with self._lock:
            # more are counted than there are where memory ran out and something was done again
            self.n_done = min(self.n_done + 1, self.total)
            # the finished part that began first belonged to the item
            if self.parts and not self.parts[0].is_running:
                del self.parts[0]
        self.note_position()

    def note_position(self) -> None:
        """Take note of the position at this moment."""
        with self._lock:
            self._pace.note(self.position, time.monotonic())

    def begin_part(self, what: str, total: int) -> "_Work":
        """Add a part."""
        with self._lock:
            self.parts.append(_Work(what=what, total=total))
            return self.parts[-1]

    def end_part(self, one: "_Work") -> None:
        """Remove a part that was only named, or not finished: it is done again, or its item failed."""
        with self._lock:
            if one.is_running and one in self.parts:
                self.parts.remove(one)

    def time_words(self) -> str:
        """Return the text behind the bar."""
        now_s = time.monotonic()
        if self.words is not None:
            if words := self.words():
                return words
        elif self.n_done < self.total:
            left_s = self._pace.left_s(self.total, now_s)
            if left_s is not None:
                return left_text(left_s)
        so_far_s = now_s - self.started_s
        return f"{duration_text(so_far_s)} so far" if so_far_s > _NO_ESTIMATE_S else ""

    def line(self) -> str:
        """Return the state as a line of text."""
        count = f": {self.n_done} of {self.total}" if self.total > 1 else ""
        running = "".join(
            f" ({one.what}: {one.n_done} of {one.total})" if one.total > 1 else f" ({one.what})"
            for one in self.running[:1]
        )
        words = self.time_words()
        return f"{self.what}{count}{running}{words and ', '}{words}"


class _Display(Protocol):
    """Interface of the places where work is shown."""

    def begin(self, work: _Work) -> None:
        """Show work that begins."""

    def refresh(self) -> None:
        """Show the work as it is now."""

    def end(self) -> None:
        """Show it no longer."""


class _Bar:
    """Draws work as a bar on a terminal, above which other output is printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def begin(self, work: _Work) -> None:
        """Draw the bar, and draw it again several times a second."""
        self._live = Live(
            console=self._console,
            get_renderable=lambda: _drawn(work, self._console.width),
            transient=True,
            # output that goes to a file or a pipe must not be drawn on the terminal instead
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start(refresh=True)

    def refresh(self) -> None:
        """Do nothing: a thread draws the bar."""

    def end(self) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.stop()


class _Cell:
    """Shows work in one output of each cell of a notebook, which is empty in the end."""

    def __init__(self) -> None:
        self._work: _Work | None = None
        self._number: int | None = None
        self._output: Any = None
        self._shown_s = 0.0

    def begin(self, work: _Work) -> None:
        """Take note of the work, which is shown when it has lasted for some time."""
        self._work, self._shown_s = work, time.monotonic()

    def refresh(self) -> None:
        """Show the work, unless it was shown just now."""
        if self._work is not None and time.monotonic() - self._shown_s >= _CELL_S:
            self._shown_s = time.monotonic()
            self._put(_html(self._work), self._work.line())

    def end(self) -> None:
        """Empty the output, if there is one."""
        self._work = None
        if self._number == _cell_number():
            self._put("", "")

    def _put(self, html: str, text: str) -> None:
        # IPython is installed wherever a notebook runs, and needed nowhere else
        from IPython.display import display

        content = {"text/html": html, "text/plain": text}
        if self._number == _cell_number():
            self._output.update(content, raw=True)
        else:
            self._number = _cell_number()
            self._output = display(content, raw=True, display_id=True)


class _LogLines:
    """Writes lines to the log, fewer and fewer the longer a process works."""

    def __init__(self) -> None:
        self._work: _Work | None = None
        self._pause_s = _FIRST_LINE_S
        self._due_s = 0.0

    def begin(self, work: _Work) -> None:
        """Take note of the work; the first line comes after a while."""
        self._work = work
        self._due_s = max(self._due_s, time.monotonic() + _FIRST_LINE_S)

    def refresh(self) -> None:
        """Write a line if one is due."""
        now_s = time.monotonic()
        if self._work is not None and now_s >= self._due_s:
            log.info("%s", self._work.line())
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due_s = now_s + self._pause_s

    def end(self) -> None:
        """Forget the work."""
        self._work = None


class _Screen:
    """The place where the progress of a process is shown, and the work that is in progress."""

    def __init__(self) -> None:
        self._open: list[_Work] = []
        self._display: _Display | None = None
        self._cell = _Cell()
        self._lines = _LogLines()
        self._lock = RLock()
        self._is_registered = False

    @property
    def work(self) -> _Work | None:
        """The work that is shown, or None."""
        last = self._open[-1] if self._open else None
        # the traceback of a cell that failed keeps its work open
        return last if last is not None and last.cell == _cell_number() else None

    @contextmanager
    def showing(self, work: _Work) -> Iterator[_Work]:
        """Show work instead of what is shown, until the block ends."""
        self._register()
        with self._lock:
            self.close()
            self._open = [one for one in self._open if one.cell == work.cell] + [work]
            self._begin(work)
        try:
            yield work
        finally:
            with self._lock:
                if self.work is work:
                    self.close()
                if work in self._open:
                    self._open.remove(work)

    def advance(self, work: _Work) -> None:
        """Count an item of the work as done."""
        work.advance()
        self.refresh(work)

    def refresh(self, work: _Work) -> None:
        """Show the work as it is now, if it is the one that is shown."""
        with self._lock:
            if self.work is not work:
                return
            if self._display is None:
                self._begin(work)
            else:
                self._display.refresh()

    def close(self) -> None:
        """Remove what is shown."""
        if self._display is not None:
            self._display.end()
            self._display = None

    def _begin(self, work: _Work) -> None:
        console = Console(stderr=True)
        if console.is_jupyter:
            self._display = self._cell
        # rich may take a log file for a terminal, for the sake of colours (FORCE_COLOR)
        elif sys.stderr.isatty() and not console.is_dumb_terminal:
            self._display = _Bar(console)
        else:
            self._display = self._lines
        self._display.begin(work)

    def _register(self) -> None:
        if not self._is_registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        self._is_registered = True

    def _forget(self) -> None:
        """Forget the display in a forked process: its lock may be held by a thread of the parent."""
        self._open, self._display, self._lock = [], None, RLock()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, FileProxy):
                setattr(sys, name, stream.rich_proxied_file)


_SCREEN = _Screen()


def _nothing() -> None:
    pass


def _cell_number() -> int:
    """Return the number of the cell that runs; 0 outside IPython."""
    shell_of = getattr(builtins, "get_ipython", None)
    return 0 if shell_of is None else int(shell_of().execution_count)


def _drawn(work: _Work, width: int) -> Group:
    """Return the work and its parts as lines of a terminal of that width; the bar gives way first."""
    return Group(*(_line_of(*row, width) for row in _rows(work)))


def _line_of(work: _Work, margin: str, words: str, width: int) -> Table:
    what, count = margin + work.what, _count(work)
    bar_width = min(_BAR_WIDTH, width - len(what) - len(count) - len(words) - 4)
    line = Table.grid(padding=(0, 1))
    for _ in range(4):
        line.add_column(no_wrap=True)
    bar = ProgressBar(total=max(work.total, 1), completed=work.position, width=bar_width)
    line.add_row(Text(what), bar if count and bar_width > 0 else Text(), Text(count), Text(words))
    return line


def _html(work: _Work) -> str:
    """Return the work and its parts as lines of a notebook."""
    lines = []
    for one, margin, words in _rows(work):
        bar = f'<progress value="{one.position:.3f}" max="{one.total}"></progress>'
        count = _count(one)
        lines.append(f"{escape(margin + one.what)} {count and bar} {count} {escape(words)}")
    return f"<pre>{'<br>'.join(lines)}</pre>"


def _count(work: _Work) -> str:
    """Return how many items are done, or nothing for a single one."""
    if work.total <= 1:
        return ""
    return f"{work.n_done:{len(str(work.total))}}/{work.total}"


def _rows(work: _Work) -> Iterator[tuple[_Work, str, str]]:
    """Yield the work and its parts, each with its margin and the text behind it."""
    yield work, "", work.time_words()
    for one in work.running:
        yield one, "  ", ""
