"""What a run does when memory runs out: the same window again, one rung down.

No rung changes what is learnt: a smaller micro-batch and activations that are computed twice give
the same gradient to rounding. Half precision changes the arithmetic, and is a rung only if the
settings allow it. Effective batch and patch stay what they are.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from brats_seg.config import TrainingConfig
from brats_seg.data.loader import Sample
from brats_seg.errors import EnvironmentalError
from brats_seg.models.activation_checkpointing import (
    ActivationCheckpointing,
    set_activation_checkpointing,
)
from brats_seg.runtime.device import native_dtype
from brats_seg.runtime.memory import give_back_memory, is_out_of_memory, peak_memory_mb
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.epoch import MicroBatches
from brats_seg.training.losses import Measure

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMode:
    """One way to compute a window, by what it costs in memory."""

    micro_batch: int
    """Patches in one forward pass."""
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    """Which activations are computed twice, or kept outside the device."""
    in_half: bool = False
    """Whether half precision takes the place of float32."""

    def __str__(self) -> str:
        parts = [f"micro-batch {self.micro_batch}"]
        if self.checkpointing is not ActivationCheckpointing.NONE:
            parts.append(f"checkpointing {self.checkpointing.value}")
        return ", ".join([*parts, *(["half precision"] if self.in_half else [])])


class OutOfMemoryFallback:
    """The modes of a run, and where on them it stands."""

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
        """Compute on another rung from now on."""
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
        """Go on from the rung of a state, or from the first if this machine does not have it."""
        mode = MemoryMode(
            **{**state, "checkpointing": ActivationCheckpointing(state["checkpointing"])}
        )
        if mode in self.modes:
            self.move_to(mode)

    def step(self, samples: Sequence[Sample], measure: Measure) -> StepResult:
        """Make one optimizer step, on a lower rung if memory runs out on this one.

        Raises:
            EnvironmentalError: Memory ran out on the last mode.
        """
        while True:
            try:
                window = MicroBatches(samples, self.mode.micro_batch)
                return self.accumulator.step(window, measure)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            self._descend(reason)

    def _descend(self, reason: str) -> None:
        device = self.accumulator.device.torch_device
        # the error and the graph it ended in are gone by now: what they held can be given back
        give_back_memory(device)
        if self.place + 1 == len(self.modes):
            tried = "; ".join(str(mode) for mode in self.modes)
            msg = (
                f"memory ran out on every rung ({tried}), at a peak of {peak_memory_mb(device):.0f} "
                f"MB: {reason}. Lower patch.size or model.widths"
            )
            raise EnvironmentalError(msg)
        log.warning("memory ran out with %s: %s", self.mode, reason)
        self.move_to(self.modes[self.place + 1])
        log.warning("the same window again, and all that follow, with %s", self.mode)


def _modes(accumulator: Accumulator, config: TrainingConfig) -> tuple[MemoryMode, ...]:
    sizes = [config.micro_batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    modes = [MemoryMode(micro_batch=size) for size in sizes]
    network = accumulator.network
    kinds = [
        kind for kind in ActivationCheckpointing if set_activation_checkpointing(network, kind)
    ]
    set_activation_checkpointing(network, ActivationCheckpointing.NONE)
    modes += [MemoryMode(micro_batch=1, checkpointing=kind) for kind in kinds[1:]]
    device = accumulator.device
    if (
        config.half_if_needed
        and device.autocast_dtype is None
        and native_dtype(device.torch_device)
    ):
        modes.append(replace(modes[-1], in_half=True))
    return tuple(modes)
