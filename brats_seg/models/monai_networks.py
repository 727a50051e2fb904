"""Build MONAI's networks with the interface of the package's own networks.

This module imports MONAI, which takes seconds, so `build_model` imports it only when needed.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

from monai.networks.nets import DynUNet, SegResNet, SwinUNETR
from torch import Tensor, nn

from brats_seg.models.convolution import use_slabs
from brats_seg.models.interface import ActivationCheckpointing, HasLevels, TrainingOutput, run_level
from brats_seg.models.unet import dynunet_arguments
from brats_seg.voxels.box import Triple

Levels: TypeAlias = Sequence[tuple[nn.Module, ...]]
"""The modules of each level, finest first, whose activations are checkpointed together."""


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


def segresnet(n_in: int, n_out: int) -> MonaiNetwork:
    """Build SegResNet in the size of MONAI's bundle for BraTS."""
    network = SegResNet(
        spatial_dims=3,
        in_channels=n_in,
        out_channels=n_out,
        init_filters=16,
        blocks_down=(1, 2, 2, 4),
        blocks_up=(1, 1, 1),
        dropout_prob=0.2,
    )
    up = zip(reversed(network.up_samples), reversed(network.up_layers), strict=True)
    return MonaiNetwork(network, _pair_levels(network.down_layers, up))


def dynunet(
    n_in: int, n_out: int, *, widths: tuple[int, ...], strides: tuple[Triple, ...]
) -> MonaiNetwork:
    """Build DynUNet in the shape of `UNet`; it computes the same function."""
    network = DynUNet(**dynunet_arguments(n_in, n_out, widths, strides))
    down = (network.input_block, *network.downsamples, network.bottleneck)
    return MonaiNetwork(network, _pair_levels(down, zip(reversed(network.upsamples))))


def swin_unetr(n_in: int, n_out: int) -> MonaiNetwork:
    """Build SwinUNETR in a width for small GPUs."""
    # a quarter of the memory of the published 48
    network = SwinUNETR(in_channels=n_in, out_channels=n_out, feature_size=24)
    transformer = network.swinViT
    levels = [
        (network.encoder1, network.decoder1),
        (network.encoder2, network.decoder2, *transformer.layers1),
        (network.encoder3, network.decoder3, *transformer.layers2),
        (network.encoder4, network.decoder4, *transformer.layers3),
        (network.encoder10, network.decoder5, *transformer.layers4),
    ]
    return MonaiNetwork(network, levels)


def _pair_levels(down: Iterable[nn.Module], up: Iterable[tuple[nn.Module, ...]]) -> Levels:
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
