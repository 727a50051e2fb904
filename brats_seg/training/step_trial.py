"""Measure the memory and the time of a training step in a process of its own.

The step is a real one, of patches of noise: the peak memory of a process cannot be reset, and a process
that runs out of memory must not end the one that asked.
"""

import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch

from brats_seg.config import Config, Size
from brats_seg.data.loader import Sample
from brats_seg.errors import EnvironmentalError
from brats_seg.labels import MODALITIES
from brats_seg.models.interface import ActivationCheckpointing
from brats_seg.runtime.device import choose_device, threads_for
from brats_seg.runtime.memory import MEGABYTE, is_out_of_memory, peak_memory_mb, read_numbers
from brats_seg.training.epoch import Batch
from brats_seg.training.losses import Measure
from brats_seg.training.out_of_memory import MemoryMode
from brats_seg.training.ranks import Ranks
from brats_seg.training.state import (
    RunState,
    build_network,
    build_state,
)
from brats_seg.training.tasks import task_of

_SLOW_STEP_S = 10.0
"""Seconds of a step above which a trial does not compute a second one, which would be a little faster."""
_N_MICRO_BATCHES = 2
"""Micro-batches of a trial: from the second on gradients are held, and later ones take no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Memory and time of a real batch."""

    peak_bytes: int | None
    """Peak memory beside what Python and torch take before; None where the system does not report it."""
    step_s: float
    """Seconds of an optimizer step of the effective batch, without reading patches."""


def measure_step(
    config: Config, patch: Size, checkpointing: ActivationCheckpointing
) -> Measurement:
    """Measure the peak memory and the time of an optimizer step of a run.

    Some micro-batches of noise are computed in a process of its own, and the time is that of as many
    as the effective batch has. On a GPU the peak is what torch has allocated, on the CPU what the
    process grows by.

    Raises:
        EnvironmentalError: Memory ran out, or the system ended the process, as it does when memory
            runs out.
    """
    # not forked: a child cannot use a GPU that its parent has used
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_measured, config, patch, checkpointing).result()
        except BrokenProcessPool as error:
            msg = "the system ended the trial, most likely because memory ran out"
            raise EnvironmentalError(msg) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            msg = f"memory ran out in the trial: {error}"
            raise EnvironmentalError(msg) from error


def _measured(config: Config, patch: Size, checkpointing: ActivationCheckpointing) -> Measurement:
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
    state.fallback.move_to(
        MemoryMode(micro_batch=training.micro_batch, checkpointing=checkpointing)
    )
    _fill_optimizer(state)
    samples = [_noise(patch, task.n_targets) for _ in range(training.effective_batch_at(0))]
    with threads_for(device.torch_device, patch):
        step_s = _step_seconds(state, Batch(samples=tuple(samples)), task.measure)
    peak_mb = _own_peak_mb(device.torch_device) - before_mb
    peak_bytes = None if math.isnan(peak_mb) else int(peak_mb * MEGABYTE)
    return Measurement(peak_bytes=peak_bytes, step_s=step_s)


def _step_seconds(state: RunState, batch: Batch, measure: Measure) -> float:
    """Compute some micro-batches of a batch, and return the seconds that all of them would take."""
    on_gpu = state.accumulator.device.torch_device.type == "cuda"
    patch_s = math.inf
    for _ in range(2):
        started_s = time.perf_counter()
        micro_batches = batch.micro_batches(state.fallback.mode.micro_batch)
        result = state.accumulator.step(islice(micro_batches, _N_MICRO_BATCHES), measure)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started_s
        patch_s = min(patch_s, seconds / result.n_patches)
        # kernels are loaded and memory is touched first in the first step, which is little of a slow one
        if seconds > _SLOW_STEP_S:
            break
    return patch_s * len(batch.samples)


def _own_peak_mb(device: torch.device) -> float:
    if device.type == "cpu" and sys.platform == "linux":
        # the peak of `getrusage` starts as that of the process that started this one. Pages of files,
        # such as libraries, are left out: the system reads them again when it needs their memory
        status = read_numbers(Path("/proc/self/status"))
        return (status["VmHWM"] - status["RssFile"]) / 1024
    return peak_memory_mb(device)


def _fill_optimizer(state: RunState) -> None:
    """Let the optimizer allocate its state, which it otherwise does after the first batch."""
    for parameter in state.network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.accumulator.optimizer.step()


def _noise(patch: Size, n_targets: int) -> Sample:
    image = torch.randn(len(MODALITIES), *patch).half()
    target = (torch.rand(n_targets, *patch) > 0.5).to(torch.uint8)
    return Sample(image=image, target=target, case_id="")
