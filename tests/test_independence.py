"""Test that layers which mix patches or change in a pass are found, and no others are refused."""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from brats_seg.config import ModelConfig
from brats_seg.errors import ConfigError
from brats_seg.models.build import build_model
from brats_seg.runtime.device import Device
from brats_seg.training.independence import PatchIndependence, ReplayError, check_replay
from tests.training_builders import same

CPU = Device(torch_device=torch.device("cpu"))
IN_HALF = Device(torch_device=torch.device("cpu"), autocast_dtype=torch.bfloat16)


def ask(network: nn.Module, size: int = 8, device: Device = CPU) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 4, size, size, size, generator=generator)
    PatchIndependence(network).check(image, device)


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, features: Tensor) -> Tensor:
        return self.function(features)


class Counts(nn.Module):
    """Counts passes or patches in an attribute or a buffer, and may compute with the count."""

    def __init__(self, *, in_buffer: bool = True, patches: bool = False, used: float = 0) -> None:
        super().__init__()
        self.patches, self.used = patches, used
        if in_buffer:
            self.register_buffer("n", torch.zeros(()))
        else:
            self.n = 0

    def forward(self, features: Tensor) -> Tensor:
        self.n += len(features) if self.patches else 1
        return features * (1 + self.n) if self.used else features


def mean_over_batch(features: Tensor) -> Tensor:
    return features - features.mean(0, keepdim=True)


def numpy_noise(features: Tensor) -> Tensor:
    return features + torch.from_numpy(np.random.rand(*features.shape)).to(features)  # noqa: NPY002


MIXED = "another output beside another patch: it mixes them"
IN_A_PASS = "another output in another pass"

FAULTS = {
    "batch norm": (lambda: nn.BatchNorm3d(6), MIXED),
    "batch norm of the batch": (lambda: nn.BatchNorm3d(6, track_running_stats=False), MIXED),
    "mean over the batch": (lambda: Layer(mean_over_batch), MIXED),
    "largest of the batch": (lambda: Layer(lambda x: x / x.abs().amax()), MIXED),
    "detached mean": (lambda: Layer(lambda x: x - x.detach().mean(0)), MIXED),
    "swapped patches": (lambda: Layer(lambda x: x.flip(0)), MIXED),
    "number of patches": (lambda: Layer(lambda x: x / len(x)), "beside another patch than alone"),
    "counter": (lambda: Counts(in_buffer=False, used=True), IN_A_PASS),
    "counter in a buffer": (lambda: Counts(used=True), IN_A_PASS),
    "numpy noise": (lambda: Layer(numpy_noise), IN_A_PASS),
    "quiet counter": (lambda: Counts(), "changes its buffer 'n'"),
    "running statistics": (
        lambda: nn.InstanceNorm3d(6, track_running_stats=True),
        "changes its buffer 'running_mean'",
    ),
}


def around(layer: nn.Module, *, last_is_zero: bool = False) -> nn.Module:
    torch.manual_seed(0)
    last = nn.Conv3d(6, 3, 1)
    if last_is_zero:
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    inner = nn.Sequential(nn.LeakyReLU(inplace=True), layer, nn.LeakyReLU(inplace=True))
    return nn.Sequential(nn.Conv3d(4, 6, 3, padding=1), inner, last)


