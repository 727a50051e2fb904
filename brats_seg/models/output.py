"""What a network gives while it learns."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOutput:
    """The output of a network in training mode; in evaluation mode networks give a plain tensor."""

    logits: tuple[Tensor, ...]
    """Finest first: `(N, R, X, Y, Z)`, then the coarser levels that are taught as well."""
    penalty: Tensor | None = None
    """`(N,)`, added to the loss of each patch as it is; None where the network asks for nothing."""


def as_output(value: Tensor | TrainingOutput) -> TrainingOutput:
    """Take what any network returned: one that knows nothing of this package returns its logits."""
    if isinstance(value, TrainingOutput):
        return value
    return TrainingOutput(logits=(value,))


def tensors_of(value: Tensor | TrainingOutput) -> tuple[Tensor, ...]:
    """Return every tensor of an output, the first axis of each counting patches."""
    output = as_output(value)
    return output.logits if output.penalty is None else (*output.logits, output.penalty)


def output_from(tensors: tuple[Tensor, ...]) -> Tensor | TrainingOutput:
    """Put the tensors of `tensors_of` together again: the penalty is the one with a single axis."""
    *logits, last = tensors
    if last.ndim == 1 and logits:
        return TrainingOutput(logits=tuple(logits), penalty=last)
    return TrainingOutput(logits=tensors) if logits else last
