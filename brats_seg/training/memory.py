"""Choose how a step is computed in little memory, and predict the memory that it needs.

A smaller micro-batch and activation checkpointing give the same gradient to rounding, so that a run
goes on with them when memory runs out. The effective batch, the patch and the precision never change.

The prediction computes a step of the real modules on fake tensors, which have shape, type and device,
and no memory. What allocators and kernels need beside the tensors is not visible that way.
`FakeTensorMode` is imported from a private module of torch because there is no public one.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brats_seg.config import Config, Size
from brats_seg.data.loader import Sample
from brats_seg.errors import ConfigError, EnvironmentalError
from brats_seg.labels import MODALITIES
from brats_seg.models.interface import (
    ActivationCheckpointing,
    set_activation_checkpointing,
    supported_checkpointing,
)
from brats_seg.models.norm import group_as_on_gpu
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import MEGABYTE, Fallback
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.batches import Batch
from brats_seg.training.losses import Criterion, Measure, whole_loss
from brats_seg.training.optimisation import build_optimizer
from brats_seg.training.tasks import task_of


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMode:
    """One way to compute a batch; modes differ in the memory that they need."""

    micro_batch: int
    """Patches in one forward pass."""
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE

    def __str__(self) -> str:
        if self.checkpointing is ActivationCheckpointing.NONE:
            return f"micro-batch {self.micro_batch}"
        return f"micro-batch {self.micro_batch}, checkpointing {self.checkpointing.value}"


def memory_modes(network: nn.Module, micro_batch: int) -> tuple[MemoryMode, ...]:
    """Return the modes of a network, from that of the settings to the one that needs least memory."""
    sizes = [micro_batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    modes = [MemoryMode(micro_batch=size) for size in sizes]
    kinds = supported_checkpointing(network)[1:]
    return (*modes, *(MemoryMode(micro_batch=1, checkpointing=kind) for kind in kinds))


def step_fallback(accumulator: Accumulator, micro_batch: int) -> Fallback[MemoryMode]:
    """Return the fallback of the steps of a run."""
    return Fallback(
        memory_modes(accumulator.network, micro_batch),
        accumulator.device.torch_device,
        lambda message: EnvironmentalError(f"{message}. Lower patch.size or model.widths"),
    )


def make_step(
    accumulator: Accumulator, fallback: Fallback[MemoryMode], batch: Batch, measure: Measure
) -> StepResult:
    """Make one optimizer step; if memory runs out, repeat it in the next mode."""

    def step(mode: MemoryMode) -> StepResult:
        set_activation_checkpointing(accumulator.network, mode.checkpointing)
        return accumulator.step(batch.micro_batches(mode.micro_batch), measure)

    return fallback.run(step)


def mode_entries(mode: MemoryMode) -> dict[str, Any]:
    """Return a mode in plain values."""
    return {"micro_batch": mode.micro_batch, "checkpointing": mode.checkpointing.value}


def resume_mode(fallback: Fallback[MemoryMode], entries: Mapping[str, Any]) -> None:
    """Go on in the mode of those entries, or in the first if this machine does not have it."""
    known = [mode_entries(mode) for mode in fallback.modes]
    fallback.index = known.index(dict(entries)) if entries in known else 0


# An allowance for what allocators and kernels need beside the tensors, and for code that is loaded or
# compiled when it is first used: peaks of processes under glibc with patches of 48^3 to 96^3 of the
# default U-Net. On GPUs it is for workspaces of cuDNN, and was not measured on every one; the context
# is not part of the peak that torch reports.
_SHARE_OF_CUDA, _SHARE_OF_HOST, _CODE_OF_HOST_MB = 0.10, 0.30, 160


def predicted_bytes(counted: int, device: torch.device) -> int:
    """Return the expected peak of a run whose tensors need that many bytes."""
    if device.type == "cuda":
        return int(counted * (1 + _SHARE_OF_CUDA))
    return int(counted * (1 + _SHARE_OF_HOST) + _CODE_OF_HOST_MB * MEGABYTE)


class UncountableError(ConfigError):
    """A network or a loss needs values of tensors, which tensors without memory lack."""


class Footprint:
    """A network, and everything that training keeps beside it, on fake tensors.

    The given network is not changed, nor is the random state of torch.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: Criterion,
        config: Config,
        device: torch.device,
        *,
        for_gpu: bool = False,
    ) -> None:
        """Copy the network to fake tensors.

        Args:
            network: Network to count.
            criterion: Its loss.
            config: Settings; those of the optimizer and the effective batch are used.
            device: Device of the fake tensors.
            for_gpu: Whether tensors on the CPU stand for those of a GPU that this machine lacks. Then
                the batch on the host is not counted, and norms take temporaries as on a GPU.
        """
        self._criterion = criterion
        self._for_gpu = for_gpu
        self._n_targets = task_of(config).n_targets
        batches = config.training.effective_batch
        self._effective_batch = batches if isinstance(batches, int) else max(batches.values())
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._live = _LiveBytes(device.type)
        with self._counting():
            fakes = _fakes_of(network, device)
        # tensors in the memo count as copied already, so this takes no memory
        self._network = deepcopy(network, fakes).train()
        if for_gpu:
            group_as_on_gpu(self._network)
        with self._counting():
            optimizer = build_optimizer(self._network.parameters(), config.optimizer)
            self._hold_gradients(hold=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self._optimizer = optimizer
            averaged = self._network.state_dict().values() if config.optimizer.ema else ()
            self._averaged = [torch.empty_like(tensor) for tensor in averaged]
        self._peak_of_update = self._live.peak

    def counted_bytes(self, patch: Size, mode: MemoryMode, device: Device) -> int:
        """Return the peak memory of all tensors, for batches of patches of that size.

        On the CPU this includes the batch that the host holds.
        """
        set_activation_checkpointing(self._network, mode.checkpointing)
        try:
            with self._counting():
                self._live.start()
                self._run(patch, mode, device)
        except RuntimeError as error:
            msg = (
                "the memory of the network cannot be counted, because it, or the loss, needs values "
                f"and not only sizes: {error}. Give --patch and --preset to train it."
            )
            raise UncountableError(msg) from error
        return max(self._live.peak, self._peak_of_update)

    def _run(self, patch: Size, mode: MemoryMode, device: Device) -> None:
        # from the second micro-batch on, the gradients of those before are held
        self._hold_gradients(hold=self._effective_batch > mode.micro_batch)
        # the batch is held on the host, which is the device itself on the CPU
        n_samples = 1 if self._for_gpu else self._effective_batch
        samples = [_fake_sample(patch, self._n_targets) for _ in range(n_samples)]
        if self._for_gpu:
            # the micro-batch that is copied to the device
            samples *= mode.micro_batch
        micro_batch = next(Batch(samples=tuple(samples)).micro_batches(mode.micro_batch))
        image, target = micro_batch.to(device.torch_device)
        with device.autocast():
            output = self._network(image)
            loss = whole_loss(self._criterion, output, target)
        loss.backward()
        self._hold_gradients(hold=False)

    def _hold_gradients(self, *, hold: bool) -> None:
        for parameter in self._network.parameters():
            held = hold and parameter.requires_grad
            parameter.grad = torch.empty_like(parameter) if held else None

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._mode)
            stack.enter_context(self._live)
            # dispatch modes apply to this thread only
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


def _fakes_of(network: nn.Module, device: torch.device) -> dict[int, Any]:
    """Return a fake tensor for every tensor of a network, by its id."""
    fakes: dict[int, Any] = {}
    for parameter in network.parameters():
        fake = torch.empty_like(parameter, device=device)
        fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in network.buffers():
        fakes[id(buffer)] = torch.empty_like(buffer, device=device)
    return fakes


def _fake_sample(patch: Size, n_targets: int) -> Sample:
    image = torch.empty(len(MODALITIES), *patch, dtype=torch.float16)
    target = torch.empty(n_targets, *patch, dtype=torch.uint8)
    return Sample(image=image, target=target, case_id="")


class _LiveBytes(TorchDispatchMode):
    """Adds up the memory of the tensors of a device while they live, each storage once."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.now = self.peak = 0

    def start(self) -> None:
        """Reset the peak."""
        self.peak = self.now

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(result)
        return result

    def _note(self, result: Any) -> None:
        if isinstance(result, list | tuple):
            for part in result:
                self._note(part)
        elif isinstance(result, Tensor) and result.device.type == self._device_type:
            memory = result.untyped_storage()
            if memory not in self._known:
                self._known[memory] = size = memory.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(memory, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size
