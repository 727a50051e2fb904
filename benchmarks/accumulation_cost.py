"""Time the exact step, and compare it with a plain loop over micro-batches.

A step is a batch of micro-batches: forward, backward, clipping, optimizer. Both run in turn in one
process. Shown are the median CPU time over rounds, and the quartiles over rounds of the ratio of
ours to the loop. Micro-batches hold two patches, because torch computes a small single patch with
kernels that are several times slower.

- A loss that is a mean over patches takes one pass: the loop computes the same gradient.
- Batch Dice, and a loss that declares nothing, take two passes, with all forward passes but one
  made twice. The loop accumulates in the ordinary way, which is faster, and wrong.

    python benchmarks/accumulation_cost.py --patch 32 --widths 16 32 64 --micro-batches 4
"""

import argparse
import platform
import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from time import process_time

import torch
from machine import matrix_product_rate
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.models.output import as_output
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.certificate import phantom_patches
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.losses import (
    BatchDiceBce,
    Criterion,
    DiceBce,
    Measure,
    Output,
    measure_nothing,
    whole_loss,
)
from brats_seg.training.tasks import count_voxels

CLIP_NORM = 12.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Our step, and the loop that it is compared with."""

    name: str
    ours: Callable[[], object]
    loop: Callable[[], object]


def main() -> None:
    """Print one line per pair."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    patch = (arguments.patch,) * 3
    network = build_model(ModelConfig(widths=tuple(arguments.widths)), patch)
    patches = phantom_patches(arguments.micro_batches * arguments.micro_batch, patch)
    parts = (part.split(arguments.micro_batch) for part in patches)
    micro_batches = [MicroBatch(*pair) for pair in zip(*parts, strict=True)]
    print(
        f"{platform.machine()}, torch {torch.__version__}, {arguments.threads} threads, "
        f"{matrix_product_rate() / 1e9:.0f} GFLOP/s in a matrix product; patch {patch}, widths "
        f"{arguments.widths}, batches of {arguments.micro_batches} x {arguments.micro_batch} patches, "
        f"{arguments.rounds} rounds"
    )
    print(f"{'':46}  loop ms  ours ms  ratio  quartiles")
    for pair in _pairs(network, micro_batches):
        _print_line(pair, arguments.rounds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--patch", type=int, default=32, help="voxels along each axis")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches in a batch")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def _pairs(network: nn.Module, micro_batches: list[MicroBatch]) -> list[Pair]:
    rows: list[tuple[str, Criterion, Measure]] = [
        ("patch Dice, one pass / the same loop", DiceBce(), measure_nothing),
        ("... and voxels counted, as the trainer does", DiceBce(), count_voxels),
        ("batch Dice, two passes / ordinary loop", BatchDiceBce(), measure_nothing),
        ("undeclared loss, two passes / ordinary loop", _undeclared, measure_nothing),
    ]
    return [
        Pair(
            name=name,
            ours=_our_step(deepcopy(network), criterion, micro_batches, measure),
            loop=partial(_loop, *_with_optimizer(network), criterion, micro_batches, measure),
        )
        for name, criterion, measure in rows
    ]


def _our_step(
    network: nn.Module, criterion: Criterion, micro_batches: list[MicroBatch], measure: Measure
) -> Callable[[], object]:
    network, optimizer = _with_optimizer(network)
    accumulator = Accumulator(network, criterion, optimizer, clip_norm=CLIP_NORM)
    return partial(accumulator.step, micro_batches, measure)


def _with_optimizer(network: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    network = deepcopy(network)
    return network, torch.optim.AdamW(network.parameters(), lr=1e-3)


def _loop(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion,
    micro_batches: list[MicroBatch],
    measure: Measure,
) -> None:
    optimizer.zero_grad()
    for image, target in micro_batches:
        output = network(image)
        (whole_loss(criterion, output, target) / len(micro_batches)).backward()
        with torch.no_grad():
            measure(output, target)
    clip_grad_norm_(network.parameters(), CLIP_NORM)
    optimizer.step()


def _undeclared(output: Output, target: Tensor) -> Tensor:
    logits = as_output(output).logits[0]
    return functional.binary_cross_entropy_with_logits(logits, target)


def _print_line(pair: Pair, n_rounds: int) -> None:
    pair.loop(), pair.ours()  # warm up
    times = [(_seconds(pair.loop), _seconds(pair.ours)) for _ in range(n_rounds)]
    loop_ms, ours_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    low, middle, high = statistics.quantiles([ours / loop for loop, ours in times], n=4)
    print(
        f"{pair.name:46}  {loop_ms:7.0f}  {ours_ms:7.0f}  {middle:4.2f}x  {low:.2f} to {high:.2f}"
    )


def _seconds(step: Callable[[], object]) -> float:
    start = process_time()
    step()
    return process_time() - start


if __name__ == "__main__":
    main()
