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
from functools import cache
from threading import RLock
from typing import Protocol, TypeVar

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TextColumn

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
    _forget_in_forks()
    with _SCREEN.lock:
        close_display()
        work = _Work(what, total)
        _SCREEN.open.append(work)
        work.bar.start()
    try:
        for item in items:
            yield item
            with _SCREEN.lock:
                work.n_done = min(work.n_done + 1, total)
                # a finished part that was counted before belonged to the item
                work.n_ahead = max(work.n_ahead - 1, 0)
                _SCREEN.refresh(work)
    finally:
        with _SCREEN.lock:
            # a forked process has forgotten it
            if work in _SCREEN.open:
                work.bar.live.stop()
                _SCREEN.open.remove(work)


@contextmanager
def part(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Count a part of the item of `tracked` that is in progress, such as the windows of a case.

    Provides a function to call whenever one of `total` is done. With a total of 0 the part is
    only named. Nothing is shown if no work is shown. May be used in several threads at once.
    """
    work = _SCREEN.work
    if work is None:
        yield lambda: None
        return
    with _SCREEN.lock:
        work.bar.add_task(what, total=total, visible=False)
        inner = work.bar.tasks[-1]

    def advance() -> None:
        with _SCREEN.lock:
            # may pass the total, where memory ran out and something was done again
            work.bar.advance(inner.id)
            _SCREEN.refresh(work)

    try:
        yield advance
    finally:
        with _SCREEN.lock:
            # one that was only named, or not finished, does not count: it is done again, or its item failed
            work.n_ahead += inner.finished
            work.bar.remove_task(inner.id)


def say(text: Callable[[], str]) -> None:
    """Show a text behind the work that is shown, in place of its remaining time, whenever it is drawn."""
    if (work := _SCREEN.work) is not None:
        work.text = text


def close_display() -> None:
    """Remove what is shown, for example before the message of an error is printed."""
    if (work := _SCREEN.work) is not None:
        work.bar.live.stop()


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


class _Work:
    """A piece of work, whose bar is hidden where it cannot be drawn.

    The first task of the bar is the work; the others, which have no bar of their own, are the parts of
    items that are in progress.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.started_s = time.monotonic()
        self.n_done = 0
        self.n_ahead = 0
        """Finished parts of items that are in progress."""
        self.text: Callable[[], str] | None = None
        """Text in place of the remaining time."""
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.fields[work].label}", markup=False),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.fields[work].status}", markup=False),
            console=console,
            transient=True,
            # output that goes to a file or a pipe must not be drawn on the terminal instead
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            get_time=time.monotonic,
            # rich may take a log file for a terminal, for the sake of colours (FORCE_COLOR); in a
            # notebook it would need ipywidgets
            disable=not console.file.isatty() or console.is_dumb_terminal or console.is_jupyter,
        )
        self._items = self.bar.add_task(what, total=total, work=self)
        self._samples: deque[tuple[float, float]] = deque(maxlen=1000)
        """Moments and the positions then."""
        self.note_position()

    @property
    def position(self) -> float:
        """Items that are done, and the shares of those in progress."""
        shares = sum(inner.percentage for inner in self.bar.tasks[1:]) / 100
        return min(self.n_done + self.n_ahead + shares, self.total)

    def note_position(self) -> None:
        """Take note of the position at this moment, and draw it."""
        position = self.position
        self._samples.append((time.monotonic(), position))
        self.bar.update(self._items, completed=position)

    def left_s(self) -> float | None:
        """Return the seconds until all items are done, or None if that is not known yet."""
        samples = tuple(self._samples)
        last_s, position = samples[-1]
        # the pace of the later half counts, as items may be skipped at first
        since_s = last_s - max((last_s - self.started_s) / 2, _RECENT_S)
        first_s, start = max((s for s in samples if s[0] <= since_s), default=samples[0])
        if position <= start:
            return None
        item_s = (last_s - first_s) / (position - start)
        # the time since the last sample is a part of the item in progress, and no more than that
        return max((self.total - position) * item_s - min(time.monotonic() - last_s, item_s), 0.0)

    @property
    def label(self) -> str:
        """What is done, with the first part that has been in progress for some time."""
        for inner in self.bar.tasks[1:]:
            if not inner.finished and (inner.elapsed or 0.0) > _PART_SHOWN_S:
                count = _count_text(inner.completed, inner.total)
                return f"{self.what} ({_join(': ', inner.description, count)})"
        return self.what

    @property
    def status(self) -> str:
        """How many items are done, and the remaining time or the text in its place."""
        time_text, so_far_s = "", time.monotonic() - self.started_s
        if self.text is not None:
            time_text = self.text()
        elif self.n_done < self.total and (left_s := self.left_s()) is not None:
            time_text = left_text(left_s)
        if not time_text and so_far_s > _NO_ESTIMATE_S:
            time_text = f"{duration_text(so_far_s)} so far"
        return _join(", ", _count_text(self.n_done, self.total), time_text)


def _count_text(n_done: float, total: float | None) -> str:
    return f"{n_done:.0f} of {total:.0f}" if total and total > 1 else ""


def _join(separator: str, *texts: str) -> str:
    return separator.join(filter(None, texts))


class _Screen:
    """The terminal or log of a process, and the work that is in progress."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.open: list[_Work] = []
        """Works in progress; the last one is shown."""
        self._pause_s = _FIRST_LINE_S
        self._due_s = 0.0

    @property
    def work(self) -> _Work | None:
        """The work that is shown, or None."""
        return self.open[-1] if self.open else None

    def refresh(self, work: _Work) -> None:
        """Note the position of the work; if it is shown, draw it, or write a line to the log if one is due."""
        work.note_position()
        if self.work is not work:
            return
        # its bar was removed while other work was shown
        work.bar.start()
        now_s = time.monotonic()
        if work.bar.disable and now_s >= max(self._due_s, work.started_s + _FIRST_LINE_S):
            log.info("%s", _join(": ", work.label, work.status))
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._due_s = now_s + self._pause_s

    def forget(self) -> None:
        """Forget the bar in a forked process: its lock may be held by a thread of the parent."""
        self.open, self.lock = [], RLock()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, FileProxy):
                setattr(sys, name, stream.rich_proxied_file)


@cache
def _forget_in_forks() -> None:
    os.register_at_fork(after_in_child=lambda: _SCREEN.forget())


_SCREEN = _Screen()
