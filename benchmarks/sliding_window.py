"""Time the prediction of a volume larger than the window: MONAI's sliding window, and ours.

Both get the same network, volume, windows of the same size and overlap, Gaussian weights and one
thread, and run in turn. Shown are the median CPU time, the median and range over rounds of the
ratio of MONAI's time to ours, and the peak memory of a process beyond the volume (Linux only), with
a network that takes almost no memory itself.

    python benchmarks/sliding_window.py --shape 141 175 137 --window 64
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time

import torch
from monai.inferers.utils import sliding_window_inference
from torch import Tensor

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.runtime.memory import read_numbers
from brats_seg.runtime.sliding_window import predict_logits

OVERLAP = 0.5


def main() -> None:
    """Print one line per way."""
    arguments = _arguments()
    window = (arguments.window,) * 3
    torch.set_num_threads(1)
    torch.manual_seed(0)
    image = torch.randn(4, *arguments.shape)
    config = ModelConfig(widths=(8, 16, 32), deep_supervision=False)
    network = build_model(config, window).eval()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(arguments.rounds):
        for name, own in seconds.items():
            started_s = process_time()
            with torch.inference_mode():
                WAYS[name](network, image, window)
            own.append(process_time() - started_s)
    ratios = [theirs / ours for theirs, ours in zip(*seconds.values(), strict=True)]
    shape = "x".join(map(str, arguments.shape))
    print(f"{shape}, window {arguments.window}^3, {arguments.rounds} rounds")
    for name, own in seconds.items():
        print(f"{name:6} {statistics.median(own):6.2f} s  {_peak_mb(name, image, window):6.0f} MB")
    print(
        f"MONAI's time over ours: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, default=(141, 175, 137))
    parser.add_argument("--window", type=int, default=64, help="voxels along each axis")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _peak_mb(name: str, image: Tensor, window: tuple[int, int, int]) -> float:
    """Return the memory taken at the peak, in MB, beyond what was taken before."""
    network = torch.nn.Conv3d(4, 3, kernel_size=1)
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read_numbers(status)["VmHWM"]
    with torch.inference_mode():
        WAYS[name](network, image, window)
    return (read_numbers(status)["VmHWM"] - before) / 1024


def _by_monai(network: Callable[[Tensor], Tensor], image: Tensor, window: tuple[int, ...]) -> None:
    sliding_window_inference(image[None], window, 1, network, overlap=OVERLAP, mode="gaussian")


def _by_us(network: Callable[[Tensor], Tensor], image: Tensor, window: tuple[int, ...]) -> None:
    predict_logits(network, image, window=window, overlap=OVERLAP)


WAYS = {"MONAI": _by_monai, "ours": _by_us}


if __name__ == "__main__":
    main()
