"""Time the prediction of a volume larger than the window: MONAI's sliding window, and ours.

Both get the same network, volume, windows of the same size and overlap, Gaussian weights and one
thread, and run in turn. Shown are CPU times, and the peak memory of a process beyond the volume (Linux
only), with a network that takes almost no memory itself.

    python benchmarks/sliding_window.py --shape 141 175 137 --window 96
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from comparison import (
    Comparison,
    append_json,
    options_of,
    ratios_of,
    seconds_in_turn,
    table_of,
)
from machine import version_of
from monai.inferers.utils import sliding_window_inference
from torch import Tensor

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.runtime.memory import read_numbers
from brats_seg.runtime.windows import predict_logits

OVERLAP = 0.5


def main() -> None:
    """Print the comparison, and the peak memory of both."""
    arguments = options_of(__doc__, shape=(141, 175, 137), window=96, rounds=5)
    window = (arguments.window,) * 3
    torch.set_num_threads(1)
    torch.manual_seed(0)
    image = torch.randn(4, *arguments.shape)
    config = ModelConfig(widths=(8, 16, 32))
    network = build_model(config, window).eval()
    with torch.inference_mode():
        ways = {name: partial(way, network, image, window) for name, way in WAYS.items()}
        seconds = seconds_in_turn(ways, arguments.rounds, n_warm_ups=0)
    memory = {name: f"{_peak_mb(name, image, window):.0f} MB" for name in WAYS}
    shape = "x".join(map(str, arguments.shape))
    ours, theirs = (f"{statistics.median(seconds[name]):.2f} s" for name in ("ours", "MONAI"))
    found = Comparison(
        task=f"sliding windows of {arguments.window}^3 over {shape} voxels",
        ours=f"{ours}, {memory['ours']}",
        peer=f"MONAI {version_of('monai')}, the same windows",
        theirs=f"{theirs}, {memory['MONAI']}",
        ratios=ratios_of(seconds["MONAI"], seconds["ours"]),
        least=0.95,
    )
    print(table_of([found]))
    append_json([found], arguments.json)


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
