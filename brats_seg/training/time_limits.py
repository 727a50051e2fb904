"""Limit the time of a run, and fit its number of epochs to the hours that there are.

A schedule that looks ahead must know the length of a run before its first step. Steps and held-out
cases are therefore timed beforehand, on a network that is thrown away (`Trainer.timed_epoch`), and
the number of epochs that the hours hold is stored in the settings of the run. It stays when the run
is interrupted; what all sessions have taken is stored in the checkpoints.
"""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import FrameType

from brats_seg.config import Config
from brats_seg.errors import BratsError, ResumeError, UsageError
from brats_seg.progress import duration_text
from brats_seg.training.checkpoints import Run
from brats_seg.training.ranks import Ranks

log = logging.getLogger(__name__)

MARGIN = 0.1
"""Share of the hours that stays free for what is not timed: checkpoints, pictures of the history,
the start of later sessions, and other work on the machine."""
TRIAL_SHARE = 0.01
"""Share of the hours that the timing may take, of steps and of held-out cases each."""
SHORTEST_TRIAL_S, LONGEST_TRIAL_S = 2.0, 60.0
"""Bounds of that time in seconds; a step or a case that takes longer is timed to its end."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunStoppedError(BratsError):
    """The run was asked to stop, and its state is saved."""


class StopRequest:
    """Asks a run to stop early: after a signal, or at the end of its time.

    The run checks it between batches and between cases, and saves its state before it stops.
    """

    def __init__(self, max_hours: float | None = None) -> None:
        self._signal: Signals | None = None
        self.began_s = time.monotonic()
        """Start of the session, by the monotonic clock."""
        self._session_hours = max_hours
        self._all_hours: float | None = None
        self._spent_before_s = 0.0

    def limit_sessions(self, hours: float | None, spent_before_s: float) -> None:
        """Stop as well when all sessions of the run together have taken so many hours.

        Args:
            hours: Hours of all sessions; None for no such limit.
            spent_before_s: Seconds that earlier sessions have taken.
        """
        self._all_hours = hours
        self._spent_before_s = spent_before_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.began_s

    @property
    def signal(self) -> Signals | None:
        """The signal that was received, or None."""
        return self._signal

    @property
    def is_used_up(self) -> bool:
        """Whether all sessions together have taken their hours, so that the same call ends at once."""
        hours = self._all_hours
        return hours is not None and self._spent_before_s + self.elapsed_s >= 3600 * hours

    @property
    def reason(self) -> str | None:
        """The reason to stop now, or None."""
        if self._signal is not None:
            return f"{self._signal.name} was received"
        if self.is_used_up:
            return f"the time of the run, {self._all_hours:g} h, is used up"
        if self._session_hours is not None and self.elapsed_s >= 3600 * self._session_hours:
            return f"the time limit of {self._session_hours} hours was reached"
        return None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record Ctrl-C and SIGTERM instead of ending the process; a second one ends it."""
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
        self._signal = Signals(number)
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )


class TrialEndedError(BratsError):
    """A trial has timed enough."""


