"""Turn probabilities into a label map, and measure the parts of a tumour.

Probabilities are thresholded, regions nested, and components below a volume removed.
Probabilities and masks are `(3, x, y, z)` in the order of `REGIONS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg import labels
from brats_seg.cases.layouts import NNUNET, UNKNOWN, resolve
from brats_seg.runtime.weights import Decoding
from brats_seg.voxels.grids import MM3_PER_ML
from brats_seg.voxels.shapes import nested_regions, number_components

TISSUES = ("ed", "ncr")
"""Oedema (WT without TC) and necrosis (TC without ET); the third tissue is the region ET."""
PARTS = (*labels.REGIONS, *TISSUES)


def decode(
    probabilities: npt.NDArray[np.float32],
    decoding: Decoding,
    convention: labels.LabelConvention,
    voxel_mm3: float,
) -> labels.LabelMap:
    """Return the label map (x, y, z) of probabilities (3, x, y, z).

    Example:
        >>> from brats_seg.labels import BRATS2023
        >>> probabilities = np.float32([[[[0.9]]], [[[0.8]]], [[[0.1]]]])  # WT and TC, not ET
        >>> int(decode(probabilities, Decoding(), BRATS2023, voxel_mm3=1.0)[0, 0, 0])
        1
    """
    return labels.label_map_of(decode_regions(probabilities, decoding, voxel_mm3), convention)


def decode_regions(
    probabilities: npt.NDArray[np.float32], decoding: Decoding, voxel_mm3: float
) -> labels.RegionMasks:
    """Return nested region masks: ET in TC in WT.

    A voxel of an inner region belongs to the outer ones whatever their probabilities. A component
    that is removed from a region is removed from those inside it, and stays in those around it.
    """
    return nested_regions(
        probabilities,
        decoding.thresholds,
        smallest=[mm3 / voxel_mm3 for mm3 in decoding.smallest_mm3],
        smallest_et=decoding.smallest_et_mm3 / voxel_mm3,
    )


def convention_to_write(
    asked_for: str | None, release: str, trained_on: Sequence[str]
) -> tuple[labels.LabelConvention, str]:
    """Return the label convention to write a case in, and the reason if it is not that of its release.

    Args:
        asked_for: Name of the convention that the user asked for.
        release: Release of the case; where it allows several conventions, that of the training cases
            is written, if they had only one.
        trained_on: Names of the conventions of the training cases.
    """
    of_release, is_ambiguous = resolve(release, ())
    if not is_ambiguous:
        if asked_for in {None, of_release.name}:
            return of_release, ""
        known = f"the release of the scans has {of_release.name}"
    elif release in {UNKNOWN, NNUNET}:
        known = "the names of the scans show no release"
    else:
        known = f"the release {release} exists in several conventions"
    if asked_for is not None:
        return labels.convention_named(asked_for), f"asked for; {known}"
    if len(trained_on) == 1:
        reason = f"{known}, and the model was trained on this convention"
        return labels.convention_named(trained_on[0]), reason
    names = ", ".join(trained_on) or "labels of no known convention"
    return labels.BRATS2023, f"{known}, and the model was trained on {names}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartVolume:
    """One region or tissue of a case."""

    name: str
    """One of `PARTS`."""
    ml: float
    n_components: int
    """Connected components; voxels that share a corner are connected."""


def measure(
    label_map: labels.LabelMap, convention: labels.LabelConvention, voxel_mm3: float
) -> tuple[PartVolume, ...]:
    """Measure every region and tissue of a label map (x, y, z)."""
    wt, tc, et = labels.regions_of(label_map, convention)
    masks = (wt, tc, et, wt & ~tc, tc & ~et)
    return tuple(
        PartVolume(
            name=name,
            ml=round(np.count_nonzero(mask) * voxel_mm3 / MM3_PER_ML, 6),
            n_components=int(number_components(mask).max(initial=0)),
        )
        for name, mask in zip(PARTS, masks, strict=True)
    )
