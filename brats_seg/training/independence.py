"""Check that a network gives a patch the same output however its batch is cut.

Only then does a step over micro-batches equal that of the whole batch. Some layers break it: those
that mix patches (batch norm, a mean over the batch), those that change in every pass (a counter, the
power iteration of spectral norm), and those that draw random numbers which torch does not restore.
There is no list of such layers: the network is run on two patches, and its outputs are compared.

- The same patch beside itself and beside another must have the same output. Both runs have the same
  shapes and draw the same random numbers, so no difference is due to rounding or dropout.
- The second run begins with the buffers that the first one left, so a layer that changes in every
  pass is found by it too.
- Without random layers, the patch alone must have nearly the same output; kernels for one patch and
  for two differ in rounding.
- Buffers that a pass changes must be the same after one pass of two patches and two passes of one.

A layer of zeros hides those before it, and a power iteration that has converged changes nothing until
the next step, so meanwhile the weights are disturbed. Weights, buffers and random state of the
network are as before afterwards.

The module also holds what two passes over the same patches need: their random state and buffers, and
the comparison of their values.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from brats_seg.errors import BratsError, ConfigError
from brats_seg.models.interface import tensors_of
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import is_out_of_memory

log = logging.getLogger(__name__)

REPLAY_TOLERANCE = 1e3
"""Largest difference between two passes over the same patches, in units of the type's precision."""
LARGEST_TOLERANCE = 0.05
"""Largest difference relative to the values, for types of little precision."""
ALONE_TOLERANCE = 0.1
"""Largest difference between a patch alone and beside another, relative to the values.

Kernels for one patch differ from those for two by 1e-5 in float32 and 1e-2 in half precision; a
layer that counts the patches beside it changes the output by half.
"""
BUFFER_TOLERANCE = 16
"""Largest difference between buffers, in units of the type's precision."""

DISTURBANCE = 0.3
"""Change of the weights while a network is asked, relative to their root mean square."""
SIZE_FOR_ZEROS = 0.1
"""Root mean square that parameters of zeros are given."""

Summary: TypeAlias = list[tuple[float, float]]
"""Scaled weighted sum and norm of each tensor."""


class ReplayError(BratsError):
    """A network returned another output for the same micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """The state of the generators that random layers draw from."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device

    @classmethod
    def capture(cls, device: torch.device) -> Self:
        """Return the current state of torch's generators, on the CPU and on a GPU."""
        on_gpu = device.type == "cuda"
        cuda = torch.cuda.get_rng_state(device) if on_gpu else None
        return cls(cpu=torch.get_rng_state(), cuda=cuda, device=device)

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def is_current(self) -> bool:
        """Return whether the generators are in this state: nothing was drawn since."""
        now = self.capture(self.device)
        same_on_gpu = now.cuda is None or self.cuda is None or torch.equal(self.cuda, now.cuda)
        return torch.equal(self.cpu, now.cpu) and same_on_gpu


def capture_buffers(*modules: nn.Module) -> tuple[Tensor, ...]:
    """Copy the buffers of modules, such as running statistics."""
    return tuple(buffer.detach().clone() for module in modules for buffer in module.buffers())


def restore_buffers(buffers: Sequence[Tensor], *modules: nn.Module) -> None:
    """Set the buffers of modules to the copies."""
    places = (buffer for module in modules for buffer in module.buffers())
    for buffer, copy in zip(places, buffers, strict=True):
        buffer.copy_(copy)


