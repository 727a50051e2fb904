"""Test the memory of a step, counted on fake tensors."""

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import Config
from brats_seg.config_text import load_config
from brats_seg.errors import ConfigError
from brats_seg.models.build import build_model
from brats_seg.models.interface import (
    ActivationCheckpointing,
    TrainingOutput,
    as_output,
    set_activation_checkpointing,
)
from brats_seg.runtime.device import Device
from brats_seg.training.accumulation import MemoryMode
from brats_seg.training.losses import build_criterion
from brats_seg.training.memory_plan import Footprint, predicted_bytes

CPU = torch.device("cpu")
FP32 = Device(torch_device=CPU)
BF16 = Device(torch_device=CPU, autocast_dtype=torch.bfloat16)
SMALL = ["model.widths=[8, 12, 16]", "training.effective_batch=1"]
LARGEST = (32, 40, 32)


def settings(*assignments: str) -> Config:
    return load_config(assignments=[*SMALL, *assignments])


def footprint_of(config: Config, network: nn.Module | None = None) -> Footprint:
    network = network or build_model(config.model, LARGEST)
    return Footprint(network, build_criterion(config.loss), config, CPU)


def mean_of_output(output: Tensor | TrainingOutput, target: Tensor) -> Tensor:
    return as_output(output).logits[0].mean()


def chain(n_hidden: int) -> nn.Module:
    """1x1x1 convolutions with ten channels between them; each keeps its input."""
    middle = [nn.Conv3d(10, 10, 1) for _ in range(n_hidden - 1)]
    return nn.Sequential(nn.Conv3d(4, 10, 1), *middle, nn.Conv3d(10, 3, 1))


@pytest.mark.parametrize("n_hidden", [1, 2, 5])
def test_a_chain_takes_what_it_takes_by_hand(n_hidden: int) -> None:
    """Bytes per voxel at the peak, in the backward pass of the last convolution."""
    n_voxels = 40**3
    sample = 4 * 2 + 3 * 1
    # as float32 on the device
    image, target = 4 * 4, 3 * 4
    hidden = 10 * 4 * n_hidden
    output, by_output, by_hidden = 3 * 4, 3 * 4, 10 * 4
    expected = (sample + image + target + hidden + output + by_output + by_hidden) * n_voxels

    footprint = Footprint(chain(n_hidden), mean_of_output, settings(), CPU)
    counted = footprint.counted_bytes((40, 40, 40), MemoryMode(micro_batch=1), FP32)

    # and the weights, of which there are a few hundred
    assert expected < counted < expected + 20_000


def test_the_count_forgets_what_is_freed() -> None:
    """The control of the test above: without a gradient no activation is kept."""
    counts = []
    for n_hidden in (2, 6):
        network = chain(n_hidden).requires_grad_(False)
        network.append(nn.Conv3d(3, 3, 1))
        footprint = Footprint(network, mean_of_output, settings(), CPU)
        counts.append(footprint.counted_bytes((40, 40, 40), MemoryMode(micro_batch=1), FP32))

    assert counts[1] - counts[0] < 20_000


@pytest.mark.parametrize(
    ("assignments", "n_kept"),
    [
        (["optimizer.name=adamw"], 4),
        (["optimizer.name=adamw", "optimizer.ema=0.9"], 5),
        (["optimizer.name=muon"], 3),
        (["optimizer.name=sgd"], 3),
    ],
)
def test_the_optimizer_and_the_average_are_counted(assignments: list[str], n_kept: int) -> None:
    """Weights, gradients, two moments or one, average: each as large as the weights."""
    network = nn.Conv3d(4, 8, 25, bias=False)
    weights = 4 * 8 * 25**3 * 4

    footprint = footprint_of(settings(*assignments), network)

    # between two updates there are no gradients
    assert footprint._live.now == pytest.approx((n_kept - 1) * weights, rel=0.001)


@pytest.mark.parametrize("device", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "mode", [ActivationCheckpointing.NONE, ActivationCheckpointing.TOP, ActivationCheckpointing.ALL]
)
def test_a_larger_patch_takes_more(device: Device, mode: ActivationCheckpointing) -> None:
    footprint = footprint_of(settings())
    sizes = [(16, 16, 16), (16, 24, 16), (24, 24, 24), (32, 32, 32), LARGEST]

    counts = [
        footprint.counted_bytes(size, MemoryMode(micro_batch=1, checkpointing=mode), device)
        for size in sizes
    ]

    assert counts == sorted(set(counts))


@pytest.mark.parametrize("device", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["unet", "notebook", "dynunet", "segresnet"])
def test_more_checkpointing_takes_less(name: str, device: Device) -> None:
    footprint = footprint_of(settings(f"model.name={name}"))
    modes = (ActivationCheckpointing.NONE, ActivationCheckpointing.TOP, ActivationCheckpointing.ALL)

    none, top, every = (
        footprint.counted_bytes(LARGEST, MemoryMode(micro_batch=1, checkpointing=mode), device)
        for mode in modes
    )

    assert none > top >= every


def test_half_precision_takes_less() -> None:
    footprint = footprint_of(settings())

    in_float32, in_half = (
        footprint.counted_bytes(LARGEST, MemoryMode(micro_batch=1), device)
        for device in (FP32, BF16)
    )

    assert in_half < 0.75 * in_float32


def test_a_larger_micro_batch_takes_more_and_a_second_one_holds_gradients() -> None:
    footprint = footprint_of(settings("training.effective_batch=2"))
    alone = footprint_of(settings())

    one, both = (
        footprint.counted_bytes((16, 16, 16), MemoryMode(micro_batch=n), FP32) for n in (1, 2)
    )

    assert one > alone.counted_bytes((16, 16, 16), MemoryMode(micro_batch=1), FP32)
    assert footprint.counted_bytes(LARGEST, MemoryMode(micro_batch=2), FP32) > both


def test_counting_leaves_network_and_random_state_alone() -> None:
    config = settings("optimizer.ema=0.9")
    network = build_model(config.model, LARGEST)
    set_activation_checkpointing(network, ActivationCheckpointing.TOP)
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()

    footprint = footprint_of(config, network)
    footprint.counted_bytes(
        LARGEST, MemoryMode(micro_batch=1, checkpointing=ActivationCheckpointing.ALL), BF16
    )

    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], now) for name, now in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert network.checkpointing is ActivationCheckpointing.TOP


def test_a_network_that_looks_at_values_is_refused() -> None:
    class Looks(nn.Conv3d):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(image / float(image.max()))

    footprint = footprint_of(settings(), Looks(4, 3, 1))

    with pytest.raises(ConfigError, match="needs values and not only sizes"):
        footprint.counted_bytes((16, 16, 16), MemoryMode(micro_batch=1), FP32)


def test_more_is_to_be_expected_than_was_counted() -> None:
    for kind in ("cpu", "cuda", "mps"):
        assert predicted_bytes(2**30, torch.device(kind)) > 2**30
