"""Compute the probabilities of a scan, with the memory that there is.

Probabilities are the mean over networks and mirror images. An image is `(4, x, y, z)`,
probabilities are `(3, x, y, z)` in the order of `REGIONS`. Two float32 volumes of them are held: the
sum, and the part that is being added.

When memory runs out, a case is computed again in a mode that needs less: first with the sum of the
windows in the memory of the host, then with smaller windows, and finally on the CPU. The next case
starts in the first mode again.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import entr
from torch import Tensor, nn

from brats_seg.errors import CaseError, ConfigError
from brats_seg.inference.foreign import ForeignMethod
from brats_seg.inference.model import Member, Model
from brats_seg.inference.scan import Scan
from brats_seg.inference.settings import ONE_PASS, PredictionSettings
from brats_seg.models.norm import Shares, shares_of, statistics_of_centre
from brats_seg.progress import part
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.memory import is_out_of_memory
from brats_seg.runtime.sliding_window import (
    WindowRule,
    n_windows,
    predict_logits,
    window_around,
    window_within,
)
from brats_seg.runtime.weights import FittedPrediction
from brats_seg.voxels.box import Triple, rounded_up

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Field: TypeAlias = npt.NDArray[np.float32]

_SMALLEST_WINDOW = 16
"""Shortest axis of a halved window, in voxels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionMode:
    """Device, memory and window with which a case is computed."""

    device: Device
    stitch_on_host: bool = False
    """Whether the sum of the windows is kept in the memory of the host."""
    n_halvings: int = 0
    """Times that the axes of the window are halved."""

    def __str__(self) -> str:
        parts = [f"on {self.device.torch_device}"]
        if self.stitch_on_host and self.device.torch_device.type != "cpu":
            parts.append("with the sum of the windows on the host")
        if self.n_halvings:
            parts.append(f"with windows of 1/{2**self.n_halvings} along each axis")
        return " ".join(parts)