def check_replay(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Raise `ReplayError` unless both passes over a micro-batch gave the same values.

    Kernels that add in no fixed order (some of cuDNN) differ in the last digits between passes, so
    values may differ by `REPLAY_TOLERANCE`; another dropout mask makes them differ by far more.
    """
    for before, after in zip(first, second, strict=True):
        error, scale = _difference(before, after)
        if not error <= _tolerance(before.dtype) * max(scale, 1.0):
            msg = (
                f"the network returned another output for the same micro-batch: they differ by "
                f"{error:.3g}, with values up to {scale:.3g}. Expected random layers to draw from "
                "torch's default generators only, and no state that changes in a forward pass. "
                "Give the layer torch's generator."
            )
            raise ReplayError(msg)


class PatchIndependence:
    """Asks a network once, and again when its layers change between training and evaluation."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._asked: set[tuple[bool, ...]] = set()

    def check(self, image: Tensor, device: Device) -> None:
        """Raise unless the network gives a patch the same output however its batch is cut."""
        modes = tuple(module.training for module in self._network.modules())
        if modes in self._asked:
            return
        before, buffers = RandomState.capture(device.torch_device), capture_buffers(self._network)
        question = _Question(network=self._network, patch=image[:1], random=before, buffers=buffers)
        try:
            with torch.no_grad(), device.autocast(), _disturbed(self._network):
                question.ask()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("memory ran out before it was clear that no layer mixes patches")
        finally:
            before.restore()
            restore_buffers(buffers, self._network)
        self._asked.add(modes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """Runs a network on a patch alone, beside itself and beside another."""

    network: nn.Module
    patch: Tensor
    """`(1, C, X, Y, Z)`"""
    random: RandomState
    """The random state that every run begins with."""
    buffers: tuple[Tensor, ...]
    """The buffers before the first run."""

    @property
    def other(self) -> Tensor:
        """Another patch: larger, so that it is the largest of both, and not alike in any scaling."""
        flipped = self.patch.flip(tuple(range(2, self.patch.ndim)))
        return 2 * (flipped + 1 + _pattern_like(self.patch)).abs()

    def ask(self) -> None:
        try:
            beside_itself = self._outputs(self.patch)
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return  # a network that takes one patch at a time mixes none
        draws_nothing = self.random.is_current()
        buffers = capture_buffers(self.network)
        beside_another = self._outputs(self.other)
        if not _same(beside_itself, beside_another):
            self._refuse()
        if draws_nothing:
            # a tensor without a row for each patch is as long alone as beside another
            pairs = zip(beside_itself, self._outputs(), strict=True)
            if not all(_same([b], [a], ALONE_TOLERANCE) for b, a in pairs if b.shape == a.shape):
                self._refuse()
        if not all(map(torch.equal, buffers, self.buffers)):
            self._check_buffers(buffers)

    def _outputs(self, *beside: Tensor) -> list[Tensor]:
        """Return the tensors of the output for the patch, without those that are for all patches."""
        self.random.restore()
        output = self.network(torch.cat([self.patch, *beside]))
        n_patches = 1 + len(beside)
        tensors = (tensor for tensor in tensors_of(output) if tensor.ndim)
        return [tensor[: len(tensor) // n_patches].clone() for tensor in tensors]

    def _check_buffers(self, expected: Sequence[Tensor]) -> None:
        restore_buffers(self.buffers, self.network)
        for _ in range(2):
            self._outputs()
        for (name, found), buffer in zip(self.network.named_buffers(), expected, strict=True):
            error, scale = _difference(buffer, found)
            if not error <= _precision(buffer.dtype) * BUFFER_TOLERANCE * scale:
                layer, _, own_name = name.rpartition(".")
                what = (
                    f"changes its buffer {own_name!r} in another way in two passes of one patch "
                    "than in one pass of both"
                )
                raise ConfigError(_message(self.network, layer, what))

    def _refuse(self) -> None:
        """Find the layer, and what it does, by comparing the calls of all layers."""
        restore_buffers(self.buffers, self.network)
        first, again = self._calls(self.patch), self._calls(self.patch)
        tolerance = _tolerance(self.patch.dtype)
        if (layer := _first_different(first, again, tolerance)) is not None:
            what = (
                "gives the same patch another output in another pass: it counts passes, or draws "
                "random numbers from elsewhere than torch's default generators"
            )
        elif (layer := _first_different(first, self._calls(self.other), tolerance)) is not None:
            what = "gives a patch another output beside another patch: it mixes them"
        else:
            layer = _first_different(first, self._calls(), ALONE_TOLERANCE)
            what = "gives a patch another output beside another patch than alone"
        raise ConfigError(_message(self.network, layer or "", what))

    def _calls(self, *beside: Tensor) -> list["_Call"]:
        with _recorded(self.network, n_patches=1 + len(beside)) as calls:
            self._outputs(*beside)
        return calls


@dataclass(kw_only=True, slots=True)
class _Call:
    """A call of a layer, as far as it concerns the first patch."""

    layer: str
    inputs: Summary
    outputs: Summary = field(default_factory=list)


@contextmanager
def _recorded(network: nn.Module, n_patches: int) -> Iterator[list[_Call]]:
    """Yield a list that the calls of all layers are added to as they end."""
    names = {module: name for name, module in network.named_modules()}
    running: list[_Call] = []
    ended: list[_Call] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(
            _Call(layer=names[module], inputs=_summary((args, kwargs), n_patches)),
        )

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = running.pop()
        call.outputs = _summary(output, n_patches)
        ended.append(call)

    with ExitStack() as hooks:
        for module in names:
            before = module.register_forward_pre_hook(begin, with_kwargs=True)
            after = module.register_forward_hook(end, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield ended


def _summary(value: object, n_patches: int) -> Summary:
    """Return numbers that differ if the values for the first patch do.

    Inside a network an axis other than the first may count patches, and then the layer that is
    named in a message is another; whether there is one is decided by the output alone.
    """
    found = []
    for tensor in tensors_of(value):
        values = tensor.detach().double()
        if values.ndim and len(values) % n_patches == 0:
            values = values[: len(values) // n_patches]
        norm = float(torch.linalg.vector_norm(values))
        weighted = float((values * _pattern_like(values)).sum())
        found.append((weighted / max(values.numel(), 1) ** 0.5, norm))
    return found


def _first_different(one: Sequence[_Call], other: Sequence[_Call], tolerance: float) -> str | None:
    """Return the first layer to end with other outputs for the same inputs."""

    def same(before: Summary, after: Summary) -> bool:
        pairs = zip(before, after, strict=True)
        return all(
            abs(x - y) <= tolerance * max(a[1], b[1])
            for a, b in pairs
            for x, y in zip(a, b, strict=True)
        )

    for before, after in zip(one, other, strict=False):
        if same(before.inputs, after.inputs) and not same(before.outputs, after.outputs):
            return before.layer
    return None


def _message(network: nn.Module, layer: str, what: str) -> str:
    kind = type(network.get_submodule(layer)).__name__
    name = f"the layer {layer!r} ({kind})" if layer else f"the network ({kind})"
    return (
        f"{name} {what}. So a batch that is cut into micro-batches cannot equal the whole batch: "
        "use another layer, such as instance or group norm, or freeze it in evaluation mode, or set "
        "training.micro_batch to the effective batch."
    )


@contextmanager
def _disturbed(network: nn.Module) -> Iterator[None]:
    """Change the parameters a little, so that none is all zero and no iteration is at its end."""
    parameters = [p for p in network.parameters() if p.is_floating_point()]
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter in parameters:
            scale = parameter.square().mean().sqrt()
            scale = torch.where(scale > 0, scale, SIZE_FOR_ZEROS)
            parameter.add_(DISTURBANCE * scale * _pattern_like(parameter))
        yield
    finally:
        for parameter, weights in zip(parameters, before, strict=True):
            parameter.copy_(weights)


def _pattern_like(tensor: Tensor) -> Tensor:
    """Return values between -1 and 1 that differ from place to place, the same in every call."""
    places = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64)
    return torch.cos(places).to(tensor.dtype).view_as(tensor)


def _same(
    first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float | None = None
) -> bool:
    for before, after in zip(first, second, strict=True):
        error, scale = _difference(before, after)
        if not error <= (tolerance or _tolerance(before.dtype)) * scale:
            return False
    return True


def _difference(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the largest difference, and the largest value; what was not finite does not count."""
    if before.shape != after.shape or not before.is_floating_point():
        return (0.0 if torch.equal(before, after) else inf), 1.0
    # a value that is not finite makes the whole step be skipped, with a warning of its own
    finite = before.isfinite()
    if not finite.any():
        return 0.0, 0.0
    error = (before.detach() - after.detach())[finite].abs().max()
    return float(error), float(before[finite].abs().max())


def _tolerance(dtype: torch.dtype) -> float:
    return min(REPLAY_TOLERANCE * _precision(dtype), LARGEST_TOLERANCE)


def _precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
