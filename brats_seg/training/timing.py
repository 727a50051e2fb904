"""Measure how long steps and validations take, expect the end of a run, and stop it in time.

A schedule that looks ahead must know the length of a run. A run that is given hours instead of epochs
trains and validates its first epoch, and then keeps the number of epochs that the hours hold.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from signal import Signals
from types import FrameType

from brats_seg.errors import BratsError
from brats_seg.progress import duration_text
from brats_seg.training.run_plan import RunPlan
from brats_seg.training.state import Progress

SAID_AFTER_S = 10.0
"""Seconds of training after which the expected duration of a run is said."""
MARGIN = 0.1
"""Share of the hours that stays free for what is not timed: checkpoints, pictures of the history,
the start of later sessions, and other work on the machine."""
_RECENT_STEPS = 50
"""Steps over which the time of a patch is averaged."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunStoppedError(BratsError):
    """The run was asked to stop, and its state is saved."""


class StopRequest:
    """Asks a run to stop early: after a signal, or at the end of its time.

    The run checks it between batches and between cases, and saves its state before it stops.
    """

    def __init__(self, max_hours: float | None = None) -> None:
        self.signal: Signals | None = None
        """The signal that was received, or None."""
        self._began_s = time.monotonic()
        self._session_hours = max_hours
        self._all_hours: float | None = None
        self._spent_before_s = 0.0

    def limit_sessions(self, hours: float | None, spent_before_s: float) -> None:
        """Stop as well when all sessions of the run together have taken that many hours."""
        self._all_hours = hours
        self._spent_before_s = spent_before_s

    @property
    def spent_s(self) -> float:
        """Seconds that the run has taken in all its sessions."""
        return self._spent_before_s + self._elapsed_s

    @property
    def is_used_up(self) -> bool:
        """Whether all sessions together have taken their hours, so that the same call ends at once."""
        return self._all_hours is not None and self.spent_s >= 3600 * self._all_hours

    @property
    def reason(self) -> str | None:
        """The reason to stop now, or None."""
        if self.signal is not None:
            return f"{self.signal.name} was received"
        if self.is_used_up:
            return f"the time of the run, {self._all_hours:g} h, is used up"
        if self._session_hours is not None and self._elapsed_s >= 3600 * self._session_hours:
            return "the time of this session is used up"
        return None

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

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
        self.signal = Signals(number)
        is_ctrl_c = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


