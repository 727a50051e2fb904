"""Which network a name means, and which patches it can take."""

from math import prod

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from brats_seg.config import ModelConfig
from brats_seg.errors import ConfigError
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.models.notebook_unet import SMALLEST_PATCH, NotebookUNet
from brats_seg.models.unet import SMALLEST_AXIS, Triple, UNet, level_strides

_DYNUNET_LEVELS = 3  # MONAI builds none with fewer


def build_model(config: ModelConfig, patch: Triple) -> nn.Module:
    """Build a network for patches of that many voxels, or of multiples of `size_multiple`.

    In training mode it turns `(N, 4, X, Y, Z)` into a `TrainingOutput`, in evaluation mode into
    logits `(N, 3, X, Y, Z)`; the autoencoder into an image `(N, 4, X, Y, Z)` in both. Weights are
    drawn from torch's global generator. Raises `ConfigError` if the patch does not fit the network.
    """
    _check_patch(config, patch)
    n_in, n_out = len(MODALITIES), len(REGIONS)
    if config.name == "unet":
        strides = level_strides(patch, len(config.widths))
        return UNet(
            n_in=n_in,
            n_out=n_out,
            widths=config.widths[: len(strides)],
            strides=strides,
            deep_supervision=config.deep_supervision,
        )
    if config.name == "notebook":
        return NotebookUNet(n_in=n_in, n_out=n_out)
    if config.name == "autoencoder":
        return Autoencoder(n_channels=n_in, latent=config.latent)
    return _monai_network(config, patch)


def size_multiple(config: ModelConfig, patch: Triple) -> Triple:
    """Return what the size of every input must be a multiple of, along X, Y and Z.

    Depends on the patch, because long axes are halved more often. A size rounded up to the
    multiple is one that the network can be built for.
    """
    match config.name:
        case "unet" | "dynunet":
            x, y, z = zip(*level_strides(patch, len(config.widths)), strict=True)
            return prod(x), prod(y), prod(z)
        case "notebook" | "autoencoder":
            return 1, 1, 1
        case "segresnet":
            return 8, 8, 8
        case "vae-unet":
            return 16, 16, 16
        case "swin-unetr":
            return 32, 32, 32
        case _:
            return 1, 1, 1


def has_batch_statistics(model: nn.Module) -> bool:
    """Tell whether a patch's output, or a buffer, depends on the patches beside it.

    Such a network learns something else from several micro-batches than from one batch.
    """
    return any(
        isinstance(module, _BatchNorm) or getattr(module, "running_mean", None) is not None
        for module in model.modules()
    )


def _monai_network(config: ModelConfig, patch: Triple) -> nn.Module:
    from brats_seg.models import monai_networks

    n_in, n_out = len(MODALITIES), len(REGIONS)
    if config.name == "segresnet":
        return monai_networks.segresnet(n_in, n_out)
    if config.name == "vae-unet":
        return monai_networks.vae_unet(n_in, n_out, patch)
    if config.name == "swin-unetr":
        return monai_networks.swin_unetr(n_in, n_out)
    strides = level_strides(patch, len(config.widths))
    if len(strides) < _DYNUNET_LEVELS:
        msg = (
            f"model.name 'dynunet' with {len(config.widths)} widths and patch {_words(patch)} has "
            f"{len(strides)} levels; expected at least {_DYNUNET_LEVELS}. Give more widths or a "
            "larger patch, or take 'unet'."
        )
        raise ConfigError(msg)
    return monai_networks.dynunet(n_in, n_out, widths=config.widths, strides=strides)


def _check_patch(config: ModelConfig, patch: Triple) -> None:
    multiple = size_multiple(config, patch)
    smallest = _smallest_axis(config)
    if all(n >= smallest and n % m == 0 for n, m in zip(patch, multiple, strict=True)):
        return
    below, above = (
        _words(tuple(max(smallest, n // m * m) for n, m in zip(sizes, multiple, strict=True)))
        for sizes in (patch, tuple(n + m - 1 for n, m in zip(patch, multiple, strict=True)))
    )
    nearest = above if below == above else f"{below} and {above}"
    msg = (
        f"patch.size {_words(patch)} does not fit model.name {config.name!r}; expected multiples "
        f"of {_words(multiple)}, at least {smallest} along each axis. Nearest: {nearest}."
    )
    raise ConfigError(msg)


def _smallest_axis(config: ModelConfig) -> int:
    match config.name:
        case "unet" | "dynunet":
            return SMALLEST_AXIS
        case "notebook":
            return SMALLEST_PATCH
        case "autoencoder":
            return 1
        case "segresnet":
            return 8
        case "vae-unet":
            return 16
        case "swin-unetr":
            return 64  # its InstanceNorm at 1/32 of the size cannot learn from a single voxel
        case _:
            return 1


def _words(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))
