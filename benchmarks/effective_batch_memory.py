"""Measure the memory of a step on the device, at effective batches of 2 and 32 single patches.

The host holds the batch. Each effective batch is measured in a
process of its own, in the second step, because the first also allocates memory that is kept. On a
GPU the peak is that of torch. On the CPU, where the device is the host, it is the rise of the peak
of the process during the step (Linux).

    python benchmarks/effective_batch_memory.py --patch 48 --device cpu
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from comparison import Comparison, in_a_process, options_of, report

from brats_seg.config import LossConfig, ModelConfig
from brats_seg.data.loader import Sample
from brats_seg.models.build import build_model
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import MEGABYTE, read_numbers
from brats_seg.training.certificate import phantom_patches
from brats_seg.training.losses import build_criterion, count_voxels
from brats_seg.training.optimisation import Accumulator
from brats_seg.training.run_plan import Batch

EFFECTIVE_BATCHES = (2, 32)


def main() -> None:
    """Print a table with a row per loss, or in a process of its own the memory of one step."""
    arguments = options_of(
        __doc__, patch=48, widths=[16, 32, 64], device="cpu", batch_dice=False, effective_batch=int
    )
    if arguments.effective_batch is not None:
        print(json.dumps(_measure(arguments)))
        return
    comparisons = []
    for loss, flag in (("patch Dice", []), ("batch Dice", ["--batch-dice"])):
        # freed memory is returned to the system at once, so that the peak is what was in use
        found = [
            in_a_process(
                [*sys.argv, "--effective-batch", str(n), *flag], MALLOC_MMAP_THRESHOLD_="65536"
            )
            for n in EFFECTIVE_BATCHES
        ]
        comparisons.append(_comparison(loss, at_largest_mb=found[1], at_two_mb=found[0]))
    report(comparisons, arguments.json)


def _comparison(loss: str, *, at_largest_mb: float, at_two_mb: float) -> Comparison:
    return Comparison(
        task=f"memory of a step of {loss} at effective batch {EFFECTIVE_BATCHES[-1]}",
        ours=f"{at_largest_mb:.0f} MB",
        peer="effective batch 2",
        theirs=f"{at_two_mb:.0f} MB",
        ratios=(at_two_mb / at_largest_mb,),
        least=1 / 1.02,
    )


def _measure(arguments: argparse.Namespace) -> float:
    """Return the peak of the device in MB."""
    torch.set_num_threads(1)
    patch = (arguments.patch,) * 3
    device = Device(torch_device=torch.device(arguments.device))
    network = build_model(ModelConfig(widths=tuple(arguments.widths)), patch)
    network.to(device.torch_device)
    criterion = build_criterion(LossConfig(batch_dice=arguments.batch_dice))
    optimizer = torch.optim.AdamW(network.parameters())
    accumulator = Accumulator(network, criterion, optimizer, device=device)
    accumulator.step(_batch(patch, 1).micro_batches(1), count_voxels)
    batch = _batch(patch, arguments.effective_batch)
    before = _reset_mb(device.torch_device)
    accumulator.step(batch.micro_batches(1), count_voxels)
    return _peak_now_mb(device.torch_device) - before


def _batch(patch: tuple[int, int, int], n_patches: int) -> Batch:
    """Make a batch with float16 images and uint8 targets, as the store has them."""
    return Batch(samples=tuple(_sample(patch, seed) for seed in range(n_patches)))


def _sample(patch: tuple[int, int, int], seed: int) -> Sample:
    made = phantom_patches(1, patch, seed=seed)
    image, target = made.image[0].half(), made.target[0].to(torch.uint8)
    return Sample(image=image, target=target, case_id=str(seed))


def _reset_mb(device: torch.device) -> float:
    """Reset the peak, and return what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / MEGABYTE
    Path("/proc/self/clear_refs").write_text("5")
    return _of_process_mb("VmRSS")


def _peak_now_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MEGABYTE
    return _of_process_mb("VmHWM")


def _of_process_mb(name: str) -> float:
    return read_numbers(Path("/proc/self/status"))[name] / 1024


if __name__ == "__main__":
    main()
