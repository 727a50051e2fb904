"""Test networks by name, and the patch sizes that they take."""

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import ModelConfig
from brats_seg.errors import ConfigError
from brats_seg.models import build
from brats_seg.models.interface import TrainingOutput

Triple = tuple[int, int, int]
SMALLEST_PATCHES = {
    "unet": (16, 16, 16),
    "notebook": (16, 16, 16),
    "segresnet": (8, 8, 8),
    "dynunet": (16, 16, 16),
    "swin-unetr": (64, 64, 64),
}


def config_of(name: str, widths: tuple[int, ...] = (4, 6, 8)) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "widths": widths})


@pytest.mark.parametrize("name", SMALLEST_PATCHES)
def test_every_name_builds_a_network_that_keeps_the_contract(name: str) -> None:
    patch = SMALLEST_PATCHES[name]
    shape = patch if name != "swin-unetr" else (64, 32, 32)  # the whole patch takes ten seconds
    network = build.build_model(config_of(name), patch)
    image = torch.randn(1, 4, *shape)
    output = network(image)
    with torch.inference_mode():
        logits = network.eval()(image)
    assert isinstance(output, TrainingOutput)
    assert output.logits[0].shape == (1, 3, *shape)
    assert output.logits[0].requires_grad
    assert type(logits) is Tensor
    assert logits.shape == (1, 3, *shape)
    assert (output.logits[0] < 0).any(), "probabilities instead of logits"
    multiple = build.size_multiple(config_of(name), patch)
    other = tuple(2 * n + m for n, m in zip(shape, multiple, strict=True))
    if name != "swin-unetr":
        with torch.inference_mode():
            assert network(torch.zeros(1, 4, *other)).shape == (1, 3, *other)


def test_the_default_network_has_the_shape_of_nnu_net_for_its_patch() -> None:
    network = build.build_model(ModelConfig(), (128, 128, 128))
    strides = [level[0].convolution.stride for level in network.encoder]
    widths = [level[1].convolution.out_channels for level in network.encoder]
    assert strides == [(1, 1, 1)] + 5 * [(2, 2, 2)]
    assert widths == [32, 64, 128, 256, 320, 320]
    assert len(network.heads) == 4
    # levels that the patch is too small for are left out
    small = build.build_model(ModelConfig(widths=(2, 3, 4, 5, 6, 7)), (32, 32, 16))
    assert [level[1].convolution.out_channels for level in small.encoder] == [2, 3, 4, 5]


WIDE = (32, 64, 128, 256, 320, 320)


@pytest.mark.parametrize(
    ("name", "widths", "patch", "message"),
    [
        ("unet", WIDE, (100, 128, 128), r"of 16x32x32, at least 4 .* 96x128x128 and 112x128x128\."),
        ("unet", WIDE, (2, 16, 16), r"patch\.size 2x16x16 .* Nearest: 4x16x16\."),
        ("dynunet", WIDE, (36, 64, 64), r"multiples of 8x16x16.*32x64x64 and 40x64x64"),
        ("dynunet", (4, 6), (32, 32, 32), r"'dynunet' has 2 levels; expected 3 at least"),
        ("dynunet", (4, 6, 8), (8, 8, 8), r"'dynunet' has 2 levels; expected 3 at least"),
        ("notebook", WIDE, (15, 16, 200), r"multiples of 1x1x1, at least 16.*Nearest: 16x16x200\."),
        ("segresnet", WIDE, (20, 24, 24), r"multiples of 8x8x8.*16x24x24 and 24x24x24"),
        ("swin-unetr", WIDE, (80, 64, 64), r"multiples of 32x32x32.*64x64x64 and 96x64x64"),
        ("swin-unetr", WIDE, (32, 64, 64), r"at least 64.*Nearest: 64x64x64\."),
    ],
)
def test_patches_must_fit(name: str, widths: tuple[int, ...], patch: Triple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build.build_model(config_of(name, widths), patch)


@pytest.mark.parametrize("name", SMALLEST_PATCHES)
def test_a_size_rounded_up_to_the_multiple_fits(name: str) -> None:
    config = config_of(name, (32, 64, 128, 256, 320, 320))
    for size in range(64, 300):
        multiple = build.size_multiple(config, (size, 96, 64))
        rounded = -(-size // multiple[0]) * multiple[0]
        build._check_patch(config, (rounded, 96, 64))


UNET = {"spatial_dims": 3, "in_channels": 4, "out_channels": 3}


def own(name: str, **arguments: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("monai.networks.nets.BasicUNet", {"features": [4, 4, 8, 8, 8, 4]}),
        ("monai.networks.nets.UNet", {"channels": [4, 8], "strides": [2]}),
        # its coarser levels are left out in training mode
        ("monai.networks.nets.SegResNetDS", {"init_filters": 8}),
    ],
)
def test_a_network_by_dotted_name_returns_logits(name: str, arguments: dict[str, object]) -> None:
    network = build.build_model(own(name, **UNET, **arguments), (32, 32, 32))
    image = torch.randn(1, 4, 32, 32, 32)
    output = network(image)
    with torch.inference_mode():
        logits = network.eval()(image)
    for found in (output, logits):
        assert type(found) is Tensor
        assert found.shape == (1, 3, 32, 32, 32)
    assert output.requires_grad


def build_small(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv3d(4, width, 3, padding=1), nn.Conv3d(width, 3, 1))


def build_undeclared(width: int = 4):
    return build_small(width)


def build_mistyped() -> "nn.Modul":  # type: ignore[name-defined]
    return build_small()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nowhere.Net", {}, r"model\.name 'nowhere\.Net' cannot be imported: .*No module named"),
        ("torch.nn.Nowhere", {}, r"cannot be imported: AttributeError.*PYTHONPATH"),
        (
            "monai.networks.nets.UNet",
            {"spatial_dims": 3},
            "cannot be built .*: TypeError: .*4 chan",
        ),
        # a checkpoint from elsewhere can name anything: only what makes a network is called
        ("os.system", {"command": "exit"}, r"is no torch\.nn\.Module, nor"),
        (f"{__name__}.build_undeclared", {}, r"annotated to return one"),
        (f"{__name__}.build_mistyped", {}, r"annotated to return one"),
        ("unet", {"width": 4}, r"model\.arguments with model\.name 'unet'"),
        (
            "torch.nn.Conv3d",
            {"in_channels": 4, "out_channels": 2, "kernel_size": 1},
            "expected logits",
        ),
    ],
)
def test_unusable_networks_are_named(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build.build_model(own(name, **arguments), (32, 32, 32))(torch.zeros(1, 4, 8, 8, 8))


@pytest.mark.parametrize(
    ("patch", "multiple"), [((96, 128, 48), (32, 32, 16)), ((24, 30, 7), (8, 2, 1))]
)
def test_a_network_by_dotted_name_takes_any_patch(patch: Triple, multiple: Triple) -> None:
    config = own("torch.nn.Conv3d")
    assert build.size_multiple(config, patch) == multiple
    assert build.padded_size(config, (139, 160, 1)) == (160, 160, 32)
    # as does a function that is annotated
    network = build.build_model(own(f"{__name__}.build_small", width=2), patch)
    assert network(torch.zeros(1, 4, 7, 9, 8)).shape == (1, 3, 7, 9, 8)
