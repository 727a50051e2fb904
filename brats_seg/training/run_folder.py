"""Keep the folder of a run: begin it or resume it, alone, and write its checkpoints.

config.yaml       the settings
split.csv         training and validation cases
environment.json  versions and device
history.csv       a row for each epoch; history.png shows it
last.pt, best.pt  the latest state; the weights with the best watched value, for prediction
.training.lock    held by the process that trains or tunes the run
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from brats_seg.cases.find import find_cases
from brats_seg.cases.folds import SPLIT_NAME, read_split, write_split
from brats_seg.config import CasesConfig, Config, StartConfig, differing_settings
from brats_seg.errors import BratsError, EnvironmentalError, ResumeError, UsageError, some_of
from brats_seg.figures.charts import HISTORY_NAME
from brats_seg.files import explained_writing, remove_leftovers, whole_file, write_json
from brats_seg.runtime import weights
from brats_seg.training.losses import RunningSums
from brats_seg.training.run_plan import RunPlan
from brats_seg.training.state import RunState, check_start, environment_of, read_state, start_from

log = logging.getLogger(__name__)

FREE_SETTINGS = frozenset(
    {
        # the cases themselves are compared
        *(f"cases.{name}" for name in CasesConfig.model_fields),
        "training.device",
        "training.n_workers",
        "training.checkpoint_minutes",
        "training.micro_batch",
        "tracking.to",
    }
)
"""Settings that may change when a run is resumed, because they do not change its mathematics."""
CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
_NEXT_STEPS = "Use those, choose another --run, or start anew with --fresh."


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The folder of a run, with its files."""

    path: Path

    @property
    def last_path(self) -> Path:
        """The latest state, from which the run resumes."""
        return self.path / "last.pt"

    @property
    def best_path(self) -> Path:
        """The weights with the best watched value on the held-out cases."""
        return self.path / weights.BEST_NAME

    @property
    def is_begun(self) -> bool:
        """Whether there is a state to resume from."""
        return self.last_path.is_file()

    def check(self, data: Path, config: Config, *, fresh: bool = False) -> None:
        """Check settings, and scans by their names, of a run that begins or goes on, before they are prepared."""
        begins = fresh or not self.is_begun
        check_start(config.start, self.path, begins=begins)
        if begins or not (self.path / SPLIT_NAME).exists():
            return
        self._changes(read_state(self.last_path).card.config, config)
        split = read_split(self.path / SPLIT_NAME)
        offered = find_cases(data, label_files=config.cases.label_files).cases
        if missing := {*split.train, *split.validation} - {case.case_id for case in offered}:
            msg = f"{data} lacks cases of {self.path}: {some_of(sorted(missing))}. {_NEXT_STEPS}"
            raise ResumeError(msg)

    @contextmanager
    def opened(self, state: RunState, start: StartConfig, *, fresh: bool) -> Iterator[None]:
        """Lock the run, and set a state to its latest one; `fresh` renames an earlier run first.

        A run that begins starts from the weights that `start` names.
        """
        plan, ranks = state.plan, state.accumulator.ranks
        # before anything is written or renamed
        check_start(start, self.path, begins=False)
        if not fresh and not self.is_begun and (self.path / HISTORY_NAME).exists():
            msg = f"{self.path} has a history and lacks last.pt, from which it would continue: copy it back, choose another --run, or use --fresh, which renames this one"
            raise ResumeError(msg)
        if fresh or not self.is_begun:
            if state.progress.epoch or state.progress.n_batches:
                msg = f"{self.path} would begin with weights that are trained already: make a new Trainer"
                raise UsageError(msg)
            state.started_from = start_from(state.network, start, plan.data)
            state.schedule.lower_to(start.lr_factor if state.started_from else 1.0)
        with ExitStack() as locks:
            error = self._lock(locks, fresh=fresh) if ranks.is_first else None
            # every rank raises it: the others would wait for the first one
            for raised in filter(None, ranks.gather(error)):
                raise raised
            if self.is_begun:
                self._resume(state)
            if ranks.is_first:
                self._write_facts(plan)
            ranks.broadcast(*state.accumulator.leaves.modules)
            yield

    def save(self, state: RunState) -> None:
        """Write the latest state as a whole: after a crash the file is the old one or the new one."""
        if state.accumulator.ranks.is_first:
            # a state alone, in a new folder, could not be resumed
            if not (self.path / CONFIG_NAME).exists():
                msg = f"{self.path} is not there any more: give it back, and start the same command again"
                raise EnvironmentalError(msg)
            weights.write_checkpoint(state.state_dict(), self.last_path)

    def save_best(self, state: RunState, validation: RunningSums) -> None:
        """Write the weights for prediction, with the sums of the validation that chose them."""
        if state.accumulator.ranks.is_first:
            weights.write_checkpoint(state.best_entries(validation), self.best_path)

    def _lock(self, locks: ExitStack, *, fresh: bool) -> BratsError | None:
        """Lock the folder, and the new one if the earlier run is renamed; return an error."""
        try:
            locks.enter_context(weights.run_locked(self.path))
            if fresh and (new_path := self._set_aside()):
                log.info("the earlier run is now %s", new_path)
                # the first lock was renamed with its folder
                locks.enter_context(weights.run_locked(self.path))
        except BratsError as error:
            return error
        return None

    def _set_aside(self) -> Path | None:
        """Rename an earlier run of this name to a free one, and return that, or None without one."""
        if all(path.name == weights.RUN_LOCK_NAME for path in self.path.glob("*")):
            return None
        if self.path.name in {"", ".."}:
            msg = f"--fresh renames the folder of a run, and {self.path} is not its name: give it by name"
            raise UsageError(msg)
        names = (self.path.with_name(f"{self.path.name}.{number}") for number in count(1))
        new_path = next(path for path in names if not path.exists())
        with explained_writing(new_path):
            self.path.rename(new_path)
        return new_path

    def _resume(self, state: RunState) -> None:
        """Set a state to the latest one of the run, if it is one of the same settings and cases."""
        # onto the host: Adam reads its number of steps, of every parameter, in every step
        entries = weights.read_checkpoint(self.last_path)
        begun: weights.ModelCard = entries["card"]
        for key, (old, new) in self._changes(begun.config, state.plan.config).items():
            log.info("%s changes from %r to %r", key, old, new)
        if begun.identity.fingerprint != state.plan.data.fingerprint:
            msg = f"{self.path} was trained on other cases. {_NEXT_STEPS}"
            raise ResumeError(msg)
        state.load_state_dict(entries)
        training, progress = state.plan.config.training, state.progress
        state.set_epochs(progress.n_epochs if training.hours else training.n_epochs)
        if not progress.is_finished:
            if progress.best is not None and not self.best_path.exists():
                log.warning("%s is missing: the next validation writes it", self.best_path)
                progress.best = None
            log.info("resuming at epoch %d, step %d", progress.epoch + 1, progress.n_steps)
        elif not self.best_path.exists():
            msg = f"{self.path} has had {progress.epoch} of {progress.n_epochs} epochs and lacks best.pt: use --fresh, or more --epochs if schedule.name is plateau or constant, without --hours"
            raise ResumeError(msg)

    def _changes(self, before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
        """Return the settings that change; raise `ResumeError` if one of them may not."""
        free = FREE_SETTINGS
        if before.training.hours and now.training.hours:
            # only a limit, once the number of epochs is fitted to it
            free |= {"training.hours"}
        elif now.schedule.name in {"plateau", "constant"}:
            # `constant` does not depend on the length of the run, nor `plateau` before its cool-down
            free |= {"training.n_epochs"}
        changes = differing_settings(before, now)
        refused = [
            f"  {key}: {old!r} -> {new!r}" for key, (old, new) in changes.items() if key not in free
        ]
        if refused:
            head = f"{self.path} was begun with other settings:"
            keeps = "Without --preset and --config the run keeps its own settings."
            raise ResumeError("\n".join([head, *refused, f"{keeps} {_NEXT_STEPS}"]))
        return changes

    def _write_facts(self, plan: RunPlan) -> None:
        """Write the settings, the cases and the environment."""
        with whole_file(self.path / CONFIG_NAME) as temporary:
            temporary.write_text(plan.config.to_yaml())
        write_split(plan.data.split, self.path / SPLIT_NAME)
        write_json(self.path / ENVIRONMENT_NAME, environment_of(plan.device))
        remove_leftovers(self.path)
