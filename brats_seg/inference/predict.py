"""From a scan to a label map on its own grid."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg.errors import CaseError
from brats_seg.inference.ensemble import entropy, predict_probabilities
from brats_seg.inference.ladder import Ladder
from brats_seg.inference.model import Model
from brats_seg.inference.postprocess import decode
from brats_seg.inference.scan import Scan
from brats_seg.inference.settings import InferenceConfig
from brats_seg.inference.volumes import PartVolume, measure
from brats_seg.labels import LabelConvention, LabelMap
from brats_seg.models.memory import peak_memory_mb, reset_peak_memory


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


def predict_scan(model: Model, scan: Scan, settings: InferenceConfig) -> CaseResult:
    """Segment a scan.

    Raises:
        CaseError: There is not enough memory for it, even on the last rung of the ladder, or a
            network gives what is no number.
        ConfigError: A network cannot take the window that the settings ask for.
    """
    started_s = time.monotonic()
    reset_peak_memory(model.device.torch_device)
    ladder = Ladder(scan.case_id, model.device)
    mean = crop_probabilities(model, scan.case_id, scan.image, settings, ladder)
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
        warnings=(*scan.warnings, *ladder.warnings),
        seconds=time.monotonic() - started_s,
        peak_memory_mb=peak_memory_mb(model.device.torch_device),
        device=str(model.device.torch_device),
    )


def crop_probabilities(
    model: Model,
    case_id: str,
    image: npt.NDArray[np.float32],
    settings: InferenceConfig,
    ladder: Ladder,
) -> npt.NDArray[np.float32]:
    """Return the probabilities (3, x, y, z) of a brain crop (4, x, y, z), 0 outside the brain.

    Raises as `predict_scan`.
    """
    mean = predict_probabilities(model, image, settings, ladder)
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
