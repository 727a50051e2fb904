"""Predict what fits in a given memory, and choose the settings that suit a device.

Every row of a plan is one of the memory modes that a run falls back to. The prediction computes a step
of the real modules on fake tensors, which have shape, type and device, and no memory; what allocators
and kernels need beside the tensors is an allowance. `FakeTensorMode` is imported from a private module
of torch because there is no public one.
"""

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from brats_seg.config import Config, Size, load_config, read_yaml
from brats_seg.data.loader import Sample
from brats_seg.errors import ConfigError, UsageError
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.models.convolution import cpu_as_gpu
from brats_seg.models.interface import set_activation_checkpointing, tensors_of
from brats_seg.models.norm import check_in_place
from brats_seg.presets import check_stored, trusting
from brats_seg.progress import Track, part, untracked
from brats_seg.runtime.device import Device, Gpu, choose_device, device_name, gpus
from brats_seg.runtime.memory import MEGABYTE, free_memory, total_memory
from brats_seg.training.accumulation import MemoryMode, memory_modes
from brats_seg.training.losses import Criterion, build_task, whole_loss
from brats_seg.training.optimisation import build_optimizer
from brats_seg.training.run_folder import CONFIG_NAME, RunFolder
from brats_seg.training.run_plan import Batch
from brats_seg.training.state import build_network
from brats_seg.voxels.box import shape_text

RESERVED_MIB = 512
"""Part of a given memory that is left for the context of a GPU, or for Python and torch themselves."""
SMALL_GPU_BYTES = 20 * 2**30
"""Memory below which a GPU gets the preset `kaggle-t4`, which is made for 16 GB, and not `full`."""
_CUBES = (32, 48, 64, 80, 96, 112, 128, 160)
_BOXES = ((96, 128, 96), (128, 160, 128), (128, 192, 128), (160, 192, 128), (160, 192, 160))
"""Patches that are longer from front to back, as brains are; the last holds nearly every brain."""
_ALLOWANCE_OF_CUDA, _ALLOWANCE_OF_HOST = (0.10, 0), (0.30, 160)
"""Share of the tensors, and MiB, for what allocators and kernels need beside the tensors, and for code that is
loaded or compiled when it is first used. That of the host is from peaks of processes under glibc with patches
of 48^3 to 96^3 of the default U-Net. On GPUs it is for workspaces of cuDNN, and was not measured on every one;
the context is not part of the peak that torch reports."""


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
        what = f"a patch of {shape_text(least.patch)} in {least.precision} needs {least.predicted_mib} MiB"
        way = "Lower model.widths or patch.size, or use optimizer.name sgd, which keeps less"
        return f"nothing fits in {self.memory_mib} MiB: {what}. {way}"


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
    rows: list[PlanRow] = []
    if config.patch.size != "whole":
        rows += counter.rows(config.patch.size, config.training.effective_batch_at(0))
    # where that fits, nobody asks for a smaller one
    n_least = max((prod(row.patch) for row in rows if row.fits), default=0)
    sizes = {*((n, n, n) for n in _CUBES), *_BOXES}.difference(row.patch for row in rows)
    patches = sorted((size for size in sizes if prod(size) > n_least), key=prod)
    for patch in track(patches, what="counting memory", total=len(patches)):
        rows_of_patch = list(counter.fitting_rows(patch))
        rows += rows_of_patch
        # larger patches need more
        if rows_of_patch and not rows_of_patch[-1].fits:
            break
    if not rows:
        # the network refuses all of these patches, and says why
        next(counter.rows(patches[-1], micro_batch=1))
    best = max(
        (row for row in rows if row.fits and row.micro_batch == 1),
        key=lambda row: prod(row.patch),
        default=None,
    )
    return MemoryPlan(
        device=counter.device,
        memory_mib=counter.usable_bytes // MEGABYTE,
        rows=tuple(replace(row, suggested=row is best) for row in rows),
    )


