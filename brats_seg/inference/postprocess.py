"""Turn probabilities into a label map, and measure the parts of a tumour.

Probabilities are thresholded, regions nested, and components below a volume removed.
Probabilities and masks are `(3, x, y, z)` in the order of `REGIONS`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg.labels import (
    REGIONS,
    LabelConvention,
    LabelMap,
    RegionMasks,
    label_map_of,
    regions_of,
)
from brats_seg.runtime.weights import Decoding
from brats_seg.voxels.grids import MM3_PER_ML
from brats_seg.voxels.shapes import nested_regions, number_components

TISSUES = ("ed", "ncr")
"""Oedema (WT without TC) and necrosis (TC without ET); the third tissue is the region ET."""
PARTS = (*REGIONS, *TISSUES)


def decode(
    probabilities: npt.NDArray[np.float32],
    decoding: Decoding,
    convention: LabelConvention,
    voxel_mm3: float,
) -> LabelMap:
    """Return the label map (x, y, z) of probabilities (3, x, y, z).

    Example:
        >>> from brats_seg.labels import BRATS2023
        >>> probabilities = np.float32([[[[0.9]]], [[[0.8]]], [[[0.1]]]])  # WT and TC, not ET
        >>> int(decode(probabilities, Decoding(), BRATS2023, voxel_mm3=1.0)[0, 0, 0])
        1
    """
    return label_map_of(decode_regions(probabilities, decoding, voxel_mm3), convention)


def decode_regions(
    probabilities: npt.NDArray[np.float32], decoding: Decoding, voxel_mm3: float
) -> RegionMasks:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PartVolume:
    """One region or tissue of a case."""

    name: str
    """One of `PARTS`."""
    ml: float
    n_components: int
    """Connected components; voxels that share a corner are connected."""


def measure(
    label_map: LabelMap, convention: LabelConvention, voxel_mm3: float
) -> tuple[PartVolume, ...]:
    """Measure every region and tissue of a label map (x, y, z)."""
    wt, tc, et = regions_of(label_map, convention)
    masks = zip(PARTS, (wt, tc, et, wt & ~tc, tc & ~et), strict=True)
    return tuple(_measured(name, mask, voxel_mm3) for name, mask in masks)


def _measured(name: str, mask: npt.NDArray[np.bool_], voxel_mm3: float) -> PartVolume:
    return PartVolume(
        name=name,
        ml=round(np.count_nonzero(mask) * voxel_mm3 / MM3_PER_ML, 6),
        n_components=int(number_components(mask).max(initial=0)),
    )
