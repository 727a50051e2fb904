"""Measure how well two masks agree: overlap, Hausdorff distance and surface Dice.

Arrays `(R,)` hold one number per region. Overlaps are ratios of the same voxel counts, taken once;
Dice and Jaccard equal those of MONAI with `ignore_empty=False`. Distances are in mm. `hausdorff95`
weights every piece of surface by its area, as the challenges' programs do (Nikolov et al. 2018,
arXiv 1809.04430); MONAI and medpy count surface voxels and differ. `surface_dice` is the mean of the
shares of both surfaces, as in nnU-Net and BraTS 2024; MONAI pools both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy as sp  # imports its modules when they are used

from brats_seg.labels import RegionMasks
from brats_seg.voxels.box import Array, Box, Mask, bounding_box
from brats_seg.voxels.grids import Spacing
from brats_seg.voxels.shapes import cell_areas, cell_codes

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

BOTH_EMPTY = 1.0
"""Dice and Jaccard of a region that is empty on both sides; one that is empty on one side scores 0."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionCounts:
    """Numbers of voxels of one case by region, `(R,)` each."""

    case_id: str
    true_positive: Counts
    """Voxels in the prediction and in the reference."""
    false_positive: Counts
    """Voxels in the prediction only."""
    false_negative: Counts
    """Voxels in the reference only."""
    true_negative: Counts
    """Voxels in neither."""

    @property
    def in_prediction(self) -> Counts:
        """Voxels in the prediction."""
        return self.true_positive + self.false_positive

    @property
    def in_reference(self) -> Counts:
        """Voxels in the reference."""
        return self.true_positive + self.false_negative


def region_counts(case_id: str, counts: Sequence[npt.ArrayLike]) -> RegionCounts:
    """Return the voxel counts of a case from rows TP, FP, FN, TN of `R` counts."""
    return RegionCounts(case_id, *np.asarray(counts, np.int64))


def count_regions(prediction: RegionMasks, reference: RegionMasks, case_id: str) -> RegionCounts:
    """Count the voxels in which region masks `(R, X, Y, Z)` on one grid agree and differ.

    Example:
        >>> reference, prediction = np.zeros((2, 3, 4, 4, 4), bool)
        >>> reference[:, :2] = prediction[:, :1] = True
        >>> dice(count_regions(prediction, reference, "case")).round(3).tolist()
        [0.667, 0.667, 0.667]
    """
    in_prediction, in_reference = _count(prediction), _count(reference)
    both = _count(prediction & reference)
    neither = reference[0].size - in_prediction - in_reference + both
    return region_counts(case_id, [both, in_prediction - both, in_reference - both, neither])


def dice_of_counts(both: npt.ArrayLike, one: npt.ArrayLike, other: npt.ArrayLike) -> Values:
    """Return the Dice of masks of `one` and `other` voxels that share `both`."""
    return _ratio(2 * np.asarray(both), np.add(one, other))


def dice(counts: RegionCounts) -> Values:
    """Return `2 |P and R| / (|P| + |R|)` per region; `BOTH_EMPTY` where both are empty."""
    return dice_of_counts(counts.true_positive, counts.in_prediction, counts.in_reference)


def jaccard(counts: RegionCounts) -> Values:
    """Return `|P and R| / |P or R|` per region; `BOTH_EMPTY` where both are empty."""
    return _ratio(counts.true_positive, counts.in_prediction + counts.false_negative)


def sensitivity(counts: RegionCounts) -> Values:
    """Return the share of the reference that is predicted; where it is empty, that of Dice."""
    share = _ratio(counts.true_positive, counts.in_reference)
    return np.where(counts.in_reference > 0, share, dice(counts))


def specificity(counts: RegionCounts) -> Values:
    """Return the share of the voxels outside the reference that are not predicted."""
    return _ratio(counts.true_negative, counts.true_negative + counts.false_positive)


def hausdorff95(reference: Mask, prediction: Mask, spacing_mm: Spacing) -> float:
    """Return the 95th percentile Hausdorff distance in mm: 95 % of each surface is at most so far.

    Surfaces lie between voxels and are weighted by area, and the larger of the two sides counts. The
    distance is 0 if both masks `(X, Y, Z)` are empty, and infinite if one is.

    Example:
        >>> reference, prediction = np.zeros((2, 20, 20, 20), bool)
        >>> reference[5:10, 5:10, 5:10] = True
        >>> prediction[7:12, 5:10, 5:10] = True
        >>> hausdorff95(reference, prediction, (1.0, 1.0, 1.0))
        2.0
    """
    if not (reference.any() and prediction.any()):
        return float("inf") if reference.any() or prediction.any() else 0.0
    codes = [cell_codes(side) for side in cropped(reference, prediction)]
    surfaces = [(code > 0) & (code < 255) for code in codes]
    areas = cell_areas(spacing_mm)
    return max(
        _area_percentile(_distances(surface, other, spacing_mm), areas[code[surface]])
        for surface, other, code in zip(surfaces, surfaces[::-1], codes, strict=True)
    )


def surface_distances(
    reference: Mask, prediction: Mask, spacing_mm: Spacing
) -> tuple[Values, Values]:
    """Return the distance of each surface voxel of two masks to the other surface, by side.

    Neither mask `(X, Y, Z)` may be empty.
    """
    # a surface voxel has at least one of its six neighbours outside the mask
    first, second = (
        side & ~sp.ndimage.binary_erosion(side) for side in cropped(reference, prediction)
    )
    return _distances(first, second, spacing_mm), _distances(second, first, spacing_mm)


def surface_dice(sides: Sequence[Values], tolerance_mm: float) -> float:
    """Return the share of surface distances up to a tolerance, as the mean of the two sides."""
    return float(np.mean([np.mean(side <= tolerance_mm) for side in sides]))


def cropped(one: Array, other: Array) -> tuple[Array, Array]:
    """Crop two masks or label maps to the box around both, which changes no distance."""
    box = bounding_box(one | other) or Box.at((0, 0, 0), (1, 1, 1))
    return one[box.slices], other[box.slices]


def shared_voxels(one: Array, other: Array, shape: tuple[int, int]) -> Counts:
    """Return how many voxels have each number in one array and each in another, as `shape`."""
    joint = one.astype(np.int64) * shape[1] + other
    return np.bincount(joint.ravel(), minlength=shape[0] * shape[1]).reshape(shape)


def _count(masks: RegionMasks) -> Counts:
    # one mask at a time: with an axis, numpy is slower
    return np.array([np.count_nonzero(mask) for mask in masks], np.int64)


def _ratio(part: Array, whole: Array) -> Values:
    empty = whole == 0
    return np.where(empty, BOTH_EMPTY, part / np.where(empty, 1, whole))


def _distances(surface: Mask, other: Mask, spacing_mm: Spacing) -> Values:
    """Return the distance of each point of a surface to the nearest point of another."""
    points, targets = np.argwhere(surface), np.argwhere(other)
    # quicker than a distance transform, and the same to the last bit
    tree = sp.spatial.KDTree(targets * spacing_mm, compact_nodes=False, balanced_tree=False)
    nearest = targets[tree.query(points * spacing_mm)[1]]
    return np.sqrt((((points - nearest) * spacing_mm) ** 2).sum(axis=1))


def _area_percentile(distances: Values, areas: Values) -> float:
    """Return the smallest distance that 95 % of the area does not exceed."""
    order = np.argsort(distances, kind="stable")
    share = np.cumsum(areas[order]) / areas.sum()
    return float(distances[order[np.searchsorted(share, 0.95)]])
