"""What fits into a given memory: patches, micro-batches, precision and checkpointing.

Every row is counted (see `footprint`), and the one that is suggested is tried for real (`trial`).
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from brats_seg.config import Config, Size
from brats_seg.errors import ConfigError, EnvironmentalError
from brats_seg.models.device import Device, choose_device, native_dtype
from brats_seg.models.memory import MEGABYTE
from brats_seg.models.norm import check_in_place
from brats_seg.models.rungs import Checkpointing, set_checkpointing
from brats_seg.progress import Track, untracked
from brats_seg.training.footprint import Footprint, predicted_bytes
from brats_seg.training.ladder import Rung
from brats_seg.training.room import free_memory
from brats_seg.training.state import RunState, build_network
from brats_seg.training.task import task_of
from brats_seg.training.trial import measured_bytes

log = logging.getLogger(__name__)

_CUBES = (32, 48, 64, 80, 96, 112, 128, 160)
_BOXES = ((96, 128, 96), (128, 160, 128), (128, 192, 128), (160, 192, 128), (160, 192, 160))
"""Longer from front to back, as brains are; the last holds nearly every brain whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One way to train, and what it takes."""

    patch: Size
    """Voxels."""
    micro_batch: int
    precision: str
    checkpointing: str
    predicted_mib: int
    """Peak to expect."""
    measured_mib: int | None = None
    """Peak of a real window, where one was tried."""
    fits: bool
    suggested: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What fits on a device."""

    device: Device
    """With the precision of the settings."""
    memory_mib: int
    """What a run may take."""
    rows: tuple[PlanRow, ...]

    @property
    def candidates(self) -> tuple[PlanRow, ...]:
        """What fits at micro-batch 1 in the settings' precision, the largest patch first.

        Of one patch, that with the least checkpointing comes first.
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
        """Say what would help where nothing fits."""
        least = min(self.rows, key=lambda row: row.measured_mib or row.predicted_mib)
        return (
            f"nothing fits in {self.memory_mib} MiB: the least, a patch of {size_words(least.patch)} "
            f"in {least.precision} with checkpointing {least.checkpointing}, needs "
            f"{least.measured_mib or least.predicted_mib}. Lower model.widths or patch.size, take "
            "optimizer.name sgd, which keeps less than adam, or a smaller model.name"
        )


def size_words(patch: Size) -> str:
    """Return `128x128x128`."""
    return "x".join(map(str, patch))


def count_plan(config: Config, memory_bytes: int, track: Track = untracked) -> Plan:
    """Count what the settings' patch takes in every way, and how large a patch can be.

    Args:
        config: Its device, precision, network, loss, optimizer and effective batch are planned for.
        memory_bytes: What a run may take.
        track: Shows the patches as they are counted.
    """
    training = config.training
    device = choose_device(training.device, training.precision)
    counter = _Counter(config=config, device=device, memory_bytes=memory_bytes)
    own = None if config.patch.size == "whole" else config.patch.size
    rows = [] if own is None else list(counter.every_way(own))
    others = sorted({*((n, n, n) for n in _CUBES), *_BOXES} - {own}, key=prod)
    for patch in track(others, what="counting", total=len(others)):
        found = list(counter.first_fitting(patch))
        rows += found
        # larger patches take more
        if found and not found[-1].fits:
            break
    plan = Plan(device=device, memory_mib=memory_bytes // MEGABYTE, rows=tuple(rows))
    return replace(plan, rows=_suggesting(plan.rows, plan.candidates))


def try_plan(plan: Plan, config: Config) -> Plan:
    """Train one window of what is suggested, and go on to the next that fits if it does not.

    Nothing is tried that is larger than what this machine has free.
    """
    row = plan.suggested
    while row is not None and row.predicted_mib * MEGABYTE < free_memory(plan.device.torch_device):
        tried = _tried(row, plan, config)
        rows = tuple(tried if other is row else other for other in plan.rows)
        if tried.fits:
            return replace(plan, rows=rows)
        plan = replace(plan, rows=rows)
        plan = replace(plan, rows=_suggesting(rows, plan.candidates))
        row = plan.suggested
    return plan


def plan_rung(state: RunState, config: Config, patch: Size, memory_bytes: int) -> Rung | None:
    """Return the first rung of a run's ladder that is predicted to fit, or None if none is."""
    accumulator = state.accumulator
    device = accumulator.device.torch_device
    footprint = Footprint(state.network, accumulator.criterion, config, device)
    for rung in state.ladder.rungs:
        dtype = native_dtype(device) if rung.in_half else accumulator.device.autocast_dtype
        where = Device(torch_device=device, autocast_dtype=dtype)
        counted = footprint.counted_bytes(patch, rung, where)
        if predicted_bytes(counted, device) <= memory_bytes:
            return rung
    return None


