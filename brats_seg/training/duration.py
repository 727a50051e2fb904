"""Expect how long the rest of a run takes, from the time that its steps and validations have taken.

Before the first validation is measured, its time is expected from its cost relative to an epoch of
training (`validation_cost`). Times are those of one call: the next may run on another machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from brats_seg.progress import Pace, duration_text

SAID_AFTER_S = 10.0
"""Seconds of training after which the expected duration of a run is said."""


@dataclass(kw_only=True, slots=True)
class RunDuration:
    """Clock of a run; nothing is expected before its second step.

    The trainer tells it where the run is.
    """

    n_epochs: int
    n_patches: int
    """Patches of an epoch."""
    is_validated: Callable[[int], bool]
    """Whether an epoch ends with a validation on whole cases."""
    validation_cost: float
    """Cost of that validation, in epochs of training."""
    n_steps: int = field(default=0, init=False)
    """Steps that were measured."""
    training_s: float = field(default=0.0, init=False)
    """Seconds of all batches."""
    _epoch: int = field(default=0, init=False)
    _n_done: int = field(default=0, init=False)
    _n_measured: int = field(default=0, init=False)
    _marked_s: float = field(default=0.0, init=False)
    _pace: Pace = field(default_factory=Pace, init=False)
    _rests_s: dict[bool, float] = field(default_factory=dict, init=False)
    """Seconds from the last batch of an epoch to the next epoch, with and without validation."""

    def begin(self, epoch: int, n_done: int) -> None:
        """Start the clock.

        Args:
            epoch: Index of the epoch that begins, or is resumed.
            n_done: Patches of that epoch that an earlier call has trained on.
        """
        self._epoch, self._n_done, self._marked_s = epoch, n_done, time.monotonic()

    def after_batch(self, n_patches: int) -> None:
        """Count a batch of so many patches."""
        now_s = time.monotonic()
        self.training_s += now_s - self._marked_s
        self._marked_s = now_s
        self._n_done += n_patches
        self._n_measured += n_patches
        self.n_steps += 1
        # the first step is left out: buffers are allocated and kernels chosen meanwhile
        self._pace.note(self._n_measured, self.training_s)

    def end_epoch(self) -> None:
        """Count an epoch; what followed its last batch was its validation."""
        now_s = time.monotonic()
        self._rests_s[self.is_validated(self._epoch)] = now_s - self._marked_s
        self._epoch, self._n_done, self._marked_s = self._epoch + 1, 0, now_s

    @property
    def left_s(self) -> float | None:
        """Expected seconds to the end of the run, or None if they are not known yet."""
        patch_s = self._pace.item_s
        if patch_s is None or self._epoch >= self.n_epochs:
            return None
        n_epochs = self.n_epochs - self._epoch
        left_s = patch_s * (n_epochs * self.n_patches - self._n_done)
        validation_s = self._validation_s(patch_s)
        if self._n_done >= self.n_patches and self.is_validated(self._epoch):
            left_s -= min(time.monotonic() - self._marked_s, validation_s)
        left_s += self._n_validations * validation_s
        return left_s + (n_epochs - self._n_validations) * self._rests_s.get(False, 0.0)

    def expectation(self) -> str | None:
        """Return the expected duration in words, or None in the first seconds of training."""
        patch_s, left_s = self._pace.item_s, self.left_s
        if patch_s is None or left_s is None or self.training_s < SAID_AFTER_S:
            return None
        validation_s = self._n_validations * self._validation_s(patch_s)
        return (
            f"about {duration_text(left_s)} to the end of epoch {self.n_epochs}, of which validation "
            f"takes {duration_text(validation_s)}; expected from the first {self.n_steps} steps"
        )

    @property
    def _n_validations(self) -> int:
        return sum(map(self.is_validated, range(self._epoch, self.n_epochs)))

    def _validation_s(self, patch_s: float) -> float:
        return self._rests_s.get(True, self.validation_cost * self.n_patches * patch_s)
