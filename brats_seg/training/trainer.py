"""Train a network on one fold.

`train_fold` indexes and prepares a folder of scans, and trains on it. `Trainer` is the loop over
epochs alone, for data, a network or a loss that are given in Python.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from pathlib import Path
from signal import Signals

import torch
from torch import nn

from brats_seg.config import Config
from brats_seg.data.fold import FoldData, open_fold, open_split
from brats_seg.data.loader import Sample
from brats_seg.data.manifest import raise_damage, verify_cases
from brats_seg.data.patches import stable_seed
from brats_seg.data.store import open_case
from brats_seg.errors import BratsError, EnvironmentalError, UsageError, counted
from brats_seg.figures.history import Row
from brats_seg.files import reading
from brats_seg.progress import Track, say, tracked, untracked
from brats_seg.runtime.device import choose_device, threads_for
from brats_seg.runtime.machine import RUN_BYTES, check_machine
from brats_seg.runtime.memory import (
    give_back_memory,
    keep_to_limit_of_address_space,
    peak_memory_mb,
    reset_peak_memory,
)
from brats_seg.training.accumulation import HalfUpdatedError, StepResult
from brats_seg.training.checkpoints import Checkpointer, Run
from brats_seg.training.duration import RunDuration
from brats_seg.training.epoch import (
    Batch,
    epoch_batches,
    n_optimizer_steps,
    patch_shape,
    read_batches,
    shared_memory_needed,
)
from brats_seg.training.history import outlook_text, phase_columns, row_line
from brats_seg.training.losses import Criterion
from brats_seg.training.memory_plan import start_in_planned_mode
from brats_seg.training.ranks import Ranks, joined_ranks
from brats_seg.training.start_weights import check_start, holding
from brats_seg.training.state import (
    Position,
    build_network,
    build_state,
)
from brats_seg.training.tasks import RunningSums, task_of
from brats_seg.training.time_limits import (
    EpochTime,
    RunStoppedError,
    StopRequest,
    Stopwatch,
    TrialEndedError,
    fitted_to_hours,
    kept_from_start,
    trial_s,
)
from brats_seg.training.trackers import LogRow, check_trackers, tracked_run
from brats_seg.training.validation import plan_validation, validate
from brats_seg.training.validation_interval import (
    interval_line,
    is_validated_whole,
    validation_cost,
    validation_interval,
)

log = logging.getLogger(__name__)

MAX_IN_A_ROW = 50
"""Skipped steps in a row after which a run gives up; a float16 loss scale settles in 16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one call that trains a run."""

    finished: bool
    """Whether all epochs are done; otherwise the same call continues the run."""
    reason: str
    """Reason why it ended."""
    signal: Signals | None = None
    """Signal that stopped it, if one did."""
    history: tuple[Row, ...]
    """A row for each finished epoch."""
    best: float | None
    """Best watched value."""


def train_fold(  # noqa: PLR0913 - the options of a run
    data: Path,
    fold: int,
    *,
    config: Config,
    run_path: Path | None = None,
    prepared_path: Path | None = None,
    max_hours: float | None = None,
    fresh: bool = False,
    track: Track = tracked,
) -> Outcome:
    """Index and prepare the scans of a folder, and train one fold, or resume it.

    Under `torchrun` all its processes train the fold together.

    Args:
        data: Folder of scans.
        fold: Index of the fold that is held out.
        config: Settings.
        run_path: Folder to write to; `runs/fold<fold>` by default.
        prepared_path: Folder of prepared cases; `prepared_path_of` the data folder by default.
        max_hours: Time after which training stops; the same call then continues it.
        fresh: Rename an earlier run of that name instead of resuming it.
        track: Shows the progress.

    Raises:
        BratsError: Scans, settings, run or machine cannot be used; the subclass says which.
    """
    stop = StopRequest(max_hours)
    run_path = run_path or Path(f"runs/fold{fold}")
    begins = fresh or not Run(path=run_path).last_path.exists()
    check_start(config.start, run_path, begins=begins)
    with joined_ranks() as ranks:
        track = track if ranks.is_first else untracked
        _check_machine(config, run_path)
        with ranks.first_alone():
            if not begins:
                Run(path=run_path).check_scans(data, config)
            fold_data = open_fold(
                data, fold=fold, config=config, prepared_path=prepared_path, track=track
            )
        with reading(fold_data.folder):
            check_unchanged(fold_data)
            if config.training.hours is not None:
                if begins:
                    timed = time_epoch(fold_data, config, ranks)
                    config = fitted_to_hours(config, timed, max(ranks.gather(stop.elapsed_s)))
                else:
                    config = kept_from_start(config, run_path)
            trainer = Trainer(data=fold_data, config=config, run_path=run_path, ranks=ranks)
            n_train, n_held_out = len(fold_data.split.train), len(fold_data.split.validation)
            of = f"fold {fold} of {fold_data.folds_path}"
            log.info("%s: %s to train on, %d held out", of, counted(n_train, "case"), n_held_out)
            outcome = trainer.run(fresh=fresh, stop=stop, track=track)
        _log_outcome(outcome, config.validation.watch, Run(path=run_path), stop)
    return outcome


def _check_machine(config: Config, run_path: Path) -> None:
    """Check the device, the trackers and the folder of the run, before hours of preparation."""
    check_trackers(config.tracking)
    settings = config.training
    on_gpu = choose_device(settings.device, settings.precision).torch_device.type != "cpu"
    needed = shared_memory_needed(config, on_gpu=on_gpu)
    check_machine(run_path, needed_shared=needed, needed_disk=RUN_BYTES)


def time_epoch(data: FoldData, config: Config, ranks: Ranks | None = None) -> EpochTime:
    """Time real steps and held-out cases on a network that is thrown away; nothing is written.

    Args:
        data: Prepared cases of a fold.
        config: Settings; the timing takes a share of `training.hours`.
        ranks: The processes that share each batch.
    """
    log.info("timing steps and held-out cases, to fit the number of epochs to the hours")
    # no checkpoint meanwhile
    training = config.training.model_copy(update={"checkpoint_minutes": inf})
    config = config.model_copy(update={"training": training})
    trainer = Trainer(data=data, config=config, run_path=Path(), ranks=ranks)
    timed = trainer.timed_epoch(trial_s(config.training.hours or 0))
    device = trainer.device.torch_device
    del trainer
    give_back_memory(device)
    return timed


def check_unchanged(data: FoldData) -> None:
    """Raise `UsageError` if another process has replaced the prepared cases since they were opened."""
    if open_split(data.folder, data.split).fingerprint != data.fingerprint:
        msg = (
            f"another process has prepared the cases in {data.folder} with other settings since "
            "they were opened. Start the same command again."
        )
        raise UsageError(msg)


class SkippedSteps:
    """Counts the optimizer steps in a row that were skipped."""

    def __init__(self) -> None:
        self._n_in_a_row = 0

    def note(self, result: StepResult) -> None:
        """Count a step.

        Raises:
            BratsError: Too many steps in a row were skipped.
        """
        self._n_in_a_row = self._n_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            log.warning("a step was skipped: its gradient was not finite")
        if self._n_in_a_row == MAX_IN_A_ROW:
            msg = (
                f"{MAX_IN_A_ROW} steps in a row had no finite gradient. Lower optimizer.lr, or set "
                "training.precision to fp32, and start anew with --fresh."
            )
            raise BratsError(msg)


class Trainer:
    """Train a network on one fold, or resume an earlier start of the run.

    Writes the files that `checkpoints` lists into the folder of the run. Network and loss are those
    of the settings, unless given. Parameters of a loss that is a `torch.nn.Module` are learnt, saved
    and resumed with those of the network.

    Example:
        >>> config = Config()
        >>> data = open_fold(Path("data/BraTS2021"), fold=0, config=config)  # doctest: +SKIP
        >>> run_path = Path("runs/fold0")  # doctest: +SKIP
        >>> Trainer(data=data, config=config, run_path=run_path).run()  # doctest: +SKIP
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
        self.state = build_state(
            self.network,
            self.task.criterion,
            config,
            device=self.device,
            ranks=self.ranks,
            n_steps=n_optimizer_steps(config, len(data.split.train)),
        )
        self._checkpointer = Checkpointer(
            path=run_path,
            state=self.state,
            config=config,
            data=data,
            patch=patch,
            device=self.device,
            ranks=self.ranks,
        )
        self._skipped = SkippedSteps()
        self._every = validation_interval(data, config)
        self._duration = RunDuration(
            n_epochs=config.training.n_epochs,
            n_patches=config.patch.per_case * len(data.split.train),
            is_validated=partial(is_validated_whole, config, self._every),
            validation_cost=validation_cost(data, config),
        )
        self._log_row: LogRow = _ignore_row
        # a run that has begun says it once
        self._is_duration_said = True

    def run(
        self,
        *,
        fresh: bool = False,
        stop: StopRequest | None = None,
        track: Track = tracked,
    ) -> Outcome:
        """Train to the last epoch, or until a stop is requested; a new trainer continues the run.

        Args:
            fresh: Rename an earlier run of that name instead of resuming it.
            stop: Request to stop, which is checked between batches and between cases.
            track: Shows the progress.

        Raises:
            CaseError: A prepared case is damaged.
            UsageError: Another process trains or tunes the run.
            ResumeError: The run was begun with other settings or cases.
        """
        stop = stop or StopRequest()
        self._checkpointer.session_began_s = stop.began_s
        keep_to_limit_of_address_space()
        patch = patch_shape(self.config, self.data)
        with (
            threads_for(self.device.torch_device, patch),
            reading(self.data.folder),
        ):
            self._verify(track)
            with self._checkpointer.opened(fresh=fresh) as resumed, self._tracked():
                return self._run(stop, track, resumed=resumed)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Open the trackers of the settings on the first rank."""
        if not self.ranks.is_first:
            yield
            return
        with tracked_run(self.config, self._checkpointer.path) as self._log_row:
            yield

    def _run(self, stop: StopRequest, track: Track, *, resumed: bool) -> Outcome:
        if not resumed:
            self._plan()
        start, training = self.config.start, self.config.training
        if self.config.validation.every == "auto":
            log.info(interval_line(self._every, training.n_epochs))
        stop.limit_sessions(training.hours, self.state.spent_s)
        epoch, n_batches = self.state.position.epoch, self.state.position.n_batches
        self._duration.begin(epoch, n_batches * training.effective_batch_at(epoch))
        self._is_duration_said = False
        try:
            with (
                stop.listening(),
                holding(self.network, self.state.started_from, start.hold_epochs) as self._hold,
            ):
                while self.state.position.epoch < training.n_epochs:
                    self._run_epoch(stop, track)
        except RunStoppedError as stopped:
            return self._outcome(str(stopped), signal=stop.signal)
        return self._outcome("all epochs are done")

    def _plan(self) -> None:
        """Choose the memory mode of a new run."""
        patch = patch_shape(self.config, self.data)
        if self.config.training.memory == "auto":
            start_in_planned_mode(self.state, self.config, patch)

    def _verify(self, track: Track) -> None:
        """Verify the prepared cases, each by one rank."""
        split, folder = self.data.split, self.data.folder
        own_ids = self.ranks.share((*split.train, *split.validation))
        own = verify_cases(own_ids, folder, track=track)
        raise_damage([error for errors in self.ranks.gather(own) for error in errors])

    def timed_epoch(self, limit_s: float) -> EpochTime:
        """Time an epoch by a part of it: the weights change, and nothing is written.

        Args:
            limit_s: Seconds that the timing of steps may take, and that of held-out cases.
        """
        config, device = self.config, self.device.torch_device
        patch = patch_shape(config, self.data)
        self._is_duration_said = True
        with threads_for(device, patch), reading(self.data.folder):
            self._plan()
            return EpochTime(
                training_s=max(self.ranks.gather(self._timed_training(limit_s))),
                validation_s=max(self.ranks.gather(self._timed_validation(limit_s))),
                every=self._every,
            )

    def _timed_training(self, limit_s: float) -> float:
        sizes = [len(keys) for keys in epoch_batches(self.config, self.data.split.train, 0)]
        # memory is allocated, and kernels are chosen, in the first step
        self._timed_pass(Stopwatch(0, self.ranks))
        watch, n_patches = Stopwatch(limit_s, self.ranks), 0
        while not watch.is_over:
            self._timed_pass(watch)
            n_patches += sum(sizes[: self.state.position.n_batches])
        return watch.first_s[0] + sum(watch.steps_s) * sum(sizes) / n_patches

    def _timed_pass(self, watch: Stopwatch) -> None:
        """Train on an epoch, until it ends or enough is timed."""
        self.state.position = Position()
        self._duration.begin(0, 0)
        watch.begin_pass()
        with suppress(TrialEndedError):
            self._train(watch, untracked)

    def _timed_validation(self, limit_s: float) -> float:
        """Return the seconds of a validation, by the first cases and the voxels of all."""
        held_out = self.data.split.validation
        timed = held_out[: self.ranks.n_ranks]
        self.data = replace(self.data, split=replace(self.data.split, validation=timed))
        self.state.position = Position(epoch=self.config.training.n_epochs - 1)
        voxels = {case_id: prod(open_case(self.data.folder, case_id).shape) for case_id in held_out}
        for _ in range(2):
            began_s = time.monotonic()
            self._validate(StopRequest(), untracked)
            took_s = time.monotonic() - began_s
            if took_s > limit_s / 2:
                break
        return took_s * sum(voxels.values()) / sum(voxels[case_id] for case_id in timed)

    def _run_epoch(self, stop: StopRequest, track: Track) -> None:
        self._hold(self.state.position.epoch)
        self._checkpointer.begin_epoch()
        reset_peak_memory(self.device.torch_device)
        self._train(stop, track)
        validation = self._validate(stop, track)
        self._end_epoch(validation)

    def _train(self, stop: StopRequest, track: Track) -> None:
        epoch, n_done = self.state.position.epoch, self.state.position.n_batches
        keys = epoch_batches(self.config, self.data.split.train, epoch)[n_done:]
        shares = [self.ranks.share(batch) for batch in keys]
        batches = read_batches(self.data, self.config, shares, self.device)
        self.network.train()
        what = f"epoch {epoch + 1}/{self.config.training.n_epochs}"
        try:
            for batch in track(batches, what=what, total=len(shares)):
                say(partial(self._outlook, stop))
                self._stop_if_asked(stop)
                self._train_batch(batch)
                self._say_duration()
                if self._checkpointer.is_due:
                    self._checkpointer.save()
        except HalfUpdatedError:
            raise
        except EnvironmentalError:
            # a signal to the whole process group, as SLURM sends it, ends the workers too
            self._stop_if_asked(stop)
            raise
        self._stop_if_asked(stop)

    def _train_batch(self, batch: Batch) -> None:
        state, position = self.state, self.state.position
        # random layers draw from torch's generator: their numbers depend on the position alone
        seed = self.config.training.seed
        torch.manual_seed(stable_seed(seed, position.epoch, position.n_batches, self.ranks.rank))
        result = state.fallback.step(batch, self.task.measure)
        share = batch.case_ids, result.measured.tolist()
        for case_ids, rows in self.ranks.gather(share):
            for case_id, measured in zip(case_ids, rows, strict=True):
                state.sums.add(case_id, measured)
        state.after_batch(result)
        self._duration.after_batch(result.n_patches)
        self._skipped.note(result)

    def _outlook(self, stop: StopRequest) -> str:
        """Return the text behind the progress bar."""
        if stop.signal is not None:
            return "stopping soon; a second Ctrl-C does not save"
        state, watch = self.state, self.config.validation.watch
        return outlook_text(state.best, watch, self._duration.left_s, state.sums.loss)

    def _say_duration(self) -> None:
        """Log the expected duration once; later the line of each epoch says it."""
        if not self._is_duration_said and (words := self._duration.expectation()):
            self._is_duration_said = True
            log.info("%s", words)

    def _validate(self, stop: StopRequest, track: Track) -> RunningSums | None:
        own_ids = self.ranks.share(self.data.split.validation)
        epoch = self.state.position.epoch
        plan = plan_validation(self.data, self.config, own_ids, epoch, self.device, self._every)
        if plan is None:
            return None
        samples = track(plan.samples, what="validation", total=plan.n_samples)
        until_stopped = self._until_stopped(samples, stop)
        network = self.state.evaluated
        own = validate(
            network,
            self.task,
            until_stopped,
            self.device,
            plan.predict,
        )
        sums = RunningSums()
        for part in self.ranks.gather(own):
            sums.add_all(part)
        return sums

    def _end_epoch(self, validation: RunningSums | None) -> None:
        state, device, scores = self.state, self.device.torch_device, self.task.scores
        row = {
            "epoch": state.position.epoch + 1,
            "step": state.position.n_steps,
            "lr": float(state.accumulator.optimizer.param_groups[0]["lr"]),
            "seconds": self._checkpointer.epoch_s,
            "peak_memory_mb": peak_memory_mb(device),
            **phase_columns("train", scores(state.sums)),
            **({} if validation is None else phase_columns("val", scores(validation))),
        }
        state.history.append(row)
        line = row_line(row, self.config.training.n_epochs)
        line = f"{line}, {state.fallback.mode}" if state.fallback.place else line
        state.position = Position(epoch=state.position.epoch + 1, n_steps=state.position.n_steps)
        state.sums = RunningSums()
        self._checkpointer.begin_epoch()
        if validation is not None:
            state.schedule.after_validation(row[self.config.schedule.watch])
            self._checkpointer.save_if_best(row[self.config.validation.watch], validation)
        self._duration.end_epoch()
        self._is_duration_said = True
        outlook = outlook_text(state.best, self.config.validation.watch, self._duration.left_s)
        log.info("%s", f"{line} | {outlook}" if outlook else line)
        self._checkpointer.save()
        self._checkpointer.write_history()
        self._log_row(row)

    def _until_stopped(self, samples: Iterable[Sample], stop: StopRequest) -> Iterator[Sample]:
        for sample in samples:
            say(partial(self._outlook, stop))
            # ranks must check together, and have different numbers of cases
            if self.ranks.n_ranks == 1:
                self._stop_if_asked(stop)
            yield sample

    def _stop_if_asked(self, stop: StopRequest) -> None:
        if self.ranks.any(stop.reason is not None):
            self._checkpointer.save()
            raise RunStoppedError(stop.reason or "another rank was asked to stop")

    def _outcome(self, reason: str, *, signal: Signals | None = None) -> Outcome:
        return Outcome(
            finished=self.state.position.epoch >= self.config.training.n_epochs,
            reason=reason,
            signal=signal,
            history=tuple(self.state.history),
            best=self.state.best,
        )


def _ignore_row(row: Row) -> None:
    pass


def _log_outcome(outcome: Outcome, watched: str, run: Run, stop: StopRequest) -> None:
    if outcome.best is not None:
        log.info("best %s %.4f, weights in %s", watched, outcome.best, run.best_path)
    if outcome.finished:
        n_epochs = counted(len(outcome.history), "epoch")
        log.info("finished after %s: %s. Research use only.", n_epochs, run.path)
    else:
        way = "The same command with more --hours" if stop.is_used_up else "The same command"
        what = f"stopped: %s. {way} continues from %s."
        log.info(what, outcome.reason, run.last_path)
