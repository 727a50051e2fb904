"""Test what networks return, and activation checkpointing: recomputed or offloaded activations."""

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, nn

from brats_seg import build_model
from brats_seg.config import ModelConfig
from brats_seg.models.interface import (
    ActivationCheckpointing,
    as_output,
    set_activation_checkpointing,
    supported_checkpointing,
)
from tests.training_builders import same, saved_bytes

WIDTHS = (4, 6, 8)
NETWORKS = ("unet", "notebook", "dynunet", "segresnet")
IMAGE = torch.randn(2, 4, 16, 16, 16, generator=torch.Generator().manual_seed(1))
LOWER = [ActivationCheckpointing.TOP, ActivationCheckpointing.ALL, ActivationCheckpointing.HOST]


def make_network(name: str = "unet", edge: int = 16) -> nn.Module:
    torch.manual_seed(0)
    config = ModelConfig.model_validate({"name": name, "widths": WIDTHS})
    network = build_model(config, (edge, edge, edge))
    if name == "autoencoder":
        # its reconstructions start at the mean image, whatever the input is
        nn.init.normal_(network.head.weight)
    return network


def gradients(
    network: nn.Module, precision: torch.dtype = torch.float32, image: Tensor = IMAGE
) -> list[Tensor]:
    network.zero_grad()
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        loss = sum(logits.square().mean() for logits in as_output(network(image)).logits)
    loss.backward()
    found = [p.grad for p in network.parameters() if p.grad is not None]
    return [loss, *found, torch.rand(1)]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *product((*NETWORKS, "autoencoder"), LOWER),
        *(pytest.param("swin-unetr", mode, marks=pytest.mark.slow) for mode in LOWER[:2]),
    ],
)
def test_no_mode_changes_a_bit_of_the_gradient(name: str, mode: ActivationCheckpointing) -> None:
    is_large = name == "swin-unetr"
    network = make_network(name, 64 if is_large else 16)
    image = torch.randn(1, 4, 64, 32, 32) if is_large else IMAGE
    before = gradients(network, image=image)
    network.checkpointing = mode  # also the last one, which no fallback takes on a CPU
    assert same(before, gradients(network, image=image))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_random_layers_replay(precision: torch.dtype) -> None:
    network = make_network()
    # in the finest and the lowest level
    for level in (network.encoder[0], network.encoder[-1], network.decoder[0].level[1]):
        level.add_module("dropout", nn.Dropout(0.3))
    before = gradients(network, precision)
    for mode in LOWER:
        network.checkpointing = mode
        assert same(before, gradients(network, precision))
    # the negative control
    network.encoder[0].dropout.p = 0.31
    assert not same(before, gradients(network, precision))


@pytest.mark.parametrize("name", NETWORKS)
def test_each_mode_keeps_less_than_the_one_before(name: str) -> None:
    network = make_network(name)
    names, kept = list(network.state_dict()), []
    for mode in ActivationCheckpointing:
        network.checkpointing = mode  # the last one too: copies on the host are not the graph's
        kept.append(saved_bytes(network, IMAGE))
    assert all(more > less for more, less in pairwise(kept))
    assert list(network.state_dict()) == names
    set_activation_checkpointing(network, ActivationCheckpointing.NONE)
    assert saved_bytes(network, IMAGE) == kept[0]


def test_a_device_and_a_network_have_the_modes_that_they_support() -> None:
    network, plain = make_network(), nn.Conv3d(4, 3, 1)
    assert [mode.value for mode in supported_checkpointing(network)] == ["none", "top", "all"]
    assert supported_checkpointing(network.to("meta")) == list(ActivationCheckpointing)
    assert supported_checkpointing(plain) == [ActivationCheckpointing.NONE]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))])
def test_a_copy_has_its_own_mode(name: str, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """An averaged model is a copy, made before the first mode is taken."""
    network = make_network(name)
    copied = duplicate(network)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter *= 2
    before = gradients(copied)
    set_activation_checkpointing(network, ActivationCheckpointing.ALL)
    assert copied.checkpointing is ActivationCheckpointing.NONE
    assert all(map(torch.equal, before, gradients(copied)))
    assert not torch.equal(gradients(network)[0], before[0])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", LOWER)
def test_a_gpu_has_every_mode(mode: ActivationCheckpointing) -> None:
    network = make_network().cuda()
    image = IMAGE.cuda()
    found = []
    for taken in (ActivationCheckpointing.NONE, mode):
        set_activation_checkpointing(network, taken)
        network.zero_grad()
        network(image).logits[0].square().mean().backward()
        found.append([p.grad for p in network.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(*found, strict=True))
