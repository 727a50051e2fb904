"""Three ways to make a gradient: each is what it says."""

import pytest
import torch
from torch import Tensor, nn

from brats_seg.runtime.device import Device
from brats_seg.training.certificate import (
    Backward,
    exact,
    gradient_of,
    ordinary,
    phantom_patches,
    whole,
)
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.losses import BatchDiceBce, DiceBce

CPU = Device(torch_device=torch.device("cpu"))


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(4, 6, 3, padding=1), nn.Tanh(), *layers, nn.Conv3d(6, 3, 1)
    ).double()


def window(n_patches: int = 3) -> list[MicroBatch]:
    patches = phantom_patches(n_patches, (6, 6, 6))
    return [
        MicroBatch(image[None].double(), target[None].double())
        for image, target in zip(*patches, strict=True)
    ]


def by_differences(model: nn.Module, parts: list[MicroBatch]) -> Tensor:
    """The slow oracle: batch Dice + BCE by hand, its derivative by central differences."""

    def loss() -> float:
        with torch.no_grad():
            logits = torch.cat([model(part.image) for part in parts])
        target = torch.cat([part.target for part in parts])
        probabilities = logits.sigmoid()
        voxels = (0, 2, 3, 4)
        both = (probabilities * target).sum(voxels)
        dice = (2 * both + 1) / (probabilities.sum(voxels) + target.sum(voxels) + 1)
        bce = -(target * probabilities.log() + (1 - target) * (1 - probabilities).log())
        return float((1 - dice).mean() + bce.mean())

    derivatives = []
    for parameter in model.parameters():
        flat = parameter.detach().view(-1)
        for place in range(len(flat)):
            value = float(flat[place])
            flat[place] = value + 1e-6
            above = loss()
            flat[place] = value - 1e-6
            derivatives.append((above - loss()) / 2e-6)
            flat[place] = value
    return torch.tensor(derivatives, dtype=torch.float64)


@pytest.mark.parametrize("backward", [whole, exact])
def test_whole_and_exact_are_the_derivative_of_the_batch_loss(backward: Backward) -> None:
    model = network()
    found = gradient_of(backward, model, BatchDiceBce(), window(), CPU)

    assert torch.allclose(found, by_differences(model, window()), atol=1e-8)


def test_ordinary_is_the_mean_of_the_micro_batches_gradients() -> None:
    model, parts = network(), window()
    found = gradient_of(ordinary, model, BatchDiceBce(), parts, CPU)

    each = [gradient_of(whole, model, BatchDiceBce(), [part], CPU) for part in parts]

    assert torch.allclose(found, torch.stack(each).mean(0), rtol=1e-12)


@pytest.mark.parametrize("criterion", [DiceBce(), BatchDiceBce()])
def test_random_layers_draw_alike_in_every_way(criterion: nn.Module) -> None:
    model = network(nn.Dropout3d(0.5))
    state = torch.get_rng_state()

    expected = gradient_of(whole, model, criterion, window(), CPU)
    found = gradient_of(exact, model, criterion, window(), CPU)

    assert float((found - expected).norm() / expected.norm()) <= 1e-12
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("backward", [whole, exact, ordinary])
def test_the_loss_scale_of_float16_is_taken_out_again(backward: Backward) -> None:
    in_float16 = Device(torch_device=torch.device("cpu"), autocast_dtype=torch.float16)
    model = network().float()
    parts = [MicroBatch(part.image.float(), part.target.float()) for part in window()]

    found = gradient_of(backward, model, DiceBce(), parts, in_float16)
    expected = gradient_of(backward, model, DiceBce(), parts, CPU)

    assert float((found - expected).norm() / expected.norm()) <= 0.01


def test_a_parameter_that_takes_no_part_counts_as_zero() -> None:
    model = network()
    model.register_parameter("idle", nn.Parameter(torch.ones(5, dtype=torch.float64)))

    # the module's own parameters come first
    assert not gradient_of(exact, model, DiceBce(), window(), CPU)[:5].any()
