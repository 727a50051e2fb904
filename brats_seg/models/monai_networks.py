"""MONAI's networks, answering as the package's own do.

To import this module is to import MONAI, which takes seconds: only `build_model` does.
"""

from monai.networks.nets import DynUNet, SegResNet, SegResNetVAE, SwinUNETR
from torch import Tensor, nn

from brats_seg.errors import ConfigError
from brats_seg.models.output import TrainingOutput
from brats_seg.models.unet import LEAKY_SLOPE, Triple

AUTOENCODER_WEIGHT = 0.1
"""Of the autoencoder's loss beside that of the segmentation (Myronenko 2018)."""
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
    """A network that returns its logits in either mode."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor | TrainingOutput:
        """Give logits: a `TrainingOutput` in training mode, else `(N, n_out, X, Y, Z)`."""
        logits: Tensor = self.network(image)
        return TrainingOutput(logits=(logits,)) if self.training else logits


class AutoencoderNetwork(nn.Module):
    """SegResNet whose encoder must also serve to rebuild the image (Myronenko 2018).

    The autoencoder has one size and works in training mode only.
    """

    def __init__(self, network: nn.Module, patch: Triple) -> None:
        super().__init__()
        self.network = network
        self.patch = patch

    def forward(self, image: Tensor) -> Tensor | TrainingOutput:
        """Give logits: a `TrainingOutput` in training mode, else `(N, n_out, X, Y, Z)`.

        Each entry of the penalty is the mean over the patches, so their sum is right.
        """
        if self.training and tuple(image.shape[2:]) != self.patch:
            msg = (
                f"model.name 'segresnet-vae' was built for patches of {self.patch} and got "
                f"{tuple(image.shape[2:])}: its autoencoder has one size. Give patch.size as three "
                "numbers, or take 'segresnet'."
            )
            raise ConfigError(msg)
        logits, loss = self.network(image)
        if not self.training:
            return logits
        return TrainingOutput(
            logits=(logits,), penalty=AUTOENCODER_WEIGHT * loss.expand(len(image))
        )


def segresnet(n_in: int, n_out: int) -> MonaiNetwork:
    """Build SegResNet in the size of MONAI's bundle for BraTS."""
    return MonaiNetwork(SegResNet(in_channels=n_in, out_channels=n_out, **_SEGRESNET))


def segresnet_vae(n_in: int, n_out: int, patch: Triple) -> AutoencoderNetwork:
    """Build SegResNetVAE for patches of one size."""
    network = SegResNetVAE(
        input_image_size=patch, in_channels=n_in, out_channels=n_out, **_SEGRESNET
    )
    return AutoencoderNetwork(network, patch)


def dynunet(
    n_in: int, n_out: int, *, widths: tuple[int, ...], strides: tuple[Triple, ...]
) -> MonaiNetwork:
    """Build DynUNet in the shape of `UNet`: the same mathematics in MONAI's words."""
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
    return MonaiNetwork(network)


def swin_unetr(n_in: int, n_out: int) -> MonaiNetwork:
    """Build SwinUNETR in a width for small GPUs."""
    return MonaiNetwork(SwinUNETR(in_channels=n_in, out_channels=n_out, feature_size=_SWIN_WIDTH))