class PredictionFallback:
    """Out-of-memory fallback of one case."""

    def __init__(self, case_id: str, device: Device) -> None:
        self.case_id = case_id
        self._modes = _modes(device)
        self._place = 0

    @property
    def mode(self) -> PredictionMode:
        """Mode in which the case is computed now."""
        return self._modes[self._place]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentence for the record of the case; none in the first mode."""
        return (f"memory ran out: computed {self.mode}",) if self._place else ()

    def run(self, work: Callable[[PredictionMode], Result]) -> Result:
        """Do the work, and again in the next mode if memory runs out.

        Raises:
            CaseError: Memory ran out in the last mode too.
        """
        while True:
            try:
                return work(self.mode)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # outside the handler, which would keep the tensors of the work alive
            self._step_down(reason)

    def _step_down(self, reason: str) -> None:
        if self._place + 1 == len(self._modes):
            expected = "memory for windows of that size"
            next_step = "Close other programs, or give smaller windows with --window."
            raise CaseError(
                self.case_id, "(all)", f"no memory {self.mode} ({reason})", expected, next_step
            )
        self._place += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("case %s: memory ran out; computing it again %s", self.case_id, self.mode)


def crop_probabilities(
    model: Model,
    case_id: str,
    image: npt.NDArray[np.float32],
    settings: PredictionSettings,
    fallback: PredictionFallback,
) -> npt.NDArray[np.float32]:
    """Return the probabilities (3, x, y, z) of a brain crop (4, x, y, z), 0 outside the brain.

    Raises as `predict_scan`.
    """
    mean = predict_probabilities(model, image, settings, fallback)
    _check_numbers(case_id, mean)
    # no tumour outside the brain, whatever a network returns there
    mean *= (image != 0).any(axis=0)
    return mean


@torch.inference_mode()
def foreign_probabilities(
    model: Model,
    method: ForeignMethod,
    scan: Scan,
    settings: PredictionSettings,
    fallback: PredictionFallback,
) -> npt.NDArray[np.float32]:
    """Return the probabilities (3, x, y, z) of a crop, computed as another program does.

    Logits are averaged over windows, networks and mirror images, and tumour may be anywhere.

    Raises as `predict_scan`.
    """
    (member,) = model.members
    axes = method.mirror_axes if settings.tta else ()
    mirrors = [mirror for n in range(len(axes) + 1) for mirror in combinations(axes, n)]
    if settings.overlap is None:
        settings = settings.model_copy(update={"overlap": method.overlap})
    given = method.to_network(scan)
    with part(
        f"{scan.case_id}, windows", _n_windows(member, settings, given.image, method.rule)
    ) as after_window:
        passing = _Pass(
            member=member,
            settings=settings,
            after_window=after_window,
            rule=method.rule,
            window_mirrors=mirrors,
        )
        logits = fallback.run(partial(passing.logits, torch.from_numpy(given.image)))
    mean = given.back(logits.cpu().numpy())
    _check_numbers(scan.case_id, mean)
    return mean


@torch.inference_mode()
def predict_probabilities(
    model: Model, image: Field, settings: PredictionSettings, fallback: PredictionFallback
) -> Field:
    """Return the mean probabilities of an image; raises as `predict_scan`."""
    mirrors = list(product((False, True), repeat=3)) if settings.tta else [(False,) * 3]
    total = torch.zeros(len(model.members[0].regions), *image.shape[1:])
    n_all = len(mirrors) * sum(_n_windows(member, settings, image) for member in model.members)
    with part(f"{fallback.case_id}, windows", n_all) as after_window:
        for member, mirror in product(model.members, mirrors):
            axes = [axis for axis, flipped in enumerate(mirror, start=1) if flipped]
            passing = _Pass(member=member, axes=axes, settings=settings, after_window=after_window)
            found = fallback.run(partial(passing.probabilities, torch.from_numpy(image)))
            for region, place in zip(total, member.regions, strict=True):
                region += found[place].flip([axis - 1 for axis in axes])
    return total.div_(len(model.members) * len(mirrors)).numpy()


def completed(member: Member, settings: PredictionSettings) -> PredictionSettings:
    """Return settings for a network, whose window is None only where the crop is taken in one pass.

    Raises:
        ConfigError: The norms of the network cannot take statistics of the centre.
    """
    own = settings.over(member.fitted).over(FittedPrediction(window=member.window or "whole"))
    if own.windows == "centre" and not member.has_centred_norms:
        msg = (
            f"--windows centre needs the norms of model.name 'unet'; found {member.name!r}. Give "
            "--windows sliding or whole."
        )
        raise ConfigError(msg)
    if own.windows in ONE_PASS or own.window is not None:
        return own
    return own.model_copy(update={"window": member.window or member.patch})


def window_of(member: Member, settings: PredictionSettings, shape: Triple) -> Triple:
    """Return the window of a network for a crop of that shape.

    Raises:
        ConfigError: The network cannot take the window asked for.
    """
    own = completed(member, settings)
    if own.windows == "centre":
        # never smaller than a training patch, as sliding windows
        return window_around(member.patch, member.multiple, shape)
    if own.window is None:
        return rounded_up(shape, member.multiple)
    window = own.window
    if rounded_up(window, member.multiple) != window:
        words = ["x".join(map(str, size)) for size in (window, member.multiple)]
        nearest = ",".join(map(str, rounded_up(window, member.multiple)))
        msg = (
            f"--window {words[0]} does not fit model.name {member.name!r}; expected "
            f"multiples of {words[1]}. Nearest above: {nearest}."
        )
        raise ConfigError(msg)
    return window_within(window, member.patch, member.multiple, shape)


def centre_shares(member: Member, settings: PredictionSettings, window: Triple) -> Shares | None:
    """Return the part of each axis of a window that norms take statistics from; None for all.

    It has the size of the default sliding window, with which a network sees about what it saw in
    training.
    """
    if completed(member, settings).windows != "centre":
        return None
    return shares_of(member.window or member.patch, window)


def entropy(probabilities: Field) -> Field:
    """Return the entropy of each voxel (x, y, z) in bits: the largest over the regions."""
    bits = np.zeros(probabilities.shape[1:], dtype=np.float32)
    for inside in probabilities:
        outside = 1 - inside
        np.maximum(bits, (entr(inside) + entr(outside)) / np.float32(np.log(2)), out=bits)
    return bits


def _check_numbers(case_id: str, probabilities: npt.NDArray[np.float32]) -> None:
    n_broken = np.count_nonzero(~np.isfinite(probabilities))
    if n_broken:
        # NaN would become background: an empty label map that looks like a result
        found = f"{n_broken} probabilities that are NaN or infinite"
        next_step = "Predict with --precision fp32; if that does not help, the model is broken."
        raise CaseError(case_id, "(all)", found, "numbers from 0 to 1", next_step)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pass:
    """Application of one network to one mirror image."""

    member: Member
    settings: PredictionSettings
    after_window: Callable[[], None]
    axes: Sequence[int] = ()
    """Axes of the image that are mirrored."""
    window_mirrors: Sequence[tuple[int, ...]] = ((),)
    """Axes of the mirror images of a window whose logits are averaged."""
    rule: WindowRule | None = None
    """Rule of another program for windows."""

    def probabilities(self, image: Tensor, mode: PredictionMode) -> Tensor:
        """Return the probabilities, mirrored as the image."""
        # in place, which saves a whole float32 volume
        return self.logits(image, mode).sigmoid_().cpu()

    def logits(self, image: Tensor, mode: PredictionMode) -> Tensor:
        """Return the logits, mirrored as the image."""
        mirrored = image[list(self.member.channels)].flip(list(self.axes))
        window = window_of(self.member, self.settings, _shape_of(image))
        for _ in range(mode.n_halvings):
            window = _halved(window, self.member.multiple)
        place = mode.device.torch_device

        def of_window(voxels: Tensor) -> Tensor:
            with mode.device.autocast():
                logits = self._of_window(voxels.to(place))
            self.after_window()
            return logits

        shares = centre_shares(self.member, self.settings, window)
        with (
            _on(self.member.network, mode.device),
            statistics_of_centre(self.member.network, shares),
        ):
            return predict_logits(
                of_window,
                mirrored if mode.stitch_on_host else mirrored.to(place),
                window=window,
                overlap=completed(self.member, self.settings).least_overlap,
                rule=self.rule,
            )

    def _of_window(self, voxels: Tensor) -> Tensor:
        """Return the logits of a window (1, C, X, Y, Z), averaged over its mirror images."""
        _, *others = self.window_mirrors
        logits: Tensor = self.member.network(voxels)
        for mirror in others:
            dims = _dims(mirror)
            logits = logits + self.member.network(voxels.flip(dims)).flip(dims)
        return logits / len(self.window_mirrors) if others else logits


def _dims(mirror: Sequence[int]) -> list[int]:
    """Return the dimensions of a window (1, C, X, Y, Z) for axes of the image."""
    return [2 + axis for axis in mirror]


def _n_windows(
    member: Member, settings: PredictionSettings, image: Field, rule: WindowRule | None = None
) -> int:
    shape, overlap = _shape_of(image), completed(member, settings).least_overlap
    return n_windows(shape, window_of(member, settings, shape), overlap, rule)


def _shape_of(image: Tensor | Field) -> Triple:
    return image.shape[1], image.shape[2], image.shape[3]


@contextmanager
def _on(network: nn.Module, device: Device) -> Iterator[None]:
    """Move a network to a device, and back afterwards."""
    home = next(network.parameters()).device
    network.to(device.torch_device)
    try:
        yield
    finally:
        network.to(home)


def _halved(window: Triple, multiple: Triple) -> Triple:
    x, y, z = (min(n, max(n // 2, _SMALLEST_WINDOW)) for n in window)
    return rounded_up((x, y, z), multiple)


def _modes(device: Device) -> tuple[PredictionMode, ...]:
    if device.torch_device.type == "cpu":
        return tuple(
            PredictionMode(device=device, stitch_on_host=True, n_halvings=n) for n in range(3)
        )
    return (
        PredictionMode(device=device),
        *(PredictionMode(device=device, stitch_on_host=True, n_halvings=n) for n in range(3)),
        PredictionMode(device=choose_device("cpu", "auto"), stitch_on_host=True, n_halvings=1),
    )
