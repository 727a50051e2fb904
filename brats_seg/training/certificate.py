"""How exact the accumulated gradient is, on a person's own network, loss, precision and device.

The gradient of a window of micro-batches is held against that of the same patches in one batch,
which plain torch makes without the accumulator. Beside it stands ordinary accumulation: the loss
of each micro-batch divided by their number.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from math import atan2, degrees, isfinite
from pathlib import Path

from monai.losses import GeneralizedDiceLoss
from torch import Tensor, nn

from brats_seg.config import LossConfig
from brats_seg.errors import BratsError, ConfigError, EnvironmentalError
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS
from brats_seg.models.build import has_batch_statistics
from brats_seg.models.device import Device
from brats_seg.models.memory import is_out_of_memory
from brats_seg.models.output import as_output
from brats_seg.training.comparison import exact, gradient_of, ordinary, whole
from brats_seg.training.criterion import Criterion, Output
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.losses import BatchDiceBce, DiceBce
from brats_seg.training.probe import Probe
from brats_seg.training.run import environment_of

PATCH_DICE = "patch Dice + BCE"
BATCH_DICE = "batch Dice + BCE"
UNDECLARED = "generalized Dice, undeclared"
"""MONAI's, over the whole batch: a loss that says nothing of how it adds up over patches."""

FLOAT64_LIMIT, ROUNDING_LIMIT = 1e-9, 0.05
"""Largest relative error that is rounding, in float64 and in less; a wrong sum misses by more."""

