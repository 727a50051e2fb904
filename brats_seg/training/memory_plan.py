"""Plan what fits in a given memory: patches, micro-batches, precision and checkpointing.

Every row of a plan is counted on tensors without memory (`memory_count`), and the suggested one is
measured in a process of its own. A plan for a GPU that this machine lacks is counted only.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn

from brats_seg.config import Config, Size
from brats_seg.errors import ConfigError, EnvironmentalError
from brats_seg.models.build import size_words
from brats_seg.models.interface import (
    ActivationCheckpointing,
    supported_checkpointing,
)
from brats_seg.models.norm import check_in_place
from brats_seg.progress import Track, part, untracked
from brats_seg.runtime.device import Device, Gpu, choose_device, native_dtype
from brats_seg.runtime.memory import MEGABYTE, free_memory
from brats_seg.training.memory_count import Footprint, predicted_bytes
from brats_seg.training.out_of_memory import MemoryMode
from brats_seg.training.state import RunState, build_network
from brats_seg.training.step_trial import measure_step
from brats_seg.training.tasks import task_of

log = logging.getLogger(__name__)

RESERVED_MIB = 512
"""Part of a given memory that is left for the context of a GPU, or for Python and torch themselves."""
_CUBES = (32, 48, 64, 80, 96, 112, 128, 160)
_BOXES = ((96, 128, 96), (128, 160, 128), (128, 192, 128), (160, 192, 128), (160, 192, 160))
"""Patches that are longer from front to back, as brains are; the last holds nearly every brain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One way to train, and the memory that it takes."""

    patch: Size
    """Voxels along X, Y, Z."""
    micro_batch: int
    precision: str
    checkpointing: str
    predicted_mib: int
    """Expected peak."""
    measured_mib: int | None = None
    """Peak of a real batch, where one was computed."""
    step_s: float | None = None
    """Seconds of an optimizer step on this device, without reading patches, where one was computed."""
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
    """GPU that was planned for without using it; then nothing was measured."""
    memory_mib: int
    """Memory that a run may take."""
    rows: tuple[PlanRow, ...]

    @property
    def candidates(self) -> tuple[PlanRow, ...]:
        """Rows that fit at micro-batch 1 in the precision of the settings, the largest patch first.

        Of one patch, the row with the least checkpointing comes first.
        """
        fitting = (
            row
            for row in self.rows
            if row.fits and row.micro_batch == 1 and row.precision == self.device.precision
        )
        return tuple(sorted(fitting, key=lambda row: -prod(row.patch)))

    @property
    def suggested(self) -> PlanRow | None:
        """The row to train with, if any fits."""
        return next((row for row in self.rows if row.suggested), None)

    def what_to_lower(self) -> str:
        """Return an error message with advice, for a plan in which nothing fits."""
        least = min(self.rows, key=lambda row: row.measured_mib or row.predicted_mib)
        return (
            f"nothing fits in {self.memory_mib} MiB: the row that takes least, a patch of "
            f"{size_words(least.patch)} in {least.precision} with checkpointing "
            f"{least.checkpointing}, needs {least.measured_mib or least.predicted_mib} MiB. Lower "
            "model.widths or patch.size, use optimizer.name sgd, which keeps less state than adam, "
            "or choose a smaller model.name"
        )


def plan_memory(
    config: Config,
    memory_bytes: int | None = None,
    track: Track = untracked,
    *,
    gpu: Gpu | None = None,
) -> MemoryPlan:
    """Return what fits in memory for the network, loss and optimizer of the settings.

    Args:
        config: Settings; `training.device` is the device that is planned for.
        memory_bytes: Memory of that device, of which `RESERVED_MIB` are left for torch itself; by
            default what is free on it now.
        track: Shows the progress.
        gpu: GPU to plan for instead, which this machine need not have. Its memory is the default,
            and nothing is measured.

    Raises:
        ConfigError: The network cannot be counted.
        EnvironmentalError: The device is missing, or does not report its free memory.
    """
    if gpu is not None:
        whole_bytes = gpu.memory_bytes if memory_bytes is None else memory_bytes
        return count_plan(config, _without_reserve(whole_bytes), track, gpu=gpu)
    training = config.training
    device = choose_device(training.device, training.precision).torch_device
    available = free_memory(device) if memory_bytes is None else _without_reserve(memory_bytes)
    return try_plan(count_plan(config, available, track), config, track)


def count_plan(
    config: Config, memory_bytes: int, track: Track = untracked, *, gpu: Gpu | None = None
) -> MemoryPlan:
    """Count what the patch of the settings takes in every way, and how large a patch can be.

    Args:
        config: Settings to plan for.
        memory_bytes: Memory that a run may take.
        track: Shows the progress.
        gpu: GPU to plan for, instead of the device of the settings.
    """
    counter = _counter_of(config, memory_bytes, gpu)
    own = None if config.patch.size == "whole" else config.patch.size
    others = sorted({*((n, n, n) for n in _CUBES), *_BOXES} - {own}, key=prod)
    patches = [*([] if own is None else [own]), *others]
    rows: list[PlanRow] = []
    for patch in track(patches, what="counting memory", total=len(patches)):
        if patch == own:
            rows += counter.every_way(patch)
            continue
        found = list(counter.first_fitting(patch))
        rows += found
        # larger patches take more
        if found and not found[-1].fits:
            break
    plan = MemoryPlan(
        device=counter.device, gpu=gpu, memory_mib=memory_bytes // MEGABYTE, rows=tuple(rows)
    )
    return replace(plan, rows=_suggesting(plan.rows, plan.candidates))


def largest_patch(config: Config, memory_bytes: int, *, gpu: Gpu | None = None) -> PlanRow | None:
    """Return how to train on the patch of the settings, or on the largest cube below it that fits.

    Args:
        config: Settings to plan for, with a patch of a fixed size.
        memory_bytes: Memory of the device, of which `RESERVED_MIB` are left for torch itself.
        gpu: GPU to plan for, instead of the device of the settings.

    Returns:
        The row with the least checkpointing that fits, or None if no patch does.

    Raises:
        UncountableError: The network or the loss cannot be counted.
        ConfigError: The network cannot be built for the patch of the settings.
    """
    own = config.patch.size
    if own == "whole":
        return None
    counter = _counter_of(config, _without_reserve(memory_bytes), gpu)
    build_network(config, own)
    smaller = [(n, n, n) for n in reversed(_CUBES) if n**3 < prod(own)]
    for patch in (own, *smaller):
        fitting = [row for row in counter.first_fitting(patch) if row.fits]
        if fitting:
            return fitting[0]
    return None


def try_plan(plan: MemoryPlan, config: Config, track: Track = untracked) -> MemoryPlan:
    """Compute a batch of the suggested row, and of the next row that fits if it does not.

    A row that takes more than this machine has free is not tried.
    """
    row = plan.suggested
    while row is not None and row.predicted_mib * MEGABYTE < free_memory(plan.device.torch_device):
        what = f"computing a batch of {size_words(row.patch)}, {row.precision}"
        (tried,) = track((_tried(one, plan, config) for one in [row]), what=what, total=1)
        rows = tuple(tried if other is row else other for other in plan.rows)
        if tried.fits:
            return replace(plan, rows=rows)
        plan = replace(plan, rows=rows)
        plan = replace(plan, rows=_suggesting(rows, plan.candidates))
        row = plan.suggested
    return plan


def plan_memory_mode(
    state: RunState, config: Config, patch: Size, memory_bytes: int
) -> MemoryMode | None:
    """Return the first memory mode of a run that is predicted to fit, or None if none is."""
    accumulator = state.accumulator
    device = accumulator.device.torch_device
    footprint = Footprint(state.network, accumulator.criterion, config, device)
    for mode in state.fallback.modes:
        dtype = native_dtype(device) if mode.in_half else accumulator.device.autocast_dtype
        where = Device(torch_device=device, autocast_dtype=dtype)
        counted = footprint.counted_bytes(patch, mode, where)
        if predicted_bytes(counted, device) <= memory_bytes:
            return mode
    return None


def start_in_planned_mode(state: RunState, config: Config, patch: Size) -> None:
    """Start a run in the first mode that is predicted to fit in free memory, the same on all ranks."""
    fallback, ranks = state.fallback, state.accumulator.ranks
    free_bytes = free_memory(state.accumulator.device.torch_device)
    mode = plan_memory_mode(state, config, patch, free_bytes)
    if mode is None:
        mode = fallback.modes[-1]
        log.warning("no mode is predicted to fit in the %d MiB free", free_bytes // MEGABYTE)
    place = max(ranks.gather(fallback.modes.index(mode)))
    fallback.move_to(fallback.modes[place])
    log.info("of %d MiB free, planned for %s", free_bytes // MEGABYTE, fallback.mode)


def _without_reserve(memory_bytes: int) -> int:
    return max(memory_bytes - RESERVED_MIB * MEGABYTE, 0)


def _counter_of(config: Config, memory_bytes: int, gpu: Gpu | None) -> "_Counter":
    training = config.training
    half: torch.dtype | None
    if gpu is not None:
        device, half = gpu.device(training.precision), gpu.half
    else:
        device = choose_device(training.device, training.precision)
        half = native_dtype(device.torch_device)
    return _Counter(
        config=config,
        device=device,
        half=half,
        memory_bytes=memory_bytes,
        is_absent=gpu is not None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counter:
    config: Config
    device: Device
    half: torch.dtype | None
    """Half precision that the device computes natively."""
    memory_bytes: int
    is_absent: bool
    """Whether the device is a GPU that is not used; tensors on the CPU then stand for its own."""

    def every_way(self, patch: Size) -> Iterator[PlanRow]:
        """Yield rows of all precisions and checkpointing, micro-batches until one does not fit."""
        footprint, kinds = self._footprint(patch)
        for device in (self.device, *self._other_precision()):
            for micro_batch in self._micro_batches():
                row = self._row(footprint, patch, MemoryMode(micro_batch=micro_batch), device)
                yield row
                if not row.fits:
                    break
            for kind in kinds[1:]:
                mode = MemoryMode(micro_batch=1, checkpointing=kind)
                yield self._row(footprint, patch, mode, device)

    def first_fitting(self, patch: Size) -> Iterator[PlanRow]:
        """Yield rows of ever more checkpointing until one fits; none if the network refuses the patch."""
        try:
            footprint, kinds = self._footprint(patch)
        except ConfigError:
            return
        for kind in kinds:
            mode = MemoryMode(micro_batch=1, checkpointing=kind)
            row = self._row(footprint, patch, mode, self.device)
            yield row
            if row.fits:
                break

    def _footprint(self, patch: Size) -> tuple[Footprint, Sequence[ActivationCheckpointing]]:
        device = torch.device("cpu") if self.is_absent else self.device.torch_device
        network = build_network(self.config, patch).to(device)
        check_in_place(network)
        criterion = task_of(self.config).criterion
        if isinstance(criterion, nn.Module):
            criterion.to(device)
        footprint = Footprint(network, criterion, self.config, device, for_gpu=self.is_absent)
        return footprint, supported_checkpointing(network)

    def _row(self, footprint: Footprint, patch: Size, mode: MemoryMode, device: Device) -> PlanRow:
        stand_in = replace(device, torch_device=torch.device("cpu")) if self.is_absent else device
        with part(f"{size_words(patch)}, {device.precision}, {mode}", 0):
            counted = footprint.counted_bytes(patch, mode, stand_in)
        predicted = predicted_bytes(counted, device.torch_device)
        return PlanRow(
            patch=patch,
            micro_batch=mode.micro_batch,
            precision=device.precision,
            checkpointing=mode.checkpointing.value,
            predicted_mib=predicted // MEGABYTE,
            fits=predicted <= self.memory_bytes,
        )

    def _micro_batches(self) -> list[int]:
        """Return 1, 2, 4 ... up to the effective batch."""
        largest = self.config.training.effective_batch_at(0)
        return [2**k for k in range(largest.bit_length())]

    def _other_precision(self) -> tuple[Device, ...]:
        other = self.half if self.device.autocast_dtype is None else None
        if other is self.device.autocast_dtype:
            return ()
        return (replace(self.device, autocast_dtype=other),)


def _suggesting(rows: Iterable[PlanRow], candidates: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    best = candidates[0] if candidates else None
    return tuple(replace(row, suggested=row is best) for row in rows)


def _tried(row: PlanRow, plan: MemoryPlan, config: Config) -> PlanRow:
    changes = {"micro_batch": row.micro_batch, "precision": row.precision}
    training = config.training.model_copy(update=changes)
    changed = config.model_copy(update={"training": training})
    try:
        measured = measure_step(changed, row.patch, ActivationCheckpointing(row.checkpointing))
    except EnvironmentalError:
        return replace(row, fits=False)
    row = replace(row, step_s=measured.step_s)
    if measured.peak_bytes is None:
        return row
    measured_mib = measured.peak_bytes // MEGABYTE
    return replace(row, measured_mib=measured_mib, fits=measured_mib <= plan.memory_mib)
