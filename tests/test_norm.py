"""Instance norm and LeakyReLU in one layer that keeps one tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from brats_seg.errors import ConfigError
from brats_seg.models import norm
from brats_seg.models.norm import SMALLEST_WEIGHT, ActivatedNorm, check_in_place
from tests.training_builders import saved_bytes

SLOPE = 0.01
SHAPE = (2, 5, 7, 6, 4)
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative errors of gradients."""


def make_layer(n_channels: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A layer for features of that type; half precision has weights in float32."""
    generator = torch.Generator().manual_seed(0)
    layer = ActivatedNorm(n_channels, SLOPE)
    layer.to(torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(n_channels, generator=generator) + 0.5)
        layer.weight[0] *= -1
        layer.bias.copy_(torch.randn(n_channels, generator=generator) * 0.3)
    return layer


def stock_of(layer: nn.Module) -> nn.Sequential:
    stock = nn.InstanceNorm3d(len(layer.weight), affine=True, dtype=layer.weight.dtype)
    stock.load_state_dict(layer.state_dict())
    return nn.Sequential(stock, nn.LeakyReLU(SLOPE, inplace=True))


def random_features(shape: tuple[int, ...] = SHAPE, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 2


def gradients(layer: nn.Module, features: Tensor) -> tuple[Tensor, ...]:
    features = features.clone().requires_grad_()
    output = layer(features.clone())
    by_output = random_features(tuple(output.shape), seed=2).to(output.dtype)
    return torch.autograd.grad(output, (features, *layer.parameters()), by_output)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES.items())
def test_values_and_gradients_are_stock(dtype, tolerance, memory_format, monkeypatch):
    """Values bit for bit; large features channels last are computed in parts of 32 voxels."""
    layer = make_layer(dtype=dtype)
    features = random_features().to(dtype, memory_format=memory_format)
    output = layer(features.clone())
    whole, stock = gradients(layer, features), gradients(stock_of(layer), features)
    assert output.dtype == dtype
    if memory_format == torch.contiguous_format:
        assert torch.equal(output, stock_of(layer)(features))
    assert [gradient.dtype for gradient in whole] == [gradient.dtype for gradient in stock]
    assert max(map(relative_error, whole, stock)) < tolerance
    if memory_format == torch.channels_last_3d:
        monkeypatch.setattr(norm, "_NUMBERS_TO_SPLIT", 1)
        monkeypatch.setattr(norm, "_NUMBERS_AT_A_TIME", 5 * 32)
        parts = gradients(layer, features)
        assert not torch.equal(parts[0], whole[0]) or dtype == torch.float64
        assert parts[0].is_contiguous(memory_format=torch.channels_last_3d)
        most = 1e-5 if dtype == torch.float32 else tolerance
        assert max(map(relative_error, parts, stock)) < most
        assert max(map(relative_error, parts, whole)) < most


@pytest.mark.parametrize("at_a_time", [1, 400, 10**9])
def test_groups_change_no_gradient(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, features = make_layer(), random_features().float()
    before = gradients(layer, features)
    monkeypatch.setattr(norm, "_VOXELS_AT_A_TIME", at_a_time)
    after = gradients(layer, features)
    assert all(map(torch.equal, before, after))


def test_keeps_one_tensor_where_the_stock_layers_keep_two() -> None:
    """The input of the first convolution counts once in both."""

    def chain(make: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
        pairs = ((nn.Conv3d(5, 5, 3, padding=1), make(make_layer())) for _ in range(4))
        return nn.Sequential(*[layer for pair in pairs for layer in pair])

    image = torch.randn(1, 5, 32, 32, 32)
    n_bytes = image.numel() * image.itemsize
    assert saved_bytes(chain(lambda ours: ours), image) / n_bytes == pytest.approx(1 + 4, abs=0.02)
    assert saved_bytes(chain(stock_of), image) / n_bytes == pytest.approx(1 + 4 + 4, abs=0.02)


def test_the_output_lies_where_the_input_lay_and_is_left_alone() -> None:
    """A retained graph can be used again; what the graph cannot do is refused."""
    layer, features = make_layer(dtype=torch.float64), random_features().requires_grad_()
    inner = features.clone()
    output = layer(inner)
    before = output.detach().clone()
    (first,) = torch.autograd.grad(output.square().sum(), features, create_graph=True)
    (second,) = torch.autograd.grad(output.square().sum(), features, retain_graph=True)
    assert output.data_ptr() == inner.data_ptr()
    assert torch.equal(output, before)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward(retain_graph=True)
    output += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_weight_near_zero_counts_as_the_smallest_of_its_sign() -> None:
    """A channel of one value has the gradient of the stock layers too."""
    layer = make_layer(4, dtype=torch.float64)
    stock = stock_of(layer)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.0, 1e-9, -1e-9, -0.5]).double())
        used = [SMALLEST_WEIGHT, SMALLEST_WEIGHT, -SMALLEST_WEIGHT, -0.5]
        stock[0].weight.copy_(torch.tensor(used, dtype=torch.float64))
    features = random_features((2, 4, 5, 4, 3))
    features[0, 3] = 4.0
    assert torch.equal(layer(features.clone()), stock(features))
    for ours, theirs in zip(gradients(layer, features), gradients(stock, features), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
def test_the_smallest_weight_leaves_a_usable_gradient(dtype: torch.dtype, tolerance: float) -> None:
    """The bias is a hundred times as large, so that inverting the layer rounds most."""
    layer = make_layer(4)
    # sums in bfloat16 would stop growing at a few hundred
    shifted = (random_features((1, 4, 16, 16, 16)) + 50).to(dtype)
    exact = stock_of(layer).double()(shifted.double())
    assert relative_error(layer(shifted.clone()), exact) < 4e-3
    with torch.no_grad():
        layer.weight.fill_(SMALLEST_WEIGHT)
        layer.bias.fill_(0.1)
    features = random_features((1, 4, 16, 16, 16)).to(dtype)
    exact = gradients(stock_of(layer).double(), features.double())
    assert max(map(relative_error, gradients(layer, features), exact)) < tolerance


def block(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(4, 5, 3, bias=False), layer, nn.Conv3d(5, 3, 1))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_gives_what_the_stock_layers_give(inside: bool) -> None:
    """The backward pass may run under autocast or not."""
    image, found = random_features((2, 4, 9, 8, 8)).float(), []
    for network in (block(make_layer()), block(stock_of(make_layer()))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = network(image)
            loss = output.float().square().sum()
            with torch.autocast("cpu", enabled=inside, dtype=torch.bfloat16):
                loss.backward()
        found.append((output, [p.grad for p in network.parameters()]))
    (ours, our_gradients), (theirs, their_gradients) = found
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    assert max(map(relative_error, our_gradients, their_gradients)) < 1e-2


def test_a_single_voxel_is_refused() -> None:
    for layer in (make_layer(), make_layer().eval()):
        with pytest.raises(ConfigError, match=r"\(2, 5, 1, 1, 1\).*expected two voxels at least"):
            layer(torch.randn(2, 5, 1, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize(("dtype", "tolerance"), list(TOLERANCES.items())[1:])
def test_a_gpu_gives_what_the_stock_layers_give(dtype, tolerance, memory_format):
    layer, tolerance = make_layer().cuda(), max(tolerance, 1e-5)
    features = random_features((2, 5, 33, 20, 18)).cuda().to(dtype, memory_format=memory_format)
    with torch.no_grad():
        assert relative_error(layer(features.clone()), stock_of(layer)(features)) < tolerance
    ours, theirs = gradients(layer, features), gradients(stock_of(layer), features)
    assert max(map(relative_error, ours, theirs)) < tolerance


def wrong(features: Tensor, *others: object) -> Tensor:
    """Return what a kernel computes whose output overwrites its input too early."""
    return features * 2


def missing(*inputs: object) -> Tensor:
    raise NotImplementedError("no kernel")


@pytest.mark.parametrize("kernel", [wrong, missing])
def test_a_device_that_cannot_compute_it_gets_the_stock_layers(kernel, monkeypatch, caplog):
    network = nn.Sequential(nn.Conv3d(1, 3, 1), ActivatedNorm(3, slope=0.1))
    image = torch.randn(1, 1, 4, 4, 4)
    expected = network(image)
    check_in_place(network)
    assert network[1].in_place
    monkeypatch.setattr(norm, "_overwrite", kernel)
    check_in_place(network)
    assert not network[1].in_place
    assert "as in stock torch" in caplog.text
    assert torch.allclose(network(image), expected, atol=1e-6)