def start_on_planned_rung(state: RunState, config: Config, patch: Size) -> None:
    """Begin a run on the first rung that is predicted to fit in what is free; ranks agree on one."""
    ladder, ranks = state.ladder, state.accumulator.ranks
    free_bytes = free_memory(state.accumulator.device.torch_device)
    rung = plan_rung(state, config, patch, free_bytes)
    if rung is None:
        rung = ladder.rungs[-1]
        log.warning("no rung is predicted to fit in the %d MiB free", free_bytes // MEGABYTE)
    place = max(ranks.gather(ladder.rungs.index(rung)))
    ladder.move_to(ladder.rungs[place])
    log.info("of %d MiB free, planned for %s", free_bytes // MEGABYTE, ladder.rung)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counter:
    config: Config
    device: Device
    memory_bytes: int

    def every_way(self, patch: Size) -> Iterator[PlanRow]:
        """Yield all precisions, micro-batches up to the first that does not fit, all checkpointing."""
        footprint, modes = self._footprint(patch)
        for device in (self.device, *self._other_precision()):
            for micro_batch in self._micro_batches():
                row = self._row(footprint, patch, Rung(micro_batch=micro_batch), device)
                yield row
                if not row.fits:
                    break
            for mode in modes[1:]:
                yield self._row(footprint, patch, Rung(micro_batch=1, checkpointing=mode), device)

    def first_fitting(self, patch: Size) -> Iterator[PlanRow]:
        """Yield ever more checkpointing until it fits; nothing for a patch the network cannot take."""
        try:
            footprint, modes = self._footprint(patch)
        except ConfigError:
            return
        for mode in modes:
            rung = Rung(micro_batch=1, checkpointing=mode)
            row = self._row(footprint, patch, rung, self.device)
            yield row
            if row.fits:
                break

    def _footprint(self, patch: Size) -> tuple[Footprint, Sequence[Checkpointing]]:
        device = self.device.torch_device
        network = build_network(self.config, patch).to(device)
        check_in_place(network)
        modes = [mode for mode in Checkpointing if set_checkpointing(network, mode)]
        criterion = task_of(self.config).criterion
        return Footprint(network, criterion, self.config, device), modes

    def _row(self, footprint: Footprint, patch: Size, rung: Rung, device: Device) -> PlanRow:
        counted = footprint.counted_bytes(patch, rung, device)
        predicted = predicted_bytes(counted, device.torch_device)
        return PlanRow(
            patch=patch,
            micro_batch=rung.micro_batch,
            precision=device.precision,
            checkpointing=rung.checkpointing.value,
            predicted_mib=predicted // MEGABYTE,
            fits=predicted <= self.memory_bytes,
        )

    def _micro_batches(self) -> list[int]:
        """Return 1, 2, 4 ... up to the effective batch."""
        largest = self.config.training.effective_batch_at(0)
        return [2**k for k in range(largest.bit_length())]

    def _other_precision(self) -> tuple[Device, ...]:
        half = native_dtype(self.device.torch_device)
        other = half if self.device.autocast_dtype is None else None
        if other is self.device.autocast_dtype:
            return ()
        return (replace(self.device, autocast_dtype=other),)


def _suggesting(rows: Iterable[PlanRow], candidates: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    best = candidates[0] if candidates else None
    return tuple(replace(row, suggested=row is best) for row in rows)


def _tried(row: PlanRow, plan: Plan, config: Config) -> PlanRow:
    changes = {"micro_batch": row.micro_batch, "precision": row.precision}
    training = config.training.model_copy(update=changes)
    changed = config.model_copy(update={"training": training})
    try:
        measured = measured_bytes(changed, row.patch, Checkpointing(row.checkpointing))
    except EnvironmentalError:
        return replace(row, fits=False)
    if measured is None:
        return row
    measured_mib = measured // MEGABYTE
    return replace(row, measured_mib=measured_mib, fits=measured_mib <= plan.memory_mib)
