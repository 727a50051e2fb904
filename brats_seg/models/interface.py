"""Define the output of networks, and keep, recompute or offload their activations.

The package's own networks return a `TrainingOutput` in training mode. Those of other people also
return tuples, dictionaries or dataclasses of tensors: a loss of their own gets these as they are,
and whatever needs logits takes them by `as_output`.

A network supports activation checkpointing if its attribute `checkpointing` holds an
`ActivationCheckpointing` and it calls its levels, the finest of which is 0, through `run_level`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from brats_seg.errors import ConfigError
from brats_seg.labels import MODALITIES

LOGITS_KEYS = ("logits", "out")
"""Keys of the logits in an output that is a dictionary; torchvision's networks have `out`."""


class ActivationCheckpointing(Enum):
    """The modes, in the order in which they are tried when memory runs out.

    Each takes more time and less memory than the one before; gradients and state dict do not change.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOutput:
    """Output of a network in training mode; in evaluation mode networks return a plain tensor."""

    logits: tuple[Tensor, ...]
    """Logits `(N, R, X, Y, Z)` of the finest level, then those of coarser levels."""


def set_activation_checkpointing(network: nn.Module, mode: ActivationCheckpointing) -> None:
    """Set the mode of a network to one of those that it supports."""
    if isinstance(network, HasLevels):
        network.checkpointing = mode


def supported_checkpointing(network: nn.Module) -> list[ActivationCheckpointing]:
    """Return the modes that a network supports, in their order.

    A network without levels supports `NONE` only, and a network on the CPU all modes but `HOST`.
    """
    if not isinstance(network, HasLevels):
        return [ActivationCheckpointing.NONE]
    on_host = all(parameter.device.type == "cpu" for parameter in network.parameters())
    unsupported = [ActivationCheckpointing.HOST] if on_host else []
    return [mode for mode in ActivationCheckpointing if mode not in unsupported]


def check_window(network: nn.Module, window: Sequence[int], n_out: int) -> None:
    """Raise `ValueError` unless a network returns logits of a window; no memory is taken for them."""
    image = torch.empty(1, len(MODALITIES), *window, device="meta")
    logits = deepcopy(network).to("meta")(image)
    if logits.shape != (1, n_out, *window):
        msg = f"the network turns {tuple(image.shape)} into {tuple(logits.shape)}"
        raise ValueError(msg)


def run_level(
    mode: ActivationCheckpointing, level: int, function: Callable[..., Tensor], *features: Tensor
) -> Tensor:
    """Return `function(*features)` for a part of a level, checkpointed if the mode says so.

    Random layers draw the same numbers when a part is recomputed.
    """
    if mode is ActivationCheckpointing.NONE or (mode is ActivationCheckpointing.TOP and level > 0):
        return function(*features)
    with save_on_cpu(pin_memory=True) if mode is ActivationCheckpointing.HOST else nullcontext():
        return checkpoint(function, *features, use_reentrant=False)


def as_output(value: object) -> TrainingOutput:
    """Return the output of any network as a `TrainingOutput`.

    A plain tensor is its logits. Of a tuple or list the first entry is taken, of a dictionary the
    one under `LOGITS_KEYS`; only a `TrainingOutput` has coarser levels.

    Raises:
        ConfigError: There are no logits in it.
    """
    match value:
        case TrainingOutput():
            return value
        case Tensor():
            return TrainingOutput(logits=(value,))
        case [first, *_]:
            return as_output(first)
        case Mapping() if key := next((key for key in LOGITS_KEYS if key in value), None):
            return as_output(value[key])
    kind = f"a dictionary of {list(value)}" if isinstance(value, Mapping) else type(value).__name__
    msg = f"the network returned {kind}; expected logits as a tensor, first in a tuple or list, or under a key {LOGITS_KEYS}"
    raise ConfigError(msg)


def logits_of(value: object, image: Tensor, n_out: int, name: str) -> Tensor:
    """Return the logits `(N, n_out, X, Y, Z)` in the output of a network for an image `(N, C, X, Y, Z)`.

    Raises:
        ConfigError: There are none, or none of that shape.
    """
    logits, expected = as_output(value).logits[0], (len(image), n_out, *image.shape[2:])
    if logits.shape != expected:
        problem = f"{name} returned {tuple(logits.shape)} for an image of {tuple(image.shape)}"
        msg = f"{problem}; expected logits of {expected}"
        raise ConfigError(msg)
    return logits


def tensors_of(value: object) -> tuple[Tensor, ...]:
    """Return every tensor of an output, however it is nested."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _map_tensors(value, note)
    return tuple(tensors)


def structure_of(value: object) -> Any:
    """Return an output with empty tensors in place of its own, which takes no memory to keep."""
    return _map_tensors(value, lambda tensor: torch.empty(0))


def output_from(structure: object, tensors: Sequence[Tensor]) -> Any:
    """Return an output of that structure with those tensors, in the order of `tensors_of`."""
    rest: Iterator[Tensor] = iter(tensors)
    return _map_tensors(structure, lambda _: next(rest))


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with `change` applied to each tensor of it; other values stay."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        entries = ((entry.name, getattr(value, entry.name)) for entry in fields(value))
        return replace(value, **{name: _map_tensors(entry, change) for name, entry in entries})
    if isinstance(value, dict):
        changed = copy(value)
        changed.update({key: _map_tensors(entry, change) for key, entry in value.items()})
        return changed
    if isinstance(value, tuple | list):
        parts = [_map_tensors(entry, change) for entry in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts) if named else type(value)(parts)
    return value
