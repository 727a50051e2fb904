"""Probabilities of a case: the mean over networks and mirror images.

Shapes: an image is `(4, x, y, z)`, probabilities are `(3, x, y, z)` in the order of `REGIONS`. Of
the volume in float32 there are two: the sum, and the part that is being added.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import entr
from torch import Tensor, nn

from brats_seg.errors import ConfigError
from brats_seg.inference.ladder import Ladder, Rung
from brats_seg.inference.model import Member, Model
from brats_seg.inference.settings import InferenceConfig
from brats_seg.models.device import Device
from brats_seg.models.windows import predict_logits

Triple: TypeAlias = tuple[int, int, int]
Field: TypeAlias = npt.NDArray[np.float32]

_SMALLEST_WINDOW = 16
"""Voxels along an axis below which a network sees too little to tell anything."""


@torch.inference_mode()
def predict_probabilities(
    model: Model, image: Field, settings: InferenceConfig, ladder: Ladder
) -> Field:
    """Return the mean probabilities of an image.

    Raises:
        CaseError: There is not enough memory for it, even on the last rung of the ladder.
        ConfigError: A network cannot take the window that the settings ask for.
    """
    mirrors = list(product((False, True), repeat=3)) if settings.tta else [(False,) * 3]
    total = torch.zeros(len(model.members[0].regions), *image.shape[1:])
    for member in model.members:
        for mirror in mirrors:
            axes = [axis for axis, flipped in enumerate(mirror, start=1) if flipped]
            part = ladder.run(partial(_part, member, torch.from_numpy(image), axes, settings))
            for region, place in zip(total, member.regions, strict=True):
                region += part[place].flip([axis - 1 for axis in axes])
    return total.div_(len(model.members) * len(mirrors)).numpy()


def window_of(member: Member, settings: InferenceConfig, shape: Triple) -> Triple:
    """Return the window that a network goes over a crop of that shape with.

    Raises:
        ConfigError: The network cannot take the window asked for.
    """
    window = settings.window or member.window
    if settings.windows == "sliding" and window is None:
        window = member.patch
    if settings.windows == "whole" or window is None:
        return _rounded_up(shape, member.multiple)
    if _rounded_up(window, member.multiple) != window:
        words = ["x".join(map(str, size)) for size in (window, member.multiple)]
        nearest = ",".join(map(str, _rounded_up(window, member.multiple)))
        msg = (
            f"--window {words[0]} does not fit model.name {member.config.model.name!r}; expected "
            f"multiples of {words[1]}. Nearest above: {nearest}."
        )
        raise ConfigError(msg)
    return window


def entropy(probabilities: Field) -> Field:
    """Return how uncertain each voxel (x, y, z) is, in bits: that of its most uncertain region."""
    bits = np.zeros(probabilities.shape[1:], dtype=np.float32)
    for inside in probabilities:
        outside = 1 - inside
        np.maximum(bits, (entr(inside) + entr(outside)) / np.float32(np.log(2)), out=bits)
    return bits


def _part(
    member: Member, image: Tensor, axes: list[int], settings: InferenceConfig, rung: Rung
) -> Tensor:
    """Return the probabilities that one network gives one mirror image, mirrored as that is."""
    mirrored = image[list(member.channels)].flip(axes)
    window = window_of(member, settings, (image.shape[1], image.shape[2], image.shape[3]))
    for _ in range(rung.n_halvings):
        window = _halved(window, member.multiple)
    place = rung.device.torch_device

    def of_window(part: Tensor) -> Tensor:
        with rung.device.autocast():
            return member.network(part.to(place))

    with _on(member.network, rung.device):
        logits = predict_logits(
            of_window,
            mirrored if rung.stitch_on_host else mirrored.to(place),
            window=window,
            overlap=settings.overlap,
        )
    # in place, which a whole float32 volume is worth
    return logits.sigmoid_().cpu()


@contextmanager
def _on(network: nn.Module, device: Device) -> Iterator[None]:
    """Have the network on a device for a while."""
    home = next(network.parameters()).device
    network.to(device.torch_device)
    try:
        yield
    finally:
        network.to(home)


def _rounded_up(size: Triple, multiple: Triple) -> Triple:
    x, y, z = (-(-n // m) * m for n, m in zip(size, multiple, strict=True))
    return x, y, z


def _halved(window: Triple, multiple: Triple) -> Triple:
    x, y, z = (min(n, max(n // 2, _SMALLEST_WINDOW)) for n in window)
    return _rounded_up((x, y, z), multiple)
