"""Size, shape and place of the regions of a tumour.

Surfaces are measured as for the surface distances of the challenges (Nikolov et al. 2018, see
`evaluation.cells`): the surface passes half way between a voxel inside and one outside. Steps of
voxels make it too large, by 9 % for a ball of cubic voxels, whose sphericity so is 0.92, and by more
where voxels are long.
"""

from collections.abc import Iterator
from math import pi

import numpy as np
import numpy.typing as npt

from brats_seg.data.box import bounding_box
from brats_seg.evaluation.cells import cell_areas, cell_codes
from brats_seg.inference.volumes import measure
from brats_seg.labels import REGIONS
from brats_seg.survival.feature import Feature
from brats_seg.survival.tumour import Mask, Tumour

_MM3_PER_ML = 1000.0
_RATIOS = (("tc", "wt"), ("et", "wt"), ("et", "tc"), ("wt", "brain"))


def measure_shape(tumour: Tumour) -> tuple[Feature, ...]:
    """Measure the regions of a tumour.

    Volumes and components of every region and tissue; shares of one region in another; and for
    WT, TC and ET the surface, the sphericity and its cube the compactness (1 for a ball, less for
    all else), and how far the middle of the region is from the middle of the brain.
    """
    brain, regions = tumour.brain, tumour.regions
    parts = measure(tumour.label_map, tumour.convention, tumour.voxel_mm3)
    ml = {part.name: part.ml for part in parts}
    ml["brain"] = np.count_nonzero(brain) * tumour.voxel_mm3 / _MM3_PER_ML
    features = [Feature(name=f"{name}_ml", value=value) for name, value in ml.items()]
    features += [Feature(name=f"{p.name}_components", value=p.n_components) for p in parts]
    for one, other in _RATIOS:
        share = ml[one] / ml[other] if ml[other] else float("nan")
        features.append(Feature(name=f"{one}_{other}_ratio", value=share))
    middle = _middle(brain, tumour.spacing_mm)
    for name, region in zip(REGIONS, regions, strict=True):
        features += _shape_of(name, region, tumour.spacing_mm, middle)
    return tuple(features)


def surface_mm2(mask: Mask, spacing_mm: tuple[float, float, float]) -> float:
    """Return the area of the surface of a mask (x, y, z); 0 if it is empty."""
    box = bounding_box(mask)
    if box is None:
        return 0.0
    counts = np.bincount(cell_codes(mask[box.slices]).ravel(), minlength=256)
    return float(counts @ cell_areas(spacing_mm))


def _shape_of(
    name: str,
    mask: Mask,
    spacing_mm: tuple[float, float, float],
    middle: npt.NDArray[np.float64],
) -> Iterator[Feature]:
    surface = surface_mm2(mask, spacing_mm)
    sphericity = distance = float("nan")
    if surface:
        volume = np.count_nonzero(mask) * float(np.prod(spacing_mm))
        sphericity = pi ** (1 / 3) * (6 * volume) ** (2 / 3) / surface
        distance = float(np.linalg.norm(_middle(mask, spacing_mm) - middle))
    yield Feature(name=f"{name}_surface_mm2", value=surface)
    yield Feature(name=f"{name}_sphericity", value=sphericity)
    yield Feature(name=f"{name}_compactness", value=sphericity**3)
    yield Feature(name=f"{name}_centre_distance_mm", value=distance)


def _middle(mask: Mask, spacing_mm: tuple[float, float, float]) -> npt.NDArray[np.float64]:
    """Return the mean place of the voxels of a mask, in mm."""
    sums = (mask.sum(axis=others, dtype=np.float64) for others in ((1, 2), (0, 2), (0, 1)))
    places = [np.average(np.arange(len(weights)), weights=weights) for weights in sums]
    return np.array(places) * spacing_mm