@dataclass(kw_only=True, slots=True)
class Clock:
    """Clock of one session of a run; nothing is expected before its second step."""

    plan: RunPlan
    progress: Progress
    stop: StopRequest
    n_steps: int = field(default=0, init=False)
    """Steps that were measured."""
    training_s: float = field(default=0.0, init=False)
    """Seconds of all batches."""
    patch_s: float | None = field(default=None, init=False)
    """Seconds of a patch in training, averaged over the last steps."""
    _epoch_began_s: float = field(default=0.0, init=False)
    _marked_s: float = field(default=0.0, init=False)
    _is_said: bool = field(default=False, init=False)
    _saved_s: float = field(default_factory=time.monotonic, init=False)
    _rests_s: dict[bool, float] = field(default_factory=dict, init=False)
    """Seconds from the last batch of an epoch to the next epoch, with and without validation."""

    @property
    def epoch_s(self) -> float:
        """Seconds that the epoch has taken, including those before an interruption."""
        return time.monotonic() - self._epoch_began_s

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the latest state is older than the settings allow."""
        return time.monotonic() - self._saved_s > 60 * self.plan.config.training.checkpoint_minutes

    def begin_epoch(self) -> None:
        """Start the clock of an epoch, from the times that it had taken before an interruption."""
        self._marked_s = time.monotonic() - self.progress.validated.seconds
        self._epoch_began_s = time.monotonic() - self.progress.sums.seconds

    def before_saving(self) -> None:
        """Note the times in the progress, which is saved now."""
        self.progress.sums.seconds, self.progress.spent_s = self.epoch_s, self.stop.spent_s
        self._saved_s = time.monotonic()
        self.progress.validated.seconds = self._saved_s - self._marked_s

    def after_batch(self, n_patches: int) -> None:
        """Count a batch of `n_patches`."""
        now_s = time.monotonic()
        seconds, self._marked_s = now_s - self._marked_s, now_s
        self.training_s += seconds
        self.n_steps += 1
        # the first step is left out: buffers are allocated and kernels chosen meanwhile
        if self.n_steps > 1:
            before_s = self.patch_s or 0.0
            weight = 1 / min(self.n_steps - 1, _RECENT_STEPS)
            self.patch_s = before_s + weight * (seconds / n_patches - before_s)

    def end_epoch(self) -> None:
        """Note the time since the last batch of an epoch, which was that of its validation."""
        self._is_said = True
        self._rests_s[self._is_validated(self.progress.epoch)] = time.monotonic() - self._marked_s

    @property
    def left_s(self) -> float | None:
        """Expected seconds to the end of the run, or None if they are not known yet."""
        progress = self.progress
        if self.patch_s is None or progress.n_epochs is None or progress.is_finished:
            return None
        n_epochs = progress.n_epochs - progress.epoch
        n_done, n_patches = self._n_done, self.plan.n_patches
        left_s = self.patch_s * (n_epochs * n_patches - n_done)
        if n_done >= n_patches and self._is_validated(progress.epoch):
            left_s -= min(time.monotonic() - self._marked_s, self._validation_s)
        left_s += self._n_validations * self._validation_s
        return left_s + (n_epochs - self._n_validations) * self._rests_s.get(False, 0.0)

    def expectation(self) -> str | None:
        """Return the expected duration in words, once, after the first seconds of training."""
        left_s = self.left_s
        if self._is_said or left_s is None or self.training_s < SAID_AFTER_S:
            return None
        self._is_said = True
        validation = duration_text(self._n_validations * self._validation_s)
        end = f"the end of epoch {self.progress.n_epochs}"
        return f"about {duration_text(left_s)} to {end}, of which validation takes {validation}"

    def missing_hours(self, hours: float) -> str | None:
        """Return a message if the hours do not hold one epoch of training, as soon as that is known."""
        if self.patch_s is None or self.training_s < SAID_AFTER_S:
            return None
        training_s = self.patch_s * self.plan.n_patches
        left_s = training_s - self.patch_s * self._n_done
        needed = (self.stop.spent_s + left_s) / (1 - MARGIN) / 3600
        if needed <= hours:
            return None
        # the factor keeps two digits from being rounded to less
        return (
            f"training.hours is {hours:g}, and not one epoch fits: it takes {duration_text(training_s)} "
            f"of training. Expected at least {1.05 * needed:.2g} h; or lower patch.per_case or model.widths."
        )

    def epochs_in(self, hours: float) -> int:
        """Return the number of epochs that the hours hold, of which the first has just ended."""
        validation_s = self._rests_s[True]
        training_s = max(self.epoch_s - validation_s, 1e-3)
        left_s = max(3600 * hours - self.stop.spent_s, 0) * (1 - MARGIN)
        every = self.plan.validate_every
        for n_epochs in range(1 + int(left_s / training_s), 1, -1):
            # the last epoch is always validated
            n_validations = -(-n_epochs // every) - (every == 1)
            if (n_epochs - 1) * training_s + n_validations * validation_s <= left_s:
                return n_epochs
        return 1

    @property
    def _n_done(self) -> int:
        """Patches of the current epoch that are done."""
        size = self.plan.config.training.effective_batch_at(self.progress.epoch)
        return min(self.progress.n_batches * size, self.plan.n_patches)

    @property
    def _n_validations(self) -> int:
        return sum(map(self._is_validated, range(self.progress.epoch, self.progress.n_epochs or 0)))

    @property
    def _validation_s(self) -> float:
        """Seconds of a validation: as measured, or expected from its cost."""
        expected_s = self.plan.validation_cost * self.plan.n_patches * (self.patch_s or 0.0)
        return self._rests_s.get(True, expected_s)

    def _is_validated(self, epoch: int) -> bool:
        return self.plan.is_validated(epoch, self.progress.n_epochs)
