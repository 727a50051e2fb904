"""Measure the memory of a training step of the default U-Net, with its own and stock layers.

Each row is a step: forward, loss and backward of one patch. `tensors` is the peak of the memory that
torch allocates in it, without the weights. The CPU time is of a single step; step.py measures it over
rounds. Two more rows compare steps at effective batches of 2 and of 32 single patches, which the host
holds.

    python benchmarks/step_memory.py --patch 64 --threads 2
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from time import process_time
from typing import NamedTuple

import torch
from comparison import Comparison, options_of, report
from gpu_setting import Setting, make_step
from torch import Tensor, nn
from torch.profiler import profile

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.models.interface import ActivationCheckpointing, set_activation_checkpointing
from brats_seg.models.unet import LEAKY_SLOPE, Block, Decoder
from brats_seg.runtime.device import native_dtype
from brats_seg.runtime.memory import MEGABYTE
from brats_seg.training.losses import DiceBce

ROWS = {
    "stock": ("stock", "none"),
    "unet": ("unet", "none"),
    "unet, top recomputed": ("unet", "top"),
    "unet, all recomputed": ("unet", "all"),
}
"""Layers of the network, and levels at which activations are recomputed."""
GOALS: dict[str, dict[str, float | None]] = {
    "bf16": {"fp32 stock": 1 / 0.46, "bf16 stock": 1 / 0.83},
    "fp32": {"fp32 stock": None},
}
"""Smallest ratio of the memory of a row to ours, in the precision that a CPU chooses."""
EFFECTIVE_BATCHES = (2, 32)


class Measured(NamedTuple):
    """Measurements of a step."""

    loss: float
    tensors_mb: float
    cpu_s: float


def main() -> None:
    """Print one line per kind of layers, and compare."""
    arguments = options_of(__doc__, patch=128, threads=1)
    torch.set_num_threads(arguments.threads)
    print(f"patch {(arguments.patch,) * 3}, batch 1, deep supervision, {arguments.threads} threads")
    print(f"{'':34} tensors MB  CPU s    loss")
    rows: dict[str, Measured] = {}
    precisions = ("fp32", "bf16") if native_dtype(torch.device("cpu")) else ("fp32",)
    for precision, name in product(precisions, ROWS):
        row = rows[f"{precision} {name}"] = _measure(arguments.patch, precision, *ROWS[name])
        numbers = f"{row.tensors_mb:10.0f}  {row.cpu_s:5.1f}  {row.loss:.4f}"
        print(f"{f'{precision} {name}':34} {numbers}", flush=True)
    comparisons = _comparisons(arguments.patch, rows, precisions[-1])
    report([*comparisons, *_effective_batches(arguments.patch)], arguments.json)


def _comparisons(patch: int, found: dict[str, Measured], precision: str) -> list[Comparison]:
    ours = found[f"{precision} unet"]
    return [
        Comparison(
            task=f"tensors of a training step, patch {(patch,) * 3}",
            ours=f"{ours.tensors_mb:.0f} MB ({precision} unet)",
            peer=f"{name} layers, torch {torch.__version__}",
            theirs=f"{found[name].tensors_mb:.0f} MB",
            ratios=(found[name].tensors_mb / ours.tensors_mb,),
            least=least,
            agreement=f"loss {ours.loss:.4f} and {found[name].loss:.4f}; "
            f"{found[name].cpu_s / ours.cpu_s:.2f} times our CPU time",
        )
        for name, least in GOALS[precision].items()
    ]


def _effective_batches(patch: int) -> Iterator[Comparison]:
    size, widths = (patch // 2,) * 3, "model.widths=[16,32,64]"
    setting = Setting(device=torch.device("cpu"), patch=size, model=(widths,))
    for loss, batch_dice in (("patch Dice", "false"), ("batch Dice", "true")):
        changes = (f"loss.batch_dice={batch_dice}", "training.micro_batch=1")
        state = setting.state("fp32", *changes)
        # the first step also allocates memory that is kept
        _, few_mb, many_mb = (
            _allocated_mb(partial(make_step, state, setting.batch(n)))
            for n in (1, *EFFECTIVE_BATCHES)
        )
        yield Comparison(
            task=f"memory of a step of {loss} at effective batch {EFFECTIVE_BATCHES[1]}, patch {size}",
            ours=f"{many_mb:.0f} MB",
            peer=f"effective batch {EFFECTIVE_BATCHES[0]}",
            theirs=f"{few_mb:.0f} MB",
            ratios=(few_mb / many_mb,),
            least=1 / 1.02,
        )


def _measure(patch: int, precision: str, layers: str, checkpointing: str) -> Measured:
    torch.manual_seed(0)
    network = build_model(ModelConfig(), (patch,) * 3)
    if layers != "unet":
        _use_stock_layers(network)
    set_activation_checkpointing(network, ActivationCheckpointing(checkpointing))
    step = partial(_step, network, precision, *_patch(patch))
    loss, started_s = step(), process_time()
    step()
    cpu_s = process_time() - started_s
    return Measured(loss=loss, tensors_mb=_allocated_mb(step), cpu_s=cpu_s)


def _patch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 4, size, size, size, generator=generator)
    return image, (image[:, :3] > 1).to(torch.uint8)


def _step(network: nn.Module, precision: str, image: Tensor, target: Tensor) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = DiceBce()(network(image), target).sum()
    loss.backward()
    network.zero_grad(set_to_none=True)
    return float(loss.detach())


def _use_stock_layers(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, Decoder):
            module.join = partial(_concatenate, module)
        if isinstance(module, Block):
            stock = nn.InstanceNorm3d(len(module.norm.weight), affine=True)
            stock.load_state_dict(module.norm.state_dict())
            module.norm = nn.Sequential(stock, nn.LeakyReLU(LEAKY_SLOPE, inplace=True))


def _concatenate(decoder: Decoder, below: Tensor, skip: Tensor) -> Tensor:
    return decoder.level[0](torch.cat((decoder.upsampling(below), skip), dim=1))


def _allocated_mb(step: Callable[[], object]) -> float:
    """Return the peak of the allocated memory, including gradients of the weights."""
    with profile(profile_memory=True) as profiler:
        step()
    changes = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / MEGABYTE


if __name__ == "__main__":
    main()
