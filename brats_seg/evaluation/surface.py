"""Distances between the surfaces of two masks: HD95 and the normalised surface Dice.

All distances are in mm. Masks are cropped to the box around both, which changes no result.

The two metrics are of two flavours, because the challenges' own scores are:

- HD95 weights every piece of surface by its area, and places surfaces between the voxels (the
  `surface_distance` of DeepMind; Nikolov et al. 2018, arXiv 1809.04430). The official scores of
  2023 and of 2024 both come out so. Tools that count surface voxels instead (medpy, MONAI, and
  with them nnU-Net) differ by a fraction of a millimetre, or more where a thin part sticks out.
- The surface Dice counts surface voxels, as nnU-Net does and BraTS 2024 after it: the mean of both
  sides' shares. It is not the area-weighted surface Dice of DeepMind.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from brats_seg.evaluation.cells import cell_areas, cell_codes

Mask = npt.NDArray[np.bool_]
Distances = npt.NDArray[np.float64]
Spacing = tuple[float, float, float]
Slices = tuple[slice, slice, slice]

_FACE_NEIGHBOURS = ndimage.generate_binary_structure(3, 1)


def hausdorff95(reference: Mask, prediction: Mask, spacing_mm: Spacing) -> float:
    """Return the distance in mm that 95 % of each surface's area keeps to from the other.

    The larger of the two sides counts. 0 if both masks (X, Y, Z) are empty, infinite if one is.
    """
    if not (reference.any() and prediction.any()):
        return float("inf") if reference.any() or prediction.any() else 0.0
    box = box_around(reference | prediction)
    codes = cell_codes(reference[box]), cell_codes(prediction[box])
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
    box = box_around(reference | prediction)
    on_reference, on_prediction = (
        mask[box] & ~ndimage.binary_erosion(mask[box], _FACE_NEIGHBOURS)
        for mask in (reference, prediction)
    )
    return (
        _distances(on_reference, on_prediction, spacing_mm),
        _distances(on_prediction, on_reference, spacing_mm),
    )


def box_around(mask: Mask, margin: int = 0) -> Slices:
    """Return the smallest box that holds a mask (X, Y, Z), grown by a margin but not past its ends.

    The mask must not be empty.
    """
    columns = np.any(mask, axis=2)
    return (
        _extent(np.any(columns, axis=1), margin),
        _extent(np.any(columns, axis=0), margin),
        _extent(np.any(mask, axis=(0, 1)), margin),
    )


def _extent(held: npt.NDArray[np.bool_], margin: int) -> slice:
    [places] = np.nonzero(held)
    return slice(max(int(places[0]) - margin, 0), int(places[-1]) + 1 + margin)


def _distances(here: Mask, there: Mask, spacing_mm: Spacing) -> Distances:
    """Return how far each point that is here is from the nearest one there."""
    return ndimage.distance_transform_edt(~there, sampling=spacing_mm)[here]


def _reached(distances: Distances, areas: Distances) -> float:
    """Return the shortest distance that 95 % of the area does not exceed."""
    order = np.argsort(distances, kind="stable")
    share = np.cumsum(areas[order]) / areas.sum()
    return float(distances[order[np.searchsorted(share, 0.95)]])
