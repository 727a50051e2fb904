"""Train a network on one fold.

`train_fold` indexes and prepares a folder of scans, and trains on it. `Trainer` is the loop over
epochs alone, for data, a network or a loss that are given in Python.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from signal import Signals

import torch
from torch import Tensor, nn

from brats_seg.config import Config, StartConfig
from brats_seg.data.fold import FoldData, open_fold, open_split
from brats_seg.data.loader import Sample, stable_seed, whole_case
from brats_seg.data.store import raise_damage, verify_cases
from brats_seg.errors import EnvironmentalError, UsageError, counted
from brats_seg.figures.charts import Row
from brats_seg.files import reading
from brats_seg.models.interface import HasLevels, as_output
from brats_seg.presets import SHIPPED_START
from brats_seg.progress import Track, part, say, tracked, untracked
from brats_seg.runtime import memory
from brats_seg.runtime.device import choose_device, threads_for
from brats_seg.runtime.machine import RUN_BYTES, check_machine
from brats_seg.runtime.windows import n_windows, predict_logits
from brats_seg.training import history, losses, run_plan
from brats_seg.training.accumulation import make_step
from brats_seg.training.losses import Criterion, RunningSums, foreground_mask, whole_loss
from brats_seg.training.ranks import Ranks, joined_ranks
from brats_seg.training.run_folder import RunFolder
from brats_seg.training.state import new_state
from brats_seg.training.timing import Clock, RunStoppedError, StopRequest
from brats_seg.voxels.box import shape_text, triple

log = logging.getLogger(__name__)


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
    folder = RunFolder(path=run_path or Path(f"runs/fold{fold}"))
    folder.check(data, config, fresh=fresh)
    with joined_ranks(config.training.device) as ranks:
        track = track if ranks.is_first else untracked
        _check_machine(config, folder.path)
        with ranks.first_alone():
            fold_data = open_fold(
                data, fold=fold, config=config, prepared_path=prepared_path, track=track
            )
        with reading(fold_data.folder):
            check_unchanged(fold_data)
            trainer = Trainer(data=fold_data, config=config, run_path=folder.path, ranks=ranks)
            n_train, n_held_out = len(fold_data.split.train), len(fold_data.split.validation)
            of = f"fold {fold} of {fold_data.folds_path}"
            log.info("%s: %s to train on, %d held out", of, counted(n_train, "case"), n_held_out)
            outcome = trainer.run(fresh=fresh, stop=stop, track=track)
        _log_outcome(outcome, config.validation.watch, folder, stop)
    return outcome


def _check_machine(config: Config, run_path: Path) -> None:
    """Check the device, the tracking and the folder of the run, before hours of preparation."""
    history.check_tracking(config.tracking)
    device = choose_device(config.training.device, config.training.precision).torch_device
    needed = run_plan.shared_memory_needed(config, on_gpu=device.type != "cpu")
    check_machine(run_path, needed_shared=needed, needed_disk=RUN_BYTES)


def check_unchanged(data: FoldData) -> None:
    """Raise `UsageError` if another process has replaced the prepared cases since they were opened."""
    if open_split(data.folder, data.split).fingerprint != data.fingerprint:
        msg = f"another process has prepared the cases in {data.folder}. Start the same command again."
        raise UsageError(msg)


class Trainer:
    """Train a network on one fold, or resume an earlier start of the run.

    Writes the files that `run_folder` lists into the folder of the run. Network and loss are those
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
        self.ranks = ranks or Ranks()
        is_given = network is not None
        # networks of this package return a `TrainingOutput` in training
        if criterion is not None and (not is_given or isinstance(network, HasLevels)):
            criterion = losses.loss_of_logits(criterion)
        self.plan = run_plan.plan_run(config, data, criterion=criterion, is_given=is_given)
        self.state = new_state(self.plan, network=network, ranks=self.ranks)
        self.folder = RunFolder(path=run_path)
        # a network that is given keeps its weights, unless the settings name others
        is_kept = is_given and config.start.path == SHIPPED_START
        self._start = StartConfig(path=None) if is_kept else config.start

    def run(
        self, *, fresh: bool = False, stop: StopRequest | None = None, track: Track = tracked
    ) -> Outcome:
        """Train to the last epoch, or until a stop is requested; a new trainer continues the run.

        Args:
            fresh: Rename an earlier run of that name instead of resuming it.
            stop: Request to stop, which is checked between batches and between cases.
            track: Shows the progress.

        Raises:
            CaseError: A prepared case is damaged.
            UsageError: Another process trains or tunes the run, or its hours do not hold one epoch.
            ResumeError: The run was begun with other settings or cases.
        """
        plan = self.plan
        self._stop = stop or StopRequest()
        memory.keep_to_limit_of_address_space()
        with threads_for(plan.device.torch_device, plan.patch), reading(plan.data.folder):
            self._verify(track)
            with self.folder.opened(self.state, self._start, fresh=fresh):
                rows = self.state.progress.history
                recording = history.recording(plan.config, self.folder.path, rows)
                nothing = nullcontext[history.SendRow](lambda row: None)
                with recording if self.ranks.is_first else nothing as self._record:
                    return self._run(track)

    def _verify(self, track: Track) -> None:
        """Verify the prepared cases, each by one rank."""
        split, folder = self.plan.data.split, self.plan.data.folder
        share = self.ranks.share((*split.train, *split.validation))
        errors = verify_cases(share, folder, track=track)
        raise_damage([error for found in self.ranks.gather(errors) for error in found])

    def _run(self, track: Track) -> Outcome:
        config, progress, stop = self.plan.config, self.state.progress, self._stop
        every = self.plan.validate_every
        if config.validation.every == "auto" and every > 1 and not progress.is_finished:
            text = f"every {every} epochs and " if every < (progress.n_epochs or inf) else ""
            log.info("whole cases are validated %safter the last epoch", text)
        stop.limit_sessions(config.training.hours, progress.spent_s)
        self._clock = Clock(plan=self.plan, progress=progress, stop=stop)
        reason = "all epochs are done"
        try:
            with stop.listening():
                while not progress.is_finished:
                    self._clock.begin_epoch()
                    memory.reset_peak_memory(self.plan.device.torch_device)
                    self._train(track)
                    self._end_epoch(*self._validate(track))
        except RunStoppedError as stopped:
            reason = str(stopped)
        return Outcome(
            finished=progress.is_finished,
            reason=reason,
            signal=None if progress.is_finished else stop.signal,
            history=tuple(progress.history),
            best=progress.best,
        )

    def _train(self, track: Track) -> None:
        progress = self.state.progress
        keys = self.plan.keys(progress.epoch)[progress.n_batches :]
        batches = run_plan.read_batches(self.plan, [self.ranks.share(batch) for batch in keys])
        self.state.network.train()
        what = f"epoch {progress.epoch + 1}/{progress.n_epochs or '?'}"
        for batch in track(batches, what=what, total=len(keys)):
            say(self._progress_text)
            self._save_or_stop()
            self._train_batch(batch)
        self._save_or_stop()

    def _train_batch(self, batch: run_plan.Batch) -> None:
        state, progress, clock = self.state, self.state.progress, self._clock
        training, rank = self.plan.config.training, self.ranks.rank
        # random layers draw from torch's generator: their numbers depend on the position alone
        torch.manual_seed(stable_seed(training.seed, progress.epoch, progress.n_batches, rank))
        result = make_step(state.accumulator, state.fallback, batch, self.plan.task.measure)
        for case_ids, rows in self.ranks.gather((batch.case_ids, result.measured.tolist())):
            for case_id, measured in zip(case_ids, rows, strict=True):
                progress.sums.add(case_id, measured)
        state.after_batch(result)
        clock.after_batch(result.n_patches)
        if text := clock.expectation():
            log.info("%s", text)
        if training.hours is not None and progress.n_epochs is None:
            # all ranks together
            for message in filter(None, self.ranks.gather(clock.missing_hours(training.hours))):
                raise UsageError(message)

    def _validate(self, track: Track) -> tuple[RunningSums | None, float | None]:
        """Return the sums over whole cases where they are due, and the loss of the watched patches, if any."""
        plan, progress = self.plan, self.state.progress
        whole = patch_loss = None
        if plan.is_validated(progress.epoch, progress.n_epochs):
            # ranks do not stop between cases, and have other shares of them
            sums = progress.validated if self.ranks.n_ranks == 1 else RunningSums()
            share = self.ranks.share(plan.data.split.validation)
            case_ids = [name for name in share if name not in sums.counts]
            cases = (whole_case(plan.data.folder, name, plan.task.target_key) for name in case_ids)
            whole = self._sums(track(cases, what="validation", total=len(case_ids)), sums)
        if plan.watched_patches:
            keys = self.ranks.share(plan.watched_patches)
            patch_loss = self._sums(run_plan.held_out_patches(plan, keys), RunningSums()).loss
        return whole, patch_loss

    def _sums(self, samples: Iterable[Sample], share: RunningSums) -> RunningSums:
        """Add samples to the share of this rank, one after the other, and return the sums of all ranks."""
        plan, network, device = self.plan, self.state.network, self.plan.device.torch_device
        predict = case_predictor(network, plan)
        # ranks must check together, and have different numbers of cases
        is_alone = self.ranks.n_ranks == 1
        network.eval()
        with torch.inference_mode():
            for sample in samples:
                say(self._progress_text)
                if is_alone:
                    self._save_or_stop()
                output = predict(sample.image)[None]
                target = sample.target[None].to(device).float()
                share.loss_sum += float(whole_loss(plan.task.criterion, output, target))
                share.n_patches += 1
                if plan.config.model.task == "segmentation":
                    # a label map has no tumour outside the brain
                    output.masked_fill_(~foreground_mask(sample.image[None].to(device)), -1)
                share.add(sample.case_id, plan.task.measure(output, target)[0].tolist())
        sums = RunningSums()
        for part_of_rank in self.ranks.gather(share):
            sums.add_all(part_of_rank)
        return sums

    def _end_epoch(self, validation: RunningSums | None, patch_loss: float | None) -> None:
        state, progress, clock = self.state, self.state.progress, self._clock
        hours, watch = self.plan.config.training.hours, self.plan.config.validation.watch
        row = self._row(validation, patch_loss)
        clock.end_epoch()
        if hours is not None and progress.n_epochs is None:
            state.set_epochs(min(self.ranks.gather(clock.epochs_in(hours))))
            log.info("training.n_epochs is %d: %g h hold so many", progress.n_epochs, hours)
        state.end_epoch(row)
        clock.begin_epoch()
        if (watched_loss := row.get("patch_loss", row.get("val_loss"))) is not None:
            state.schedule.after_validation(watched_loss)
        if validation is not None:
            self._keep_if_best(row[watch], validation)
        mode = f", {state.fallback.mode}" if state.fallback.index else ""
        outlook = history.outlook_text(progress.best, watch, clock.left_s)
        line = f"{history.epoch_line(row, progress.n_epochs)}{mode}"
        log.info("%s", f"{line} | {outlook}" if outlook else line)
        self._save()
        self._record(row)

    def _row(self, validation: RunningSums | None, patch_loss: float | None) -> dict[str, float]:
        """Return the row of the history for the epoch that ends."""
        progress, scores = self.state.progress, self.plan.task.scores
        return {
            "epoch": progress.epoch + 1,
            "step": progress.n_steps,
            "lr": float(self.state.accumulator.optimizer.param_groups[0]["lr"]),
            "seconds": self._clock.epoch_s,
            "peak_memory_mb": memory.peak_memory_mb(self.plan.device.torch_device),
            **history.phase_columns("train", scores(progress.sums)),
            **({} if validation is None else history.phase_columns("val", scores(validation))),
            **({} if patch_loss is None else {"patch_loss": patch_loss}),
        }

    def _keep_if_best(self, value: float, validation: RunningSums) -> None:
        progress = self.state.progress
        sign = 1 if self.plan.config.validation.watch == "val_dice" else -1
        if isfinite(value) and (progress.best is None or sign * value > sign * progress.best):
            progress.best = value
            self.folder.save_best(self.state, validation)

    def _progress_text(self) -> str:
        """Return the text behind the progress bar."""
        if self._stop.signal is not None:
            return "stopping soon; a second Ctrl-C does not save"
        progress, watch = self.state.progress, self.plan.config.validation.watch
        return history.outlook_text(progress.best, watch, self._clock.left_s, progress.sums.loss)

    def _save_or_stop(self) -> None:
        """Save the state if it is due, or if the run is asked to stop, which then ends."""
        is_asked = self.ranks.any(self._stop.reason is not None)
        if is_asked or self._clock.is_checkpoint_due:
            self._save()
        if is_asked:
            raise RunStoppedError(self._stop.reason or "another rank was asked to stop")

    def _save(self) -> None:
        self._clock.before_saving()
        self.folder.save(self.state)


