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
from brats_seg.data.dataset import Sample
from brats_seg.errors import EnvironmentalError
from brats_seg.models.device import native_dtype
from brats_seg.models.memory import give_back_memory, is_out_of_memory, peak_memory_mb
from brats_seg.models.rungs import Checkpointing, set_checkpointing
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.criterion import Measure
from brats_seg.training.epoch import MicroBatches

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to compute a window, by what it costs in memory."""

    micro_batch: int
    """Patches in one forward pass."""
    checkpointing: Checkpointing = Checkpointing.NONE
    """Which activations are computed twice, or kept outside the device."""
    in_half: bool = False
    """Whether half precision takes the place of float32."""

    def __str__(self) -> str:
        parts = [f"micro-batch {self.micro_batch}"]
        if self.checkpointing is not Checkpointing.NONE:
            parts.append(f"checkpointing {self.checkpointing.value}")
        return ", ".join([*parts, *(["half precision"] if self.in_half else [])])


class Ladder:
    """The rungs of a run, and where on them it stands."""

    def __init__(self, accumulator: Accumulator, config: TrainingConfig) -> None:
        self.accumulator = accumulator
        self.rungs = _rungs(accumulator, config)
        self.place = 0
        """Index of the rung in use."""

    @property
    def rung(self) -> Rung:
        """The rung in use."""
        return self.rungs[self.place]

    def move_to(self, rung: Rung) -> None:
        """Compute on another rung from now on."""
        self.place = self.rungs.index(rung)
        set_checkpointing(self.accumulator.network, rung.checkpointing)
        if rung.in_half:
            device = self.accumulator.device
            half = native_dtype(device.torch_device)
            self.accumulator.compute_on(replace(device, autocast_dtype=half))

    def state_dict(self) -> dict[str, Any]:
        """Return the rung in use, in plain values."""
        rung = self.rung
        return {
            "micro_batch": rung.micro_batch,
            "checkpointing": rung.checkpointing.value,
            "in_half": rung.in_half,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the rung of a state, or from the first if this machine does not have it."""
        rung = Rung(**{**state, "checkpointing": Checkpointing(state["checkpointing"])})
        if rung in self.rungs:
            self.move_to(rung)

    def step(self, samples: Sequence[Sample], measure: Measure) -> StepResult:
        """Make one optimizer step, on a lower rung if memory runs out on this one.

        Raises:
            EnvironmentalError: Memory ran out on the last rung.
        """
        while True:
            try:
                window = MicroBatches(samples, self.rung.micro_batch)
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
        if self.place + 1 == len(self.rungs):
            tried = "; ".join(str(rung) for rung in self.rungs)
            msg = (
                f"memory ran out on every rung ({tried}), at a peak of {peak_memory_mb(device):.0f} "
                f"MB: {reason}. Lower patch.size or model.widths"
            )
            raise EnvironmentalError(msg)
        log.warning("memory ran out with %s: %s", self.rung, reason)
        self.move_to(self.rungs[self.place + 1])
        log.warning("the same window again, and all that follow, with %s", self.rung)


def _rungs(accumulator: Accumulator, config: TrainingConfig) -> tuple[Rung, ...]:
    sizes = [config.micro_batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    rungs = [Rung(micro_batch=size) for size in sizes]
    network = accumulator.network
    modes = [mode for mode in Checkpointing if set_checkpointing(network, mode)]
    set_checkpointing(network, Checkpointing.NONE)
    rungs += [Rung(micro_batch=1, checkpointing=mode) for mode in modes[1:]]
    device = accumulator.device
    if (
        config.half_if_needed
        and device.autocast_dtype is None
        and native_dtype(device.torch_device)
    ):
        rungs.append(replace(rungs[-1], in_half=True))
    return tuple(rungs)
