"""Steps that were left out because their gradient was not finite."""

import logging

from brats_seg.errors import BratsError
from brats_seg.training.accumulation import StepResult

log = logging.getLogger(__name__)

MAX_IN_A_ROW = 50
"""Before a run gives up; a float16 loss scale settles in 16."""


class SkippedSteps:
    """Counts those in a row."""

    def __init__(self) -> None:
        self._n_in_a_row = 0

    def note(self, result: StepResult) -> None:
        """Take a step down.

        Raises:
            BratsError: Too many in a row were left out.
        """
        self._n_in_a_row = self._n_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            log.warning("a step was left out: its gradient was not finite")
        if self._n_in_a_row == MAX_IN_A_ROW:
            msg = (
                f"{MAX_IN_A_ROW} steps in a row had no finite gradient. Lower optimizer.lr, or set "
                "training.precision to fp32, and start anew with --fresh."
            )
            raise BratsError(msg)
