"""Save and restore a run: its checkpoints, and the other files of its folder.

config.yaml       the settings
split.csv         training and validation cases
environment.json  versions and device
history.csv       a row for each epoch; history.png shows it
last.pt           the latest state, from which the run resumes
best.pt           the weights with the best watched value, for prediction
.training.lock    held by the process that trains or tunes the run

A checkpoint is a dictionary of plain values and tensors, read with `weights_only=True`, so that
opening one runs no code. Its entry `model` is the plain state dict of the network.
"""

import json
import logging
import math
import platform
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from brats_seg.cases.find import find_cases
from brats_seg.cases.folds import SPLIT_NAME, Split, read_split, write_split
from brats_seg.config import Config
from brats_seg.config_text import config_of, differing_settings
from brats_seg.data.fold import FoldData
from brats_seg.errors import BratsError, ResumeError, counted, some_of
from brats_seg.files import explained, remove_leftovers, whole_file
from brats_seg.labels import MODALITY_SUBSETS
from brats_seg.quality.profile import TrainingProfile, parse_profile, profile_of_cases
from brats_seg.runtime.device import Device
from brats_seg.runtime.torch_files import reason_of, write_checkpoint
from brats_seg.runtime.weights import (
    BEST_NAME,
    RUN_LOCK_NAME,
    SCHEMA_VERSION,
    ModelIdentity,
    parse_identity,
    read_checkpoint,
    run_locked,
)
from brats_seg.training.history import write_history, write_picture
from brats_seg.training.ranks import Ranks
from brats_seg.training.start_weights import StartedFrom, check_start, start_from
from brats_seg.training.state import Position, RunState
from brats_seg.training.tasks import RunningSums

log = logging.getLogger(__name__)

FREE_SETTINGS = frozenset(
    {
        "training.device",
        "training.n_workers",
        "training.checkpoint_minutes",
        "training.micro_batch",
        "training.memory",
        # a limit, once the number of epochs is fitted to it
        "training.hours",
        "tracking.to",
        "tracking.project",
    }
)
"""Settings that may change when a run is resumed, because they do not change its mathematics."""
CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
_RESTORE = "Replace it by a copy, or start anew with --fresh."
DRAWN_EVERY_S = 10.0
"""Time between two pictures of the history, each of which takes up to 0.3 s."""
_WAYS_OUT = "Use those, choose another --run, or start anew with --fresh."