class Stopwatch(StopRequest):
    """Times the batches of a trial, before each of which it is asked, and ends the trial after a while."""

    def __init__(self, limit_s: float, ranks: Ranks) -> None:
        super().__init__()
        self.first_s: list[float] = []
        """Seconds from the start of each pass to its first batch."""
        self.steps_s: list[float] = []
        """Seconds of each batch, the reading of the next one included."""
        self.is_over = False
        """Whether enough is timed."""
        self._limit_s = limit_s
        self._ranks = ranks
        self._asked_s: float | None = None

    def begin_pass(self) -> None:
        """Start a pass over the batches of an epoch."""
        self._asked_s, self._begun_s = None, self.elapsed_s

    @property
    def reason(self) -> str | None:
        """None, until enough is timed.

        Raises:
            TrialEndedError: The time is over on a rank, and a batch is timed.
        """
        now_s = self.elapsed_s
        if self._asked_s is None:
            self.first_s.append(now_s - self._begun_s)
        else:
            self.steps_s.append(now_s - self._asked_s)
        self._asked_s = now_s
        if self.steps_s and self._ranks.any(now_s > self._limit_s):
            self.is_over = True
            raise TrialEndedError
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochTime:
    """Measured time of an epoch."""

    training_s: float
    """Seconds of the training on all patches."""
    validation_s: float
    """Seconds of the validation on all held-out cases."""
    every: int
    """Epochs from one validation to the next."""

    def run_s(self, n_epochs: int) -> float:
        """Return the seconds of so many epochs; the last one is always validated."""
        return n_epochs * self.training_s + -(-n_epochs // self.every) * self.validation_s

    def n_epochs_in(self, seconds: float) -> int:
        """Return the largest number of epochs that take no longer than that, perhaps none.

        Example:
            >>> EpochTime(training_s=60, validation_s=30, every=5).n_epochs_in(1000)
            15
        """
        n_epochs = int(seconds / self.training_s)
        while self.run_s(n_epochs) > seconds:
            n_epochs -= 1
        return n_epochs


def trial_s(hours: float) -> float:
    """Return the seconds for which the steps of a run of so many hours are timed, and its cases."""
    return min(max(3600 * hours * TRIAL_SHARE, SHORTEST_TRIAL_S), LONGEST_TRIAL_S)


def fitted_to_hours(config: Config, timed: EpochTime, spent_s: float) -> Config:
    """Return the settings with as many epochs as the hours hold.

    Args:
        config: Settings with `training.hours`.
        timed: Time of an epoch.
        spent_s: Seconds that preparation and timing have taken.

    Raises:
        UsageError: Not one epoch fits.
    """
    hours = config.training.hours or 0
    left_s = (3600 * hours - spent_s) * (1 - MARGIN)
    n_epochs = timed.n_epochs_in(max(left_s, 0))
    training, validation = duration_text(timed.training_s), duration_text(timed.validation_s)
    parts = f"{training} of training, {validation} of validation"
    if n_epochs < 1:
        needed = (timed.run_s(1) / (1 - MARGIN) + spent_s) / 3600
        msg = (
            f"training.hours is {hours:g}, and not one epoch fits: it takes {parts}, after "
            f"{duration_text(spent_s)} of preparation. Expected at least {needed:.2g} h; or lower "
            "patch.per_case, patch.size or model.widths."
        )
        raise UsageError(msg)
    log.info(
        "training.n_epochs is %d: %g h, less a margin of %d %%, at %s of training an epoch and %s "
        "a validation",
        n_epochs,
        hours,
        100 * MARGIN,
        training,
        validation,
    )
    return with_epochs(config, n_epochs)


def with_epochs(config: Config, n_epochs: int) -> Config:
    """Return the settings with another number of epochs."""
    training = config.training.model_copy(update={"n_epochs": n_epochs})
    return config.model_copy(update={"training": training})


def kept_from_start(config: Config, run_path: Path) -> Config:
    """Return the settings with the number of epochs that was fitted when the run began.

    Raises:
        ResumeError: The run was begun without `training.hours`, or its checkpoint is damaged.
    """
    begun_with = Run(path=run_path).begun_with()
    if begun_with.training.hours is None:
        msg = (
            f"{run_path} was begun without --hours, for {begun_with.training.n_epochs} epochs. Limit "
            "this session with --session-hours, choose another --run, or start anew with --fresh."
        )
        raise ResumeError(msg)
    # hours that change are logged when the run is opened
    if config.training.n_epochs != begun_with.training.n_epochs:
        log.info(
            "training.n_epochs stays %d, which was fitted to the hours when the run began; %d is not "
            "used",
            begun_with.training.n_epochs,
            config.training.n_epochs,
        )
    return with_epochs(config, begun_with.training.n_epochs)