@pytest.mark.parametrize("last_is_zero", [False, True])
@pytest.mark.parametrize("device", [CPU, IN_HALF])
@pytest.mark.parametrize("name", FAULTS)
def test_layers_over_the_batch_are_refused(name: str, device: Device, last_is_zero: bool) -> None:
    make, message = FAULTS[name]
    layer = make()
    network = around(layer, last_is_zero=last_is_zero)
    with pytest.raises(ConfigError, match=rf"the layer '1\.1' \({type(layer).__name__}\).*") as e:
        ask(network, device=device)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (spectral_norm, r"'1\.1' \(Conv3d\)"),
        (parametrizations.spectral_norm, r"'1\.1\.parametrizations\.weight\.0' \(_Sp"),
    ],
)
def test_spectral_norm_must_be_frozen(make: Callable[[nn.Module], nn.Module], layer: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        norm = make(nn.Conv3d(6, 6, 1))
        for _ in range(100 * (seed % 2)):
            norm(torch.zeros(1, 6, 1, 1, 1))
        network = nn.Sequential(nn.Conv3d(4, 6, 1), nn.Sequential(nn.ReLU(), norm))
        with pytest.raises(ConfigError, match=f"the layer {layer}"):
            ask(network)
        ask(network.eval())


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(4, 6, 1), nn.Conv3d(6, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.last(mean_over_batch(self.first(image)))


def test_mixing_between_layers_is_attributed_to_the_network() -> None:
    """A patch of zeros suffices for the check."""
    with pytest.raises(ConfigError, match=r"the network \(Mixing\) .* mixes them"):
        PatchIndependence(Mixing()).check(torch.zeros(1, 4, 8, 8, 8), CPU)
    with pytest.raises(ConfigError, match=r"the layer '0' \(Mixing\) .* mixes them"):
        ask(nn.Sequential(Mixing(), nn.ReLU()))


RIGHT = {
    "frozen batch norm": lambda: nn.BatchNorm3d(6).eval(),
    "instance norm": lambda: nn.InstanceNorm3d(6, affine=True),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "layer norm": lambda: nn.LayerNorm(8),
    "dropout": lambda: nn.Dropout(0.5),
    "dropout of channels": lambda: nn.Dropout3d(0.5),
    "random slopes": lambda: nn.RReLU(),
    "noise": lambda: Layer(lambda x: x + torch.randn_like(x)),
    "noise of its own shape": lambda: Layer(lambda x: x * torch.rand(len(x), 6, 1, 1, 1)),
    "stochastic depth": lambda: Layer(lambda x: x * (torch.rand(()) > 0.5)),
    "patches counted": lambda: Counts(patches=True),
    "channels first": lambda: Layer(lambda x: (x.transpose(0, 1) * 2).transpose(0, 1)),
}


@pytest.mark.parametrize("device", [CPU, IN_HALF])
@pytest.mark.parametrize("name", RIGHT)
def test_layers_that_take_each_patch_by_itself_are_accepted(name: str, device: Device) -> None:
    for seed in range(5):
        network = around(RIGHT[name]())
        torch.manual_seed(seed)
        ask(network, device=device)


def test_a_network_for_patches_of_one_size_is_probed_with_whole_ones() -> None:
    whole = Layer(lambda x: x.view(-1, 6, 8, 8, 8))
    ask(around(nn.Sequential(whole, nn.InstanceNorm3d(6))))
    with pytest.raises(ConfigError, match="BatchNorm3d"):
        ask(around(nn.Sequential(whole, nn.BatchNorm3d(6))))
    # of the half of two voxels, batch norm takes no patch alone
    with pytest.raises(ConfigError, match=rf"BatchNorm3d.* {MIXED}"):
        ask(around(nn.BatchNorm3d(6)), size=2)


@pytest.mark.parametrize(
    "last",
    [
        lambda x: x.view(1, 3, 8, 8, 8),
        lambda x: torch.testing.assert_close(len(x), 1) or x,
        lambda x: (x, torch.ones(7, 4)),
    ],
)
def test_a_network_for_one_patch_and_outputs_without_a_row_for_each_are_accepted(last) -> None:
    ask(nn.Sequential(nn.Conv3d(4, 3, 1), Layer(last)))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 16) for name in ("unet", "notebook", "segresnet", "dynunet", "autoencoder")),
        pytest.param("swin-unetr", 64, marks=pytest.mark.slow),
    ],
)
def test_the_networks_of_the_settings_are_accepted(name: str, size: int) -> None:
    config = ModelConfig.model_validate({"name": name, "widths": (4, 6, 8)})
    torch.manual_seed(0)
    ask(build_model(config, (size, size, size)), size)


def test_the_check_changes_neither_weights_nor_buffers_nor_random_state() -> None:
    network = around(nn.Sequential(Counts(patches=True), nn.Dropout(0.5)), last_is_zero=True)
    before, random_state = deepcopy(network.state_dict()), torch.get_rng_state()
    ask(network)
    assert same(network.state_dict(), before)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in network.parameters())
    # a layer that is no longer frozen is asked again
    network = around(nn.BatchNorm3d(6).eval())
    independence, image = PatchIndependence(network), torch.randn(1, 4, 8, 8, 8)
    independence.check(image, CPU)
    network.train()
    with pytest.raises(ConfigError, match="BatchNorm3d"):
        independence.check(image, CPU)


def test_a_run_outlives_running_out_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    def full(features: Tensor) -> Tensor:
        if len(features) > 1:
            raise torch.OutOfMemoryError
        return features

    ask(around(Layer(full)))
    assert "memory ran out before it was clear" in caplog.text


def test_two_passes_that_differ_are_noticed_in_any_precision() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        first = torch.linspace(-1, 1, 99).to(dtype)
        rounded = first * (1 + 2 * torch.finfo(dtype).eps)
        check_replay([first, torch.arange(3)], [rounded, torch.arange(3)])
        with pytest.raises(ReplayError, match="another output for the same micro-batch"):
            check_replay([first], [first * 1.2])
