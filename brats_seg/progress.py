"""Show the progress of work: as a bar on a terminal, and as lines of the log elsewhere.

A function that works through many items is given `tracked` (or `untracked`) as its `track`. Work
within an item, such as the windows of a case, is counted by `part` as a share of the item, so that
the remaining time is known before the first item is done. One piece of work is shown at a time, the
one that began last.
"""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import Protocol, TypeVar

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TaskID, TextColumn

log = logging.getLogger(__name__)

Item = TypeVar("Item")

_PART_SHOWN_S = 2.0
"""Age from which a part is shown: a faster one would flicker."""
_NO_ESTIMATE_S = 5.0
"""Time after which the time so far is shown where the remaining time is not known."""
_FIRST_LINE_S, _LONGEST_PAUSE_S = 30.0, 600.0
"""Pause before the first line of the log; it doubles with every line, up to the longest."""
_RECENT_S = 20.0
"""Shortest time that a pace is taken over; otherwise it is the second half of the time so far."""
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

    Without a terminal the log has a line after half a minute, and then ever fewer.
    """
    with _SCREEN.showing(_Work(what=what, total=total)) as work:
        for item in items:
            yield item
            with _SCREEN.lock:
                work.advance()
                _SCREEN.refresh(work)


@contextmanager
def part(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Count a part of the item of `tracked` that is in progress, such as the windows of a case.

    Provides a function to call whenever one of `total` is done. With a total of 0 the part is
    only named. Nothing is shown if no work is shown. May be used in several threads at once.
    """
    whole = _SCREEN.work
    if whole is None:
        yield lambda: None
        return
    inner = _Work(what=what, total=total)
    whole.parts.append(inner)

    def advance() -> None:
        with _SCREEN.lock:
            inner.advance()
            _SCREEN.refresh(whole)

    try:
        yield advance
    finally:
        # one that was only named, or not finished: it is done again, or its item failed
        if inner.is_running and inner in whole.parts:
            whole.parts.remove(inner)


def say(text: Callable[[], str]) -> None:
    """Show a text behind the work that is shown, in place of its remaining time, whenever it is drawn."""
    if (work := _SCREEN.work) is not None:
        work.text = text


def close_display() -> None:
    """Remove what is shown, for example before the message of an error is printed."""
    _SCREEN.close()


def duration_text(seconds: float) -> str:
    """Return a duration in words, rounded as an expectation deserves.

    Example:
        >>> [duration_text(s) for s in (0.42, 3, 9.7, 82, 1500, 12_100, 100_000, 300_000)]
        ['0.4 s', '3 s', '10 s', '80 s', '25 min', '3 h 20 min', '28 h', '3 days 11 h']
    """
    # from 9.5 on, one digit would be 1e+01
    if seconds < 9.5:
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


@dataclass(kw_only=True, slots=True, eq=False)
class _Work:
    """A piece of work: the items that are done, and the parts of those in progress."""

    what: str
    total: int
    n_done: int = 0
    text: Callable[[], str] | None = None
    """Text in place of the remaining time."""
    started_s: float = field(default_factory=lambda: time.monotonic())
    parts: list["_Work"] = field(default_factory=list)
    """Parts in progress, and finished parts of items that are in progress."""
    _samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=1000))
    """Moments and the positions then: the pace of the later half counts, as items may be skipped at first."""

    @property
    def position(self) -> float:
        """Items that are done, and the shares of those in progress."""
        shares = sum(inner.n_done / max(inner.total, 1) for inner in tuple(self.parts))
        return min(self.n_done + shares, self.total)

    @property
    def is_running(self) -> bool:
        """Whether items are left; of a part without any this is not known."""
        return self.n_done < self.total or self.total == 0

    def advance(self) -> None:
        """Count an item as done."""
        # more are counted than there are where memory ran out and something was done again
        self.n_done = min(self.n_done + 1, self.total)
        # the finished part that began first belonged to the item
        if self.parts and not self.parts[0].is_running:
            del self.parts[0]

    def note_position(self) -> None:
        """Take note of the position at this moment, and forget those that no longer count."""
        now_s = time.monotonic()
        self._samples.append((now_s, self.position))
        since_s = now_s - max((now_s - self.started_s) / 2, _RECENT_S)
        while len(self._samples) > 1 and self._samples[1][0] <= since_s:
            self._samples.popleft()

    def left_s(self) -> float | None:
        """Return the seconds until all items are done, or None if that is not known yet."""
        (first_s, start), (last_s, position) = self._samples[0], self._samples[-1]
        if position <= start:
            return None
        item_s = (last_s - first_s) / (position - start)
        # the time since the last sample is a part of the item in progress, and no more than that
        in_progress_s = min(time.monotonic() - last_s, item_s)
        return max((self.total - position) * item_s - in_progress_s, 0.0)

    @property
    def label(self) -> str:
        """What is done, with the first part that has been in progress for some time."""
        started_s = time.monotonic() - _PART_SHOWN_S
        for inner in tuple(self.parts):
            if inner.is_running and inner.started_s < started_s:
                return f"{self.what} ({_join(': ', inner.what, inner.count)})"
        return self.what

    @property
    def count(self) -> str:
        """How many items are done, if there are several."""
        return f"{self.n_done} of {self.total}" if self.total > 1 else ""

    @property
    def status(self) -> str:
        """How many items are done, and the remaining time or the text in its place."""
        time_text = ""
        if self.text is not None:
            time_text = self.text()
        elif self.n_done < self.total and (left_s := self.left_s()) is not None:
            time_text = left_text(left_s)
        so_far_s = time.monotonic() - self.started_s
        if not time_text and so_far_s > _NO_ESTIMATE_S:
            time_text = f"{duration_text(so_far_s)} so far"
        return _join(", ", self.count, time_text)


