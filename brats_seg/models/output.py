"""Define the output of a network in training mode, which networks and losses share."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOutput:
    """Output of a network in training mode; in evaluation mode networks return a plain tensor."""

    logits: tuple[Tensor, ...]
    """Logits `(N, R, X, Y, Z)` of the finest level, then those of coarser levels."""
    penalty: Tensor | None = None
    """`(N,)`, added to the loss of each patch; None where the network has none."""


def as_output(value: Tensor | TrainingOutput) -> TrainingOutput:
    """Return the output of any network as a `TrainingOutput`; a plain tensor is its logits."""
    if isinstance(value, TrainingOutput):
        return value
    return TrainingOutput(logits=(value,))


def tensors_of(value: Tensor | TrainingOutput) -> tuple[Tensor, ...]:
    """Return every tensor of an output, the first axis of each counting patches."""
    output = as_output(value)
    return output.logits if output.penalty is None else (*output.logits, output.penalty)


def output_from(tensors: tuple[Tensor, ...]) -> Tensor | TrainingOutput:
    """Return the output that `tensors_of` took apart; the penalty is the tensor with a single axis."""
    *logits, last = tensors
    if last.ndim == 1 and logits:
        return TrainingOutput(logits=tuple(logits), penalty=last)
    return TrainingOutput(logits=tensors) if logits else last
