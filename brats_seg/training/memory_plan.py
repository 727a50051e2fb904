"""Plan what fits in a given memory, and choose the settings that suit a device.

Every row of a plan is one of the memory modes that a run falls back to, counted on tensors without
memory (see `training.memory`). A run for which neither a preset nor a file of settings is given keeps the
settings that it was begun with, or gets the preset that suits the device. The whole memory of the device
counts then and not what is free at the moment, so that all folds on one device get the same patch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brats_seg.config import Config, ModelConfig, Size
from brats_seg.config_text import load_config, read_yaml
from brats_seg.errors import ConfigError
from brats_seg.models.build import size_words
from brats_seg.models.norm import check_in_place
from brats_seg.progress import Track, part, untracked
from brats_seg.runtime.device import Device, Gpu, choose_device
from brats_seg.runtime.memory import MEGABYTE, free_memory, total_memory
from brats_seg.training.memory import (
    Footprint,
    UncountableError,
    memory_modes,
    predicted_bytes,
)
from brats_seg.training.run_folder import CONFIG_NAME, RunFolder
from brats_seg.training.state import build_network
from brats_seg.training.tasks import task_of

RESERVED_MIB = 512
"""Part of a given memory that is left for the context of a GPU, or for Python and torch themselves."""
SMALL_GPU_BYTES = 20 * 2**30
"""Memory below which a GPU gets the preset `kaggle-t4`, which is made for 16 GB, and not `full`."""
_CUBES = (32, 48, 64, 80, 96, 112, 128, 160)
_BOXES = ((96, 128, 96), (128, 160, 128), (128, 192, 128), (160, 192, 128), (160, 192, 160))
"""Patches that are longer from front to back, as brains are; the last holds nearly every brain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One way to train, and the memory that it needs."""

    patch: Size
    """Voxels along X, Y, Z."""
    micro_batch: int
    precision: str
    checkpointing: str
    predicted_mib: int
    """Expected peak."""
    fits: bool
    """Whether the peak is within the memory of the plan."""
    suggested: bool = False
    """Whether it is the row to train with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The ways to train on a device, and which of them fit."""

    device: Device
    """Device with the precision of the settings."""
    gpu: Gpu | None = None
    """GPU that was planned for without using it."""
    memory_mib: int
    """Memory that a run may use."""
    rows: tuple[PlanRow, ...]

    @property
    def suggested(self) -> PlanRow | None:
        """The row to train with, if any fits."""
        return next((row for row in self.rows if row.suggested), None)

    def what_to_lower(self) -> str:
        """Return an error message with advice, for a plan in which nothing fits."""
        least = min(self.rows, key=lambda row: row.predicted_mib)
        return (
            f"nothing fits in {self.memory_mib} MiB: the row that needs least memory, a patch of "
            f"{size_words(least.patch)} in {least.precision} with checkpointing "
            f"{least.checkpointing}, needs {least.predicted_mib} MiB. Lower model.widths or "
            "patch.size, use optimizer.name sgd, which keeps less state than adam, or choose a "
            "smaller model.name"
        )


def plan_memory(
    config: Config,
    memory_bytes: int | None = None,
    track: Track = untracked,
    *,
    gpu: Gpu | None = None,
) -> MemoryPlan:
    """Predict what the patch of the settings needs in every memory mode, and how large a patch can be.

    Args:
        config: Settings; `training.device` is the device that is planned for.
        memory_bytes: Memory of that device, of which `RESERVED_MIB` are left for torch itself; by
            default what is free on it now.
        track: Shows the progress.
        gpu: GPU to plan for instead, which this machine need not have. Its memory is the default.

    Raises:
        ConfigError: The network cannot be counted.
        EnvironmentalError: The device is missing, or does not report its free memory.
    """
    counter = _Counter.of(config, gpu, memory_bytes)
    own = None if config.patch.size == "whole" else config.patch.size
    sizes = {*((n, n, n) for n in _CUBES), *_BOXES} - {own}
    patches = [*([] if own is None else [own]), *sorted(sizes, key=prod)]
    rows: list[PlanRow] = []
    for patch in track(patches, what="counting memory", total=len(patches)):
        if patch == own:
            rows += counter.rows(patch, config.training.effective_batch_at(0))
            continue
        found = list(counter.fitting_rows(patch))
        rows += found
        # larger patches need more
        if found and not found[-1].fits:
            break
    best = max(
        (row for row in rows if row.fits and row.micro_batch == 1),
        key=lambda row: prod(row.patch),
        default=None,
    )
    return MemoryPlan(
        device=counter.device,
        gpu=gpu,
        memory_mib=counter.usable_bytes // MEGABYTE,
        rows=tuple(replace(row, suggested=row is best) for row in rows),
    )


def largest_patch(config: Config, memory_bytes: int, *, gpu: Gpu | None = None) -> PlanRow | None:
    """Return the row of the patch of the settings, or of the largest smaller cube, that fits."""
    own = config.patch.size
    if own == "whole":
        return None
    build_network(config, own)
    counter = _Counter.of(config, gpu, memory_bytes)
    smaller = [(n, n, n) for n in reversed(_CUBES) if n**3 < prod(own)]
    rows = (row for patch in (own, *smaller) for row in counter.fitting_rows(patch))
    return next((row for row in rows if row.fits), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counter:
    """Counts the memory of the network, loss and optimizer of the settings."""

    config: Config
    device: Device
    computing: Device
    """Device of the tensors: for a GPU that is not used, those on the CPU stand for its own."""
    usable_bytes: int
    """Memory that a run may use."""

    @classmethod
    def of(cls, config: Config, gpu: Gpu | None, memory_bytes: int | None) -> "_Counter":
        precision = config.training.precision
        if gpu is None:
            device = computing = choose_device(config.training.device, precision)
        else:
            device = gpu.device(precision)
            computing = replace(device, torch_device=torch.device("cpu"))
            memory_bytes = gpu.memory_bytes if memory_bytes is None else memory_bytes
        if memory_bytes is None:
            usable = free_memory(device.torch_device)
        else:
            usable = max(memory_bytes - RESERVED_MIB * MEGABYTE, 0)
        return cls(config=config, device=device, computing=computing, usable_bytes=usable)

    def fitting_rows(self, patch: Size) -> Iterator[PlanRow]:
        """Yield rows of ever more checkpointing until one fits; none if the network refuses the patch."""
        try:
            for row in self.rows(patch, micro_batch=1):
                yield row
                if row.fits:
                    return
        except UncountableError:
            raise
        except ConfigError:
            return

    def rows(self, patch: Size, micro_batch: int) -> Iterator[PlanRow]:
        """Yield a row for each memory mode, from micro-batches of that size to the least memory."""
        where, for_gpu = self.computing.torch_device, self.computing != self.device
        network = build_network(self.config, patch).to(where)
        check_in_place(network)
        criterion = task_of(self.config).criterion
        if isinstance(criterion, nn.Module):
            criterion.to(where)
        footprint = Footprint(network, criterion, self.config, where, for_gpu=for_gpu)
        precision = self.device.precision
        for mode in memory_modes(network, micro_batch):
            with part(f"{size_words(patch)}, {precision}, {mode}", 0):
                counted = footprint.counted_bytes(patch, mode, self.computing)
            predicted = predicted_bytes(counted, self.device.torch_device)
            yield PlanRow(
                patch=patch,
                micro_batch=mode.micro_batch,
                precision=precision,
                checkpointing=mode.checkpointing.value,
                predicted_mib=predicted // MEGABYTE,
                fits=predicted <= self.usable_bytes,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenSettings:
    """Settings of a run, and why they were chosen."""

    config: Config
    reason: str
    """One or two sentences for the person who starts the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """Device that a run is to be trained on."""

    device: Device
    gpu: Gpu | None = None
    """GPU that is planned for without using it."""
    why: str
    """Reason for the preset."""
    memory_bytes: int

    @property
    def preset(self) -> str:
        if self.device.torch_device.type != "cuda":
            return "cpu"
        return "kaggle-t4" if self.memory_bytes < SMALL_GPU_BYTES else "full"


