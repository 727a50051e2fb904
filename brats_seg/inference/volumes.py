"""How large the parts of a tumour are, and in how many pieces."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg.evaluation.lesions import number_components
from brats_seg.labels import REGIONS, LabelConvention, LabelMap, regions_of

TISSUES = ("ed", "ncr")
"""Oedema (WT without TC) and necrosis (TC without ET); the third tissue is the region ET."""
PARTS = (*REGIONS, *TISSUES)

_MM3_PER_ML = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PartVolume:
    """One region or tissue of a case."""

    name: str
    """One of `PARTS`."""
    ml: float
    n_components: int
    """Voxels that share a corner are together."""


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
        ml=round(np.count_nonzero(mask) * voxel_mm3 / _MM3_PER_ML, 6),
        n_components=int(number_components(mask).max(initial=0)),
    )
