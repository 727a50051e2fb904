"""Running a micro-batch a second time exactly as the first: random state and buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from brats_seg.errors import BratsError


class ReplayError(BratsError):
    """A network gave another output for the same micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """The generators that random layers draw from."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> Self:
        """Note where the generators of the CPU and of a GPU stand."""
        on_gpu = device.type == "cuda"
        cuda = torch.cuda.get_rng_state(device) if on_gpu else None
        return cls(cpu=torch.get_rng_state(), cuda=cuda, device=device)

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def capture_buffers(network: nn.Module) -> tuple[Tensor, ...]:
    """Copy what a forward pass may change beside the gradients, such as running statistics."""
    return tuple(buffer.detach().clone() for buffer in network.buffers())


def restore_buffers(network: nn.Module, buffers: Sequence[Tensor]) -> None:
    """Put the copies back."""
    for buffer, copy in zip(network.buffers(), buffers, strict=True):
        buffer.copy_(copy)


def check_replay(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Raise `ReplayError` unless both passes over a micro-batch gave the same.

    Kernels that add in no fixed order (cuDNN's, say) differ in the last digits between passes, so
    equality is meant to `REPLAY_TOLERANCE` of the type's precision; a dropout mask that is drawn
    anew differs by far more.
    """
    for before, after in zip(first, second, strict=True):
        # a value that is not finite makes the step be left out, with a word of its own
        finite = before.isfinite()
        if not finite.any():
            continue
        epsilon = torch.finfo(before.dtype).eps
        error = float((before - after.detach())[finite].abs().max())
        scale = float(before[finite].abs().max())
        if not error <= REPLAY_TOLERANCE * epsilon * max(scale, 1.0):
            msg = (
                f"the network gave another output for the same micro-batch: they differ by "
                f"{error:.3g} where values reach {scale:.3g}. Expected random layers to draw from "
                "torch's default generators only, and no state that a forward pass changes. Give "
                "the layer torch's generator, or use a loss that is a mean over patches, which "
                "needs one pass."
            )
            raise ReplayError(msg)


REPLAY_TOLERANCE = 1e3
