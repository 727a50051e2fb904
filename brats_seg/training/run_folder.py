"""Begin a run, from its seed, from existing weights or from its latest state, and keep its folder.

config.yaml       the settings
split.csv         training and validation cases
environment.json  versions and device
history.csv       a row for each epoch; history.png shows it
last.pt, best.pt  the latest state; the weights with the best watched value, for prediction
.training.lock    held by the process that trains or tunes the run
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path

from torch import Tensor, nn

from brats_seg.cases.find import find_cases
from brats_seg.cases.folds import SPLIT_NAME, read_split, write_split
from brats_seg.config import Config, StartConfig, differing_settings
from brats_seg.data.fold import FoldData
from brats_seg.data.normalisation import spacing_text
from brats_seg.errors import BratsError, EnvironmentalError, ResumeError, UsageError, some_of
from brats_seg.files import explained_writing, remove_leftovers, whole_file, write_json
from brats_seg.presets import SHIPPED_START
from brats_seg.runtime import weights
from brats_seg.training.losses import RunningSums
from brats_seg.training.run_plan import RunPlan
from brats_seg.training.state import RunState, StartedFrom, environment_of
from brats_seg.voxels.box import shape_text

log = logging.getLogger(__name__)

FREE_SETTINGS = frozenset(
    {
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
_WRAPPERS = re.compile(r"((module|network|_orig_mod)\.)*")
"""Prefixes of names in averaged, wrapped and compiled networks."""
_CHOOSE = "Choose other weights, or leave out --start-from."
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

    def check_scans(self, data: Path, config: Config) -> None:
        """Check that scans can be those of the run by their names, before they are prepared."""
        path = self.path / SPLIT_NAME
        if not (self.is_begun and path.exists()):
            return
        split = read_split(path)
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
        if fresh or not self.is_begun:
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
        self._check_unchanged(entries["card"], state.plan)
        state.load_state_dict(entries)
        training, progress = state.plan.config.training, state.progress
        state.set_epochs(progress.n_epochs if training.hours else training.n_epochs)
        if not progress.is_finished:
            log.info("resuming at epoch %d, step %d", progress.epoch + 1, progress.n_steps)
        elif not self.best_path.exists():
            msg = f"{self.path} has had {progress.epoch} of {progress.n_epochs} epochs and lacks best.pt: use --fresh, or more --epochs if schedule.name is plateau or constant, without --hours"
            raise ResumeError(msg)

    def _check_unchanged(self, begun: weights.ModelCard, plan: RunPlan) -> None:
        """Raise `ResumeError` unless settings and cases are those that the run was begun with."""
        before, now = begun.config, plan.config
        if now.training.hours and not before.training.hours:
            msg = f"{self.path} was begun without --hours, for {before.training.n_epochs} epochs. {_NEXT_STEPS}"
            raise ResumeError(msg)
        free = FREE_SETTINGS
        if now.training.hours:
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
        for key, (old, new) in changes.items():
            log.info("%s changes from %r to %r", key, old, new)
        if begun.identity.fingerprint != plan.data.fingerprint:
            msg = f"{self.path} was trained on other cases. {_NEXT_STEPS}"
            raise ResumeError(msg)

    def _write_facts(self, plan: RunPlan) -> None:
        """Write the settings, the cases and the environment."""
        with whole_file(self.path / CONFIG_NAME) as temporary:
            temporary.write_text(plan.config.to_yaml())
        write_split(plan.data.split, self.path / SPLIT_NAME)
        write_json(self.path / ENVIRONMENT_NAME, environment_of(plan.device))
        remove_leftovers(self.path)


def read_source(path: Path) -> weights.TrainedModel:
    """Read the network of a run, of a checkpoint or of an exported model that a run may start from."""
    trained, *rest = weights.read_trained(path)
    if rest:
        msg = f"{path} holds {len(rest) + 1} networks; expected one: give a run, or export it alone"
        raise UsageError(msg)
    identity = trained.card.identity
    expected = weights.ModelIdentity(conventions=(), patch=identity.patch, fingerprint="")
    for name in ("modalities", "regions", "normalisation"):
        value, known = getattr(identity, name), getattr(expected, name)
        if value != known:
            msg = f"{path} was trained with {name} {value}; expected {known}, in this order. {_CHOOSE}"
            raise UsageError(msg)
    return trained


def check_start(config: StartConfig, run_path: Path, *, begins: bool) -> None:
    """Raise `UsageError` if a run that begins cannot start from the weights of the settings."""
    if config.path in {None, SHIPPED_START}:
        return
    path = Path(config.path)
    if path.resolve().is_relative_to(run_path.resolve()):
        advice = "give another --run, or resume it without --start-from"
        msg = f"the run {run_path} cannot start from itself (start.path {config.path}): {advice}"
        raise UsageError(msg)
    if begins:
        read_source(path)


def start_from(network: nn.Module, config: StartConfig, data: FoldData) -> StartedFrom | None:
    """Give a network the weights of the settings that fit, log which, and return where they are from."""
    is_shipped = config.path == SHIPPED_START
    path = weights.shipped_network() if is_shipped else config.path
    if path is None:
        return None
    source = read_source(Path(path))
    loaded, unfit = match_weights(network, source.weights)
    if is_shipped and (unfit or len(loaded) < len(source.weights)):
        return None
    model = source.card.config.model
    name = f"{path} (model.name {model.name!r}, model.widths {','.join(map(str, model.widths))})"
    if is_shipped:
        name = "the network that brats_seg carries (--start-from none draws all weights anew)"
    # a bias or a norm alone starts nothing
    if not any(weight.ndim > 1 for weight in loaded.values()):
        msg = f"nothing fits of {name}. Not loaded: {some_of(unfit)}. Give its network, or leave out --start-from."
        raise UsageError(msg)
    network.load_state_dict(loaded, strict=False)
    n_layers = len(_by_layer(network.state_dict()))
    text = "started from %s: %d of %d layers loaded, learning rate times %g"
    log.info(text, name, len(_by_layer(loaded)), n_layers, config.lr_factor)
    if unfit:
        log.info("  not loaded: %s", some_of(unfit))
    _log_differences(source, name if is_shipped else path, data, is_shipped=is_shipped)
    return StartedFrom(
        path=f"brats_seg {version('brats_seg')}" if is_shipped else str(path),
        fingerprint=weights.fingerprint_of([source]),
        learnt_from=source.cases.ids,
        is_complete=source.cases.is_complete,
    )


def match_weights(
    network: nn.Module, offered: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the offered weights of the layers that they fit, and the other layers in words.

    Example:
        >>> network = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(2, 3, 1))
        >>> other = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(2, 5, 1))
        >>> loaded, unfit = match_weights(network, other.state_dict())
        >>> sorted(loaded), unfit
        (['0.bias', '0.weight'], ['1 (3x2x1x1x1 here, 5x2x1x1x1 there)'])
    """
    by_name = {_unwrap(name): weight for name, weight in offered.items()}
    state = {n: w for n, w in network.state_dict().items() if isinstance(w, Tensor)}
    loaded: dict[str, Tensor] = {}
    unfit = []
    for layer, names in _by_layer(state).items():
        fitting = {name: by_name[_unwrap(name)] for name in names if _unwrap(name) in by_name}
        shapes = [(state[name].shape, weight.shape) for name, weight in fitting.items()]
        differing = [pair for pair in shapes if pair[0] != pair[1]]
        if len(fitting) < len(names):
            unfit.append(f"{layer} (not among them)")
        elif differing:
            unfit.append("{} ({} here, {} there)".format(layer, *map(shape_text, differing[0])))
        else:
            loaded |= fitting
    return loaded, unfit


def _unwrap(name: str) -> str:
    """Return the name of a weight without the wrappers around its network."""
    return _WRAPPERS.sub("", name, count=1)


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by layer; a weight of the network itself is a layer by that name."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def _log_differences(
    source: weights.TrainedModel, name: str | Path, data: FoldData, *, is_shipped: bool
) -> None:
    """Log what the weights learnt from, where it may matter to this run."""
    spacings_mm = source.card.identity.spacing_mm, data.spacing_mm
    if spacings_mm[0] != spacings_mm[1] and not is_shipped:
        text = "%s learnt at voxels of %s mm; these are of %s mm. Prepare with store.spacing_mm as there."
        log.warning(text, name, *map(spacing_text, spacings_mm))
    if not source.cases.is_complete:
        text = "%s does not name its training cases; if some are held out here, scores will be too good"
        log.info(text, name)
    if seen := source.cases.seen_among(data.split.validation):
        text = "%s learnt from %d of %d cases that are held out here: %s. Scores will be too good"
        log.warning(text, name, len(seen), len(data.split.validation), some_of(seen))