def _join(separator: str, *texts: str) -> str:
    return separator.join(filter(None, texts))


class _Screen:
    """The terminal or log of a process, and the work that is in progress."""

    def __init__(self) -> None:
        self.lock = RLock()
        self._open: list[_Work] = []
        self._bar: Progress | None = None
        self._pause_s = _FIRST_LINE_S
        self._due_s = 0.0

    @property
    def work(self) -> _Work | None:
        """The work that is shown, or None."""
        return self._open[-1] if self._open else None

    @contextmanager
    def showing(self, work: _Work) -> Iterator[_Work]:
        """Show work instead of what is shown, until the block ends."""
        _forget_in_forks()
        with self.lock:
            self.close()
            self._open.append(work)
            work.note_position()
            self._begin(work)
        try:
            yield work
        finally:
            with self.lock:
                if self.work is work:
                    self.close()
                if work in self._open:
                    self._open.remove(work)

    def refresh(self, work: _Work) -> None:
        """Note the position of the work, and update the display if the work is on it."""
        work.note_position()
        if self.work is not work:
            return
        if self._bar is not None:
            self._bar.update(TaskID(0), completed=work.position)
        elif _is_terminal():
            self._begin(work)
        else:
            self._log(work)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _begin(self, work: _Work) -> None:
        if not _is_terminal():
            self._due_s = max(self._due_s, time.monotonic() + _FIRST_LINE_S)
            return
        self._bar = Progress(
            TextColumn("{task.fields[work].label}", markup=False),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.fields[work].status}", markup=False),
            console=Console(stderr=True),
            transient=True,
            # output that goes to a file or a pipe must not be drawn on the terminal instead
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self._bar.add_task("", total=max(work.total, 1), completed=int(work.position), work=work)
        self._bar.start()

    def _log(self, work: _Work) -> None:
        """Write a line to the log if one is due; there are fewer the longer a process works."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            log.info("%s", _join(": ", work.label, work.status))
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due_s = now_s + self._pause_s

    def forget(self) -> None:
        """Forget the bar in a forked process: its lock may be held by a thread of the parent."""
        self._open, self._bar, self.lock = [], None, RLock()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, FileProxy):
                setattr(sys, name, stream.rich_proxied_file)


def _is_terminal() -> bool:
    """Return whether a bar can be drawn; in a notebook rich would need ipywidgets."""
    # rich may take a log file for a terminal, for the sake of colours (FORCE_COLOR)
    console = Console(stderr=True)
    is_screen = sys.stderr is not None and sys.stderr.isatty()
    return is_screen and not console.is_dumb_terminal and not console.is_jupyter


@cache
def _forget_in_forks() -> None:
    os.register_at_fork(after_in_child=lambda: _SCREEN.forget())


_SCREEN = _Screen()