@dataclass(kw_only=True, slots=True)
class Checkpointer:
    """Saves the latest and the best state of a run; of several ranks the first one writes."""

    path: Path
    """Folder of the run."""
    state: RunState
    config: Config
    data: FoldData
    patch: tuple[int, int, int]
    """Voxels that the network is built for."""
    device: Device
    ranks: Ranks
    session_began_s: float = field(default_factory=time.monotonic, init=False)
    """Start of this session, by the monotonic clock."""
    _spent_before_s: float = field(default=0.0, init=False)
    _started_s: float = field(default_factory=time.monotonic, init=False)
    _saved_s: float = field(default_factory=time.monotonic, init=False)
    _drawn_s: float = field(default=-math.inf, init=False)
    _is_picture_old: bool = field(default=False, init=False)
    _profile: TrainingProfile | None = field(default=None, init=False)

    @property
    def epoch_s(self) -> float:
        """Seconds that the epoch has taken, including those before an interruption."""
        return time.monotonic() - self._started_s

    @property
    def is_due(self) -> bool:
        """Whether the latest state is older than the settings allow."""
        return time.monotonic() - self._saved_s > 60 * self.config.training.checkpoint_minutes

    @contextmanager
    def opened(self, *, fresh: bool) -> Iterator[bool]:
        """Lock the run, restore its latest state, and provide whether there was one.

        Args:
            fresh: Rename an earlier run of that name first, and start anew.

        Raises:
            UsageError: Another process trains the run, or it cannot start from the weights given.
            ResumeError: The run was begun with other settings or cases.
        """
        # before anything is written or renamed
        self._start(begins=fresh or not Run(path=self.path).last_path.exists())
        with ExitStack() as locks:
            error = self._lock(locks, fresh=fresh) if self.ranks.is_first else None
            # every rank raises it: the others would wait for the first one
            for raised in self.ranks.gather(error):
                if raised is not None:
                    raise raised
            yield self._begin()
            if self._is_picture_old:
                write_picture(self.state.history, self.path)

    def _start(self, *, begins: bool) -> None:
        """Take the weights that a run starts from, if it begins."""
        start, state = self.config.start, self.state
        check_start(start, self.path, begins=False)
        if begins:
            state.started_from = start_from(state.network, start, self.data)
            if state.ema is not None:
                state.ema.module.load_state_dict(state.network.state_dict())

    def _lock(self, locks: ExitStack, *, fresh: bool) -> BratsError | None:
        """Lock the folder, and the new one if the earlier run is renamed; return an error."""
        try:
            locks.enter_context(run_locked(self.path))
            if fresh and (aside := Run(path=self.path).set_aside()):
                log.info("the earlier run is now %s", aside)
                # the first lock was renamed with its folder
                locks.enter_context(run_locked(self.path))
        except BratsError as error:
            return error
        return None

    def _begin(self) -> bool:
        run = Run(path=self.path)
        checkpoint = run.checkpoint(self.config, self._identity, self.device.torch_device)
        if self.ranks.is_first:
            run.begin(self.config, self.data.split, self.device)
        loss = self.state.loss_module
        self.ranks.broadcast(self.state.network, *([] if loss is None else [loss]))
        if checkpoint is not None:
            restore(self.state, checkpoint)
            self._spent_before_s = self.state.spent_s
            position = self.state.position
            if self.state.history and self.ranks.is_first:
                # the process may have ended between the checkpoint and the history
                write_history(self.state.history, self.path)
                self._is_picture_old = True
            log.info("resuming at epoch %d, step %d", position.epoch + 1, position.n_steps)
        if self.ranks.is_first:
            self._profile = (checkpoint and checkpoint.profile) or self._measured_profile()
        return checkpoint is not None

    def _measured_profile(self) -> TrainingProfile | None:
        try:
            return profile_of_cases(self.data.folder, self.data.split.train)
        except MemoryError:
            log.warning(
                "memory ran out while the training scans were measured: the model will have no "
                "profile, and new scans are not compared with them"
            )
            return None

    def begin_epoch(self) -> None:
        """Start the clock of an epoch, from the time that it had taken before an interruption."""
        self._started_s = time.monotonic() - self.state.sums.seconds

    def save(self) -> None:
        """Write the latest state."""
        self.state.sums.seconds = self.epoch_s
        self.state.spent_s = self._spent_before_s + time.monotonic() - self.session_began_s
        if self.ranks.is_first:
            save_checkpoint(self._checkpoint(), Run(path=self.path).last_path)
        self._saved_s = time.monotonic()

    def save_if_best(self, value: float, validation: RunningSums) -> None:
        """Write the weights for prediction, if their watched value is the best so far.

        Args:
            value: Watched value.
            validation: Sums of the validation that it comes from, which are saved with the weights.
        """
        sign = 1 if self.config.validation.watch == "val_dice" else -1
        best = self.state.best
        if math.isfinite(value) and (best is None or sign * value > sign * best):
            self.state.best = value
            checkpoint = self._checkpoint().for_prediction(
                self.state.evaluated.state_dict(), validation
            )
            if self.ranks.is_first:
                save_checkpoint(checkpoint, Run(path=self.path).best_path)

    def write_history(self) -> None:
        """Write the table of all epochs so far, and their picture unless it was drawn just now."""
        if not self.ranks.is_first:
            return
        write_history(self.state.history, self.path)
        self._is_picture_old = time.monotonic() - self._drawn_s < DRAWN_EVERY_S
        if not self._is_picture_old:
            write_picture(self.state.history, self.path)
            self._drawn_s = time.monotonic()

    @property
    def _identity(self) -> ModelIdentity:
        return ModelIdentity(
            conventions=self.data.conventions,
            patch=self.patch,
            fingerprint=self.data.fingerprint,
            spacing_mm=self.data.spacing_mm,
            subsets=MODALITY_SUBSETS if self.config.training.modality_dropout > 0 else (),
        )

    def _checkpoint(self) -> "Checkpoint":
        made = checkpoint_of(self.state, self._identity, self.config, environment_of(self.device))
        return replace(made, profile=self._profile)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The folder of a run, with its files."""

    path: Path

    @property
    def last_path(self) -> Path:
        """The latest state, from which the run resumes."""
        return self.path / "last.pt"

    @property
    def best_path(self) -> Path:
        """The weights with the best watched value on the held-out cases."""
        return self.path / BEST_NAME

    def begun_with(self) -> Config:
        """Return the settings of the latest state.

        Raises:
            ResumeError: There is none, or it is damaged.
        """
        return config_of(load_checkpoint(self.last_path, torch.device("cpu")).config)

    def check_scans(self, data: Path, config: Config) -> None:
        """Check that scans can be those of the run by their names, before they are prepared.

        Raises:
            ResumeError: A case of the run is not among them.
            LayoutError: There are no scans.
        """
        path = self.path / SPLIT_NAME
        if not (self.last_path.exists() and path.exists()):
            return
        split = read_split(path)
        own = {*split.train, *split.validation}
        found = find_cases(data, label_files=config.cases.label_files)
        missing = own - {case.case_id for case in found.cases}
        if missing:
            n_of_run = f"{len(missing)} of the {counted(len(own), 'case')}"
            msg = (
                f"{n_of_run} that {self.path} was trained on and validated with "
                f"{'is' if len(missing) == 1 else 'are'} not in {data}: {some_of(sorted(missing))}. "
                f"{_WAYS_OUT}"
            )
            raise ResumeError(msg)

    def begin(self, config: Config, split: Split, device: Device) -> None:
        """Write the settings, the cases and the environment."""
        with whole_file(self.path / CONFIG_NAME) as beside:
            beside.write_text(config.to_yaml())
        write_split(split, self.path / SPLIT_NAME)
        with whole_file(self.path / ENVIRONMENT_NAME) as beside:
            beside.write_text(json.dumps(environment_of(device), indent=2) + "\n")
        remove_leftovers(self.path)

    def set_aside(self) -> Path | None:
        """Rename an earlier run of this name to a free one, and return that, or None without one."""
        if not self.path.exists() or {p.name for p in self.path.iterdir()} <= {RUN_LOCK_NAME}:
            return None
        numbers = (
            re.fullmatch(rf"{re.escape(self.path.name)}\.(\d+)", p.name)
            for p in self.path.parent.iterdir()
        )
        last = max((int(match[1]) for match in numbers if match), default=0)
        aside = self.path.with_name(f"{self.path.name}.{last + 1}")
        try:
            self.path.rename(aside)
        except OSError as error:
            raise explained(error, aside) from error
        return aside

    def checkpoint(
        self, config: Config, identity: ModelIdentity, device: torch.device
    ) -> "Checkpoint | None":
        """Return the latest state, or None if the run has none yet.

        Raises:
            ResumeError: Settings or training cases are not those that the run was begun with; the
                message lists the differences.
        """
        if not self.last_path.exists():
            return None
        checkpoint = load_checkpoint(self.last_path, device)
        self._check_settings(config_of(checkpoint.config), config)
        if checkpoint.identity.fingerprint != identity.fingerprint:
            msg = (
                f"{self.path} was trained on other cases: fingerprint "
                f"{checkpoint.identity.fingerprint}, now {identity.fingerprint}. {_WAYS_OUT}"
            )
            raise ResumeError(msg)
        return checkpoint

    def _check_settings(self, before: Config, now: Config) -> None:
        free = FREE_SETTINGS
        if now.schedule.name in {"plateau", "constant"}:
            # these schedules do not depend on the length of the run
            free |= {"training.n_epochs"}
        changes = differing_settings(before, now)
        refused = {key: values for key, values in changes.items() if key not in free}
        if refused:
            lines = [f"  {key}: {old!r} -> {new!r}" for key, (old, new) in refused.items()]
            own = "Without --preset and --config the run keeps its own settings."
            head = f"{self.path} was begun with other settings:"
            msg = "\n".join([head, *lines, f"{own} {_WAYS_OUT}"])
            raise ResumeError(msg)
        for key, (old, new) in changes.items():
            log.info("%s changes from %r to %r", key, old, new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a run at one moment."""

    model: dict[str, Tensor]
    """State dict of the network."""
    identity: ModelIdentity
    config: dict[str, Any]
    """Settings, as `Config` dumps them."""
    position: Position
    sums: RunningSums = field(default_factory=RunningSums)
    """Sums of the unfinished epoch; in a checkpoint for prediction, those of its validation."""
    history: tuple[dict[str, float], ...] = ()
    """Rows of `history.csv`."""
    best: float | None = None
    """Best watched value so far."""
    optimizer: dict[str, Any] | None = None
    """State of the optimizer; None in a checkpoint for prediction alone, as are the next five."""
    criterion: dict[str, Tensor] | None = None
    """State dict of a loss that is a module, with the parameters that it learns."""
    schedule: dict[str, Any] | None = None
    fallback: dict[str, Any] | None = None
    """Memory mode in use."""
    scaler: dict[str, Any] | None = None
    ema: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and device that the checkpoint was made with."""
    started_from: StartedFrom | None = None
    """The weights that the run started from."""
    spent_s: float = 0.0
    """Seconds that the run has taken in all its sessions."""
    profile: TrainingProfile | None = None
    """Profile of the training scans; None if too few of them are brains."""
    schema_version: int = SCHEMA_VERSION

    def for_prediction(self, model: dict[str, Tensor], validation: RunningSums) -> Self:
        """Return a checkpoint with those weights, without the entries that only training needs."""
        return replace(
            self,
            model=model,
            sums=validation,
            optimizer=None,
            criterion=None,
            schedule=None,
            fallback=None,
            scaler=None,
            ema=None,
        )


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint as a whole: after a crash the file is the old one or the new one."""
    content = {entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)}
    content["identity"] = asdict(checkpoint.identity)
    content["position"] = asdict(checkpoint.position)
    content["sums"] = asdict(checkpoint.sums)
    if checkpoint.started_from is not None:
        content["started_from"] = asdict(checkpoint.started_from)
    if checkpoint.profile is not None:
        content["profile"] = checkpoint.profile.model_dump()
    write_checkpoint(content, path)


