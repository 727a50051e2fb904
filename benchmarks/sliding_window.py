"""A network over a volume larger than its window: MONAI's sliding window, and ours.

Both get the same network, crop, windows of the same size and overlap, Gaussian weights and one
thread. Rounds are A B A B ...; shown are the median CPU time, MONAI's time over ours taken round by
round with its range, and the peak memory of a process of its own above that of the network and the
image.

    python benchmarks/sliding_window.py --shape 141 175 137 --window 64
"""

import argparse
import multiprocessing
import resource
import statistics
from collections.abc import Callable
from time import process_time

import torch
from monai.inferers.utils import sliding_window_inference
from torch import Tensor

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.runtime.sliding_window import predict_logits

OVERLAP = 0.5


def main() -> None:
    """Print one line per way."""
    arguments = _arguments()
    shape, window = tuple(arguments.shape), arguments.window
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(arguments.rounds):
        for name, own in seconds.items():
            own.append(_run(name, shape, window)[0])
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        peaks = {name: pool.apply(_run, (name, shape, window))[1] for name in WAYS}
    ratios = [theirs / ours for theirs, ours in zip(*seconds.values(), strict=True)]
    print(f"{'x'.join(map(str, shape))}, window {window}^3, {arguments.rounds} rounds")
    for name, own in seconds.items():
        print(f"{name:6} {statistics.median(own):6.2f} s  {peaks[name]:6.0f} MB")
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


def _run(name: str, shape: tuple[int, int, int], window: int) -> tuple[float, float]:
    """Return CPU seconds, and the MB by which the peak memory of the process rises."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ModelConfig(widths=(8, 16, 32), deep_supervision=False)
    network = build_model(config, (window,) * 3).eval()
    image = torch.randn(4, *shape)
    with torch.inference_mode():
        network(image[None, :, :window, :window, :window])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started_s = process_time()
        WAYS[name](network, image, (window,) * 3)
        elapsed_s = process_time() - started_s
    return elapsed_s, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _by_monai(network: Callable[[Tensor], Tensor], image: Tensor, window: tuple[int, ...]) -> None:
    sliding_window_inference(image[None], window, 1, network, overlap=OVERLAP, mode="gaussian")


def _by_us(network: Callable[[Tensor], Tensor], image: Tensor, window: tuple[int, ...]) -> None:
    predict_logits(network, image, window=window, overlap=OVERLAP)


WAYS = {"MONAI": _by_monai, "ours": _by_us}


if __name__ == "__main__":
    main()
