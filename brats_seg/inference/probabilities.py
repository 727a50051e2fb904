"""Compute the probabilities of a scan, with the memory that there is.

Probabilities are the mean over networks and mirror images. An image is `(4, x, y, z)`,
probabilities are `(3, x, y, z)` in the order of `REGIONS`. Two float32 volumes of them are held: the
sum, and the part that is being added.

When memory runs out, a case is computed again in a mode that needs less: first with the sum of the
windows in the memory of the host, then with smaller windows, and finally on the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import combinations, product, starmap
from operator import add, iadd

import numpy as np
import torch
from scipy.special import entr
from torch import Tensor

from brats_seg.errors import CaseError, counted
from brats_seg.inference.method import Field, NetworkInput
from brats_seg.inference.model import Member, Model
from brats_seg.progress import part
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.memory import Fallback
from brats_seg.runtime.windows import n_windows, predict_logits
from brats_seg.voxels.box import Triple, rounded_up, triple

_SMALLEST_WINDOW = 16
"""Shortest axis of a halved window, in voxels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionMode:
    """Device, memory and window with which a case is computed."""

    device: Device
    stitch_on_host: bool = False
    """Whether the sum of the windows of a GPU is kept in the memory of the host."""
    n_halvings: int = 0
    """Times that the axes of the window are halved."""

    def __str__(self) -> str:
        size = f"1/{2**self.n_halvings} along each axis" if self.n_halvings else "full size"
        their_sum = " and their sum on the host" if self.stitch_on_host else ""
        return f"windows of {size} on {self.device.torch_device}{their_sum}"


class PredictionFallback(Fallback[PredictionMode]):
    """Out-of-memory fallback of one case; the next case starts in the first mode again."""

    def __init__(self, case_id: str, device: Device) -> None:
        """Start in the first mode."""

        def exhausted(message: str) -> CaseError:
            expected = "memory for windows of that size"
            next_step = "Close other programs, or give smaller windows with --window."
            return CaseError(case_id, "(all)", message, expected, next_step)

        super().__init__(_modes(device), device.torch_device, exhausted, what=f"case {case_id}: ")
        self.case_id = case_id

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentence for the record of the case; none in the first mode."""
        return (f"memory ran out: computed with {self.mode}",) if self.index else ()


@torch.inference_mode()
def apply_model(
    model: Model, given: NetworkInput, fallback: PredictionFallback, *, tta: bool = False
) -> Field:
    """Return the output of a model for a case (R, x, y, z): the mean over networks and mirror images.

    Args:
        model: Networks, and the method that prepared the case.
        given: The case as the networks take it.
        fallback: Modes to compute the case in.
        tta: Whether all mirror images of each window are averaged.
    """
    image, method = torch.from_numpy(given.image), model.method
    # counted from the last axis, which is the same for images and windows
    axes = [axis - 3 for axis in method.mirror_axes] if tta else []
    mirrors = [mirror for n in range(len(axes) + 1) for mirror in combinations(axes, n)]
    # probabilities are averaged over passes, each with its own windows, and logits inside a window
    passes, inside = (mirrors, [()]) if method.mean_of == "probabilities" else ([()], mirrors)
    n_all = len(passes) * sum(
        n_windows(image.shape[1:], _window(member, image), member.window.overlap, method.rule)
        for member in model.members
    )
    with part(f"{fallback.case_id}, windows", n_all) as after_window:

        def output_of(member: Member, mirror: tuple[int, ...]) -> Field:
            applied = partial(_logits, _flip(image, mirror), member, inside, after_window)
            logits = _flip(fallback.run(applied), mirror)
            is_ordered = list(member.regions) == list(range(len(logits)))
            # a copy only where the network returns another order
            return given.to_volume(logits if is_ordered else logits[list(member.regions)])

        # in place, which saves a whole float32 volume
        total: Field = reduce(iadd, starmap(output_of, product(model.members, passes)))
    total /= len(model.members) * len(passes)
    if n_broken := int(np.count_nonzero(~np.isfinite(total))):
        # NaN would become background: an empty label map that looks like a result
        problem = f"{counted(n_broken, 'value')} of the network that are NaN or infinite"
        next_step = "Predict with --precision fp32; if that does not help, the model is broken."
        raise CaseError(fallback.case_id, "(all)", problem, "finite numbers", next_step)
    return total


def entropy(probabilities: Field) -> Field:
    """Return the entropy of each voxel (x, y, z) in bits: the largest over the regions."""
    bits = np.zeros(probabilities.shape[1:], dtype=np.float32)
    for inside in probabilities:
        np.maximum(bits, (entr(inside) + entr(1 - inside)) / np.float32(np.log(2)), out=bits)
    return bits


def _logits(
    image: Tensor,
    member: Member,
    mirrors: Sequence[tuple[int, ...]],
    after_window: Callable[[], None],
    mode: PredictionMode,
) -> Tensor:
    """Return the logits (R, ...) of an image (4, ...): in each window, the mean over mirror images."""

    def mean_logits(voxels: Tensor) -> Tensor:
        logits = (_flip(member.network(_flip(voxels, mirror)), mirror) for mirror in mirrors)
        total = reduce(add, logits)
        return total / len(mirrors) if len(mirrors) > 1 else total

    channels, device = image[list(member.channels)], mode.device
    # where it stays: a device whose memory is full need not have room for it again
    member.network.to(device.torch_device)
    return predict_logits(
        mean_logits,
        channels if mode.stitch_on_host else channels.to(device.torch_device),
        window=_window(member, image, mode.n_halvings),
        overlap=member.window.overlap,
        rule=member.method.rule,
        device=device,
        after_window=after_window,
    )


def _flip(tensor: Tensor, mirror: tuple[int, ...]) -> Tensor:
    # torch copies even where nothing is flipped
    return tensor.flip(mirror) if mirror else tensor


def _window(member: Member, image: Tensor, n_halvings: int = 0) -> Triple:
    """Return the size of the windows of an image, halved as often as the mode of the fallback says."""
    window = member.window.fit(triple(image.shape[1:]), member.identity.patch, member.multiple)
    for _ in range(n_halvings):
        halves = (min(n, max(n // 2, _SMALLEST_WINDOW)) for n in window)
        window = rounded_up(triple(halves), member.multiple)
    return window


def _modes(device: Device) -> Sequence[PredictionMode]:
    if device.torch_device.type == "cpu":
        return [PredictionMode(device=device, n_halvings=n) for n in range(3)]
    on_host = [PredictionMode(device=device, stitch_on_host=True, n_halvings=n) for n in range(3)]
    on_cpu = PredictionMode(device=choose_device("cpu", "auto"), n_halvings=1)
    return PredictionMode(device=device), *on_host, on_cpu