def load_checkpoint(path: Path, device: torch.device) -> Checkpoint:
    """Read a checkpoint onto a device.

    Raises:
        ResumeError: The file is damaged, is no checkpoint, or has an unknown schema version.
    """
    content = read_checkpoint(path, device)
    try:
        content = _converted(content)
        content["identity"] = parse_identity(content["identity"])
        content["position"] = _POSITION.validate_python(content["position"])
        content["sums"] = RunningSums(**content["sums"])
        content["history"] = _HISTORY.validate_python(content["history"])
        # missing in older checkpoints
        content["started_from"] = _STARTED_FROM.validate_python(content.get("started_from"))
        content["profile"] = parse_profile(content.get("profile"))
        content["spent_s"] = _SECONDS.validate_python(content.get("spent_s", 0.0))
        # other entries, such as settings fitted to the weights, are for prediction alone
        known = {entry.name for entry in fields(Checkpoint)}
        return Checkpoint(**{name: value for name, value in content.items() if name in known})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{path} is not a checkpoint of a run: {reason_of(error)}. {_RESTORE}"
        raise ResumeError(msg) from None


def checkpoint_of(
    state: RunState, identity: ModelIdentity, config: Config, environment: dict[str, str]
) -> Checkpoint:
    """Return a checkpoint of the state of a run."""
    return Checkpoint(
        model=state.network.state_dict(),
        identity=identity,
        config=config.model_dump(mode="json"),
        position=state.position,
        sums=state.sums,
        history=tuple(dict(row) for row in state.history),
        best=state.best,
        optimizer=state.accumulator.optimizer.state_dict(),
        criterion=None if state.loss_module is None else state.loss_module.state_dict(),
        schedule=state.schedule.state_dict(),
        fallback=state.fallback.state_dict(),
        scaler=state.accumulator.scaler.state_dict(),
        ema=None if state.ema is None else state.ema.state_dict(),
        environment=environment,
        started_from=state.started_from,
        spent_s=state.spent_s,
    )


