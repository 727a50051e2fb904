"""The epoch loop: from the prepared cases of a fold to `runs/<name>`."""

import logging
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
from brats_seg.models.memory import (
    keep_to_limit_of_address_space,
    peak_memory_mb,
    reset_peak_memory,
)
from brats_seg.progress import Track, tracked
from brats_seg.training.accumulation import HalfUpdatedError
from brats_seg.training.checkpoint import Position
from brats_seg.training.criterion import Criterion, is_mean_over_patches
from brats_seg.training.epoch import (
    epoch_windows,
    n_optimizer_steps,
    patch_shape,
    patch_stream,
)
from brats_seg.training.history import Row, phase_columns, row_line
from brats_seg.training.keeper import Keeper
from brats_seg.training.plan import start_on_planned_rung
from brats_seg.training.ranks import Ranks
from brats_seg.training.skipped import SkippedSteps
from brats_seg.training.state import build_network, build_state, check_network
from brats_seg.training.stopping import StopRequest
from brats_seg.training.tally import Tally
from brats_seg.training.task import task_of
from brats_seg.training.validation import plan_validation, validate

log = logging.getLogger(__name__)


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

    Gives `config.yaml`, `split.csv`, `environment.json`, `history.csv`, `history.png`, `last.pt` and
    `best.pt` in the folder of the run. Without a network or a criterion, the settings say which.

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
        self.ranks = ranks or Ranks()
        self.device = choose_device(config.training.device, config.training.precision)
        task = task_of(config)
        self.task = task if criterion is None else replace(task, criterion=criterion)
        patch = patch_shape(config, data)
        self.network = network or build_network(config, patch)
        check_network(self.network, config.training)
        self.state = build_state(
            self.network,
            self.task.criterion,
            config,
            device=self.device,
            ranks=self.ranks,
            n_steps=n_optimizer_steps(config, len(data.split.train)),
        )
        self._keeper = Keeper(
            path=run_path,
            state=self.state,
            config=config,
            data=data,
            patch=patch,
            device=self.device,
            ranks=self.ranks,
        )
        self._skipped = SkippedSteps()

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
        keep_to_limit_of_address_space()
        goes_on = self._keeper.begin(fresh=fresh)
        if self.config.training.memory == "auto" and not goes_on:
            start_on_planned_rung(self.state, self.config, patch_shape(self.config, self.data))
        try:
            with stop.listening():
                while self.state.position.epoch < self.config.training.n_epochs:
                    self._run_epoch(stop, track)
        except RunStoppedError as stopped:
            return self._outcome(finished=False, reason=str(stopped))
        return self._outcome(finished=True, reason="all epochs are done")

    def _run_epoch(self, stop: StopRequest, track: Track) -> None:
        self._keeper.begin_epoch()
        reset_peak_memory(self.device.torch_device)
        self._train(stop, track)
        validation = self._validate(stop, track)
        self._end_epoch(validation)

    def _train(self, stop: StopRequest, track: Track) -> None:
        epoch, n_done = self.state.position.epoch, self.state.position.n_windows
        windows = epoch_windows(self.config, self.data.split.train, epoch)[n_done:]
        shares = [self.ranks.share(window) for window in windows]
        patches = patch_stream(
            self.data,
            self.config,
            shares,
            n_passes=1 if is_mean_over_patches(self.task.criterion) else 2,
            micro_batch=self.state.ladder.rung.micro_batch,
            device=self.device,
        )
        self.network.train()
        what = f"epoch {epoch + 1}/{self.config.training.n_epochs}"
        for window in track(patches, what=what, total=len(shares)):
            self._stop_if_asked(stop)
            self._train_window(window, stop)
            if self._keeper.is_due:
                self._keeper.save()
        self._stop_if_asked(stop)

    def _train_window(self, patches: WindowPatches, stop: StopRequest) -> None:
        state, position = self.state, self.state.position
        # random layers draw from torch's generator: where the window is decides what they draw
        seed = self.config.training.seed
        torch.manual_seed(stable_seed(seed, position.epoch, position.n_windows, self.ranks.rank))
        try:
            result = state.ladder.step(patches, self.task.measure)
        except HalfUpdatedError:
            raise
        except EnvironmentalError:
            # a signal to the whole process group, as of SLURM, ends the workers too
            self._stop_if_asked(stop)
            raise
        share = [draw.case_id for draw in patches.draws], result.measured.tolist()
        for case_ids, rows in self.ranks.gather(share):
            for case_id, measured in zip(case_ids, rows, strict=True):
                state.tally.add(case_id, measured)
        state.after_window(result)
        self._skipped.note(result)

    def _validate(self, stop: StopRequest, track: Track) -> Tally | None:
        own_ids = self.ranks.share(self.data.split.validation)
        epoch = self.state.position.epoch
        plan = plan_validation(self.data, self.config, own_ids, epoch, self.device)
        if plan is None:
            return None
        samples = track(plan.samples, what="validation", total=plan.n_samples)
        until_stopped = self._until_stopped(samples, stop)
        network = self.state.evaluated
        own = validate(network, self.task, until_stopped, self.device, plan.predict)
        tally = Tally()
        for part in self.ranks.gather(own):
            tally.add_all(part)
        return tally

    def _end_epoch(self, validation: Tally | None) -> None:
        state, device, scores = self.state, self.device.torch_device, self.task.scores
        row = {
            "epoch": state.position.epoch + 1,
            "step": state.position.n_steps,
            "lr": float(state.accumulator.optimizer.param_groups[0]["lr"]),
            "seconds": self._keeper.epoch_s,
            "peak_memory_mb": peak_memory_mb(device),
            **phase_columns("train", scores(state.tally)),
            **({} if validation is None else phase_columns("val", scores(validation))),
        }
        state.history.append(row)
        line = row_line(row, self.config.training.n_epochs)
        log.info(f"{line}, {state.ladder.rung}" if state.ladder.place else line)
        state.position = Position(epoch=state.position.epoch + 1, n_steps=state.position.n_steps)
        state.tally = Tally()
        self._keeper.begin_epoch()
        if validation is not None:
            state.schedule.after_validation(row[self.config.schedule.watch])
            self._keeper.save_if_best(row[self.config.validation.watch])
        self._keeper.save()
        self._keeper.write_history()

    def _until_stopped(self, samples: Iterable[Sample], stop: StopRequest) -> Iterator[Sample]:
        for sample in samples:
            if self.ranks.n_ranks == 1:  # ranks hold unlike numbers of cases, and must ask together
                self._stop_if_asked(stop)
            yield sample

    def _stop_if_asked(self, stop: StopRequest) -> None:
        if self.ranks.any(stop.reason is not None):
            self._keeper.save()
            raise RunStoppedError(stop.reason or "another rank was asked to stop")

    def _outcome(self, *, finished: bool, reason: str) -> Outcome:
        return Outcome(
            finished=finished,
            reason=reason,
            history=tuple(self.state.history),
            best=self.state.best,
        )
