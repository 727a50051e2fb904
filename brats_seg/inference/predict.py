"""From a scan to a label map on its own grid."""

# DOC inference/ensemble: Probabilities of a case: the mean over networks and mirror images.
#
# Shapes: an image is `(4, x, y, z)`, probabilities are `(3, x, y, z)` in the order of `REGIONS`. Of
# the volume in float32 there are two: the sum, and the part that is being added.
#
# DOC inference/fallback: What to do when memory runs out: less of it, step by step, and slower.
#
# Windows are taken one at a time from the start. The first step down keeps the sum of the windows in
# the memory of the host, the next ones take smaller windows, and the last computes on the CPU. A
# fallback serves one case: the next one starts at the top again.
#

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import entr
from torch import Tensor, nn

from brats_seg.errors import CaseError, ConfigError
from brats_seg.inference.model import Member, Model
from brats_seg.inference.postprocess import PartVolume, decode, measure
from brats_seg.inference.scan import Scan
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import LabelConvention, LabelMap
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.memory import is_out_of_memory, peak_memory_mb, reset_peak_memory
from brats_seg.runtime.sliding_window import predict_logits

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionMode:
    """One way to compute a case."""

    device: Device
    stitch_on_host: bool = False
    """Whether the sum of the windows is kept in the memory of the host."""
    n_halvings: int = 0
    """How often the axes of the window are halved."""

    def __str__(self) -> str:
        parts = [f"on {self.device.torch_device}"]
        if self.stitch_on_host and self.device.torch_device.type != "cpu":
            parts.append("with the sum of the windows on the host")
        if self.n_halvings:
            parts.append(f"with windows of 1/{2**self.n_halvings} along each axis")
        return " ".join(parts)