def restore(state: RunState, checkpoint: Checkpoint) -> None:
    """Set a state that was built from the same settings to the values of a checkpoint.

    Raises:
        ResumeError: The checkpoint is for prediction alone, is of another network, or is damaged.
    """
    if checkpoint.optimizer is None or checkpoint.schedule is None:
        msg = "the checkpoint is for prediction alone; a run resumes from last.pt"
        raise ResumeError(msg)
    try:
        _restore(state, checkpoint, checkpoint.optimizer, checkpoint.schedule)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        msg = f"the checkpoint does not fit the run: {error!r}. {_RESTORE}"
        raise ResumeError(msg) from error


def environment_of(device: Device) -> dict[str, str]:
    """Return versions and device, which are stored in the run and its checkpoints."""
    kind = device.torch_device
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else platform.processor()
    packages = ("brats_seg", "torch", "monai", "numpy", "nibabel")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "platform": platform.platform(),
        "device": f"{kind} {name}".strip(),
        "precision": device.precision,
        "threads": str(torch.get_num_threads()),
    }


def _restore(
    state: RunState, checkpoint: Checkpoint, optimizer: dict[str, Any], schedule: dict[str, Any]
) -> None:
    _load(state.network, checkpoint.model)
    _restore_loss(state, checkpoint)
    state.accumulator.optimizer.load_state_dict(optimizer)
    state.schedule.load_state_dict(schedule)
    if checkpoint.fallback is not None:
        # before the loss scale, which belongs to the precision that this may change
        state.fallback.load_state_dict(checkpoint.fallback)
    if checkpoint.scaler:  # empty when the run computed without one
        state.accumulator.scaler.load_state_dict(checkpoint.scaler)
    if state.ema is not None and checkpoint.ema is not None:
        _load(state.ema, checkpoint.ema)
    state.position = checkpoint.position
    state.sums = checkpoint.sums
    state.history = list(checkpoint.history)
    state.best = checkpoint.best
    state.started_from = checkpoint.started_from
    state.spent_s = checkpoint.spent_s


