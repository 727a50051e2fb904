"""Hold everything that changes while a run is trained, from its seed or from existing weights on.

`RunState.state_dict` is the checkpoint of a run: a dictionary of plain values and tensors, read with
`weights_only=True`, so that opening one runs no code. Its entry `model` is the plain state dict of the network.
"""

import logging
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from brats_seg.config import Config, Size, StartConfig, is_dotted_name
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.fold import FoldData
from brats_seg.data.normalisation import spacing_text
from brats_seg.errors import BratsError, ConfigError, ResumeError, UsageError, some_of
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.models.build import build_model
from brats_seg.models.interface import logits_of
from brats_seg.models.norm import check_in_place
from brats_seg.models.unet import NotebookUNet, UNet
from brats_seg.presets import SHIPPED_START
from brats_seg.runtime import weights
from brats_seg.runtime.device import Device, device_name, uses_one_thread
from brats_seg.runtime.memory import Fallback, is_out_of_memory
from brats_seg.training import accumulation, optimisation
from brats_seg.training.independence import PassState
from brats_seg.training.losses import DiceBce, RunningSums, parameters_of
from brats_seg.training.ranks import Ranks
from brats_seg.training.run_plan import RunPlan
from brats_seg.voxels.box import shape_text

log = logging.getLogger(__name__)

MOST_SKIPPED = 50
"""Skipped steps in a row after which a run gives up; a float16 loss scale settles in 16."""
_WRAPPERS = re.compile(r"((module|network|_orig_mod)\.)*")
"""Prefixes of names in averaged, wrapped and compiled networks."""
_CHOOSE = "Choose other weights, or leave out --start-from."
ADVICE = "Replace it by a copy, or start anew with --fresh."

