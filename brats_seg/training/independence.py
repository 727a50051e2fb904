"""Check that a network gives a patch the same output however its batch is cut.

Only then does a step over micro-batches equal that of the whole batch. Layers that mix patches (batch
norm), that change in every pass (a counter, the power iteration of spectral norm), or that draw random
numbers which torch does not restore, break it. There is no list of them: the network is run on two
patches and its outputs are compared, see `_Probe`. The module also holds what two passes over the same
patches need: `PassState`, and the comparison of their values.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from brats_seg.errors import BratsError, ConfigError
from brats_seg.models.interface import tensors_of
from brats_seg.runtime.device import Device, generators_of, widest_dtype
from brats_seg.runtime.memory import is_out_of_memory

log = logging.getLogger(__name__)

REPLAY_TOLERANCE = 1e3
"""Largest difference between two passes over the same patches, in units of the type's precision."""
LARGEST_TOLERANCE = 0.05
"""Largest difference relative to the values, for types of little precision."""
ALONE_TOLERANCE = 0.1
"""Largest difference between a patch alone and in a batch, relative to the values.

Kernels for one patch differ from those for two by 1e-5 in float32 and 1e-2 in half precision; a
layer that counts the patches of the batch changes the output by half.
"""
BUFFER_TOLERANCE = 16
"""Largest difference between buffers, in units of the type's precision."""

DISTURBANCE = 0.3
"""Change of the weights while a network is probed, relative to their root mean square."""
SIZE_FOR_ZEROS = 0.1
"""Root mean square that parameters of zeros are given."""

Summary: TypeAlias = list[tuple[float, float]]
"""Scaled weighted sum and norm of each tensor."""
Call: TypeAlias = tuple[str, Summary, Summary]
"""Name of a layer, its inputs and its outputs, as far as they concern the first patch."""


class ReplayError(BratsError):
    """A network returned another output for the same micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassState:
    """What a forward pass changes: the state of torch's generators, and the buffers of modules."""

    generators: tuple[tuple[torch.Generator, Tensor], ...]
    modules: tuple[nn.Module, ...]
    buffers: tuple[Tensor, ...]
    """Copies of the buffers of the modules."""

    @classmethod
    def capture(cls, device: torch.device, *modules: nn.Module) -> Self:
        """Copy the state of the generators of CPU and GPU, and the buffers of modules."""
        return cls(
            generators=tuple((one, one.get_state()) for one in generators_of(device)),
            modules=modules,
            buffers=tuple(b.detach().clone() for module in modules for b in module.buffers()),
        )

    def restore(self) -> None:
        """Set generators and buffers to this state."""
        self.restore_generators()
        buffers = (buffer for module in self.modules for buffer in module.buffers())
        for buffer, copy in zip(buffers, self.buffers, strict=True):
            buffer.copy_(copy)

    def restore_generators(self) -> None:
        """Set the generators to this state."""
        for generator, state in self.generators:
            generator.set_state(state)

    @property
    def is_random_state_current(self) -> bool:
        """Whether nothing has been drawn since."""
        return all(torch.equal(g.get_state(), state) for g, state in self.generators)


