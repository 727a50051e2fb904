"""The default 3D U-Net."""

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import Tensor, nn
from torch.nn import functional

from brats_seg.interop.export import _as_dynunet
from brats_seg.models.interface import TrainingOutput
from brats_seg.models.unet import SMALLEST_AXIS, NotebookUNet, UNet, level_strides

Triple = tuple[int, int, int]


def make_unet(patch: Triple, widths: tuple[int, ...]) -> UNet:
    torch.manual_seed(0)
    strides = level_strides(patch, len(widths))
    return UNet(n_in=4, n_out=3, widths=widths[: len(strides)], strides=strides)


def random_images(n: int, shape: Triple) -> Tensor:
    return torch.randn(n, 4, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("patch", "n_levels", "expected"),
    [
        ((128, 128, 128), 6, [(1, 1, 1)] + 5 * [(2, 2, 2)]),
        ((127, 64, 64), 6, [(1, 1, 1)] + 4 * [(2, 2, 2)]),
        ((64, 64, 64), 6, [(1, 1, 1)] + 4 * [(2, 2, 2)]),
        ((32, 32, 32), 3, [(1, 1, 1)] + 2 * [(2, 2, 2)]),
        ((128, 64, 16), 5, [(1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 1), (2, 2, 1)]),
        ((128, 16, 4), 6, [(1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 1, 1), (2, 1, 1), (2, 1, 1)]),
        ((7, 4, 5), 6, [(1, 1, 1)]),
    ],
    ids=str,
)
def test_axes_are_halved_down_to_four(patch: Triple, n_levels: int, expected: list[Triple]) -> None:
    strides = level_strides(patch, n_levels)
    assert list(strides) == expected
    for axis, size in enumerate(patch):
        for stride in strides:
            size //= stride[axis]
        assert size >= SMALLEST_AXIS


def test_training_mode_gives_all_levels_but_the_two_lowest_finest_first() -> None:
    network = make_unet((64, 32, 16), (2, 2, 2, 2, 2))
    output = network(torch.zeros(1, 4, 64, 32, 16))
    assert isinstance(output, TrainingOutput)
    shapes = [tuple(logits.shape) for logits in output.logits]
    assert shapes == [(1, 3, 64, 32, 16), (1, 3, 32, 16, 8), (1, 3, 16, 8, 4)]


@pytest.mark.parametrize("patch", [(32, 32, 32), (32, 16, 8)], ids=str)
def test_equals_dynunet_of_monai_with_the_same_weights(patch: Triple) -> None:
    ours = make_unet(patch, (4, 6, 8, 8)).eval()
    theirs = _as_dynunet("unet", ours)
    assert isinstance(theirs, DynUNet)
    image = random_images(2, patch)
    with torch.no_grad():
        assert torch.allclose(ours(image), theirs.eval()(image), atol=1e-5)


@pytest.mark.parametrize("patch", [(32, 32, 32), (32, 16, 4), None], ids=str)
def test_every_parameter_learns(patch: Triple | None) -> None:
    network = make_notebook() if patch is None else make_unet(patch, (4, 5, 6, 7))
    output = network(random_images(1, patch or (16, 16, 16)))
    sum(logits.square().sum() for logits in output.logits).backward()
    learning = [p.grad is not None and bool(p.grad.any()) for p in network.parameters()]
    assert all(learning)


def make_notebook() -> NotebookUNet:
    torch.manual_seed(0)
    return NotebookUNet(n_in=4, n_out=3)


def described(network: NotebookUNet, image: Tensor) -> Tensor:
    def double_convolution(features: Tensor) -> Tensor:
        for _ in range(2):
            convolution, norm = next(convolutions), next(norms)
            features = functional.conv3d(features, convolution.weight, convolution.bias, padding=1)
            features = functional.group_norm(features, 8, norm.weight, norm.bias)
            features = features.clamp(min=0)
        return features

    convolutions = (m for m in network.modules() if isinstance(m, nn.Conv3d))
    norms = (m for m in network.modules() if isinstance(m, nn.GroupNorm))
    levels = [double_convolution(image)]
    for _ in range(4):
        levels.append(double_convolution(nn.MaxPool3d(2)(levels[-1])))
    features = levels.pop()
    while levels:
        skip = levels.pop()
        up = nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True)(features)
        padded = torch.zeros(*up.shape[:2], *skip.shape[2:])
        starts = [(a - b) // 2 for a, b in zip(skip.shape[2:], up.shape[2:], strict=True)]
        x, y, z = (slice(a, a + n) for a, n in zip(starts, up.shape[2:], strict=True))
        padded[:, :, x, y, z] = up
        features = double_convolution(torch.cat([skip, padded], dim=1))
    head = next(convolutions)
    return functional.conv3d(features, head.weight, head.bias)


@pytest.mark.parametrize("shape", [(16, 16, 16), (23, 31, 20)], ids=str)
def test_computes_what_the_notebook_describes(shape: Triple) -> None:
    network, image = make_notebook(), torch.randn(2, 4, *shape)
    with torch.no_grad():
        output, logits = network(image), network.eval()(image)
        assert torch.allclose(logits, described(network, image), atol=1e-5)
    assert type(logits) is Tensor
    assert isinstance(output, TrainingOutput)
    assert [torch.equal(trained, logits) for trained in output.logits] == [True]
    assert sum(p.numel() for p in network.parameters()) == 5_652_507
