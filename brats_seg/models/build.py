"""Build the network of the settings, and check that it takes the patch size.

A network has a short name, or is given by the dotted name of any class or function that makes one,
with `model.arguments` as its keyword arguments. Such a network gets images of 4 channels, in the
order of MODALITIES, and returns logits of 3, in the order of REGIONS, on the grid of the image.
"""

from collections.abc import Callable, Mapping
from inspect import isclass
from math import ceil, gcd, prod
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor, nn

from brats_seg.config import Config, ModelConfig, import_by_name, is_dotted_name
from brats_seg.errors import ConfigError
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.models import unet
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.models.interface import logits_of
from brats_seg.voxels.box import Triple, rounded_up, shape_text, triple

IMPORTED_MULTIPLE = 32
"""Number that the size of an input is a multiple of, for a network by dotted name.

It is enough for the five halvings of most such networks. A patch that is only a multiple of a smaller
number is used as it is.
"""
_WINDOW_PATCHES = 1.5
_LONGEST_WINDOW = 128


def build_model(config: ModelConfig, patch: Triple) -> nn.Module:
    """Build a network for patches of that many voxels, or of multiples of `size_multiple`.

    In training mode it turns `(N, 4, X, Y, Z)` into a `TrainingOutput`, in evaluation mode into
    logits `(N, 3, X, Y, Z)`; the autoencoder returns an image `(N, 4, X, Y, Z)` in both modes, and a
    network by dotted name its logits. Weights are drawn from torch's global generator.

    Raises:
        ConfigError: The patch does not fit the network, or the network cannot be built.

    Example:
        >>> import torch
        >>> network = build_model(ModelConfig(widths=(8, 16)), (16, 16, 16)).eval()
        >>> network(torch.zeros(1, 4, 16, 16, 16)).shape
        torch.Size([1, 3, 16, 16, 16])
    """
    if config.name not in _NETWORKS:
        return ImportedNetwork(build_by_name(config.name, config.arguments, "model"), config.name)
    if config.arguments:
        msg = f"model.arguments with model.name {config.name!r}; expected a dotted name as monai.networks.nets.UNet, or model.arguments={{}}"
        raise ConfigError(msg)
    _check_patch(config, patch)
    return _NETWORKS[config.name].build(config, patch)


def build_by_name(name: str, arguments: Mapping[str, Any], section: str) -> nn.Module:
    """Import a class or function by its dotted name, call it, and return the module that it makes.

    Only what declares to make a `torch.nn.Module` is called: a class derived from it, or a function
    whose return annotation is one. Names from files are checked when these are read, see
    `presets.check_stored`.

    Args:
        name: Dotted name, such as `monai.networks.nets.UNet`.
        arguments: Keyword arguments, passed as they are.
        section: Section of the settings that `name` and `arguments` belong to, for messages.

    Raises:
        ConfigError: It cannot be imported, does not declare to make a module, or cannot be called
            with those arguments.

    Example:
        >>> build_by_name("torch.nn.Conv3d", {"in_channels": 4, "out_channels": 3, "kernel_size": 1}, "model")
        Conv3d(4, 3, kernel_size=(1, 1, 1), stride=(1, 1, 1))
    """
    make = import_by_name(name, f"{section}.name")
    if not _makes_modules(make):
        msg = f"{section}.name {name!r} is no torch.nn.Module, nor annotated to return one"
        raise ConfigError(msg)
    try:
        module: nn.Module = make(**arguments)
    except Exception as error:
        hint = ". Expected a 3D network of 4 channels in and 3 out" if section == "model" else ""
        msg = (
            f"{section}.name {name!r} cannot be built with {section}.arguments {dict(arguments)}: "
            f"{type(error).__name__}: {error}{hint}"
        )
        raise ConfigError(msg) from error
    return module


class ImportedNetwork(nn.Module):
    """A network by dotted name, which returns plain logits in both modes.

    Of several outputs, such as the levels of deep supervision, the logits are taken as by `as_output`.
    """

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network = network
        self.name = f"model.name {name!r}"

    def forward(self, image: Tensor) -> Tensor:
        """`(N, 4, X, Y, Z)` -> logits `(N, 3, X, Y, Z)`.

        Raises:
            ConfigError: The network returns something else.
        """
        return logits_of(self.network(image), image, len(REGIONS), self.name)


def size_multiple(config: ModelConfig, patch: Triple) -> Triple:
    """Return the voxels of which the size of every input must be a multiple, along X, Y and Z.

    They depend on the patch, because long axes are halved more often. The network can be built for
    any size rounded up to the multiple. For a network by dotted name it is the largest power of two
    that the patch is a multiple of, up to `IMPORTED_MULTIPLE`.
    """
    network = _NETWORKS.get(config.name)
    if network is None:
        return triple(gcd(n, IMPORTED_MULTIPLE) for n in patch)
    if network.multiple is None:
        x, y, z = zip(*unet.level_strides(patch, len(config.widths)), strict=True)
        return prod(x), prod(y), prod(z)
    return network.multiple, network.multiple, network.multiple


