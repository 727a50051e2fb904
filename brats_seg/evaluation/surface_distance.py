"""Compute distances between the surfaces of two masks: HD95 and the normalised surface Dice.

All distances are in mm. Masks are cropped to the box around both, which changes no result.

The two metrics are defined differently, because those of the programs of the challenges are:

- HD95 weights every piece of surface by its area, places surfaces between the voxels and takes the
  larger of the two sides (the `surface_distance` of DeepMind; Nikolov et al. 2018, arXiv
  1809.04430). The programs of 2023 and of 2024 both do so. Tools that count surface voxels instead
  agree to about half a millimetre on compact tumours, but not where stray parts make up a few per
  cent of a surface: MONAI, which takes the larger side too, may then give half of it, and medpy,
  and with it nnU-Net, which pool both sides, a tenth. Compare HD95 only with HD95 of one program.
- The surface Dice counts surface voxels, as nnU-Net does and BraTS 2024 after it: the mean of the
  shares of both sides. It is not the area-weighted surface Dice of DeepMind, nor that of MONAI,
  which pools the surface voxels of both sides.

So neither is MONAI's: on real predictions HD95 differs from `compute_hausdorff_distance` by up to
4 mm, and the surface Dice from `compute_surface_dice` by up to 0.005. On the distances between
surface voxels both agree, and the tests hold them against each other. A case of 240x240x155 with
its three regions takes 0.45 s here and 0.43 s with MONAI for HD95, and 0.44 s against 0.88 s for
the surface Dice at two tolerances (processor seconds, one thread).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from brats_seg.voxels.box import Mask, bounding_box
from brats_seg.voxels.shapes import cell_areas, cell_codes

Distances = npt.NDArray[np.float64]
Spacing = tuple[float, float, float]

_FACE_NEIGHBOURS = ndimage.generate_binary_structure(3, 1)


def hausdorff95(reference: Mask, prediction: Mask, spacing_mm: Spacing) -> float:
    """Return the 95th percentile Hausdorff distance in mm: 95 % of each surface is at most so far.

    Surfaces are weighted by area, and the larger of the two sides counts. The distance is 0 if both
    masks `(X, Y, Z)` are empty, and infinite if one is.

    Example:
        >>> reference, prediction = np.zeros((2, 20, 20, 20), bool)
        >>> reference[5:10, 5:10, 5:10] = True
        >>> prediction[7:12, 5:10, 5:10] = True
        >>> hausdorff95(reference, prediction, (1.0, 1.0, 1.0))
        2.0
    """
    if not (reference.any() and prediction.any()):
        return float("inf") if reference.any() or prediction.any() else 0.0
    codes = [cell_codes(side) for side in _cut(reference, prediction)]
    on_reference, on_prediction = ((code > 0) & (code < 255) for code in codes)
    areas = cell_areas(spacing_mm)
    return max(
        _area_percentile(
            _distances(on_reference, on_prediction, spacing_mm), areas[codes[0][on_reference]]
        ),
        _area_percentile(
            _distances(on_prediction, on_reference, spacing_mm), areas[codes[1][on_prediction]]
        ),
    )


def surface_dice(
    reference: Mask, prediction: Mask, spacing_mm: Spacing, tolerances_mm: Sequence[float]
) -> tuple[float, ...]:
    """Return the share of surface voxels within each tolerance of the other surface.

    The shares of the two sides are averaged. They are 1 if both masks `(X, Y, Z)` are empty, and 0
    if one is.
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

    A surface voxel has at least one of its six neighbours outside the mask. Neither mask may be
    empty.
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
    """Return the distance of each point of one surface to the nearest point of the other."""
    return ndimage.distance_transform_edt(~there, sampling=spacing_mm)[here]


def _area_percentile(distances: Distances, areas: Distances) -> float:
    """Return the smallest distance that 95 % of the area does not exceed."""
    order = np.argsort(distances, kind="stable")
    share = np.cumsum(areas[order]) / areas.sum()
    return float(distances[order[np.searchsorted(share, 0.95)]])
