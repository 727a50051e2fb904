"""The convolution of one small image on a CPU, and the memory format of features."""

import os
import sys
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from brats_seg.models.convolution import (
    Convolution,
    convolve,
    convolve_upsampled,
    cpu_as_gpu,
    fast_format,
    is_slow,
    use_slabs,
)
from tests.builders import ROOT, start

Case = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]

CASES: list[Case] = [
    # image, kernel, stride, padding
    ((1, 4, 16, 16, 16), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ((1, 5, 7, 9, 11), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ((1, 4, 12, 10, 8), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    ((1, 4, 13, 11, 9), (3, 3, 3), (2, 1, 2), (1, 1, 1)),
    ((1, 3, 9, 8, 8), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    ((1, 3, 10, 8, 8), (3, 1, 1), (3, 1, 1), (1, 0, 0)),
    ((1, 3, 1, 8, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ((1, 20, 32, 32, 4), (3, 3, 3), (1, 1, 1), (1, 1, 1)),  # C * X * Y at the limit
]
FAST: list[Case] = [
    ((1, 21, 32, 32, 4), (3, 3, 3), (1, 1, 1), (1, 1, 1)),  # above the limit
    ((2, 4, 8, 8, 8), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ((1, 4, 8, 8, 8), (1, 4, 4), (1, 1, 1), (0, 2, 2)),
]
POINTS: list[Case] = [
    ((1, 6, 9, 8, 7), (1, 1, 1), (1, 1, 1), (0, 0, 0)),
    ((2, 64, 24, 24, 2), (1, 1, 1), (1, 1, 1), (0, 0, 0)),
]


def tensors(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    image, kernel, *_ = case
    generator = torch.Generator().manual_seed(0)
    sizes = image, (5, image[1], *kernel), (5,)
    made = (torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
    image_, weight, bias = (tensor.requires_grad_() for tensor in made)
    return image_, weight, bias


def kernels(
    function: Callable[..., Tensor], image: Tensor, weight: Tensor, *strides: tuple[int, ...]
) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        function(image, weight, None, *strides)
    return {event.key for event in measured.key_averages()}


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("case", CASES + FAST + POINTS)
def test_slabs_products_and_gradients_equal_torch(case, layout, dtype, capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    image, weight, bias = tensors(case, dtype)
    laid = image.contiguous(memory_format=layout)
    expected = functional.conv3d(laid, weight, bias, case[2], case[3])
    output = convolve(laid, weight, bias, case[2], case[3])
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    found = (output, *torch.autograd.grad(output, (image, weight, bias), upstream))
    wanted = (expected, *torch.autograd.grad(expected, (image, weight, bias), upstream))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        if dtype is torch.float64:  # computed by torch itself
            assert torch.equal(ours, theirs)
        assert (ours - theirs).double().norm() / theirs.double().norm() < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2", reason="the kernels of another CPU"
)
def test_no_gradient_of_weights_copies_neighbourhoods_on_avx2() -> None:
    """Beside the convolution of torch, which does: a torch that needs no zeros is noticed here."""
    program = (
        "import sys, torch; from brats_seg.models.convolution import convolve;"
        "image, weight = torch.ones(1, 8, 60, 60, 60), torch.ones(8, 8, 3, 3, 3, requires_grad=True);"
        "image = image.contiguous(memory_format=torch.channels_last_3d);"
        "function = {'ours': convolve, 'torch': torch.nn.functional.conv3d}[sys.argv[1]];"
        "function(image, weight, None, (1, 1, 1), (1, 1, 1)).sum().backward()"
    )
    chosen = {}
    for name in ("ours", "torch"):
        environment = os.environ | {"ONEDNN_VERBOSE": "1"}
        done = start([sys.executable, "-c", program, name], ROOT, environment)
        assert done.returncode == 0, done.stderr
        lines = [line.split(",") for line in done.stdout.splitlines() if "backward_weights" in line]
        chosen[name] = [line[6] for line in lines]
    assert chosen == {"ours": ["jit:avx2"], "torch": ["x64:gemm:jit"]}


def test_an_image_without_a_gradient_is_convolved_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first layer has it, and in evaluation, where torch convolves by itself."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    image, weight, bias = tensors(FAST[0])
    output = convolve(image.detach(), weight, bias)
    assert type(output.grad_fn).__name__ == "_ConvolveBackward"
    expected = torch.autograd.grad(functional.conv3d(image, weight, bias, padding=1).sum(), weight)
    assert torch.allclose(torch.autograd.grad(output.sum(), weight)[0], expected[0], atol=1e-3)
    with torch.no_grad():
        assert torch.equal(
            convolve(image, weight, bias), functional.conv3d(image, weight, bias, padding=1)
        )


def test_the_limit_is_where_torch_changes_its_kernel() -> None:
    """A torch that no longer needs slabs, or needs them elsewhere, is noticed here."""
    for case in CASES + FAST:
        image, weight, _ = tensors(case)
        is_slow_in_torch = "aten::slow_conv3d_forward" in kernels(
            functional.conv3d, image, weight, *case[2:]
        )
        # a stride selects oneDNN in no torch that is known
        assert is_slow(image, weight) == is_slow_in_torch, case


def test_single_voxels_are_a_product_where_channels_are_last() -> None:
    image, weight, _ = tensors(POINTS[0])
    rows = image.contiguous(memory_format=torch.channels_last_3d)
    slow, once, none = "aten::slow_conv3d_forward", (1, 1, 1), (0, 0, 0)
    assert slow in kernels(functional.conv3d, rows, weight, once, none)
    assert slow not in kernels(convolve, rows, weight, once, none)
    assert slow in kernels(convolve, image, weight, once, none)
    for stride, padding in (((2, 1, 1), 0), ((1, 1, 1), 1)):
        expected = functional.conv3d(rows, weight, None, stride, padding)
        assert torch.equal(convolve(rows, weight, None, stride, (padding,) * 3), expected)


def test_other_types_autocast_and_export_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    image, weight, _ = tensors(CASES[0])
    assert is_slow(image, weight)
    assert not is_slow(image.double(), weight.double())
    assert not is_slow(image.bfloat16(), weight.bfloat16())
    assert not is_slow(image, weight[:, :, 1:2, 1:2, 1:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_slow(image, weight)
    with cpu_as_gpu():
        assert not is_slow(image, weight)
    assert is_slow(image, weight)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert not is_slow(image, weight)


def test_a_network_built_elsewhere_gets_slabs_where_its_layers_are_plain() -> None:
    plain, grouped, dilated = (
        nn.Conv3d(4, 4, 3, padding=1),
        nn.Conv3d(4, 4, 3, groups=2),
        nn.Conv3d(4, 4, 3, dilation=2),
    )
    network = nn.Sequential(plain, nn.ReLU(), grouped, dilated)
    image = torch.randn(1, 4, 12, 12, 12)
    before, weights = network(image), deepcopy(network.state_dict())
    use_slabs(network)
    assert isinstance(plain, Convolution)
    assert not any(isinstance(layer, Convolution) for layer in (grouped, dilated))
    assert torch.allclose(network(image), before, atol=1e-6)
    assert all(torch.equal(weights[name], value) for name, value in network.state_dict().items())
    assert torch.equal(deepcopy(network)(image), network(image))


@pytest.mark.parametrize(
    ("is_one", "stride", "layout", "dtype", "n_out"),
    [
        (True, 2, torch.channels_last_3d, torch.float32, 4),
        (False, 2, torch.contiguous_format, torch.float32, 4),
        (False, 2, torch.channels_last_3d, torch.float64, 4),
        (False, (2, 2, 1), torch.channels_last_3d, torch.float32, 4),
        # too many channels for their voxels
        (False, 2, torch.channels_last_3d, torch.float32, 16),
    ],
)
def test_upsampling_and_convolution_are_one_where_it_pays(is_one, stride, layout, dtype, n_out):
    torch.manual_seed(0)
    upsampling = nn.ConvTranspose3d(6, n_out, stride, stride).to(dtype)
    weight = torch.randn(n_out, n_out, 3, 3, 3, dtype=dtype, requires_grad=True)
    below = torch.randn(2, 6, 7, 8, 9, dtype=dtype, requires_grad=True)
    leaves = below, weight, *upsampling.parameters()
    exact = deepcopy(upsampling).double()
    expected = functional.conv3d(exact(below.double()), weight.double(), padding=1)
    other, upsampled = expected.contiguous(memory_format=layout), []
    upsampling.register_forward_hook(lambda *_: upsampled.append(1))
    found = convolve_upsampled(below, upsampling, weight, other.to(dtype))
    assert upsampled == [1] * (not is_one)
    assert found.stride() == other.stride() or not is_one
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (below, weight, *exact.parameters()), upstream)
    gradients = torch.autograd.grad(found, leaves, upstream.to(dtype))
    for ours, theirs in zip((found, *gradients), (expected, *wanted), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        convolve_upsampled(below, upsampling, weight, other.to(dtype))
    assert len(upsampled) == 2 - is_one


def test_large_images_are_computed_with_channels_last_on_a_cpu() -> None:
    assert fast_format(torch.empty(1, 4, 40, 40, 40)) is torch.contiguous_format
    assert fast_format(torch.empty(2, 4, 40, 40, 41)) is torch.channels_last_3d
    with cpu_as_gpu():
        assert fast_format(torch.empty(2, 4, 40, 40, 41)) is torch.contiguous_format
    assert fast_format(torch.empty(1, 4, 64, 64, 64, device="meta")) is torch.contiguous_format