def choose_settings(
    *,
    assignments: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    run_paths: Sequence[Path] = (),
    gpu: Gpu | None = None,
) -> ChosenSettings:
    """Return the settings of a run that was begun, or those that suit the device; what is given wins.

    Args:
        assignments: `key=value` texts, see `load_config`.
        values: Values by dotted key.
        run_paths: Folders of runs. The first that holds a checkpoint gives the settings.
        gpu: GPU to choose for, instead of the device of the settings.

    Raises:
        ConfigError: A setting is not allowed, the settings of the run cannot be read, or the network
            cannot be built.
        EnvironmentalError: The machine lacks the device.

    Example:
        >>> choose_settings(values={"training.device": "cpu"}).config.patch.size
        (64, 64, 64)
    """
    assignments = list(assignments)
    begun = next((path for path in run_paths if RunFolder(path=path).is_begun), None)
    if begun is not None:
        path = begun / CONFIG_NAME
        config = load_config(text=_settings_text(path), assignments=assignments, values=values)
        return ChosenSettings(config=config, reason=f"settings of {path}, which the run began with")
    given = load_config(assignments=assignments, values=values)
    target = _target(given, gpu)
    config = load_config(preset=target.preset, assignments=assignments, values=values)
    size, why = _fitting_patch(config, given, target)
    if size != config.patch.size:
        fitted = {**(values or {}), "patch.size": size}
        config = load_config(preset=target.preset, assignments=assignments, values=fitted)
    chosen = f"preset {target.preset}, {target.why} (--preset takes another)"
    return ChosenSettings(config=config, reason=f"{chosen}: {_network_words(config.model)}, {why}")


