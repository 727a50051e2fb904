"""The scores of one case: two label maps in, a row per region out."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.checks import check_one_grid, have_one_grid
from brats_seg.cases.nifti import Volume, read_label_map
from brats_seg.data.box import Box, bounding_box
from brats_seg.evaluation.lesionwise import LesionScores, Scale, score_lesions
from brats_seg.evaluation.overlap import BOTH_EMPTY, RegionCounts, count_regions, dice, jaccard
from brats_seg.evaluation.pairs import Pair
from brats_seg.evaluation.protocols import Protocol
from brats_seg.evaluation.scores import Score
from brats_seg.evaluation.surface import hausdorff95
from brats_seg.labels import LabelConvention, LabelMap

Masks = npt.NDArray[np.bool_]
PerRegion = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbering:
    """The label conventions of the two sides of a pair."""

    reference: LabelConvention
    prediction: LabelConvention


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseScores:
    """One case, scored."""

    scores: tuple[Score, ...]
    """A row per region of the protocol."""
    remark: str = ""
    """What was unusual, and could be dealt with."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sides:
    """The regions of both sides, cut to where either has any."""

    reference: Masks
    """(R, X, Y, Z)"""
    prediction: Masks
    """(R, X, Y, Z)"""
    n_cut_off: int
    """Voxels of the volume that are in no region of either side."""


def score_pair(pair: Pair, numbering: Numbering, protocol: Protocol) -> CaseScores:
    """Score the prediction of one case.

    Without a prediction every region scores the worst there is, also one that the reference lacks.

    Raises:
        CaseError: A file cannot be read, or the two are not on one grid.
    """
    reference = read_label_map(pair.reference, case_id=pair.case_id)
    geometry = reference.geometry
    scale = Scale(
        spacing_mm=geometry.spacing_mm,
        penalty_mm=protocol.hd95_penalty(geometry.shape, geometry.spacing_mm),
    )
    if pair.prediction is None:
        nothing = np.zeros(geometry.shape, np.uint8)
        sides = _regions(reference.array, nothing, numbering, protocol)
        rows = _scored(pair.case_id, sides, protocol, scale)
        return CaseScores(scores=tuple(_worst(row, scale.penalty_mm) for row in rows))
    prediction = read_label_map(pair.prediction, case_id=pair.case_id)
    remark = _check_grids(pair.case_id, reference, prediction)
    sides = _regions(reference.array, prediction.array, numbering, protocol)
    return CaseScores(scores=_scored(pair.case_id, sides, protocol, scale), remark=remark)


def label_values(path: Path, case_id: str) -> frozenset[int]:
    """Return the values that occur in a label map, or raise `CaseError` if it cannot be read."""
    array = read_label_map(path, case_id=case_id).array
    return frozenset(np.flatnonzero(np.bincount(array.ravel(order="K"))).tolist())


def _check_grids(case_id: str, reference: Volume, prediction: Volume) -> str:
    """Refuse a prediction on another grid; return a remark if a side does not say where it is."""
    here, there = reference.geometry, prediction.geometry
    if have_one_grid(here, there):
        return ""
    sides = [(f"reference {reference.file}", here), (f"prediction {prediction.file}", there)]
    # arrays are saved with the identity when nothing is known of their place
    placeless = [file for file, grid in sides if np.array_equal(grid.affine, np.eye(4))]
    if here.shape != there.shape or not placeless:
        check_one_grid(case_id, sides)
    return f"case {case_id}: {placeless[0]} has no affine, so that voxels were paired by index"


def _regions(
    reference: LabelMap, prediction: LabelMap, numbering: Numbering, protocol: Protocol
) -> _Sides:
    box = bounding_box((reference > 0) | (prediction > 0)) or Box.at((0, 0, 0), (1, 1, 1))
    cut = reference[box.slices]
    return _Sides(
        reference=_masks(cut, numbering.reference, protocol),
        prediction=_masks(prediction[box.slices], numbering.prediction, protocol),
        n_cut_off=reference.size - cut.size,
    )


def _masks(label_map: LabelMap, convention: LabelConvention, protocol: Protocol) -> Masks:
    return np.stack([np.isin(label_map, region.values(convention)) for region in protocol.regions])


def _scored(case_id: str, sides: _Sides, protocol: Protocol, scale: Scale) -> tuple[Score, ...]:
    counts = count_regions(sides.prediction, sides.reference, case_id)
    counts = replace(counts, true_negative=counts.true_negative + sides.n_cut_off)
    ml = scale.voxel_mm3 / 1000
    hd95 = [
        hausdorff95(reference, prediction, scale.spacing_mm)
        for reference, prediction in zip(sides.reference, sides.prediction, strict=True)
    ]
    columns = {
        "dice": dice(counts),
        "jaccard": jaccard(counts),
        "hd95": np.where(np.isfinite(hd95), hd95, scale.penalty_mm),
        "sensitivity": _sensitivity(counts),
        "specificity": _specificity(counts),
        "reference_ml": counts.in_reference * ml,
        "prediction_ml": counts.in_prediction * ml,
    }
    lesions: tuple[LesionScores | None, ...] = (None,) * len(hd95)
    if protocol.lesions is not None:
        lesions = score_lesions(sides.reference, sides.prediction, protocol, scale)
    return tuple(
        Score(
            case_id=case_id,
            region=region,
            lesions=lesions[k],
            **{column: float(values[k]) for column, values in columns.items()},
        )
        for k, region in enumerate(protocol.region_names)
    )


def _sensitivity(counts: RegionCounts) -> PerRegion:
    in_reference = counts.in_reference
    without = np.where(counts.in_prediction == 0, BOTH_EMPTY, 0.0)
    return np.where(in_reference > 0, counts.true_positive / np.maximum(in_reference, 1), without)


def _specificity(counts: RegionCounts) -> PerRegion:
    outside = counts.true_negative + counts.false_positive
    return np.where(outside > 0, counts.true_negative / np.maximum(outside, 1), 1.0)


def _worst(score: Score, penalty_mm: float) -> Score:
    lesions = score.lesions
    if lesions is not None:
        nsd = (0.0,) * len(lesions.nsd)
        lesions = replace(lesions, dice=0.0, hd95=penalty_mm, nsd=nsd)
    return replace(
        score,
        dice=0.0,
        jaccard=0.0,
        hd95=penalty_mm,
        sensitivity=0.0,
        specificity=0.0,
        lesions=lesions,
    )
