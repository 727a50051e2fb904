"""Distances between the surfaces of two masks: HD95 and the normalised surface Dice.

All distances are in mm. Masks are cropped to the box around both, which changes no result.

The two metrics are of two flavours, because those of the challenges' own programs are:

- HD95 weights every piece of surface by its area, places surfaces between the voxels and takes the
  worse of the two sides (the `surface_distance` of DeepMind; Nikolov et al. 2018, arXiv
  1809.04430). The programs of 2023 and of 2024 both do so. Tools that count surface voxels instead
  agree to about half a millimetre on compact tumours, but not where stray parts make up a few per
  cent of a surface: MONAI, which takes the worse side too, may then say half as much, and medpy,
  and with it nnU-Net, which pool both sides, a tenth. Compare HD95 only with HD95 of one program.
- The surface Dice counts surface voxels, as nnU-Net does and BraTS 2024 after it: the mean of both
  sides' shares. It is not the area-weighted surface Dice of DeepMind.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from brats_seg.voxels.box import Mask, bounding_box
from brats_seg.voxels.surface import cell_areas, cell_codes

Distances = npt.NDArray[np.float64]
Spacing = tuple[float, float, float]

_FACE_NEIGHBOURS = ndimage.generate_binary_structure(3, 1)


def hausdorff95(reference: Mask, prediction: Mask, spacing_mm: Spacing) -> float:
    """Return the distance in mm that 95 % of each surface's area keeps to from the other.

    The larger of the two sides counts. 0 if both masks (X, Y, Z) are empty, infinite if one is.
    """
    if not (reference.any() and prediction.any()):
        return float("inf") if reference.any() or prediction.any() else 0.0
    codes = [cell_codes(side) for side in _cut(reference, prediction)]
    on_reference, on_prediction = ((code > 0) & (code < 255) for code in codes)
    areas = cell_areas(spacing_mm)
    return max(
        _reached(
            _distances(on_reference, on_prediction, spacing_mm), areas[codes[0][on_reference]]
        ),
        _reached(
            _distances(on_prediction, on_reference, spacing_mm), areas[codes[1][on_prediction]]
        ),
    )


def surface_dice(
    reference: Mask, prediction: Mask, spacing_mm: Spacing, tolerances_mm: Sequence[float]
) -> tuple[float, ...]:
    """Return the share of surface voxels within each tolerance of the other surface.

    The shares of the two sides are averaged. 1 if both masks (X, Y, Z) are empty, 0 if one is.
    """
    if not (reference.any() and prediction.any()):
        either = reference.any() or prediction.any()
        return tuple(0.0 if either else 1.0 for _ in tolerances_mm)
    sides = voxel_surface_distances(reference, prediction, spacing_mm)
    return tuple(
        float(np.mean([np.mean(side <= tolerance) for side in sides]))
        for tolerance in tolerances_mm
    )


def voxel_surface_distances(
    reference: Mask, prediction: Mask, spacing_mm: Spacing
) -> tuple[Distances, Distances]:
    """Return the distances in mm from the surface voxels of each of two masks to the other's.

    A surface voxel has one of its six neighbours outside the mask. Neither mask may be empty.
    """
    on_reference, on_prediction = (
        side & ~ndimage.binary_erosion(side, _FACE_NEIGHBOURS)
        for side in _cut(reference, prediction)
    )
    return (
        _distances(on_reference, on_prediction, spacing_mm),
        _distances(on_prediction, on_reference, spacing_mm),
    )


def _cut(one: Mask, other: Mask) -> tuple[Mask, Mask]:
    """Cut two masks to the box around both."""
    box = bounding_box(one | other)
    return (one, other) if box is None else (one[box.slices], other[box.slices])


def _distances(here: Mask, there: Mask, spacing_mm: Spacing) -> Distances:
    """Return how far each point that is here is from the nearest one there."""
    return ndimage.distance_transform_edt(~there, sampling=spacing_mm)[here]


def _reached(distances: Distances, areas: Distances) -> float:
    """Return the shortest distance that 95 % of the area does not exceed."""
    order = np.argsort(distances, kind="stable")
    share = np.cumsum(areas[order]) / areas.sum()
    return float(distances[order[np.searchsorted(share, 0.95)]])
