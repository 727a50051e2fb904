"""What a run leaves on disk as it goes, and how a later start takes it up."""

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.models.device import Device
from brats_seg.models.trained import ModelIdentity
from brats_seg.training.checkpoint import Checkpoint, save_checkpoint
from brats_seg.training.history import write_history
from brats_seg.training.ranks import Ranks
from brats_seg.training.run import Run, environment_of
from brats_seg.training.state import RunState, checkpoint_of, restore

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Keeper:
    """Keeps the state of a run: the latest, and the best; of several ranks the first one writes."""

    path: Path
    """Folder of the run."""
    state: RunState
    config: Config
    data: FoldData
    patch: tuple[int, int, int]
    """Voxels that the network is built for."""
    device: Device
    ranks: Ranks
    _started_s: float = field(default_factory=time.monotonic, init=False)
    _saved_s: float = field(default_factory=time.monotonic, init=False)

    @property
    def epoch_s(self) -> float:
        """Seconds that the epoch has taken, those of earlier starts included."""
        return time.monotonic() - self._started_s

    @property
    def is_due(self) -> bool:
        """Whether the latest state is older than the settings allow."""
        return time.monotonic() - self._saved_s > 60 * self.config.training.checkpoint_minutes

    def begin(self, *, fresh: bool) -> bool:
        """Go on from the latest state, and tell whether there was one.

        `fresh` sets an earlier run aside first. Raises `ResumeError` if the run was begun with
        other settings or cases.
        """
        run = Run(path=self.path)
        with self.ranks.first_alone():
            if self.ranks.is_first and fresh and (aside := run.set_aside()):
                log.info("the earlier run is now %s", aside)
        checkpoint = run.checkpoint(self.config, self._identity, self.device.torch_device)
        if self.ranks.is_first:
            run.begin(self.config, self.data.split, self.device)
        self.ranks.broadcast(self.state.network)
        if checkpoint is not None:
            restore(self.state, checkpoint)
            position = self.state.position
            log.info("going on at epoch %d, step %d", position.epoch + 1, position.n_steps)
        return checkpoint is not None

    def begin_epoch(self) -> None:
        """Start the clock of an epoch, where it stood if the epoch was begun before."""
        self._started_s = time.monotonic() - self.state.tally.seconds

    def save(self) -> None:
        """Write the latest state."""
        self.state.tally.seconds = self.epoch_s
        if self.ranks.is_first:
            save_checkpoint(self._checkpoint(), Run(path=self.path).last_path)
        self._saved_s = time.monotonic()

    def save_if_best(self, value: float) -> None:
        """Write what predicts, if its watched value is better than all before."""
        sign = 1 if self.config.validation.watch == "val_dice" else -1
        best = self.state.best
        if math.isfinite(value) and (best is None or sign * value > sign * best):
            self.state.best = value
            checkpoint = self._checkpoint().for_prediction(self.state.evaluated.state_dict())
            if self.ranks.is_first:
                save_checkpoint(checkpoint, Run(path=self.path).best_path)

    def write_history(self) -> None:
        """Write the table and the picture of all epochs so far."""
        if self.ranks.is_first:
            write_history(self.state.history, self.path)

    @property
    def _identity(self) -> ModelIdentity:
        return ModelIdentity(
            conventions=self.data.conventions,
            patch=self.patch,
            fingerprint=self.data.fingerprint,
        )

    def _checkpoint(self) -> Checkpoint:
        return checkpoint_of(self.state, self._identity, self.config, environment_of(self.device))
