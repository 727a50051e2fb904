"""Measure the memory of a training step of the default U-Net, with its own and stock layers.

Each row is a step in a process of its own: forward, loss and backward of one patch. `tensors` is
the peak of the memory that torch has allocated, without the weights. The CPU time is of a single step; step.py measures it over rounds.

    python benchmarks/step_memory.py --patch 64 --threads 2
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import process_time

import torch
from comparison import Comparison, append_json, in_a_process, options_of
from torch import Tensor, nn
from torch.profiler import profile

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.models.interface import ActivationCheckpointing, set_activation_checkpointing
from brats_seg.models.unet import LEAKY_SLOPE, Block, Decoder
from brats_seg.runtime.memory import MEGABYTE
from brats_seg.training.losses import DiceBce

LAYERS = ("stock", "stock, norm in place", "unet")
OWN = "bf16 unet"
"""Row that is compared with the stock layers: what a CPU with bf16 chooses."""
GOALS = {"fp32 stock": 1 / 0.46, "bf16 stock": 1 / 0.83}
"""Smallest ratio of the memory of a row to ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One row."""

    patch: int
    layers: str
    checkpointing: str = "none"
    precision: str
    threads: int

    @property
    def name(self) -> str:
        """Name of the row."""
        levels = {"none": "", "top": ", top recomputed", "all": ", all recomputed"}
        return f"{self.precision} {self.layers}{levels[self.checkpointing]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of a step."""

    loss: float
    tensors_mb: float
    cpu_s: float


def main() -> None:
    """Print one line per setting."""
    arguments = options_of(__doc__, patch=128, threads=1, setting=str)
    if arguments.setting:
        print(json.dumps(asdict(_measure(Setting(**json.loads(arguments.setting))))))
        return
    print(f"patch {(arguments.patch,) * 3}, batch 1, deep supervision, {arguments.threads} threads")
    print(f"{'':34} tensors MB  CPU s    loss")
    found: dict[str, Measured] = {}
    for setting in _settings(arguments):
        values = in_a_process([__file__, "--setting", json.dumps(asdict(setting))])
        row = found[setting.name] = Measured(**values)
        numbers = f"{row.tensors_mb:10.0f}  {row.cpu_s:5.1f}  {row.loss:.4f}"
        print(f"{setting.name:34} {numbers}", flush=True)
    append_json(_comparisons(arguments.patch, found), arguments.json)


def _comparisons(patch: int, found: dict[str, Measured]) -> list[Comparison]:
    ours = found[OWN]
    return [
        Comparison(
            task=f"tensors of a training step, patch {(patch,) * 3}",
            ours=f"{ours.tensors_mb:.0f} MB ({OWN})",
            peer=f"{name} layers, torch {torch.__version__}",
            theirs=f"{found[name].tensors_mb:.0f} MB",
            ratios=(found[name].tensors_mb / ours.tensors_mb,),
            least=least,
            agreement=f"loss {ours.loss:.4f} and {found[name].loss:.4f}; "
            f"{found[name].cpu_s / ours.cpu_s:.2f} times our CPU time",
        )
        for name, least in GOALS.items()
    ]


def _settings(arguments: argparse.Namespace) -> list[Setting]:
    make = partial(Setting, patch=arguments.patch, threads=arguments.threads)
    return [
        make(precision=precision, layers=layers, checkpointing=levels)
        for precision in ("fp32", "bf16")
        for layers, levels in [
            *((layers, "none") for layers in LAYERS),
            ("unet", "top"),
            ("unet", "all"),
        ]
    ]


def _measure(setting: Setting) -> Measured:
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    network = build_model(ModelConfig(), (setting.patch,) * 3)
    if setting.layers != "unet":
        _use_stock_layers(network, norm=setting.layers == "stock")
    set_activation_checkpointing(network, ActivationCheckpointing(setting.checkpointing))
    step = partial(_step, network, setting.precision)
    batch = _patch(setting.patch)
    start_s = process_time()
    loss, cpu_s = step(*batch), process_time() - start_s
    return Measured(loss=loss, tensors_mb=_allocated_mb(partial(step, *batch)), cpu_s=cpu_s)


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


def _use_stock_layers(network: nn.Module, *, norm: bool) -> None:
    for module in network.modules():
        if isinstance(module, Decoder):
            module.join = partial(_concatenate, module)
        if isinstance(module, Block) and norm:
            stock = nn.InstanceNorm3d(len(module.norm.weight), affine=True)
            stock.load_state_dict(module.norm.state_dict())
            module.norm = nn.Sequential(stock, nn.LeakyReLU(LEAKY_SLOPE, inplace=True))


def _concatenate(decoder: Decoder, below: Tensor, skip: Tensor) -> Tensor:
    return decoder.level[0](torch.cat((decoder.upsampling(below), skip), dim=1))


def _allocated_mb(step: Callable[[], float]) -> float:
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
