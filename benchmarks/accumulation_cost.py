"""Time the exact step, and compare it with a plain loop over micro-batches.

A step is a batch of micro-batches: forward, backward, clipping, optimizer. Both run in turn in one
process. It prints the median CPU time over rounds, and the ratio of the loop to ours. Micro-batches
hold two patches, because torch computes a small single patch with kernels that are several times
slower.

- A loss that is a mean over patches takes one pass: the loop computes the same gradient.
- Batch Dice, and a loss that declares nothing, take two passes, with all forward passes but one
  made twice. The loop accumulates in the ordinary way, which is faster, and wrong.

    python benchmarks/accumulation_cost.py --patch 32 --widths 16 32 64 --micro-batches 4
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from comparison import compare_with_first, options_of, report, seconds_in_turn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.models.interface import as_output
from brats_seg.training.accumulation import Accumulator
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

CLIP_NORM = 12.0


def undeclared(output: Output, target: Tensor) -> Tensor:
    """Return a loss that does not say whether it is a mean over patches."""
    logits = as_output(output).logits[0]
    return functional.binary_cross_entropy_with_logits(logits, target)


SAME, ORDINARY = "loop of the same gradient", "ordinary accumulation, another gradient"
ROWS: tuple[tuple[str, str, Criterion, Measure, float | None], ...] = (
    ("step of patch Dice, one pass", SAME, DiceBce(), measure_nothing, None),
    ("... and voxels counted, as the trainer does", SAME, DiceBce(), count_voxels, 0.98),
    ("step of batch Dice, two passes", ORDINARY, BatchDiceBce(), measure_nothing, 0.75),
    ("step of an undeclared loss, two passes", ORDINARY, undeclared, measure_nothing, None),
)
"""Task, the other program, loss, what is measured, and the goal of the ratio."""


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
    comparisons = []
    for task, peer, criterion, measure, least in ROWS:
        peer = f"{peer}, torch {torch.__version__}"
        ways = {
            "ours": _our_step(network, criterion, micro_batches, measure),
            peer: partial(_loop, *_with_optimizer(network), criterion, micro_batches, measure),
        }
        seconds = seconds_in_turn(ways, arguments.rounds)
        comparisons += compare_with_first(task, seconds, {peer: least} if least else {})
    report(comparisons, arguments.json)


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


if __name__ == "__main__":
    main()