def _network_words(model: ModelConfig) -> str:
    if model.name not in {"unet", "dynunet"}:
        return model.name
    return f"{model.name} of {model.widths[0]} to {model.widths[-1]} channels"


def _settings_text(path: Path) -> str:
    """Return the settings of a run, as YAML that `load_config` reads."""
    try:
        text = read_yaml(path)
        load_config(text=text)
        return text
    except ConfigError as error:
        msg = (
            f"{path} cannot be used: {error}. It holds the settings that the run began with; give them "
            "with --preset or --config, or start anew with --fresh"
        )
        raise ConfigError(msg) from None


def _target(given: Config, gpu: Gpu | None) -> _Target:
    training = given.training
    if gpu is not None:
        device, name, memory_bytes = gpu.device(training.precision), gpu.name, gpu.memory_bytes
    else:
        device = choose_device(training.device, training.precision)
        where = device.torch_device
        if where.type != "cuda":
            is_auto = training.device == "auto"
            found = "torch finds no GPU here" if is_auto else f"training.device is {where}"
            memory_bytes = total_memory(where)
            return _Target(device=device, why=f"because {found}", memory_bytes=memory_bytes)
        # ranks of one run must choose the same: the GPU that has least decides
        each = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        memory_bytes = min(map(total_memory, [where] if ":" in training.device else each))
        name = torch.cuda.get_device_name(where)
    why = f"for {name} with {memory_bytes / 2**30:.1f} GiB"
    return _Target(device=device, gpu=gpu, why=why, memory_bytes=memory_bytes)


def _fitting_patch(config: Config, given: Config, target: _Target) -> tuple[Any, str]:
    """Return the patch size with which a run fits in memory, and why."""
    patch, precision = config.patch.size, target.device.precision
    if patch == "whole":
        return patch, f"whole brains in {precision}"
    words = size_words(patch)
    if "size" in given.patch.model_fields_set:
        # a patch that does not fit the network is refused before the cases are prepared
        build_network(config, patch)
        return patch, f"patch {words} as given, in {precision}"
    try:
        row = largest_patch(config, target.memory_bytes, gpu=target.gpu)
    except UncountableError:
        name = config.model.name
        return patch, f"patch {words}, whose memory cannot be counted for model.name {name}"
    memory_mib = target.memory_bytes // MEGABYTE
    if row is None:
        what = f"which is not predicted to fit in {memory_mib} MiB: lower model.widths"
        return patch, f"patch {words}, {what}"
    instead = "" if row.patch == patch else f" instead of {words}"
    kind = "" if row.checkpointing == "none" else f", with checkpointing {row.checkpointing}"
    used = f"about {row.predicted_mib} of {memory_mib} MiB{kind}"
    return row.patch, f"patch {size_words(row.patch)}{instead} in {row.precision}, {used}"
