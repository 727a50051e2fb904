"""Runs for tests: trained in this process, and stopped where a test wants it."""

from pathlib import Path

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.progress import untracked
from brats_seg.training.time_limits import StopRequest
from brats_seg.training.trainer import Outcome, Trainer


class StopAtCheck(StopRequest):
    """Asks to stop the n-th time it is asked; the trainer asks before each batch and case."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n_left = n

    @property
    def reason(self) -> str | None:
        self.n_left -= 1
        return "the test says so" if self.n_left < 0 else None


def train(
    data: FoldData, run_path: Path, config: Config, stop: StopRequest | None = None, **given: object
) -> Outcome:
    """Train, or resume; further arguments are passed to the trainer."""
    trainer = Trainer(data=data, config=config, run_path=run_path, **given)  # type: ignore[arg-type]
    return trainer.run(stop=stop, track=untracked)
