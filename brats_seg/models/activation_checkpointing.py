"""What becomes of activations between forward and backward: kept, computed again, or moved.

Each mode takes more time and less memory than the one before; gradients and state dict stay. A
network has part in it that holds a `ActivationCheckpointing` in its attribute `checkpointing` and goes through
its levels, the finest of which is 0, by `run_level`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


class ActivationCheckpointing(Enum):
    """The modes, in the order in which they are tried."""

    NONE = "none"
    """All activations stay where they were computed."""
    TOP = "top"
    """The finest level, which holds most of them, computes its own again in the backward pass."""
    ALL = "all"
    """Every level does; what stays is what goes into each."""
    HOST = "host"
    """That too waits in the memory of the host."""


@runtime_checkable
class HasLevels(Protocol):
    """A network whose levels know the modes."""

    checkpointing: ActivationCheckpointing


def set_activation_checkpointing(network: nn.Module, mode: ActivationCheckpointing) -> bool:
    """Take a mode, and tell whether the network and its device have it; if not, nothing changes.

    A network without levels has the first mode only, and one on the CPU not the last.
    """
    if not isinstance(network, HasLevels):
        return mode is ActivationCheckpointing.NONE
    on_host = all(parameter.device.type == "cpu" for parameter in network.parameters())
    if mode is ActivationCheckpointing.HOST and on_host:
        return False
    network.checkpointing = mode
    return True


def run_level(
    mode: ActivationCheckpointing, level: int, function: Callable[..., Tensor], *features: Tensor
) -> Tensor:
    """Return `function(*features)` for a part of a level, as the mode has it.

    Random layers draw the same numbers when a part is computed again.
    """
    if mode is ActivationCheckpointing.NONE or (mode is ActivationCheckpointing.TOP and level > 0):
        return function(*features)
    with save_on_cpu(pin_memory=True) if mode is ActivationCheckpointing.HOST else nullcontext():
        recomputed: Tensor = checkpoint(function, *features, use_reentrant=False)
    return recomputed
