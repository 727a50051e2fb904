"""The epoch loop: from the prepared cases of a fold to `runs/<name>`."""

import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from brats_seg.config import Config
from brats_seg.data.dataset import Sample
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import WindowPatches
from brats_seg.data.patches import stable_seed
from brats_seg.errors import BratsError, EnvironmentalError
from brats_seg.models.device import choose_device
from brats_seg.models.memory import peak_memory_mb, reset_peak_memory
from brats_seg.models.trained import ModelIdentity
from brats_seg.progress import Track, tracked
from brats_seg.training.accumulation import HalfUpdatedError, StepResult
from brats_seg.training.checkpoint import Checkpoint, Position, save_checkpoint
from brats_seg.training.criterion import Criterion, is_mean_over_patches
from brats_seg.training.epoch import (
    epoch_windows,
    n_optimizer_steps,
    patch_shape,
    patch_stream,
)
from brats_seg.training.history import PhaseScores, Row, Tally, row_line, write_history
from brats_seg.training.losses import build_criterion
from brats_seg.training.ranks import Ranks
from brats_seg.training.run import Run, environment_of
from brats_seg.training.state import (
    build_network,
    build_state,
    check_network,
    checkpoint_of,
    restore,
)
from brats_seg.training.stopping import StopRequest
from brats_seg.training.validation import count_voxels, plan_validation, validate

log = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 50
"""Steps without a finite gradient before a run gives up; a float16 loss scale settles in 16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    finished: bool
    """Whether all epochs are done; otherwise the same call goes on."""
    reason: str
    history: tuple[Row, ...]
    best: float | None
    """Best watched value."""


class RunStoppedError(BratsError):
    """The run was asked to stop, and its state is saved."""


class Trainer:
    """Train a network on one fold, or go on where an earlier start of the run was.

    Gives `config.yaml`, `environment.json`, `history.csv`, `history.png`, `last.pt` and `best.pt`
    in the folder of the run. Without a network or a criterion, the settings say which.

        data = open_fold(Path("data/BraTS2021"), fold=0, config=config)
        Trainer(data=data, config=config, run_path=Path("runs/fold0"), network=network).run()
    """

    def __init__(
        self,
        *,
        data: FoldData,
        config: Config,
        run_path: Path,
        network: nn.Module | None = None,
        criterion: Criterion | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.data = data
        self.config = config
        self.run_folder = Run(path=run_path)
        self.ranks = ranks or Ranks()
        self.device = choose_device(config.training.device, config.training.precision)
        self.criterion = criterion or build_criterion(config.loss)
        self._patch = patch_shape(config, data)
        self.network = network or build_network(config, self._patch)
        check_network(self.network, config.training)
        self.state = build_state(
            self.network,
            self.criterion,
            config,
            device=self.device,
            ranks=self.ranks,
            n_steps=n_optimizer_steps(config, len(data.split.train)),
        )
        self._n_skipped_in_a_row = 0
        self._started_s = self._saved_s = time.monotonic()

    def run(
        self,
        *,
        fresh: bool = False,
        stop: StopRequest | None = None,
        track: Track = tracked,
    ) -> Outcome:
        """Train to the last epoch, or until asked to stop; a new trainer of the same run goes on.

        `fresh` renames an earlier run of that name instead of going on with it. Raises
        `ResumeError` if the run was begun with other settings or cases.
        """
        stop = stop or StopRequest()
        self._begin(fresh)
        try:
            with stop.listening():
                while self.state.position.epoch < self.config.training.n_epochs:
                    self._run_epoch(stop, track)
        except RunStoppedError as stopped:
            return self._outcome(finished=False, reason=str(stopped))
        return self._outcome(finished=True, reason="all epochs are done")

    @property
    def _identity(self) -> ModelIdentity:
        return ModelIdentity(
            conventions=self.data.conventions,
            patch=self._patch,
            fingerprint=self.data.fingerprint,
        )

    def _begin(self, fresh: bool) -> None:
        with self.ranks.first_alone():
            if self.ranks.is_first and fresh and (aside := self.run_folder.set_aside()):
                log.info("the earlier run is now %s", aside)
        device = self.device.torch_device
        checkpoint = self.run_folder.checkpoint(self.config, self._identity, device)
        if self.ranks.is_first:
            self.run_folder.begin(self.config, self.device)
        self.ranks.broadcast(self.network)
        if checkpoint is not None:
            restore(self.state, checkpoint)
            position = self.state.position
            log.info("going on at epoch %d, step %d", position.epoch + 1, position.n_steps)

    def _run_epoch(self, stop: StopRequest, track: Track) -> None:
        self._started_s = time.monotonic() - self.state.tally.seconds
        reset_peak_memory(self.device.torch_device)
        self._train(stop, track)
        validation = self._validate(stop, track)
        self._end_epoch(self.state.tally.scores(), validation)

    def _train(self, stop: StopRequest, track: Track) -> None:
        epoch, n_done = self.state.position.epoch, self.state.position.n_windows
        windows = epoch_windows(self.config, self.data.split.train, epoch)[n_done:]
        shares = [self.ranks.share(window) for window in windows]
        patches = patch_stream(
            self.data,
            self.config,
            shares,
            n_passes=1 if is_mean_over_patches(self.criterion) else 2,
            micro_batch=self.state.ladder.rung.micro_batch,
            device=self.device,
        )
        self.network.train()
        what = f"epoch {epoch + 1}/{self.config.training.n_epochs}"
        for window in track(patches, what=what, total=len(shares)):
            self._stop_if_asked(stop)
            self._train_window(window, stop)
            if time.monotonic() - self._saved_s > 60 * self.config.training.checkpoint_minutes:
                self._save()
        self._stop_if_asked(stop)

    def _train_window(self, patches: WindowPatches, stop: StopRequest) -> None:
        state, position = self.state, self.state.position
        # random layers draw from torch's generator: where the window is decides what they draw
        seed = self.config.training.seed
        torch.manual_seed(stable_seed(seed, position.epoch, position.n_windows, self.ranks.rank))
        try:
            result = state.ladder.step(patches, count_voxels)
        except HalfUpdatedError:
            raise
        except EnvironmentalError:
            # a signal to the whole process group, as of SLURM, ends the workers too
            self._stop_if_asked(stop)
            raise
        share = [draw.case_id for draw in patches.draws], result.measured.tolist()
        for case_ids, rows in self.ranks.gather(share):
            for case_id, voxels in zip(case_ids, rows, strict=True):
                state.tally.add(case_id, voxels)
        state.after_window(result)
        self._check_not_diverged(result)

    def _check_not_diverged(self, result: StepResult) -> None:
        self._n_skipped_in_a_row = self._n_skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            log.warning("a step was left out: its gradient was not finite")
        if self._n_skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            msg = (
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row had no finite gradient. Lower optimizer.lr, "
                "or set training.precision to fp32, and start anew with --fresh."
            )
            raise BratsError(msg)

    def _validate(self, stop: StopRequest, track: Track) -> PhaseScores | None:
        own_ids = self.ranks.share(self.data.split.validation)
        epoch = self.state.position.epoch
        plan = plan_validation(self.data, self.config, own_ids, epoch, self.device)
        if plan is None:
            return None
        samples = track(plan.samples, what="validation", total=plan.n_samples)
        until_stopped = self._until_stopped(samples, stop)
        network = self.state.evaluated
        own = validate(network, self.criterion, until_stopped, self.device, plan.predict)
        tally = Tally()
        for part in self.ranks.gather(own):
            tally.add_all(part)
        return tally.scores()

    def _end_epoch(self, training: PhaseScores, validation: PhaseScores | None) -> None:
        state, device = self.state, self.device.torch_device
        row = {
            "epoch": state.position.epoch + 1,
            "step": state.position.n_steps,
            "lr": float(state.accumulator.optimizer.param_groups[0]["lr"]),
            "seconds": time.monotonic() - self._started_s,
            "peak_memory_mb": peak_memory_mb(device),
            **training.columns("train"),
            **({} if validation is None else validation.columns("val")),
        }
        state.history.append(row)
        line = row_line(row, self.config.training.n_epochs)
        log.info(f"{line}, {state.ladder.rung}" if state.ladder.place else line)
        state.position = Position(epoch=state.position.epoch + 1, n_steps=state.position.n_steps)
        state.tally = Tally()
        self._started_s = time.monotonic()
        if validation is not None:
            state.schedule.after_validation(row[self.config.schedule.watch])
            self._keep_if_best(row[self.config.validation.watch])
        self._save()
        if self.ranks.is_first:
            write_history(state.history, self.run_folder.path)

    def _keep_if_best(self, value: float) -> None:
        sign = 1 if self.config.validation.watch == "val_dice" else -1
        best = self.state.best
        if math.isfinite(value) and (best is None or sign * value > sign * best):
            self.state.best = value
            checkpoint = replace(
                self._checkpoint(),
                model=self.state.evaluated.state_dict(),
                optimizer=None,
                schedule=None,
                ladder=None,
                scaler=None,
                ema=None,
            )
            if self.ranks.is_first:
                save_checkpoint(checkpoint, self.run_folder.best_path)

    def _checkpoint(self) -> Checkpoint:
        return checkpoint_of(self.state, self._identity, self.config, environment_of(self.device))

    def _save(self) -> None:
        self.state.tally.seconds = time.monotonic() - self._started_s
        if self.ranks.is_first:
            save_checkpoint(self._checkpoint(), self.run_folder.last_path)
        self._saved_s = time.monotonic()

    def _until_stopped(self, samples: Iterable[Sample], stop: StopRequest) -> Iterator[Sample]:
        for sample in samples:
            if self.ranks.n_ranks == 1:  # ranks hold unlike numbers of cases, and must ask together
                self._stop_if_asked(stop)
            yield sample

    def _stop_if_asked(self, stop: StopRequest) -> None:
        if self.ranks.any(stop.reason is not None):
            self._save()
            raise RunStoppedError(stop.reason or "another rank was asked to stop")

    def _outcome(self, *, finished: bool, reason: str) -> Outcome:
        return Outcome(
            finished=finished,
            reason=reason,
            history=tuple(self.state.history),
            best=self.state.best,
        )