_POSITION = TypeAdapter(Position)
_HISTORY = TypeAdapter(tuple[dict[str, int | float], ...])
_STARTED_FROM = TypeAdapter(StartedFrom | None)
_SECONDS = TypeAdapter(Annotated[float, Field(ge=0, allow_inf_nan=False)])


def _converted(content: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint of schema version 1 under the names of version 2."""
    if content["schema_version"] == SCHEMA_VERSION:
        return content
    renamed = {"tally": "sums", "ladder": "fallback"}
    content = {renamed.get(name, name): value for name, value in content.items()}
    position = dict(content["position"])
    position["n_batches"] = position.pop("n_windows")
    return {**content, "position": position, "schema_version": SCHEMA_VERSION}


def _restore_loss(state: RunState, checkpoint: Checkpoint) -> None:
    loss = state.loss_module
    if loss is None:
        return
    try:
        if checkpoint.criterion is not None:
            loss.load_state_dict(checkpoint.criterion)
        elif next(loss.parameters(), None) is not None:
            msg = (
                f"the run was begun without learning the parameters of the loss "
                f"{type(loss).__name__}. {_WAYS_OUT}"
            )
            raise ResumeError(msg)
    except RuntimeError as error:
        msg = f"the checkpoint holds the parameters of another loss than the one given: {error}"
        raise ResumeError(msg) from None


def _load(network: nn.Module, weights: dict[str, Any]) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        msg = f"the checkpoint holds another network than the one given: {error}"
        raise ResumeError(msg) from None
