"""The U-Net of the Kaggle notebook."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from brats_seg.models.interface import TrainingOutput
from brats_seg.models.notebook_unet import NotebookUNet


def make_notebook() -> NotebookUNet:
    torch.manual_seed(0)
    return NotebookUNet(n_in=4, n_out=3)


def test_has_as_many_parameters_as_the_notebook_s() -> None:
    assert sum(p.numel() for p in make_notebook().parameters()) == 5_652_507


def described(network: NotebookUNet, image: Tensor) -> Tensor:
    """The network as the notebook describes it, with the weights of `network`."""

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
def test_computes_what_the_notebook_describes(shape: tuple[int, int, int]) -> None:
    network = make_notebook().eval()
    image = torch.randn(2, 4, *shape)

    with torch.no_grad():
        assert torch.allclose(network(image), described(network, image), atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 16, 16), (17, 31, 20)], ids=str)
def test_any_size_from_sixteen_on_comes_back(shape: tuple[int, int, int]) -> None:
    network = make_notebook()
    image = torch.randn(1, 4, *shape)

    output = network(image)
    logits = network.eval()(image)

    assert isinstance(output, TrainingOutput)
    assert type(logits) is Tensor
    assert logits.shape == (1, 3, *shape)
    assert [torch.equal(trained, logits) for trained in output.logits] == [True]


def test_every_parameter_learns() -> None:
    network = make_notebook()

    network(torch.randn(1, 4, 16, 16, 16)).logits[0].square().sum().backward()

    assert all(p.grad is not None and p.grad.abs().any() for p in network.parameters())
