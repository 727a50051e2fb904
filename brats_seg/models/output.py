"""Define what networks return, which networks, losses and the exact step share.

The package's own networks return a `TrainingOutput` in training mode. Those of other people also
return tuples, dictionaries or dataclasses of tensors: a loss of their own gets these as they are,
and whatever needs logits takes them by `as_output`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from brats_seg.errors import ConfigError

LOGITS_KEYS = ("logits", "out")
"""Keys of the logits in an output that is a dictionary; torchvision's networks have `out`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOutput:
    """Output of a network in training mode; in evaluation mode networks return a plain tensor."""

    logits: tuple[Tensor, ...]
    """Logits `(N, R, X, Y, Z)` of the finest level, then those of coarser levels."""
    penalty: Tensor | None = None
    """`(N,)`, added to the loss of each patch; None where the network has none."""


def as_output(value: object) -> TrainingOutput:
    """Return the output of any network as a `TrainingOutput`.

    A plain tensor is its logits. Of a tuple or list the first entry is taken, of a dictionary the
    one under `LOGITS_KEYS`; only a `TrainingOutput` has coarser levels and a penalty.

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
    found = f"a dictionary of {list(value)}" if isinstance(value, Mapping) else type(value).__name__
    msg = (
        f"the network returned {found}; expected logits as a tensor, as the first entry of a tuple "
        f"or list, or under one of the keys {LOGITS_KEYS} of a dictionary"
    )
    raise ConfigError(msg)


def tensors_of(value: object) -> tuple[Tensor, ...]:
    """Return every tensor of an output, however it is nested."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, note)
    return tuple(found)


def structure_of(value: object) -> Any:
    """Return an output with empty tensors in place of its own, which takes no memory to keep."""
    return _mapped(value, lambda tensor: torch.empty(0))


def output_from(structure: object, tensors: Sequence[Tensor]) -> Any:
    """Return an output of that structure with those tensors, in the order of `tensors_of`."""
    rest: Iterator[Tensor] = iter(tensors)
    return _mapped(structure, lambda _: next(rest))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with `change` applied to each tensor of it; other values stay."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        entries = ((entry.name, getattr(value, entry.name)) for entry in fields(value))
        return replace(value, **{name: _mapped(entry, change) for name, entry in entries})
    if isinstance(value, dict):
        changed = copy(value)
        changed.update({key: _mapped(entry, change) for key, entry in value.items()})
        return changed
    if isinstance(value, tuple | list):
        parts = [_mapped(entry, change) for entry in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts) if named else type(value)(parts)
    return value
