"""Time the exact step, and compare it with a plain loop over micro-batches.

A step is a batch of micro-batches: forward, backward, clipping, optimizer. Both run in turn in one
process. Shown are the median CPU time over rounds, and the ratio of the loop to ours. Micro-batches
hold two patches, because torch computes a small single patch with kernels that are several times
slower.

- A loss that is a mean over patches takes one pass: the loop computes the same gradient.
- Batch Dice, and a loss that declares nothing, take two passes, with all forward passes but one
  made twice. The loop accumulates in the ordinary way, which is faster, and wrong.

    python benchmarks/accumulation_cost.py --patch 32 --widths 16 32 64 --micro-batches 4
"""

import platform
import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from comparison import Comparison, options_of, ratios_of, report, seconds_in_turn
from machine import matrix_product_rate
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.models.interface import as_output
from brats_seg.training.certificate import phantom_patches
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.losses import (
    BatchDiceBce,
    Criterion,
    DiceBce,
    Measure,
    Output,
    count_voxels,
    measure_nothing,
    whole_loss,
)
from brats_seg.training.optimisation import Accumulator

CLIP_NORM = 12.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Our step, and the loop that it is compared with."""

    name: str
    loop_name: str
    ours: Callable[[], object]
    loop: Callable[[], object]
    least: float | None
    """Goal of the ratio."""


def main() -> None:
    """Print one line per pair."""
    arguments = options_of(
        __doc__, patch=32, widths=[16, 32, 64], micro_batches=4, micro_batch=2, threads=1, rounds=7
    )
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    patch = (arguments.patch,) * 3
    network = build_model(ModelConfig(widths=tuple(arguments.widths)), patch)
    patches = phantom_patches(arguments.micro_batches * arguments.micro_batch, patch)
    parts = (part.split(arguments.micro_batch) for part in (patches.image, patches.target))
    micro_batches = [MicroBatch(*pair) for pair in zip(*parts, strict=True)]
    print(
        f"{platform.machine()}, torch {torch.__version__}, {arguments.threads} threads, "
        f"{matrix_product_rate() / 1e9:.0f} GFLOP/s in a matrix product; patch {patch}, widths "
        f"{arguments.widths}, batches of {arguments.micro_batches} x {arguments.micro_batch} patches, "
        f"{arguments.rounds} rounds"
    )
    found = [_compared(pair, arguments.rounds) for pair in _pairs(network, micro_batches)]
    report(found, arguments.json)


def _pairs(network: nn.Module, micro_batches: list[MicroBatch]) -> list[Pair]:
    same, ordinary = "loop of the same gradient", "ordinary accumulation, another gradient"
    rows: list[tuple[str, str, Criterion, Measure, float | None]] = [
        ("step of patch Dice, one pass", same, DiceBce(), measure_nothing, None),
        ("... and voxels counted, as the trainer does", same, DiceBce(), count_voxels, 0.98),
        ("step of batch Dice, two passes", ordinary, BatchDiceBce(), measure_nothing, 0.75),
        ("step of an undeclared loss, two passes", ordinary, _undeclared, measure_nothing, None),
    ]
    return [
        Pair(
            name=name,
            loop_name=loop_name,
            ours=_our_step(deepcopy(network), criterion, micro_batches, measure),
            loop=partial(_loop, *_with_optimizer(network), criterion, micro_batches, measure),
            least=least,
        )
        for name, loop_name, criterion, measure, least in rows
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


def _compared(pair: Pair, n_rounds: int) -> Comparison:
    seconds = seconds_in_turn({"loop": pair.loop, "ours": pair.ours}, n_rounds)
    return Comparison(
        task=pair.name,
        ours=f"{1e3 * statistics.median(seconds['ours']):.0f} ms",
        peer=f"{pair.loop_name}, torch {torch.__version__}",
        theirs=f"{1e3 * statistics.median(seconds['loop']):.0f} ms",
        ratios=ratios_of(seconds["loop"], seconds["ours"]),
        least=pair.least,
    )


if __name__ == "__main__":
    main()
