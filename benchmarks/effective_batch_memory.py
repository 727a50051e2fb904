"""Peak memory of a step at effective batches from 1 to 32, one patch at a time.

Each step runs in a process of its own, with windows as the trainer makes them. On the CPU the peak
is that of the process, less what it had taken before the step; on a GPU it is torch's.

    python benchmarks/effective_batch_memory.py --patch 64 --device cpu
"""

import argparse
import subprocess
import sys

import torch

from brats_seg.config import LossConfig, ModelConfig, TrainingConfig
from brats_seg.data.dataset import Sample
from brats_seg.models.build import build_model
from brats_seg.models.device import Device
from brats_seg.models.memory import peak_memory_mb, reset_peak_memory
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.ladder import Ladder
from brats_seg.training.losses import build_criterion
from brats_seg.training.probe import phantom_patches
from brats_seg.training.validation import count_voxels

EFFECTIVE_BATCHES = (1, 4, 16, 32)


def main() -> None:
    """Print one line per loss, or in a process of its own the peak of one step."""
    arguments = _arguments()
    if arguments.effective_batch is not None:
        print(_peak_mb(arguments))
        return
    print(
        f"torch {torch.__version__}, {arguments.device}, patch {arguments.patch}^3, widths "
        f"{arguments.widths}; MB at effective batch, and their ratio to the first"
    )
    print(f"{'':12}{''.join(f'{n:>16}' for n in EFFECTIVE_BATCHES)}")
    for loss, flag in (("patch Dice", []), ("batch Dice", ["--batch-dice"])):
        peaks = [_peak_of_child(["--effective-batch", str(n), *flag]) for n in EFFECTIVE_BATCHES]
        cells = (f"{peak:8.0f} {peak / peaks[0]:6.3f}x" for peak in peaks)
        print(f"{loss:12}{''.join(cells)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--patch", type=int, default=64, help="voxels along each axis")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-dice", action="store_true")
    parser.add_argument("--effective-batch", type=int, help="measure this one alone")
    return parser.parse_args()


def _peak_of_child(flags: list[str]) -> float:
    command = [sys.executable, *sys.argv, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _peak_mb(arguments: argparse.Namespace) -> float:
    torch.set_num_threads(1)
    patch = (arguments.patch,) * 3
    device = Device(torch_device=torch.device(arguments.device))
    network = build_model(ModelConfig(widths=tuple(arguments.widths)), patch)
    network.to(device.torch_device)
    criterion = build_criterion(LossConfig(batch_dice=arguments.batch_dice))
    optimizer = torch.optim.AdamW(network.parameters())
    ladder = Ladder(
        Accumulator(network, criterion, optimizer, device=device), TrainingConfig(micro_batch=1)
    )
    reset_peak_memory(device.torch_device)
    before = 0.0 if device.torch_device.type == "cuda" else peak_memory_mb(device.torch_device)
    samples = [_sample(patch, seed) for seed in range(arguments.effective_batch)]
    ladder.step(samples, count_voxels)
    return peak_memory_mb(device.torch_device) - before


def _sample(patch: tuple[int, int, int], seed: int) -> Sample:
    image, target = phantom_patches(1, patch, seed)
    return Sample(image=image[0], target=target[0].to(torch.uint8), case_id=str(seed))


if __name__ == "__main__":
    main()
