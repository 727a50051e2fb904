"""Activation checkpointing: keep, recompute or offload the activations of a network.

Each mode takes more time and less memory than the one before; gradients and state dict do not
change. A network supports the modes if its attribute `checkpointing` holds an
`ActivationCheckpointing` and it calls its levels, the finest of which is 0, through `run_level`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


class ActivationCheckpointing(Enum):
    """The modes, in the order in which they are tried when memory runs out."""

    NONE = "none"
    """All activations are kept on the device."""
    TOP = "top"
    """The finest level, which has most activations, recomputes them in the backward pass."""
    ALL = "all"
    """Every level recomputes its activations; only the input of each level is kept."""
    HOST = "host"
    """As `ALL`, with the inputs kept on the host."""


@runtime_checkable
class HasLevels(Protocol):
    """A network that supports the modes."""

    checkpointing: ActivationCheckpointing


def set_activation_checkpointing(network: nn.Module, mode: ActivationCheckpointing) -> bool:
    """Set the mode of a network if it supports it, and return whether it does.

    A network without levels supports `NONE` only, and a network on the CPU all modes but `HOST`.
    """
    if not isinstance(network, HasLevels):
        return mode is ActivationCheckpointing.NONE
    on_host = all(parameter.device.type == "cpu" for parameter in network.parameters())
    if mode is ActivationCheckpointing.HOST and on_host:
        return False
    network.checkpointing = mode
    return True


def supported_checkpointing(network: nn.Module) -> list[ActivationCheckpointing]:
    """Return the modes that a network supports, the first of them `NONE`, which is set."""
    modes = [
        mode for mode in ActivationCheckpointing if set_activation_checkpointing(network, mode)
    ]
    set_activation_checkpointing(network, ActivationCheckpointing.NONE)
    return modes


def run_level(
    mode: ActivationCheckpointing, level: int, function: Callable[..., Tensor], *features: Tensor
) -> Tensor:
    """Return `function(*features)` for a part of a level, checkpointed if the mode says so.

    Random layers draw the same numbers when a part is recomputed.
    """
    if mode is ActivationCheckpointing.NONE or (mode is ActivationCheckpointing.TOP and level > 0):
        return function(*features)
    with save_on_cpu(pin_memory=True) if mode is ActivationCheckpointing.HOST else nullcontext():
        recomputed: Tensor = checkpoint(function, *features, use_reentrant=False)
    return recomputed
