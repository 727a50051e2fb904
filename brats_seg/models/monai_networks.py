"""Build MONAI's networks with the interface of the package's own networks.

This module imports MONAI, which takes seconds, so `build_model` imports it only when needed.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from monai.networks.nets import DynUNet, SegResNet, SegResNetVAE, SwinUNETR
from torch import Tensor, nn

from brats_seg.errors import ConfigError
from brats_seg.models.activation_checkpointing import ActivationCheckpointing, HasLevels, run_level
from brats_seg.models.convolution import use_slabs
from brats_seg.models.output import TrainingOutput
from brats_seg.models.unet import LEAKY_SLOPE
from brats_seg.voxels.box import Triple

Levels: TypeAlias = Sequence[tuple[nn.Module, ...]]
"""The modules of each level, finest first, whose activations are checkpointed together."""

AUTOENCODER_WEIGHT = 0.1
"""Weight of the loss of the autoencoder beside that of the segmentation (Myronenko 2018)."""
# the sizes of MONAI's own bundle for BraTS
_SEGRESNET = {
    "spatial_dims": 3,
    "init_filters": 16,
    "blocks_down": (1, 2, 2, 4),
    "blocks_up": (1, 1, 1),
    "dropout_prob": 0.2,
}
_SWIN_WIDTH = 24  # a quarter of the memory of the published 48


class MonaiNetwork(nn.Module):
    """A network that returns its logits, as a `TrainingOutput` in training mode."""

    def __init__(self, network: nn.Module, levels: Levels) -> None:
        super().__init__()
        use_slabs(network)
        self.network = network
        self.checkpointing = ActivationCheckpointing.NONE
        _follow_checkpointing(self, levels)

    def forward(self, image: Tensor) -> Tensor | TrainingOutput:
        """Return logits: a `TrainingOutput` in training mode, else `(N, n_out, X, Y, Z)`."""
        logits: Tensor = self.network(image)
        return TrainingOutput(logits=(logits,)) if self.training else logits


class AutoencoderNetwork(nn.Module):
    """SegResNet whose encoder also reconstructs the image (Myronenko 2018).

    The autoencoder takes patches of one size and works in training mode only.
    """

    def __init__(self, network: nn.Module, levels: Levels, patch: Triple) -> None:
        super().__init__()
        self.network = network
        self.patch = patch
        self.checkpointing = ActivationCheckpointing.NONE
        _follow_checkpointing(self, levels)

    def forward(self, image: Tensor) -> Tensor | TrainingOutput:
        """Return logits: a `TrainingOutput` in training mode, else `(N, n_out, X, Y, Z)`.

        MONAI computes the mean loss over patches, so it is called for each of them.
        """
        if self.training and tuple(image.shape[2:]) != self.patch:
            msg = (
                f"model.name 'vae-unet' was built for patches of {self.patch} and got "
                f"{tuple(image.shape[2:])}: its autoencoder has one size. Give patch.size as three "
                "numbers, or take 'segresnet'."
            )
            raise ConfigError(msg)
        network: Any = self.network
        features, skips = network.encode(image)
        logits: Tensor = network.decode(features, skips[::-1])
        if not self.training:
            return logits
        loss = network._get_vae_loss  # noqa: SLF001 - MONAI has no public one
        losses = map(loss, image.split(1), features.split(1))
        return TrainingOutput(
            logits=(logits,), penalty=AUTOENCODER_WEIGHT * torch.stack(list(losses))
        )


def segresnet(n_in: int, n_out: int) -> MonaiNetwork:
    """Build SegResNet in the size of MONAI's bundle for BraTS."""
    network = SegResNet(in_channels=n_in, out_channels=n_out, **_SEGRESNET)
    return MonaiNetwork(network, _levels_of_segresnet(network))


def vae_unet(n_in: int, n_out: int, patch: Triple) -> AutoencoderNetwork:
    """Build SegResNetVAE for patches of one size."""
    network = SegResNetVAE(
        input_image_size=patch, in_channels=n_in, out_channels=n_out, **_SEGRESNET
    )
    return AutoencoderNetwork(network, _levels_of_segresnet(network), patch)


def _levels_of_segresnet(network: SegResNet) -> Levels:
    up = zip(reversed(network.up_samples), reversed(network.up_layers), strict=True)
    return _beside(network.down_layers, up)


def dynunet(
    n_in: int, n_out: int, *, widths: tuple[int, ...], strides: tuple[Triple, ...]
) -> MonaiNetwork:
    """Build DynUNet in the shape of `UNet`; it computes the same function."""
    network = DynUNet(
        spatial_dims=3,
        in_channels=n_in,
        out_channels=n_out,
        kernel_size=[3] * len(strides),
        strides=strides,
        upsample_kernel_size=strides[1:],
        filters=widths,
        norm_name=("instance", {"affine": True}),
        act_name=("leakyrelu", {"inplace": True, "negative_slope": LEAKY_SLOPE}),
        trans_bias=True,
    )
    down = (network.input_block, *network.downsamples, network.bottleneck)
    return MonaiNetwork(network, _beside(down, zip(reversed(network.upsamples))))


def swin_unetr(n_in: int, n_out: int) -> MonaiNetwork:
    """Build SwinUNETR in a width for small GPUs."""
    network = SwinUNETR(in_channels=n_in, out_channels=n_out, feature_size=_SWIN_WIDTH)
    transformer = network.swinViT
    levels = [
        (network.encoder1, network.decoder1),
        (network.encoder2, network.decoder2, *transformer.layers1),
        (network.encoder3, network.decoder3, *transformer.layers2),
        (network.encoder4, network.decoder4, *transformer.layers3),
        (network.encoder10, network.decoder5, *transformer.layers4),
    ]
    return MonaiNetwork(network, levels)


def _beside(down: Iterable[nn.Module], up: Iterable[tuple[nn.Module, ...]]) -> Levels:
    """Join the encoder modules of each level with its decoder modules; the lowest has no decoder."""
    return [(module, *modules) for module, modules in zip(down, (*up, ()), strict=True)]


def _follow_checkpointing(network: HasLevels, levels: Levels) -> None:
    """Let every module of a level follow the checkpointing mode of the network."""
    for level, modules in enumerate(levels):
        for module in modules:
            # MONAI's code calls the module, so only its forward method can be replaced
            forward = partial(type(module).forward, module)
            vars(module)["forward"] = partial(_run, network, level, forward)


def _run(
    network: HasLevels, level: int, forward: Callable[..., Tensor], *features: Tensor
) -> Tensor:
    return run_level(network.checkpointing, level, forward, *features)