def largest_patch(
    config: Config, largest: Size, memory_bytes: int, gpu: Gpu | None
) -> PlanRow | None:
    """Return the row of the largest patch, or of the largest smaller cube, that fits."""
    counter = _Counter.of(config, gpu, memory_bytes)
    smaller = [(n, n, n) for n in reversed(_CUBES) if n**3 < prod(largest)]
    tried = counter.rows(largest, micro_batch=1), *map(counter.fitting_rows, smaller)
    return next((row for rows in tried for row in rows if row.fits), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counter:
    """Counts the memory of the network, loss and optimizer of the settings."""

    config: Config
    gpu: Gpu | None
    device: Device
    usable_bytes: int
    """Memory that a run may use."""

    @classmethod
    def of(cls, config: Config, gpu: Gpu | None, memory_bytes: int | None) -> "_Counter":
        precision = config.training.precision
        if gpu is None:
            device = choose_device(config.training.device, precision)
        else:
            device = gpu.device(precision)
            memory_bytes = gpu.memory_bytes if memory_bytes is None else memory_bytes
        if memory_bytes is None:
            usable = free_memory(device.torch_device)
        else:
            usable = max(memory_bytes - RESERVED_MIB * MEGABYTE, 0)
        return cls(config=config, gpu=gpu, device=device, usable_bytes=usable)

    def fitting_rows(self, patch: Size) -> Iterator[PlanRow]:
        """Yield rows of ever more checkpointing until one fits; none if the network refuses the patch."""
        with suppress(ConfigError, UncountableError):
            for row in self.rows(patch, micro_batch=1):
                yield row
                if row.fits:
                    return

    def rows(self, patch: Size, micro_batch: int) -> Iterator[PlanRow]:
        """Yield a row for each memory mode, from micro-batches of that size to the least memory."""
        # for a GPU that is not used, tensors on the CPU stand for its own
        for_gpu = self.gpu is not None
        used = torch.device("cpu") if for_gpu else self.device.torch_device
        computing = replace(self.device, torch_device=used)
        network = build_network(self.config, patch).to(used)
        check_in_place(network)
        criterion = build_task(self.config).criterion
        if isinstance(criterion, nn.Module):
            criterion.to(used)
        footprint = Footprint(network, criterion, self.config, used, for_gpu=for_gpu)
        precision = self.device.precision
        for mode in memory_modes(network, micro_batch):
            with part(f"{shape_text(patch)}, {precision}, {mode}", 0):
                counted = footprint.counted_bytes(patch, mode, computing)
            is_cuda = self.device.torch_device.type == "cuda"
            share, code_mb = _ALLOWANCE_OF_CUDA if is_cuda else _ALLOWANCE_OF_HOST
            predicted = int(counted * (1 + share) + code_mb * MEGABYTE)
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


def choose_settings(
    *,
    assignments: Sequence[str] = (),
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
        >>> small = {"training.device": "cpu", "patch.size": [16, 16, 16], "model.widths": [4, 8]}
        >>> choose_settings(values=small).reason
        'preset cpu, because training.device is cpu (--preset takes another): unet, patch 16x16x16 as given, in fp32'
    """
    begun = next((path for path in run_paths if RunFolder(path=path).is_begun), None)
    if begun is not None:
        path = begun / CONFIG_NAME
        try:
            text = read_yaml(path)
            load_config(text=text)
        except ConfigError as error:
            msg = f"{path} cannot be used: {error}. Give --preset or --config, or --fresh"
            raise ConfigError(msg) from None
        config = load_config(text=text, assignments=assignments, values=values)
        _check_code(config, path, " ".join(map(str, [*assignments, *(values or {}).values()])))
        return ChosenSettings(config=config, reason=f"settings of {path}, which the run began with")
    given = load_config(assignments=assignments, values=values)
    device, memory_bytes, why = _device_of(given, gpu)
    preset = "cpu"
    if device.torch_device.type == "cuda":
        preset = "kaggle-t4" if memory_bytes < SMALL_GPU_BYTES else "full"
    config = load_config(preset=preset, assignments=assignments, values=values)
    patch, what = _fitting_patch(config, given, device.precision, memory_bytes, gpu)
    if patch != config.patch.size:
        fitted = {**(values or {}), "patch.size": patch}
        config = load_config(preset=preset, assignments=assignments, values=fitted)
    chosen = f"preset {preset}, {why} (--preset takes another)"
    return ChosenSettings(config=config, reason=f"{chosen}: {config.model.name}, {what}")


def _check_code(config: Config, path: Path, typed: str) -> None:
    """Raise `UsageError` if the settings of a run name code that is neither known nor typed again."""
    with trusting(*re.findall(r"[\w.]+", typed)):
        for choice in (config.model, config.loss):
            check_stored(path, choice.name, choice.arguments)
        for name in config.training.transforms:
            check_stored(path, name, {})


def _device_of(given: Config, gpu: Gpu | None) -> tuple[Device, int, str]:
    """Return the device that a run is to be trained on, its memory, and the reason for the preset."""
    training = given.training
    if gpu is not None:
        device, memory_bytes, name = gpu.device(training.precision), gpu.memory_bytes, gpu.name
    else:
        device = choose_device(training.device, training.precision)
        used = device.torch_device
        if used.type != "cuda":
            is_auto = training.device == "auto"
            why = "torch finds no GPU here" if is_auto else f"training.device is {used}"
            return device, total_memory(used), f"because {why}"
        # ranks of one run must choose the same: the GPU that has least decides
        memory_bytes = min(map(total_memory, [used] if ":" in training.device else gpus()))
        name = device_name(used)
    return device, memory_bytes, f"for {name} with {memory_bytes / 2**30:.1f} GiB"


def _fitting_patch(
    config: Config, given: Config, precision: str, memory_bytes: int, gpu: Gpu | None
) -> tuple[Any, str]:
    """Return the patch size with which a run fits in memory, and why."""
    patch, memory_mib = config.patch.size, memory_bytes // MEGABYTE
    if patch == "whole":
        return patch, f"whole brains in {precision}"
    size = shape_text(patch)
    # a patch that does not fit the network is refused before the cases are prepared
    build_network(config, patch)
    if "size" in given.patch.model_fields_set:
        return patch, f"patch {size} as given, in {precision}"
    try:
        row = largest_patch(config, patch, memory_bytes, gpu)
    except UncountableError:
        name = config.model.name
        return patch, f"patch {size}, whose memory cannot be counted for model.name {name}"
    if row is None:
        what = f"which is not predicted to fit in {memory_mib} MiB: lower model.widths"
        return patch, f"patch {size}, {what}"
    instead = "" if row.patch == patch else f" instead of {size}"
    kind = "" if row.checkpointing == "none" else f", with checkpointing {row.checkpointing}"
    used = f"about {row.predicted_mib} of {memory_mib} MiB{kind}"
    return row.patch, f"patch {shape_text(row.patch)}{instead} in {row.precision}, {used}"


class UncountableError(UsageError):
    """A network refuses a patch, or needs values of tensors, which tensors without memory lack."""


class Footprint:
    """A network, and everything that training keeps beside it, on fake tensors.

    The given network is not changed, nor is the random state of torch.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: Criterion,
        config: Config,
        device: torch.device,
        *,
        for_gpu: bool = False,
    ) -> None:
        """Copy the network to fake tensors.

        Args:
            network: Network to count.
            criterion: Its loss.
            config: Settings; those of the optimizer and the effective batch are used.
            device: Device of the fake tensors.
            for_gpu: Whether tensors on the CPU stand for those of a GPU that this machine lacks. Then
                the batch on the host is not counted, and the network computes as on a GPU.
        """
        self._criterion = criterion
        self._for_gpu = for_gpu
        self._target_key = build_task(config).target_key
        batches = config.training.effective_batch
        self._effective_batch = batches if isinstance(batches, int) else max(batches.values())
        self._mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self._live = _LiveBytes(device.type)
        with self._counting():
            fakes = _fakes_of(network, device)
        # tensors in the memo count as copied already, so this takes no memory
        self._network = deepcopy(network, fakes).train()
        with self._counting():
            optimizer = build_optimizer(self._network.parameters(), config.optimizer)
            self._hold_gradients(hold=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self._optimizer = optimizer
        self._peak_of_update = self._live.peak

    def counted_bytes(self, patch: Size, mode: MemoryMode, device: Device) -> int:
        """Return the peak memory of all tensors, for batches of patches of that size.

        On the CPU this includes the batch that the host holds.
        """
        set_activation_checkpointing(self._network, mode.checkpointing)
        # it logs an error that is raised too, with its traceback
        fake_tensor.log.disabled = True
        try:
            with self._counting():
                self._live.peak = self._live.now
                self._run(patch, mode, device)
        except (RuntimeError, ValueError, AssertionError) as error:
            why = f"the network refuses it, or needs values and not only sizes: {error}"
            msg = f"memory cannot be counted for a patch of {shape_text(patch)}: {why}. Give --patch and --preset to train it."
            raise UncountableError(msg) from error
        finally:
            fake_tensor.log.disabled = False
        return max(self._live.peak, self._peak_of_update)

    def _run(self, patch: Size, mode: MemoryMode, device: Device) -> None:
        # from the second micro-batch on, the gradients of those before are held
        self._hold_gradients(hold=self._effective_batch > mode.micro_batch)
        # the batch is held on the host, which is the device itself on the CPU
        n_samples = 1 if self._for_gpu else self._effective_batch
        samples = [_fake_sample(patch, self._target_key) for _ in range(n_samples)]
        # there are enough of them for a micro-batch, which is copied to the device
        samples *= mode.micro_batch
        micro_batch = next(Batch(samples=tuple(samples)).micro_batches(mode.micro_batch))
        image, target = micro_batch.to(device.torch_device)
        with device.autocast():
            output = self._network(image)
            loss = whole_loss(self._criterion, output, target)
        loss.backward()
        self._hold_gradients(hold=False)

    def _hold_gradients(self, *, hold: bool) -> None:
        for parameter in self._network.parameters():
            held = hold and parameter.requires_grad
            parameter.grad = torch.empty_like(parameter) if held else None

    @contextmanager
    def _counting(self) -> Iterator[None]:
        # dispatch modes apply to this thread only
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with self._mode, self._live, one_thread, cpu_as_gpu(is_needed=self._for_gpu):
            yield


def _fakes_of(network: nn.Module, device: torch.device) -> dict[int, Any]:
    """Return a fake tensor for every tensor of a network, by its id."""
    fakes: dict[int, Any] = {}
    for parameter in network.parameters():
        fake = torch.empty_like(parameter, device=device)
        fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in network.buffers():
        fakes[id(buffer)] = torch.empty_like(buffer, device=device)
    return fakes


def _fake_sample(patch: Size, target_key: str) -> Sample:
    image = torch.empty(len(MODALITIES), *patch, dtype=torch.float16)
    regions = torch.empty(len(REGIONS), *patch, dtype=torch.uint8)
    target = {"image": image, "label": regions}[target_key]
    return Sample(image=image, target=target, case_id="")


class _LiveBytes(TorchDispatchMode):
    """Adds up the memory of the tensors of a device while they live, each storage once."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._known: dict[weakref.ref[Any], int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            memory = weakref.ref(tensor.untyped_storage(), self._forget)
            if tensor.device.type == self._device_type and memory not in self._known:
                self._known[memory] = size = tensor.untyped_storage().nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
        return result

    def _forget(self, memory: weakref.ref[Any]) -> None:
        self.now -= self._known.pop(memory)
