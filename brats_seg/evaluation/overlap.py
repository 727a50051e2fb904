"""Compute the overlap of region masks: counts first, ratios once, at the end.

Arrays `(3,)` hold one number per region, in the order of `REGIONS`. Dice and Jaccard equal
`compute_dice` and `compute_iou` of MONAI with `ignore_empty=False`. They are implemented here
because other scores are ratios of the same counts, and because counting in boolean arrays takes
0.012 s for a case of 240x240x155 where MONAI takes 0.35 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg.errors import CaseError
from brats_seg.labels import RegionMasks

BOTH_EMPTY = 1.0
"""Dice and Jaccard of a region that is empty on both sides; one that is empty on one side scores 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RegionCounts:
    """Numbers of voxels of one case by region, `(3,)` int64 each."""

    case_id: str
    true_positive: npt.NDArray[np.int64]
    """Voxels in the prediction and in the reference."""
    false_positive: npt.NDArray[np.int64]
    """Voxels in the prediction only."""
    false_negative: npt.NDArray[np.int64]
    """Voxels in the reference only."""
    true_negative: npt.NDArray[np.int64]
    """Voxels in neither."""

    @property
    def in_prediction(self) -> npt.NDArray[np.int64]:
        """Voxels in the prediction."""
        return self.true_positive + self.false_positive

    @property
    def in_reference(self) -> npt.NDArray[np.int64]:
        """Voxels in the reference."""
        return self.true_positive + self.false_negative


def region_counts(case_id: str, counts: Sequence[Sequence[float]]) -> RegionCounts:
    """Return the voxel counts of a case from rows TP, FP, FN, TN of `R` counts.

    Raises:
        ValueError: There are not four rows of one length.
    """
    true_positive, false_positive, false_negative, true_negative = np.asarray(counts, np.int64)
    return RegionCounts(
        case_id=case_id,
        true_positive=true_positive,
        false_positive=false_positive,
        false_negative=false_negative,
        true_negative=true_negative,
    )


def count_regions(prediction: RegionMasks, reference: RegionMasks, case_id: str) -> RegionCounts:
    """Count the voxels in which region masks `(3, X, Y, Z)` agree and differ.

    Raises:
        CaseError: The two sides have different shapes.

    Example:
        >>> reference = np.zeros((3, 4, 4, 4), bool)
        >>> reference[:, :2] = True
        >>> prediction = np.zeros((3, 4, 4, 4), bool)
        >>> prediction[:, :1] = True
        >>> dice(count_regions(prediction, reference, "case")).round(3).tolist()
        [0.667, 0.667, 0.667]
    """
    if prediction.shape != reference.shape:
        raise CaseError(
            case_id,
            file="prediction",
            found=f"region masks of shape {prediction.shape}",
            expected=f"{reference.shape}, as the reference has",
            next_step="Resample both to one grid before they are compared.",
        )
    in_prediction, in_reference = _voxels(prediction), _voxels(reference)
    both = _voxels(prediction & reference)
    either = in_prediction + in_reference - both
    return RegionCounts(
        case_id=case_id,
        true_positive=both,
        false_positive=in_prediction - both,
        false_negative=in_reference - both,
        true_negative=reference[0].size - either,
    )


def dice(counts: RegionCounts) -> npt.NDArray[np.float64]:
    """Return `2 |P and R| / (|P| + |R|)` per region; `BOTH_EMPTY` where both are empty."""
    return _ratio(2 * counts.true_positive, counts.in_prediction + counts.in_reference)


def jaccard(counts: RegionCounts) -> npt.NDArray[np.float64]:
    """Return `|P and R| / |P or R|` per region; `BOTH_EMPTY` where both are empty."""
    either = counts.in_prediction + counts.false_negative
    return _ratio(counts.true_positive, either)


def _voxels(masks: RegionMasks) -> npt.NDArray[np.int64]:
    # one mask at a time: with an axis, numpy is slower
    return np.array([np.count_nonzero(mask) for mask in masks], np.int64)


def _ratio(shared: npt.NDArray[np.int64], whole: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    empty = whole == 0
    return np.where(empty, BOTH_EMPTY, shared / np.where(empty, 1, whole))
