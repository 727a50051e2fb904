"""One real window in a process of its own, and the memory that it took at its peak."""

import math
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch

from brats_seg.config import Config, Size
from brats_seg.data.dataset import Sample
from brats_seg.errors import EnvironmentalError
from brats_seg.labels import MODALITIES
from brats_seg.models.device import choose_device
from brats_seg.models.memory import MEGABYTE, is_out_of_memory, peak_memory_mb
from brats_seg.models.rungs import Checkpointing
from brats_seg.training.epoch import MicroBatches
from brats_seg.training.ladder import Rung
from brats_seg.training.ranks import Ranks
from brats_seg.training.room import read_numbers
from brats_seg.training.state import RunState, build_network, build_state
from brats_seg.training.task import task_of

_N_MICRO_BATCHES = 2
"""From the second on, gradients of the one before are held; later ones take no more."""


def measured_bytes(config: Config, patch: Size, checkpointing: Checkpointing) -> int | None:
    """Return what a run takes at its peak, beside what Python and torch take before it begins.

    On a GPU that is what torch has allocated there, on the CPU what the process grows by. None
    where the system does not tell.

    Raises:
        EnvironmentalError: Memory ran out, or the system ended the process, as it does then.
    """
    # not forked: a child cannot use a GPU that its parent has used
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            peak_mb = pool.submit(_peak_mb, config, patch, checkpointing).result()
        except BrokenProcessPool as error:
            msg = "the system ended the trial, most likely because memory ran out"
            raise EnvironmentalError(msg) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            msg = f"memory ran out in the trial: {error}"
            raise EnvironmentalError(msg) from error
    return None if math.isnan(peak_mb) else int(peak_mb * MEGABYTE)


def _peak_mb(config: Config, patch: Size, checkpointing: Checkpointing) -> float:
    training, task = config.training, task_of(config)
    device = choose_device(training.device, training.precision)
    before_mb = _own_peak_mb(device.torch_device)
    state = build_state(
        build_network(config, patch),
        task.criterion,
        config,
        device=device,
        ranks=Ranks(),
        n_steps=1,
    )
    state.ladder.move_to(Rung(micro_batch=training.micro_batch, checkpointing=checkpointing))
    _fill_optimizer(state)
    n_patches = min(training.effective_batch_at(0), _N_MICRO_BATCHES * training.micro_batch)
    samples = [_noise(patch, task.n_targets) for _ in range(n_patches)]
    state.accumulator.step(MicroBatches(samples, training.micro_batch), task.measure)
    return _own_peak_mb(device.torch_device) - before_mb


def _own_peak_mb(device: torch.device) -> float:
    if device.type == "cpu" and sys.platform == "linux":
        # what `getrusage` tells began as the peak of the process that started this one
        return read_numbers(Path("/proc/self/status"))["VmHWM"] / 1024
    return peak_memory_mb(device)


def _fill_optimizer(state: RunState) -> None:
    """Have it make what it keeps per weight, which it otherwise does after the first window."""
    for parameter in state.network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.accumulator.optimizer.step()


def _noise(patch: Size, n_targets: int) -> Sample:
    image = torch.randn(len(MODALITIES), *patch)
    target = (torch.rand(n_targets, *patch) > 0.5).to(torch.uint8)
    return Sample(image=image, target=target, case_id="")
