"""Time one training step of the default U-Net and of MONAI's DynUNet of the same shape.

Both compute forward and backward of one patch, in turn in one process. Shown are the median CPU
time over rounds, the median over rounds of the speed-up over the first row, and the floating-point
operations per second as a share of those of a big matrix product.

    python benchmarks/step.py --patch 64 --widths 16 32 64 128 160 --threads 2
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import process_time

import torch
from machine import matrix_product_rate
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.models.output import as_output


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A network and the precision it runs in."""

    name: str
    network: nn.Module
    dtype: torch.dtype


def main() -> None:
    """Print one line per contender."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    patch = (arguments.patch,) * 3
    image = torch.randn(1, 4, *patch)
    target = (torch.rand(1, 3, *patch) < 0.1).float()
    contenders = _contenders(tuple(arguments.widths), patch)
    steps = {c.name: partial(_step, c, image, target) for c in contenders}
    n_flops = {name: _flops(step) for name, step in steps.items()}  # also the warm-up
    seconds = _measured(steps, arguments.rounds)
    peaks = {dtype: matrix_product_rate(dtype) for dtype in (torch.float32, torch.bfloat16)}
    first = seconds[contenders[0].name]
    print(f"patch {patch}, widths {arguments.widths}, {arguments.threads} threads")
    print(f"{'':34}  CPU ms  speed-up  of GEMM")
    for contender in contenders:
        own = seconds[contender.name]
        speed_up = statistics.median(a / b for a, b in zip(first, own, strict=True))
        rate = n_flops[contender.name] / statistics.median(own)
        share = rate / peaks[contender.dtype]
        print(
            f"{contender.name:34}  {1e3 * statistics.median(own):6.0f}  {speed_up:7.2f}x  {share:7.2f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--patch", type=int, default=64, help="voxels along each axis")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64, 128, 160])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def _contenders(widths: tuple[int, ...], patch: tuple[int, int, int]) -> list[Contender]:
    networks = {
        "MONAI DynUNet": ModelConfig(name="dynunet", widths=widths),
        "unet, one head": ModelConfig(widths=widths, deep_supervision=False),
        "unet, deep supervision": ModelConfig(widths=widths),
    }
    return [
        Contender(name=f"{name}, {words}", network=build_model(config, patch), dtype=dtype)
        for words, dtype in (("fp32", torch.float32), ("bf16 autocast", torch.bfloat16))
        for name, config in networks.items()
    ]


def _step(contender: Contender, image: torch.Tensor, target: torch.Tensor) -> None:
    contender.network.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=contender.dtype == torch.bfloat16):
        output = as_output(contender.network(image))
    # a cheap loss, because the network is measured
    losses = [
        functional.binary_cross_entropy_with_logits(
            logits.float(), functional.interpolate(target, logits.shape[2:])
        )
        for logits in output.logits
    ]
    torch.stack(losses).sum().backward()


def _flops(step: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def _measured(steps: dict[str, Callable[[], None]], n_rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(n_rounds):
        for name, step in steps.items():
            start = process_time()
            step()
            seconds[name].append(process_time() - start)
    return seconds


if __name__ == "__main__":
    main()
