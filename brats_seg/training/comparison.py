"""The gradient of a window of micro-batches, made in three ways to be held against each other."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from brats_seg.models.device import Device
from brats_seg.models.output import output_from, tensors_of
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.criterion import Criterion, whole_loss
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.replay import RandomState

Backward: TypeAlias = Callable[[nn.Module, Criterion, Sequence[MicroBatch], Device], None]
"""Leaves the gradient of a window, times the loss scale, in the parameters."""

_LOSS_SCALE = 2.0**10
"""In float16, so that the derivative by a single logit stays above the smallest number there is."""


def gradient_of(
    backward: Backward,
    network: nn.Module,
    criterion: Criterion,
    window: Sequence[MicroBatch],
    device: Device,
) -> Tensor:
    """Return what a way to go backward leaves, `(n_parameters,)`, in float64 on the CPU.

    Each call draws the same random numbers as the one before it.
    """
    network.zero_grad()
    before = RandomState.capture(device.torch_device)
    backward(network, criterion, [part.to(device.torch_device) for part in window], device)
    before.restore()
    parts = [
        torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu()
        for p in network.parameters()
    ]
    return torch.cat([part.flatten().double() for part in parts]) / _loss_scale(device)


def whole(
    network: nn.Module, criterion: Criterion, window: Sequence[MicroBatch], device: Device
) -> None:
    """Go backward from all patches in one batch, with nothing of the accumulator."""
    image, target = (torch.cat(parts) for parts in zip(*window, strict=True))
    with device.autocast():
        if _draws(network, window[0], device):
            # random layers draw patch by patch, as they do in micro-batches
            outputs = [tensors_of(network(part.image)) for part in window]
            output = output_from(tuple(torch.cat(parts) for parts in zip(*outputs, strict=True)))
        else:
            output = network(image)
        loss = whole_loss(criterion, output, target)
    (_loss_scale(device) * loss).backward()


def exact(
    network: nn.Module, criterion: Criterion, window: Sequence[MicroBatch], device: Device
) -> None:
    """Go backward as the package does."""
    optimizer = torch.optim.SGD(network.parameters())
    accumulator = Accumulator(network, criterion, optimizer, device=device)
    accumulator.scaler = torch.amp.GradScaler(
        device.torch_device.type, init_scale=_LOSS_SCALE, enabled=device.needs_scaler
    )
    accumulator.backward(window)


def ordinary(
    network: nn.Module, criterion: Criterion, window: Sequence[MicroBatch], device: Device
) -> None:
    """Go backward from each micro-batch, its loss divided by their number."""
    for part in window:
        with device.autocast():
            loss = whole_loss(criterion, network(part.image), part.target)
        (_loss_scale(device) * loss / len(window)).backward()


def _loss_scale(device: Device) -> float:
    return _LOSS_SCALE if device.needs_scaler else 1.0


def _draws(network: nn.Module, micro_batch: MicroBatch, device: Device) -> bool:
    """Tell whether the network has random layers, and leave the generators where they were."""
    before = RandomState.capture(device.torch_device)
    with torch.no_grad():
        network(micro_batch.image)
    after = RandomState.capture(device.torch_device)
    before.restore()
    return not torch.equal(_bytes(before), _bytes(after))


def _bytes(state: RandomState) -> Tensor:
    return state.cpu if state.cuda is None else torch.cat([state.cpu, state.cuda])
