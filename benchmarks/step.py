"""Time one training step of the default U-Net beside those of nnU-Net's network and MONAI's DynUNet.

All compute forward and backward of one patch, in turn in one process, with the same widths, heads, loss,
threads and memory allocator. nnU-Net's network (`dynamic_network_architectures`) runs in float32, its
default on a CPU, and in bf16 where the CPU computes it natively, as ours does there. It prints the median
CPU time over rounds, the paired ratio to ours in that precision, and the floating-point operations per
second as a share of those of a big matrix product.

    python benchmarks/step.py --patch 64 --widths 16 32 64 128 160 --threads 1
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from comparison import compare_with_first, options_of, report, seconds_in_turn
from machine import matrix_product_rate, version_of
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.models.convolution import Convolution
from brats_seg.models.interface import as_output
from brats_seg.models.unet import level_strides
from brats_seg.runtime.device import native_dtype

NNUNET = "dynamic_network_architectures"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GOAL = 2.6
"""Smallest ratio of nnU-Net's step in float32, its default on a CPU, to ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A network, and how it is run."""

    name: str
    network: nn.Module
    precision: str


def main() -> None:
    """Compare each contender with ours in the precision of this CPU, and append the comparisons."""
    arguments = options_of(__doc__, patch=64, widths=[16, 32, 64, 128, 160], threads=1, rounds=7)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    patch = (arguments.patch,) * 3
    image = torch.randn(1, 4, *patch)
    target = (torch.rand(1, 3, *patch) < 0.1).float()
    contenders = _contenders(tuple(arguments.widths), patch)
    steps = {c.name: partial(_step, c, image, target) for c in contenders}
    ours, *peers = steps
    seconds = seconds_in_turn(steps, arguments.rounds)
    rate = _flops(steps[ours]) / statistics.median(seconds[ours])
    precision = contenders[0].precision
    share = rate / matrix_product_rate(DTYPES[precision])
    task = f"training step in {precision}, patch {patch}, widths {arguments.widths}"
    print(f"{task}, {arguments.threads} threads: {share:.2f} of a {precision} matrix product")
    goals = {name: GOAL for name in peers if "nnU-Net" in name and "fp32" in name}
    report(compare_with_first(task, seconds, goals), arguments.json)


def _contenders(widths: tuple[int, ...], patch: tuple[int, int, int]) -> list[Contender]:
    """Return the networks in bf16, if it is native here, and in float32; ours first."""
    dynunet = build_model(ModelConfig(name="dynunet", widths=widths), patch)
    for layer in dynunet.modules():
        if type(layer) is Convolution:
            layer.__class__ = nn.Conv3d  # as MONAI convolves
    peers = {f"MONAI {version_of('monai')} DynUNet, one head": dynunet}
    if find_spec(NNUNET) is None:
        print(f"{NNUNET} is not installed: nnU-Net's network is left out")
    else:
        peers[f"nnU-Net PlainConvUNet {version_of(NNUNET)}"] = _nnunet(widths, patch)
    networks = {"unet": build_model(ModelConfig(widths=widths), patch), **peers}
    return [
        Contender(name=f"{name}, {precision}", network=network, precision=precision)
        for name, network in networks.items()
        for precision in (DTYPES if native_dtype(torch.device("cpu")) else ("fp32",))
    ]


def _nnunet(widths: Sequence[int], patch: tuple[int, int, int]) -> nn.Module:
    """Return the network that nnU-Net's plans ask for, with a head for each level but the lowest."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    strides = level_strides(patch, len(widths))
    return PlainConvUNet(
        input_channels=4,
        n_stages=len(strides),
        features_per_stage=list(widths[: len(strides)]),
        conv_op=nn.Conv3d,
        kernel_sizes=3,
        strides=strides,
        n_conv_per_stage=2,
        num_classes=3,
        n_conv_per_stage_decoder=2,
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )


def _step(contender: Contender, image: torch.Tensor, target: torch.Tensor) -> None:
    network, dtype = contender.network, DTYPES[contender.precision]
    network.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = as_output(network(image))
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


if __name__ == "__main__":
    main()
