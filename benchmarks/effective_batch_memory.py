"""Peak memory of a step at effective batches from 1 to 32, one patch at a time.

Each batch has a process of its own, with windows as the trainer makes them; the second step counts,
because the first also pays for what stays. On the CPU the peak is that of the process (Linux), less
what it held before the step; on a GPU it is torch's.

    python benchmarks/effective_batch_memory.py --patch 48 --device cpu
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from brats_seg.config import LossConfig, ModelConfig, TrainingConfig
from brats_seg.data.loader import Sample
from brats_seg.models.build import build_model
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import MEGABYTE
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.certificate import phantom_patches
from brats_seg.training.losses import build_criterion
from brats_seg.training.out_of_memory import OutOfMemoryFallback
from brats_seg.training.tasks import count_voxels

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
    parser.add_argument("--patch", type=int, default=48, help="voxels along each axis")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-dice", action="store_true")
    parser.add_argument("--effective-batch", type=int, help="measure this one alone")
    return parser.parse_args()


def _peak_of_child(flags: list[str]) -> float:
    command = [sys.executable, *sys.argv, *flags]
    # what is freed goes back to the system at once, so that the peak is what was in use
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(done.stdout)


def _peak_mb(arguments: argparse.Namespace) -> float:
    torch.set_num_threads(1)
    patch = (arguments.patch,) * 3
    device = Device(torch_device=torch.device(arguments.device))
    network = build_model(ModelConfig(widths=tuple(arguments.widths)), patch)
    network.to(device.torch_device)
    criterion = build_criterion(LossConfig(batch_dice=arguments.batch_dice))
    optimizer = torch.optim.AdamW(network.parameters())
    fallback = OutOfMemoryFallback(
        Accumulator(network, criterion, optimizer, device=device), TrainingConfig(micro_batch=1)
    )
    fallback.step(Patches(patch, 1), count_voxels)
    before = _reset_mb(device.torch_device)
    fallback.step(Patches(patch, arguments.effective_batch), count_voxels)
    return _peak_now_mb(device.torch_device) - before


class Patches(Sequence[Sample]):
    """A window whose patches are made when they are asked for, as those of the trainer are."""

    def __init__(self, patch: tuple[int, int, int], n_patches: int) -> None:
        self._patch = patch
        self._places = range(n_patches)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:  # type: ignore[override]
        if isinstance(place, slice):
            return [self[i] for i in self._places[place]]
        image, target = phantom_patches(1, self._patch, seed=self._places[place])
        return Sample(image=image[0], target=target[0].to(torch.uint8), case_id=str(place))


def _reset_mb(device: torch.device) -> float:
    """Begin a new peak, and return what is held now."""
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
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kilobytes) / 1024


if __name__ == "__main__":
    main()