def check_replay(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Raise `ReplayError` unless both passes over a micro-batch gave the same values.

    Kernels that add in no fixed order (some of cuDNN) differ in the last digits between passes, so
    values may differ by `REPLAY_TOLERANCE`; another dropout mask makes them differ by far more.
    """
    for before, after in zip(first, second, strict=True):
        error, scale = _difference(before, after)
        if not error <= _tolerance(before.dtype) * max(scale, 1.0):
            msg = f"the network returned another output for the same micro-batch (differences up to {error:.3g}): draw from torch's default generators alone, and keep no state between passes"
            raise ReplayError(msg)


class PatchIndependence:
    """Probes a network once, and again when its layers change between training and evaluation."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._probed: set[tuple[bool, ...]] = set()

    def check(self, image: Tensor, device: Device) -> None:
        """Raise `ConfigError` unless the output for a patch is the same however its batch is cut.

        Weights, buffers and random state of the network are as before afterwards.
        """
        modes = tuple(module.training for module in self._network.modules())
        if modes in self._probed:
            return
        before = PassState.capture(device.torch_device, self._network)
        try:
            with torch.no_grad(), device.autocast(), _disturb(self._network):
                for patch in parts_to_probe(image):
                    if _Probe(network=self._network, patch=patch, before=before).check():
                        break
                    before.restore()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("memory ran out before it was clear that no layer mixes patches")
        finally:
            before.restore()
        self._probed.add(modes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """Runs a network on a patch alone, beside itself and beside another.

    - The same patch beside itself and beside another must have the same output. Both runs have the
      same shapes and draw the same random numbers, so no difference is due to rounding or dropout.
    - The second run begins with the buffers that the first one left, so a layer that changes in every
      pass is found by it too.
    - Without random layers, the patch alone must have nearly the same output; kernels for one patch
      and for two differ in rounding.
    - Buffers must be the same after one pass of two patches and two passes of one.
    """

    network: nn.Module
    patch: Tensor
    """`(1, C, X, Y, Z)`"""
    before: PassState
    """The random state that every run begins with, and the buffers before the first."""

    @property
    def other(self) -> Tensor:
        """Another patch: larger, so that it is the largest of both, and not alike in any scaling."""
        flipped = self.patch.flip(tuple(range(2, self.patch.ndim)))
        return 2 * (flipped + 1 + _pattern_like(self.patch)).abs()

    def check(self) -> bool:
        """Raise `ConfigError` if patches are mixed; return whether the network takes two of this size."""
        try:
            beside_itself = self._outputs(self.patch)
        except (RuntimeError, ValueError, AssertionError) as error:
            if is_out_of_memory(error):
                raise
            return False
        draws_nothing = self.before.is_random_state_current
        buffers = [buffer.clone() for buffer in self.network.buffers()]
        beside_another = self._outputs(self.other)
        is_mixed = not all(map(_are_same, beside_itself, beside_another))
        # batch norm takes no single patch where its features have one voxel
        alone = self._outputs() if draws_nothing and not is_mixed else []
        # a tensor without a row for each patch is as long alone as beside another
        pairs = [(b, a) for b, a in zip(beside_itself, alone, strict=False) if b.shape == a.shape]
        if is_mixed or not all(_are_same(b, a, ALONE_TOLERANCE) for b, a in pairs):
            raise ConfigError(self._refusal())
        if not all(map(torch.equal, buffers, self.before.buffers)):
            self._check_buffers(buffers)
        return True

    def _outputs(self, *neighbours: Tensor) -> list[Tensor]:
        """Return the tensors of the output for the patch, without those that are for all patches."""
        self.before.restore_generators()
        output = self.network(torch.cat([self.patch, *neighbours]))
        n_patches = 1 + len(neighbours)
        tensors = (tensor for tensor in tensors_of(output) if tensor.ndim)
        return [tensor[: len(tensor) // n_patches].clone() for tensor in tensors]

    def _check_buffers(self, expected: Sequence[Tensor]) -> None:
        self.before.restore()
        for _ in range(2):
            self._outputs()
        for (name, buffer), after in zip(self.network.named_buffers(), expected, strict=True):
            if not _are_same(after, buffer, _precision(after.dtype) * BUFFER_TOLERANCE):
                layer, _, buffer_name = name.rpartition(".")
                problem = f"changes its buffer {buffer_name!r} otherwise in two passes than in one"
                raise ConfigError(_message(self.network, layer, problem))

    def _refusal(self) -> str:
        """Return what the first layer does that has another output for the same input in some run."""
        self.before.restore()
        tolerance = _tolerance(self.patch.dtype)
        first = self._calls(self.patch)
        layer = _first_different(first, self._calls(self.patch), tolerance)
        problem = "gives the same patch another output in another pass: it counts, or draws not from torch"
        if layer is None:
            layer = _first_different(first, self._calls(self.other), tolerance)
            problem = "gives a patch another output beside another patch: it mixes them"
        if layer is None:
            layer = _first_different(first, self._calls(), ALONE_TOLERANCE)
            problem = "gives a patch another output beside another patch than alone"
        return _message(self.network, layer or "", problem)

    def _calls(self, *neighbours: Tensor) -> list[Call]:
        """Return the calls of all layers in the order in which they end."""
        calls: list[Call] = []
        n_patches = 1 + len(neighbours)

        def note(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = _summary((args, kwargs), n_patches)
            calls.append((name, inputs, _summary(output, n_patches)))

        with ExitStack() as hooks:
            for name, module in self.network.named_modules():
                hook = partial(note, name)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            self._outputs(*neighbours)
        return calls


def parts_to_probe(image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centre of the first patch, half as long along each axis, and the whole patch.

    The centre takes an eighth of the time and memory. Where a network takes no two patches of either
    size, it takes one patch at a time, and mixes none.
    """
    halves = (slice(length // 4, length // 4 + (length + 1) // 2) for length in image.shape[2:])
    return image[:1, :, *halves], image[:1]


def _summary(value: object, n_patches: int) -> Summary:
    """Return numbers that differ if the values for the first patch do.

    Inside a network an axis other than the first may count patches, and then the layer that is
    named in a message is another; whether there is one is decided by the output alone.
    """
    summary = []
    for tensor in tensors_of(value):
        values = tensor.detach().to(widest_dtype(tensor.device))
        if values.ndim and len(values) % n_patches == 0:
            values = values[: len(values) // n_patches]
        norm = float(torch.linalg.vector_norm(values))
        weighted = float((values * _pattern_like(values)).sum())
        summary.append((weighted / max(values.numel(), 1) ** 0.5, norm))
    return summary


def _first_different(one: Sequence[Call], other: Sequence[Call], tolerance: float) -> str | None:
    """Return the first layer to end with other outputs for the same inputs."""

    def are_same(before: Summary, after: Summary) -> bool:
        return all(
            abs(x - y) <= tolerance * max(a[1], b[1])
            for a, b in zip(before, after, strict=True)
            for x, y in zip(a, b, strict=True)
        )

    for (name, *before), (_, *after) in zip(one, other, strict=False):
        if are_same(before[0], after[0]) and not are_same(before[1], after[1]):
            return name
    return None


def _message(network: nn.Module, layer: str, problem: str) -> str:
    kind = type(network.get_submodule(layer)).__name__
    name = f"the layer {layer!r} ({kind})" if layer else f"the network ({kind})"
    return (
        f"{name} {problem}. Micro-batches cannot equal the whole batch with it: use instance or group "
        "norm, freeze it in evaluation mode, or set training.micro_batch to the effective batch."
    )


@contextmanager
def _disturb(network: nn.Module) -> Iterator[None]:
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
    """Return values between -1 and 1 that differ from voxel to voxel, the same in every call."""
    indices = torch.arange(tensor.numel(), device=tensor.device, dtype=widest_dtype(tensor.device))
    return torch.cos(indices).to(tensor.dtype).view_as(tensor)


def _are_same(before: Tensor, after: Tensor, tolerance: float | None = None) -> bool:
    error, scale = _difference(before, after)
    return error <= (_tolerance(before.dtype) if tolerance is None else tolerance) * scale


def _difference(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the largest difference, and the largest value; what was not finite does not count."""
    if before.shape != after.shape or not before.is_floating_point():
        return (0.0 if torch.equal(before, after) else inf), 1.0
    if not before.numel():
        return 0.0, 0.0
    # a value that is not finite makes the whole step be skipped, with a warning of its own
    both = torch.stack([before - after, before]).detach().abs().where(before.isfinite(), 0)
    # in one read, because each makes the host wait for the GPU
    error, scale = both.reshape(2, -1).amax(1).tolist()
    return error, scale


def _tolerance(dtype: torch.dtype) -> float:
    return min(REPLAY_TOLERANCE * _precision(dtype), LARGEST_TOLERANCE)


def _precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