def case_predictor(network: nn.Module, plan: run_plan.RunPlan) -> Callable[[Tensor], Tensor]:
    """Return a function that maps an image `(4, X, Y, Z)` to its logits, in the windows of prediction.

    A training patch, and a whole brain crop if the network was trained on those, is one window. If
    memory runs out, the windows become training patches, which have fitted in training.
    """
    modes, device = ["the windows of prediction"], plan.device.torch_device
    if plan.config.patch.size != "whole":
        modes.append(f"windows of {shape_text(plan.patch)}")
    fallback = memory.Fallback(modes, device, EnvironmentalError, what="validation: ")
    overlap = plan.config.validation.overlap

    def predict(image: Tensor) -> Tensor:
        window = plan.window(triple(image.shape[1:]))
        if fallback.index:
            window = triple(map(min, window, plan.patch))
        with part("windows", n_windows(image.shape[1:], window, overlap)) as after_window:
            return predict_logits(
                lambda voxels: as_output(network(voxels)).logits[0],
                image.to(device).float(),
                window=window,
                overlap=overlap,
                device=plan.device,
                after_window=after_window,
            )

    return lambda image: fallback.run(lambda _: predict(image))


def _log_outcome(outcome: Outcome, watched: str, folder: RunFolder, stop: StopRequest) -> None:
    if outcome.best is not None:
        log.info("best %s %.4f, weights in %s", watched, outcome.best, folder.best_path)
    if outcome.finished:
        n_epochs = counted(len(outcome.history), "epoch")
        log.info("finished after %s: %s. Research use only.", n_epochs, folder.path)
    else:
        command = "The same command with more --hours" if stop.is_used_up else "The same command"
        log.info("stopped: %s. %s continues from %s.", outcome.reason, command, folder.last_path)
