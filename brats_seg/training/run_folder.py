"""Keep the folder of a run: who may write to it, whether a run can resume, and what lies in it.

config.yaml       the settings
split.csv         training and validation cases
environment.json  versions and device
history.csv       a row for each epoch; history.png shows it
last.pt           the latest state, from which the run resumes
best.pt           the weights with the best watched value, for prediction
.training.lock    held by the process that trains or tunes the run
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from brats_seg.cases.find import find_cases
from brats_seg.cases.folds import SPLIT_NAME, read_split, write_split
from brats_seg.config import Config, differing_settings
from brats_seg.errors import BratsError, ResumeError, counted, some_of
from brats_seg.files import explained, remove_leftovers, whole_file, write_json
from brats_seg.runtime import weights
from brats_seg.training.gradient import stateful_modules
from brats_seg.training.losses import RunningSums
from brats_seg.training.run_plan import RunPlan
from brats_seg.training.start_weights import check_start, start_from
from brats_seg.training.state import RunState, environment_of

log = logging.getLogger(__name__)

FREE_SETTINGS = frozenset(
    {
        "training.device",
        "training.n_workers",
        "training.checkpoint_minutes",
        "training.micro_batch",
        # a limit, once the number of epochs is fitted to it
        "training.hours",
        "tracking.to",
    }
)
"""Settings that may change when a run is resumed, because they do not change its mathematics."""
CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
_WAYS_OUT = "Use those, choose another --run, or start anew with --fresh."


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

    def check_scans(self, data: Path, config: Config) -> None:
        """Check that scans can be those of the run by their names, before they are prepared."""
        path = self.path / SPLIT_NAME
        if not (self.is_begun and path.exists()):
            return
        split = read_split(path)
        offered = find_cases(data, label_files=config.cases.label_files).cases
        missing = {*split.train, *split.validation} - {case.case_id for case in offered}
        if missing:
            n, names = counted(len(missing), "case"), some_of(sorted(missing))
            msg = f"{data} lacks {n} of {self.path}: {names}. {_WAYS_OUT}"
            raise ResumeError(msg)

    @contextmanager
    def opened(self, state: RunState, *, fresh: bool) -> Iterator[None]:
        """Lock the run, and set a state to its latest one; `fresh` renames an earlier run first."""
        plan, ranks = state.plan, state.accumulator.ranks
        # before anything is written or renamed
        start = plan.config.start
        check_start(start, self.path, begins=False)
        if fresh or not self.is_begun:
            state.started_from = start_from(state.network, start, plan.data)
            if state.ema is not None:
                state.ema.module.load_state_dict(state.network.state_dict())
        with ExitStack() as locks:
            error = self._lock(locks, fresh=fresh) if ranks.is_first else None
            # every rank raises it: the others would wait for the first one
            for raised in ranks.gather(error):
                if raised is not None:
                    raise raised
            self._begin(state)
            yield

    def save(self, state: RunState) -> None:
        """Write the latest state as a whole: after a crash the file is the old one or the new one."""
        if state.accumulator.ranks.is_first:
            weights.write_checkpoint(state.state_dict(), self.last_path)

    def save_best(self, state: RunState, validation: RunningSums) -> None:
        """Write the weights for prediction, with the sums of the validation that chose them."""
        if state.accumulator.ranks.is_first:
            weights.write_checkpoint(state.best_entries(validation), self.best_path)

    def _lock(self, locks: ExitStack, *, fresh: bool) -> BratsError | None:
        """Lock the folder, and the new one if the earlier run is renamed; return an error."""
        try:
            locks.enter_context(weights.run_locked(self.path))
            if fresh and (aside := self._set_aside()):
                log.info("the earlier run is now %s", aside)
                # the first lock was renamed with its folder
                locks.enter_context(weights.run_locked(self.path))
        except BratsError as error:
            return error
        return None

    def _set_aside(self) -> Path | None:
        """Rename an earlier run of this name to a free one, and return that, or None without one."""
        if not self.path.exists() or {p.name for p in self.path.iterdir()} <= {
            weights.RUN_LOCK_NAME
        }:
            return None
        names = (self.path.with_name(f"{self.path.name}.{number}") for number in count(1))
        aside = next(path for path in names if not path.exists())
        try:
            self.path.rename(aside)
        except OSError as error:
            raise explained(error, aside) from error
        return aside

    def _begin(self, state: RunState) -> None:
        """Write what the run is made of, and resume it if it was begun."""
        plan, ranks = state.plan, state.accumulator.ranks
        entries = None
        if self.is_begun:
            entries = weights.read_checkpoint(self.last_path, plan.device.torch_device)
            self._check(entries["card"], plan)
        if ranks.is_first:
            self._write_facts(plan)
        ranks.broadcast(*stateful_modules(state.network, plan.task.criterion))
        if entries is None:
            return
        state.load_state_dict(entries)
        before = entries["card"].config.training
        is_fitted = plan.config.training.hours or before.hours
        state.set_epochs(state.progress.n_epochs if is_fitted else plan.config.training.n_epochs)
        log.info("resuming at epoch %d, step %d", state.progress.epoch + 1, state.progress.n_steps)

    def _write_facts(self, plan: RunPlan) -> None:
        """Write the settings, the cases and the environment."""
        with whole_file(self.path / CONFIG_NAME) as temporary:
            temporary.write_text(plan.config.to_yaml())
        write_split(plan.data.split, self.path / SPLIT_NAME)
        write_json(self.path / ENVIRONMENT_NAME, environment_of(plan.device))
        remove_leftovers(self.path)

    def _check(self, begun: weights.ModelCard, plan: RunPlan) -> None:
        """Raise `ResumeError` unless settings and cases are those that the run was begun with."""
        before, now = begun.config, plan.config
        if now.training.hours and not before.training.hours:
            n_epochs = before.training.n_epochs
            msg = f"{self.path} was begun without --hours, for {n_epochs} epochs. {_WAYS_OUT}"
            raise ResumeError(msg)
        free = FREE_SETTINGS
        # these schedules do not depend on the length of the run, and hours decide it
        if now.schedule.name in {"plateau", "constant"} or before.training.hours:
            free |= {"training.n_epochs"}
        changes = differing_settings(before, now)
        refused = [
            f"  {key}: {old!r} -> {new!r}" for key, (old, new) in changes.items() if key not in free
        ]
        if refused:
            head = f"{self.path} was begun with other settings:"
            keeps = "Without --preset and --config the run keeps its own settings."
            raise ResumeError("\n".join([head, *refused, f"{keeps} {_WAYS_OUT}"]))
        for key, (old, new) in changes.items():
            log.info("%s changes from %r to %r", key, old, new)
        if begun.identity.fingerprint != plan.data.fingerprint:
            msg = f"{self.path} was trained on other cases. {_WAYS_OUT}"
            raise ResumeError(msg)