Count: TypeAlias = Annotated[int, Field(ge=0)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedFrom:
    """The weights that a run started from, as its checkpoints store them."""

    path: str
    """Run, exported model or file that they were read from."""
    fingerprint: str
    """Hash of all offered weights."""
    learnt_from: tuple[str, ...] = ()
    """Cases that these weights were trained on, and those that they started from, where it is known."""
    is_complete: bool = False
    """Whether all of them are known."""
    seen: tuple[str, ...] = ()
    """Held-out cases of the run whose patients are among them."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is."""

    epoch: Count = 0
    """Index of the current epoch."""
    n_batches: Count = 0
    """Batches of the current epoch that are done."""
    n_steps: Count = 0
    """Optimizer steps of the run that updated the weights."""
    n_skipped: Count = 0
    """Steps in a row that were skipped until now."""
    n_epochs: Annotated[int, Field(gt=0)] | None = None
    """Epochs of the run; None in the first epoch of a run that is fitted to hours."""
    sums: RunningSums = field(default_factory=RunningSums)
    """Sums over the patches of the current epoch; with the best weights, those of their validation."""
    validated: RunningSums = field(default_factory=RunningSums)
    """Sums over the held-out cases that the current epoch has been validated on."""
    history: list[dict[str, int | float]] = field(default_factory=list)
    """A row for each finished epoch."""
    best: float | None = None
    """Best watched value so far."""
    spent_s: Seconds = 0.0
    """Seconds that the run has taken in all its sessions, when its state was last saved."""

    @property
    def is_finished(self) -> bool:
        """Whether all epochs are done."""
        return self.n_epochs is not None and self.epoch >= self.n_epochs


@dataclass(kw_only=True, slots=True)
class RunState:
    """Weights, everything that updates them, and the progress of the run."""

    plan: RunPlan
    network: nn.Module
    accumulator: accumulation.Accumulator
    fallback: Fallback[accumulation.MemoryMode]
    """How batches are cut into micro-batches; the next mode is used when memory runs out."""
    schedule: optimisation.Schedule
    card: weights.ModelCard
    progress: Progress = field(default_factory=Progress)
    started_from: StartedFrom | None = None
    """The weights that the run started from; None if all were drawn from the seed."""

    def after_batch(self, result: accumulation.StepResult) -> None:
        """Count a batch, and update schedule and sums unless its step was skipped."""
        progress = self.progress
        progress.n_batches += 1
        progress.n_skipped = progress.n_skipped + 1 if result.skipped else 0
        if progress.n_skipped == MOST_SKIPPED:
            msg = f"{MOST_SKIPPED} steps in a row had no finite gradient. Lower optimizer.lr, or set training.precision to fp32, and start anew with --fresh."
            raise BratsError(msg)
        if result.skipped:
            log.warning("a step was skipped: its gradient was not finite")
            return
        progress.n_steps += 1
        self.schedule.after_step()
        progress.sums.loss_sum += result.loss * result.n_patches
        progress.sums.n_patches += result.n_patches

    def set_epochs(self, n_epochs: int | None) -> None:
        """Set the number of epochs, which the schedule may depend on."""
        self.progress.n_epochs = n_epochs
        self.schedule.set_length(None if n_epochs is None else self.plan.n_steps(n_epochs))

    def end_epoch(self, row: dict[str, int | float]) -> None:
        """Add a row to the history, and go on to the next epoch."""
        self.progress.history.append(row)
        self.progress.epoch += 1
        self.progress.n_batches = 0
        self.progress.sums = RunningSums()
        self.progress.validated = RunningSums()

    def best_entries(self, validation: RunningSums) -> dict[str, Any]:
        """Return the entries of a checkpoint for prediction, with the sums of its validation."""
        progress = replace(self.progress, sums=validation)
        return {**self._entries(progress), "model": self.network.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of the checkpoint from which the run is resumed."""
        return {
            **self._entries(self.progress),
            "mode": str(self.fallback.mode),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, entries: Mapping[str, Any]) -> None:
        """Set a state that was made from the same settings to the entries of a checkpoint."""
        name = "progress"
        try:
            saved = _SAVED.validate_python(entries)
            for name, part in self._parts().items():
                # a run that was begun in another precision has no loss scale
                if name != "scaler" or name in entries:
                    part.load_state_dict(entries[name])
            before, now = saved.card.config.training, self.plan.config.training
            modes = [str(mode) for mode in self.fallback.modes]
            # another micro-batch is tried from its first mode, and so is what this machine does not have
            if before.micro_batch == now.micro_batch and entries["mode"] in modes:
                self.fallback.index = modes.index(entries["mode"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = f"{error}".partition("\n")[0]
            problem = f"the entry {name} does not fit ({reason})"
            msg = f"{problem}: the checkpoint is damaged, or of another network or loss. {ADVICE}"
            raise ResumeError(msg) from error
        self.progress, self.started_from = saved.progress, saved.started_from

    def _entries(self, progress: Progress) -> dict[str, Any]:
        data = self.plan.data
        hidden = {data.patient_of[name] for name in data.split.train if name in data.patient_of}
        return {
            "schema_version": weights.SCHEMA_VERSION,
            "card": self.card.model_dump(),
            "environment": environment_of(self.accumulator.device),
            "started_from": self.started_from and asdict(self.started_from),
            "patients": tuple(sorted(hidden)),
            "progress": asdict(progress),
        }

    def _parts(self) -> dict[str, Any]:
        """Return everything that saves and loads its own state, by the name of its entry."""
        accumulator = self.accumulator
        criterion, scaler = accumulator.criterion, accumulator.scaler
        parts = {
            "model": self.network,
            "optimizer": accumulator.optimizer,
            "schedule": self.schedule,
            "criterion": criterion if isinstance(criterion, nn.Module) else None,
            "scaler": scaler if scaler.is_enabled() else None,
        }
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """What a checkpoint says of its run, without weights."""

    card: weights.ModelCard
    progress: Progress
    started_from: StartedFrom | None
    environment: dict[str, str]
    """Versions and device that the checkpoint was made with."""


_SAVED = TypeAdapter(SavedState)


def read_state(path: Path) -> SavedState:
    """Read what a checkpoint says of its run."""
    entries = weights.read_checkpoint(path)
    try:
        return _SAVED.validate_python(entries)
    except ValueError as error:
        msg = f"{path} is not a checkpoint of a run: {weights.reason_of(error)}. {ADVICE}"
        raise ResumeError(msg) from None


def build_network(config: Config, patch: Size) -> nn.Module:
    """Return the network of the settings, with weights drawn from the seed of the run."""
    torch.manual_seed(config.training.seed)
    return build_model(config.model, patch)


def new_state(plan: RunPlan, *, network: nn.Module | None = None, ranks: Ranks) -> RunState:
    """Return the state of a run before its first step; a network replaces that of the settings.

    The optimizer updates the network and the parameters that the loss has, by the same settings.
    """
    config, device, criterion = plan.config, plan.device, plan.task.criterion
    is_foreign = network is not None or is_dotted_name(config.model.name)
    network = network or build_network(config, plan.patch)
    network.to(device.torch_device)
    if is_foreign:
        check_network(network, config, plan.patch, device)
    check_in_place(network)
    if isinstance(criterion, nn.Module):
        criterion.to(device.torch_device)
    parameters = [*network.parameters(), *parameters_of(criterion)]
    optimizer = optimisation.build_optimizer(parameters, config.optimizer)
    # these change nothing when they compute, and draw no random numbers
    is_plain = type(network) in (UNet, NotebookUNet) and type(criterion) is DiceBce
    has_idle_cpus = ranks.n_ranks == 1 and uses_one_thread(device.torch_device, plan.patch)
    accumulator = accumulation.Accumulator(
        network,
        criterion,
        optimizer,
        device=device,
        clip_norm=config.optimizer.clip_norm,
        ranks=ranks,
        n_at_once=available_cpus() if is_plain and has_idle_cpus else 1,
    )
    state = RunState(
        plan=plan,
        network=network,
        accumulator=accumulator,
        fallback=accumulation.step_fallback(accumulator, config.training.micro_batch),
        schedule=optimisation.Schedule(optimizer, config.schedule),
        card=weights.ModelCard(identity=plan.identity, config=config),
    )
    state.set_epochs(None if config.training.hours else config.training.n_epochs)
    return state


def check_network(network: nn.Module, config: Config, patch: Size, device: Device) -> None:
    """Raise `ConfigError` unless a network turns a patch into logits; lazy layers draw their weights."""
    image = torch.zeros(1, len(MODALITIES), *patch, device=device.torch_device)
    n_out = len(MODALITIES if config.model.task == "reconstruction" else REGIONS)
    torch.manual_seed(config.training.seed)
    try:
        with torch.no_grad(), device.autocast(), ExitStack() as stack:
            # evaluation mode changes no buffers, and makes those of lazy layers
            logits_of(network.eval()(image), image, n_out, "the network")
            stack.callback(PassState.capture(image.device, network).restore)
            logits_of(network.train()(image), image, n_out, "the network")
    except (RuntimeError, ValueError, AssertionError) as error:
        # steps have a fallback for that
        if is_out_of_memory(error):
            return
        reason = str(error).partition("\n")[0]
        msg = f"the network does not take a patch {tuple(image.shape)} in float32: {reason}. Expected a 3D network of {len(MODALITIES)} channels in and {n_out} out"
        raise ConfigError(msg) from error


def environment_of(device: Device) -> dict[str, str]:
    """Return versions and device, which are stored in the run and its checkpoints."""
    kind, name = device.torch_device, device_name(device.torch_device)
    packages = ("brats_seg", "torch", "monai", "numpy", "nibabel")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "platform": platform.platform(),
        "device": f"{kind} {name}".strip(),
        "precision": device.precision,
        "threads": str(torch.get_num_threads()),
    }


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
        msg = f"the run {run_path} cannot start from itself (start.path {config.path}): give another --run, or resume it without --start-from"
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
    spacings_mm = source.card.identity.spacing_mm, data.spacing_mm
    if spacings_mm[0] != spacings_mm[1] and not is_shipped:
        text = "%s learnt at voxels of %s mm; these are of %s mm. Prepare with store.spacing_mm as there."
        log.warning(text, path, *map(spacing_text, spacings_mm))
    held_out = ((case, data.patient_of.get(case, case)) for case in data.split.validation)
    started = StartedFrom(
        path=f"brats_seg {version('brats_seg')}" if is_shipped else str(path),
        fingerprint=weights.fingerprint_of([source]),
        learnt_from=source.cases.ids,
        is_complete=source.cases.is_complete,
        seen=tuple(source.cases.seen_among(held_out)),
    )
    _log_training_cases(started, name if is_shipped else str(path), len(data.split.validation))
    return started


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


def _log_training_cases(started: StartedFrom, name: str, n_held_out: int) -> None:
    """Log what the weights learnt from, where it may matter to this run."""
    if not started.is_complete:
        text = "%s does not name its training cases; if some are held out here, scores will be too good"
        log.info(text, name)
    if seen := started.seen:
        text = "%s learnt from %d of %d cases that are held out here: %s. Scores will be too good"
        log.warning(text, name, len(seen), n_held_out, some_of(seen))
