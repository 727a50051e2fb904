"""What to do when memory runs out: less of it, step by step, and slower.

Windows are taken one at a time from the start. The first step down keeps the sum of the windows in
the memory of the host, the next ones take smaller windows, and the last computes on the CPU. A
ladder serves one case: the next one starts at the top again.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from brats_seg.errors import CaseError
from brats_seg.models.device import Device, choose_device
from brats_seg.models.memory import is_out_of_memory

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to compute a case."""

    device: Device
    stitch_on_host: bool = False
    """Whether the sum of the windows is kept in the memory of the host."""
    n_halvings: int = 0
    """How often the axes of the window are halved."""

    def __str__(self) -> str:
        parts = [f"on {self.device.torch_device}"]
        if self.stitch_on_host and self.device.torch_device.type != "cpu":
            parts.append("with the sum of the windows on the host")
        if self.n_halvings:
            parts.append(f"with windows of 1/{2**self.n_halvings} along each axis")
        return " ".join(parts)


class Ladder:
    """Computes the parts of one case, lower down each time that memory runs out."""

    def __init__(self, case_id: str, device: Device) -> None:
        self._case_id = case_id
        self._rungs = _rungs(device)
        self._place = 0

    @property
    def rung(self) -> Rung:
        """Where it stands."""
        return self._rungs[self._place]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What became of the case, for its record; empty at the top."""
        return (f"memory ran out: computed {self.rung}",) if self._place else ()

    def run(self, work: Callable[[Rung], Result]) -> Result:
        """Do the work, again on the next rung if memory ran out.

        Raises:
            CaseError: It ran out on the last rung too.
        """
        while True:
            try:
                return work(self.rung)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # outside of the handler, which would keep alive what the work had taken
            self._step_down(reason)

    def _step_down(self, reason: str) -> None:
        if self._place + 1 == len(self._rungs):
            expected = "room for windows of that size"
            next_step = "Close other programs, or give smaller windows with --window."
            raise CaseError(
                self._case_id, "(all)", f"no memory {self.rung} ({reason})", expected, next_step
            )
        self._place += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("case %s: memory ran out; going on %s", self._case_id, self.rung)


def _rungs(device: Device) -> tuple[Rung, ...]:
    if device.torch_device.type == "cpu":
        return tuple(Rung(device=device, stitch_on_host=True, n_halvings=n) for n in range(3))
    return (
        Rung(device=device),
        *(Rung(device=device, stitch_on_host=True, n_halvings=n) for n in range(3)),
        Rung(device=choose_device("cpu", "auto"), stitch_on_host=True, n_halvings=1),
    )