_METHODS = {"exact": exact, "ordinary": ordinary}


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateRow:
    """How far one way to accumulate is from the whole batch, for one loss in one precision."""

    loss: str
    own: bool
    """Whether it is the loss of the settings."""
    method: str
    """`exact`, which is ours, or `ordinary`."""
    precision: str
    n_patches: int
    """In the window; each is a micro-batch."""
    relative_error: float
    """Length of the difference to the gradient of the whole batch, over the length of that."""
    angle_deg: float
    """Between the two gradients."""

    @property
    def passed(self) -> bool:
        """Whether the error is rounding."""
        limit = FLOAT64_LIMIT if self.precision == "fp64" else ROUNDING_LIMIT
        return self.relative_error <= limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What was measured, and on what."""

    network: str
    """Where its weights come from."""
    patches: str
    """Number, size and source, and how many lack enhancing tumour."""
    environment: dict[str, str]
    """Versions, device and precision."""
    rows: tuple[CertificateRow, ...]

    @property
    def exact(self) -> bool:
        """Whether every row of ours is."""
        return all(row.passed for row in self.rows if row.method == "exact")


def certificate_of(probe: Probe, device: Device) -> Certificate:
    """Measure on a probe; raises as `certify` does."""
    et = probe.patches.target[:, REGIONS.index("et")].flatten(1)
    n_lacking = int((et.sum(1) == 0).sum())
    x, y, z = probe.patches.image.shape[2:]
    return Certificate(
        network=probe.network_from,
        patches=f"{len(et)} patches of {x}x{y}x{z} from {probe.patches_from}, {n_lacking} without ET",
        environment=environment_of(device),
        rows=certify(probe.network, probe.config.loss, probe.patches, device),
    )


def write_certificate(certificate: Certificate, path: Path) -> None:
    """Write it as JSON."""
    with whole_file(path) as beside:
        beside.write_text(json.dumps(asdict(certificate), indent=2) + "\n")


def certify(
    network: nn.Module, config: LossConfig, patches: MicroBatch, device: Device
) -> tuple[CertificateRow, ...]:
    """Measure losses of each kind in the device's precision, and in float64 where it has that.

    Of patches that do not fit in memory as one batch fewer are taken, and float64 is left out if it
    has no room at all. The network stays as it is.

    Args:
        network: At trained weights: at random ones patches look alike, and ordinary accumulation
            would pass for exact.
        config: Weights of Dice and cross-entropy, and which Dice is the settings' own.
        patches: Of one window, with tumours of unlike size and regions that are empty.
        device: Where, and in which precision.

    Raises:
        ConfigError: The network normalises over the batch.
        EnvironmentalError: Not even two patches fit in memory.
        BratsError: A gradient is zero or not finite.
    """
    if has_batch_statistics(network):
        msg = (
            "the network normalises over the batch: no way to accumulate gives the gradient of the "
            "whole batch. Use a network with instance or group norm."
        )
        raise ConfigError(msg)
    rows = _rows_that_fit(deepcopy(network), config, patches, device)
    if not rows:
        x, y, z = patches.image.shape[2:]
        msg = (
            f"two patches of {x}x{y}x{z} in one batch do not fit in memory here, and without a "
            "whole batch there is nothing to compare with. Try --device cpu."
        )
        raise EnvironmentalError(msg)
    if device.torch_device.type == "mps":  # computes no float64
        return rows
    in_float64 = Device(torch_device=device.torch_device)
    patches = patches._replace(image=patches.image.double())
    return rows + _rows_that_fit(deepcopy(network).double(), config, patches, in_float64)


def _rows_that_fit(
    network: nn.Module, config: LossConfig, patches: MicroBatch, device: Device
) -> tuple[CertificateRow, ...]:
    """Return the rows of one precision, none if not even two patches fit."""
    network.to(device.torch_device).train()
    n_all = n_patches = len(patches.image)
    while n_patches > 1:
        # the first and the last are the most unlike
        places = [i * (n_all - 1) // (n_patches - 1) for i in range(n_patches)]
        window = [MicroBatch(*(part[i : i + 1] for part in patches)) for i in places]
        try:
            return tuple(_rows(network, config, window, device))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        n_patches //= 2
    return ()


def _rows(
    network: nn.Module, config: LossConfig, window: list[MicroBatch], device: Device
) -> Iterator[CertificateRow]:
    own = BATCH_DICE if config.batch_dice else PATCH_DICE
    precision = "fp64" if window[0].image.dtype.itemsize == 8 else device.precision
    for name, criterion in _criteria(config).items():
        expected = gradient_of(whole, network, criterion, window, device)
        _check_comparable(expected, name)
        for method, backward in _METHODS.items():
            found = gradient_of(backward, network, criterion, window, device)
            yield CertificateRow(
                loss=name,
                own=name == own,
                method=method,
                precision=precision,
                n_patches=len(window),
                relative_error=float((found - expected).norm() / expected.norm()),
                angle_deg=_angle_deg(found, expected),
            )


def _criteria(config: LossConfig) -> dict[str, Criterion]:
    """Return a loss of each kind: a mean over patches, a function of sums, and an undeclared one."""
    generalized = GeneralizedDiceLoss(sigmoid=True, batch=True)

    def undeclared(output: Output, target: Tensor) -> Tensor:
        logits = as_output(output).logits[0]
        # sums over millions of voxels: half precision would round them away
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        loss: Tensor = generalized(logits, target.to(logits.dtype))
        return loss

    return {PATCH_DICE: DiceBce(config), BATCH_DICE: BatchDiceBce(config), UNDECLARED: undeclared}


def _check_comparable(gradient: Tensor, loss: str) -> None:
    length = float(gradient.norm())
    if length == 0 or not isfinite(length):
        msg = (
            f"the gradient of the whole batch has length {length} for {loss}: there is nothing to "
            "compare with. Weights diverge, and kernels fail, sooner in half precision: try "
            "--precision fp32, or another run."
        )
        raise BratsError(msg)


def _angle_deg(one: Tensor, other: Tensor) -> float:
    """Return the angle between two vectors, without the cancellation of the arc cosine."""
    one, other = one / one.norm(), other / other.norm()
    return degrees(2 * atan2(float((one - other).norm()), float((one + other).norm())))