class PredictionFallback:
    """Computes the parts of one case, lower down each time that memory runs out."""

    def __init__(self, case_id: str, device: Device) -> None:
        self._case_id = case_id
        self._modes = _modes(device)
        self._place = 0

    @property
    def mode(self) -> PredictionMode:
        """Where it stands."""
        return self._modes[self._place]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What became of the case, for its record; empty at the top."""
        return (f"memory ran out: computed {self.mode}",) if self._place else ()

    def run(self, work: Callable[[PredictionMode], Result]) -> Result:
        """Do the work, again on the next mode if memory ran out.

        Raises:
            CaseError: It ran out on the last mode too.
        """
        while True:
            try:
                return work(self.mode)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # outside of the handler, which would keep alive what the work had taken
            self._step_down(reason)

    def _step_down(self, reason: str) -> None:
        if self._place + 1 == len(self._modes):
            expected = "room for windows of that size"
            next_step = "Close other programs, or give smaller windows with --window."
            raise CaseError(
                self._case_id, "(all)", f"no memory {self.mode} ({reason})", expected, next_step
            )
        self._place += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        log.warning("case %s: memory ran out; going on %s", self._case_id, self.mode)


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


Triple: TypeAlias = tuple[int, int, int]
Field: TypeAlias = npt.NDArray[np.float32]

_SMALLEST_WINDOW = 16
"""Voxels along an axis below which a network sees too little to tell anything."""


@torch.inference_mode()
def predict_probabilities(
    model: Model, image: Field, settings: PredictionSettings, fallback: PredictionFallback
) -> Field:
    """Return the mean probabilities of an image.

    Raises:
        CaseError: There is not enough memory for it, even on the last mode of the fallback.
        ConfigError: A network cannot take the window that the settings ask for.
    """
    mirrors = list(product((False, True), repeat=3)) if settings.tta else [(False,) * 3]
    total = torch.zeros(len(model.members[0].regions), *image.shape[1:])
    for member in model.members:
        for mirror in mirrors:
            axes = [axis for axis, flipped in enumerate(mirror, start=1) if flipped]
            part = fallback.run(partial(_part, member, torch.from_numpy(image), axes, settings))
            for region, place in zip(total, member.regions, strict=True):
                region += part[place].flip([axis - 1 for axis in axes])
    return total.div_(len(model.members) * len(mirrors)).numpy()


def window_of(member: Member, settings: PredictionSettings, shape: Triple) -> Triple:
    """Return the window that a network goes over a crop of that shape with.

    Raises:
        ConfigError: The network cannot take the window asked for.
    """
    own = settings.over(member.fitted)
    window = own.window or (member.patch if own.windows == "sliding" else member.window)
    if own.windows == "whole" or window is None:
        return _rounded_up(shape, member.multiple)
    if _rounded_up(window, member.multiple) != window:
        words = ["x".join(map(str, size)) for size in (window, member.multiple)]
        nearest = ",".join(map(str, _rounded_up(window, member.multiple)))
        msg = (
            f"--window {words[0]} does not fit model.name {member.name!r}; expected "
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
    member: Member,
    image: Tensor,
    axes: list[int],
    settings: PredictionSettings,
    mode: PredictionMode,
) -> Tensor:
    """Return the probabilities that one network gives one mirror image, mirrored as that is."""
    mirrored = image[list(member.channels)].flip(axes)
    window = window_of(member, settings, (image.shape[1], image.shape[2], image.shape[3]))
    for _ in range(mode.n_halvings):
        window = _halved(window, member.multiple)
    place = mode.device.torch_device

    def of_window(part: Tensor) -> Tensor:
        with mode.device.autocast():
            return member.network(part.to(place))

    with _on(member.network, mode.device):
        logits = predict_logits(
            of_window,
            mirrored if mode.stitch_on_host else mirrored.to(place),
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseResult:
    """What was predicted for a case, on the grid of its files."""

    case_id: str
    label_map: LabelMap
    """(X, Y, Z)"""
    convention: LabelConvention
    """The numbering of the label map."""
    probabilities: npt.NDArray[np.float32] | None
    """(3, X, Y, Z), if they were asked for."""
    uncertainty: npt.NDArray[np.float32] | None
    """(X, Y, Z) in bits, if it was asked for."""
    volumes: tuple[PartVolume, ...]
    warnings: tuple[str, ...]
    seconds: float
    """Of the network and what follows it."""
    peak_memory_mb: float
    device: str


def predict_scan(model: Model, scan: Scan, settings: PredictionSettings) -> CaseResult:
    """Segment a scan.

    Raises:
        CaseError: There is not enough memory for it, even on the last mode of the fallback, or a
            network gives what is no number.
        ConfigError: A network cannot take the window that the settings ask for.
    """
    started_s = time.monotonic()
    reset_peak_memory(model.device.torch_device)
    fallback = PredictionFallback(scan.case_id, model.device)
    mean = crop_probabilities(model, scan.case_id, scan.image, settings, fallback)
    probabilities = scan.on_scan_spacing(mean)
    convention = model.convention(settings, scan.release)
    labels = decode(probabilities, model.decoding(settings), convention, scan.voxel_mm3)
    return CaseResult(
        case_id=scan.case_id,
        label_map=scan.on_scan_grid(labels),
        convention=convention,
        probabilities=np.stack([scan.on_scan_grid(part) for part in probabilities])
        if settings.probabilities
        else None,
        uncertainty=scan.on_scan_grid(scan.on_scan_spacing(entropy(mean)[None])[0])
        if settings.uncertainty
        else None,
        volumes=measure(labels, convention, scan.voxel_mm3),
        warnings=(*scan.warnings, *fallback.warnings),
        seconds=time.monotonic() - started_s,
        peak_memory_mb=peak_memory_mb(model.device.torch_device),
        device=str(model.device.torch_device),
    )


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
    # there is no tumour in the air, whatever a network makes of zeros
    mean *= (image != 0).any(axis=0)
    return mean


def _check_numbers(case_id: str, probabilities: npt.NDArray[np.float32]) -> None:
    n_broken = np.count_nonzero(~np.isfinite(probabilities))
    if n_broken:
        # such voxels would pass for background: an empty label map that nobody doubts
        found = f"{n_broken} probabilities that are no numbers"
        next_step = "Predict with --precision fp32; if that does not help, the model is broken."
        raise CaseError(case_id, "(all)", found, "numbers from 0 to 1", next_step)
