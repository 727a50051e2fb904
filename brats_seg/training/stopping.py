"""When a run is to stop early: a signal, or the end of the time it was given."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Asked between windows and between cases; a run stops there, with all its state saved."""

    def __init__(self, max_hours: float | None = None) -> None:
        self._signal: signal.Signals | None = None
        self._max_hours = max_hours
        self._deadline_s = None if max_hours is None else time.monotonic() + 3600 * max_hours

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that asked, if one did."""
        return self._signal

    @property
    def reason(self) -> str | None:
        """Why to stop now, or None to go on."""
        if self._signal is not None:
            return f"{self._signal.name} was received"
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            return f"the {self._max_hours} hours given are over"
        return None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of Ctrl-C and SIGTERM instead of dying; a second one is not held back."""
        # only the main thread may set handlers; elsewhere the deadline still counts
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
