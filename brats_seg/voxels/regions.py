"""Turn probabilities into nested region masks, and measure what these hold.

Probabilities and masks are `(3, x, y, z)` in the order of `REGIONS`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg.config import CubicMillimetres, Fraction, Section, Threshold
from brats_seg.labels import REGIONS, RegionMasks
from brats_seg.voxels.box import Mask
from brats_seg.voxels.grids import MM3_PER_ML
from brats_seg.voxels.shapes import number_components

PARTS = (*REGIONS, "ed", "ncr")
"""The regions, oedema (WT without TC) and necrosis (TC without ET); the third tissue is the region ET."""


class Decoding(Section):
    """Settings that turn probabilities into region masks."""

    thresholds: tuple[Threshold, Threshold, Threshold] = (0.5, 0.5, 0.5)
    """Probability above which a voxel belongs to WT, TC, ET."""
    smallest_mm3: tuple[CubicMillimetres, CubicMillimetres, CubicMillimetres] = (0.0, 0.0, 0.0)
    """Volume below which a component of WT, TC, ET is removed."""
    smallest_et_mm3: CubicMillimetres = 0.0
    """Volume of all ET together below which it becomes necrosis."""
    surest_et: Fraction = 0.0
    """Probability of ET that some voxel must reach; if none does, all ET becomes necrosis."""


def decode_regions(
    probabilities: npt.NDArray[np.float32], decoding: Decoding, voxel_mm3: float
) -> RegionMasks:
    """Return nested region masks, ET in TC in WT, of probabilities (3, x, y, z).

    A voxel of an inner region belongs to the outer ones whatever their probabilities. A component
    that is removed from a region is removed from those inside it, and stays in those around it.

    Example:
        >>> probabilities = np.float32([[[[0.1]]], [[[0.8]]], [[[0.1]]]])  # TC, and neither WT nor ET
        >>> decode_regions(probabilities, Decoding(), voxel_mm3=1.0).ravel().tolist()
        [True, True, False]
    """
    regions = probabilities > np.array(decoding.thresholds, dtype=np.float32)[:, None, None, None]
    wt, tc, et = regions
    tc |= et
    wt |= tc
    for region, outer, mm3 in zip(regions, (wt, wt, tc), decoding.smallest_mm3, strict=True):
        region &= outer
        _drop_small(region, mm3 / voxel_mm3)
    is_little = np.count_nonzero(et) < decoding.smallest_et_mm3 / voxel_mm3
    if is_little or (decoding.surest_et and probabilities[2].max() < decoding.surest_et):
        et[...] = False
    return regions


def _drop_small(mask: Mask, smallest: float) -> None:
    """Empty components of fewer voxels, in place; voxels that share a corner are connected."""
    if smallest <= 1:
        return
    components = number_components(mask)
    kept = np.bincount(components.ravel()) >= smallest
    kept[0] = False
    mask[...] = kept[components]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartVolume:
    """One region or tissue of a case."""

    name: str
    """One of `PARTS`."""
    ml: float
    n_components: int
    """Connected components; voxels that share a corner are connected."""


def measure_parts(regions: RegionMasks, voxel_mm3: float) -> tuple[PartVolume, ...]:
    """Measure every region and tissue of nested region masks (3, x, y, z)."""
    wt, tc, et = regions
    masks = (wt, tc, et, wt & ~tc, tc & ~et)
    return tuple(
        PartVolume(
            name=name,
            ml=round(np.count_nonzero(mask) * voxel_mm3 / MM3_PER_ML, 6),
            n_components=int(number_components(mask).max(initial=0)),
        )
        for name, mask in zip(PARTS, masks, strict=True)
    )