def default_window(config: Config, patch: Triple) -> Triple | None:
    """Return the window that a network predicts with where none is given; None is the whole brain crop.

    It is 1.5 training patches along each axis, up to 128 voxels, and never smaller than the patch:
    fewer voxels are at the border of a window, where a network is least accurate, and less is computed
    twice. A network by dotted name may take the patch only, and an autoencoder gets the patch.
    """
    if config.patch.size == "whole":
        return None
    if is_dotted_name(config.model.name) or config.model.task == "reconstruction":
        return patch
    return triple(
        max(n, min(ceil(n * _WINDOW_PATCHES / m), _LONGEST_WINDOW // m) * m)
        for n, m in zip(patch, size_multiple(config.model, patch), strict=True)
    )


def padded_size(config: ModelConfig, shape: Triple) -> Triple:
    """Return the smallest size of an input that holds a volume of that shape."""
    is_known = config.name in _NETWORKS
    return rounded_up(shape, size_multiple(config, shape) if is_known else (IMPORTED_MULTIPLE,) * 3)


def _makes_modules(make: object) -> bool:
    if isclass(make):
        return issubclass(make, nn.Module)
    try:
        returned = get_type_hints(make).get("return")
    except Exception:  # noqa: BLE001 - an annotation may be any text
        return False
    return isclass(returned) and issubclass(returned, nn.Module)


_CHANNELS = {"n_in": len(MODALITIES), "n_out": len(REGIONS)}


class _Network(NamedTuple):
    """What is known of a network with a short name."""

    build: Callable[[ModelConfig, Triple], nn.Module]
    multiple: int | None
    """Voxels that a size must be a multiple of; None where the levels decide, see `level_strides`."""
    smallest: int
    """Fewest voxels along an axis."""


def _build_unet(config: ModelConfig, patch: Triple) -> nn.Module:
    strides = unet.level_strides(patch, len(config.widths))
    return unet.UNet(**_CHANNELS, widths=config.widths[: len(strides)], strides=strides)


def _build_autoencoder(config: ModelConfig, patch: Triple) -> nn.Module:
    return Autoencoder(n_channels=len(MODALITIES), latent=config.latent)


def _build_monai(config: ModelConfig, patch: Triple) -> nn.Module:
    from brats_seg.models import monai_networks

    make = {"segresnet": monai_networks.segresnet, "swin-unetr": monai_networks.swin_unetr}
    return make[config.name](**_CHANNELS)


def _build_dynunet(config: ModelConfig, patch: Triple) -> nn.Module:
    from brats_seg.models.monai_networks import dynunet

    strides = unet.level_strides(patch, len(config.widths))
    if len(strides) < unet.FEWEST_DYNUNET_LEVELS:
        msg = (
            f"model.name 'dynunet' has {len(strides)} levels; expected {unet.FEWEST_DYNUNET_LEVELS} at least. "
            f"Give more than {len(config.widths)} widths or a larger patch than {shape_text(patch)}."
        )
        raise ConfigError(msg)
    return dynunet(**_CHANNELS, widths=config.widths, strides=strides)


_NETWORKS = {
    "unet": _Network(_build_unet, None, unet.SMALLEST_AXIS),
    "notebook": _Network(
        lambda *_: unet.NotebookUNet(**_CHANNELS), 1, unet.SMALLEST_NOTEBOOK_PATCH
    ),
    "autoencoder": _Network(_build_autoencoder, 1, 1),
    "segresnet": _Network(_build_monai, 8, 8),
    "dynunet": _Network(_build_dynunet, None, unet.SMALLEST_AXIS),
    # its InstanceNorm at 1/32 of the size cannot be trained on a single voxel
    "swin-unetr": _Network(_build_monai, 32, 64),
}


def _check_patch(config: ModelConfig, patch: Triple) -> None:
    multiple, smallest = size_multiple(config, patch), _NETWORKS[config.name].smallest
    pairs = tuple(zip(patch, multiple, strict=True))
    if all(n >= smallest and n % m == 0 for n, m in pairs):
        return
    below = shape_text(max(smallest, n // m * m) for n, m in pairs)
    above = shape_text(max(smallest, -(-n // m) * m) for n, m in pairs)
    nearest = above if below == above else f"{below} and {above}"
    msg = (
        f"patch.size {shape_text(patch)} does not fit model.name {config.name!r}; expected multiples "
        f"of {shape_text(multiple)}, at least {smallest} along each axis. Nearest: {nearest}."
    )
    raise ConfigError(msg)
