"""Recover when memory runs out: compute the same batch again in a mode that takes less.

A smaller micro-batch and activation checkpointing give the same gradient to rounding. Half
precision changes the arithmetic, and is used only if the settings allow it. The effective batch and
the patch are never changed.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

from brats_seg.config import TrainingConfig
from brats_seg.errors import EnvironmentalError
from brats_seg.models.interface import (
    ActivationCheckpointing,
    set_activation_checkpointing,
    supported_checkpointing,
)
from brats_seg.runtime.device import native_dtype
from brats_seg.runtime.memory import give_back_memory, is_out_of_memory, peak_memory_mb
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.epoch import Batch
from brats_seg.training.losses import Measure

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMode:
    """One way to compute a batch; modes differ in the memory that they take."""

    micro_batch: int
    """Patches in one forward pass."""
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    """Activations that are recomputed in the backward pass, or kept on the host."""
    in_half: bool = False
    """Whether half precision replaces float32."""

    def __str__(self) -> str:
        parts = [f"micro-batch {self.micro_batch}"]
        if self.checkpointing is not ActivationCheckpointing.NONE:
            parts.append(f"checkpointing {self.checkpointing.value}")
        return ", ".join([*parts, *(["half precision"] if self.in_half else [])])


class OutOfMemoryFallback:
    """Makes optimizer steps, in a mode that takes less memory from when memory runs out.

    `modes` begin with that of the settings, and end with the one that takes least.
    """

    def __init__(self, accumulator: Accumulator, config: TrainingConfig) -> None:
        self.accumulator = accumulator
        self.modes = _modes(accumulator, config)
        self.place = 0
        """Index of the mode in use."""

    @property
    def mode(self) -> MemoryMode:
        """The mode in use."""
        return self.modes[self.place]

    def move_to(self, mode: MemoryMode) -> None:
        """Compute in another mode from now on."""
        self.place = self.modes.index(mode)
        set_activation_checkpointing(self.accumulator.network, mode.checkpointing)
        if mode.in_half:
            device = self.accumulator.device
            half = native_dtype(device.torch_device)
            self.accumulator.compute_on(replace(device, autocast_dtype=half))

    def state_dict(self) -> dict[str, Any]:
        """Return the mode in use, in plain values."""
        mode = self.mode
        return {
            "micro_batch": mode.micro_batch,
            "checkpointing": mode.checkpointing.value,
            "in_half": mode.in_half,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume in the mode of a state, or in the first if this machine does not have it."""
        mode = MemoryMode(
            **{**state, "checkpointing": ActivationCheckpointing(state["checkpointing"])}
        )
        if mode in self.modes:
            self.move_to(mode)

    def step(self, batch: Batch, measure: Measure) -> StepResult:
        """Make one optimizer step; if memory runs out, repeat it in the next mode.

        Raises:
            EnvironmentalError: Memory ran out in the last mode.
        """
        while True:
            try:
                return self.accumulator.step(batch.micro_batches(self.mode.micro_batch), measure)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            self._use_next_mode(reason)

    def _use_next_mode(self, reason: str) -> None:
        device = self.accumulator.device.torch_device
        # the error and its graph are gone by now, so the memory that they held can be returned
        give_back_memory(device)
        if self.place + 1 == len(self.modes):
            tried = "; ".join(str(mode) for mode in self.modes)
            msg = (
                f"memory ran out in every mode ({tried}), at a peak of {peak_memory_mb(device):.0f} "
                f"MB: {reason}. Lower patch.size or model.widths"
            )
            raise EnvironmentalError(msg)
        log.warning("memory ran out with %s: %s", self.mode, reason)
        self.move_to(self.modes[self.place + 1])
        log.warning("computing the same batch again, and all later ones, with %s", self.mode)


def _modes(accumulator: Accumulator, config: TrainingConfig) -> tuple[MemoryMode, ...]:
    sizes = [config.micro_batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    modes = [MemoryMode(micro_batch=size) for size in sizes]
    kinds = supported_checkpointing(accumulator.network)
    modes += [MemoryMode(micro_batch=1, checkpointing=kind) for kind in kinds[1:]]
    device = accumulator.device
    if (
        config.half_if_needed
        and device.autocast_dtype is None
        and native_dtype(device.torch_device)
    ):
        modes.append(replace(modes[-1], in_half=True))
    return tuple(modes)
