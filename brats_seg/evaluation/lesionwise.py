"""Compute the lesion-wise scores of the BraTS challenges of 2023 and 2024.

Each lesion of the reference is compared with the union of all predicted lesions that overlap its
dilation; missed lesions and false positive lesions get the worst score. Written from a description
of the programs of the challenges and checked against their output; MONAI has no such metric.

Lesions are an integer array `(X, Y, Z)`: 0 outside, else the number of the lesion. Numbers may be
missing from the sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from brats_seg.evaluation.metrics import dice_of_counts, hausdorff95, surface_dice
from brats_seg.evaluation.protocols import (
    NSD_TOLERANCES_MM,
    LesionRules,
    ScoredRegion,
    ScoringProtocol,
)
from brats_seg.voxels.box import Mask, bounding_box
from brats_seg.voxels.grids import Spacing
from brats_seg.voxels.shapes import Lesions, first_of_group, number_components

_DILATION = ndimage.generate_binary_structure(3, 2)

_TOUCHING = (
    ("netc", ("et", "rc")),
    ("et", ("netc", "rc")),
    ("rc", ("et", "netc")),
    ("snfh", ("et", "rc", "netc")),
)
"""Tissues in the order in which their lesions are joined, with the tissues that join them."""

Slices = tuple[slice, slice, slice]


@dataclass(frozen=True, kw_only=True, slots=True)
class LesionScores:
    """The lesion-wise scores of one region of one case."""

    dice: float
    """Mean Dice over lesions and false positives; 1 without either."""
    hd95: float
    """Mean HD95 in mm over the same; 0 without either."""
    nsd: tuple[float, ...]
    """Mean surface Dice over the same, at each of `NSD_TOLERANCES_MM`; 1 without either."""
    n_lesions: int
    """Lesions of the reference, without the small ones."""
    n_false_positive: int
    """Lesions of the prediction that match no lesion of the reference."""
    n_false_negative: int
    """Lesions of the reference, without the small ones, that no predicted lesion matches."""

    @property
    def values(self) -> tuple[float, ...]:
        """The scores in the order of `LESION_COLUMNS` of the table of scores."""
        counts = (self.n_lesions, self.n_false_positive, self.n_false_negative)
        return (self.dice, self.hd95, *self.nsd, *counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Size of the voxels of an image, and the penalty in mm that goes with it."""

    spacing_mm: Spacing
    penalty_mm: float
    """HD95 of a missed or a false positive lesion."""

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel in mm3."""
        return float(np.prod(self.spacing_mm))


def score_lesions(
    reference: npt.NDArray[np.bool_],
    prediction: npt.NDArray[np.bool_],
    protocol: ScoringProtocol,
    scale: Scale,
) -> tuple[LesionScores, ...]:
    """Score the region masks `(R, X, Y, Z)` of a protocol lesion by lesion."""
    rules = protocol.lesions
    if rules is None:
        msg = f"protocol {protocol.name} does not score lesions"
        raise ValueError(msg)
    in_reference = reference_lesions(reference, protocol.regions, rules)
    in_prediction = predicted_lesions(prediction, protocol.regions, rules, scale.voxel_mm3)
    return tuple(
        _score_region(lesions, predicted, region, rules, scale)
        for lesions, predicted, region in zip(
            in_reference, in_prediction, protocol.regions, strict=True
        )
    )


def reference_lesions(
    masks: npt.NDArray[np.bool_], regions: Sequence[ScoredRegion], rules: LesionRules
) -> list[Lesions]:
    """Return the lesions of each region of a reference, including small ones."""
    lesions = {
        region.name: number_lesions(mask, region.dilation)
        for region, mask in zip(regions, masks, strict=True)
    }
    return list((join_touching(lesions) if rules.joins_touching else lesions).values())


def predicted_lesions(
    masks: npt.NDArray[np.bool_],
    regions: Sequence[ScoredRegion],
    rules: LesionRules,
    voxel_mm3: float,
) -> list[Lesions]:
    """Return the lesions of each region of a prediction.

    If the rules merge them, they are grouped as those of a reference, and small ones are removed
    afterwards. Otherwise every component is a lesion.
    """
    if not rules.merges_predictions:
        return [number_components(mask) for mask in masks]
    return [
        without_small(lesions, region.minimum_mm3, voxel_mm3)
        for region, lesions in zip(regions, reference_lesions(masks, regions, rules), strict=True)
    ]


def number_lesions(mask: Mask, dilation: int) -> Lesions:
    """Number the components of a mask; components whose dilations touch are one lesion."""
    lesions = np.zeros(mask.shape, np.int32)
    box = bounding_box(mask)
    if box is not None:
        # two dilations that meet outside the box also meet at its edge
        cut = mask[box.slices]
        lesions[box.slices] = np.where(cut, number_components(dilated(cut, dilation)), 0)
    return lesions


def dilated(mask: Mask, steps: int) -> Mask:
    """Dilate a mask by a number of steps, at least one, over faces and edges."""
    return ndimage.binary_dilation(mask, _DILATION, iterations=steps)


def without_small(lesions: Lesions, minimum_mm3: float, voxel_mm3: float) -> Lesions:
    """Remove the lesions up to a volume."""
    kept = np.bincount(lesions.ravel()) * voxel_mm3 > minimum_mm3
    return np.where(kept[lesions], lesions, 0)


def join_touching(lesions: Mapping[str, Lesions]) -> dict[str, Lesions]:
    """Join the lesions of a tissue that touch the same lesion of another tissue.

    Visits `netc`, `et`, `rc` and `snfh` twice, as BraTS 2024 does for adult glioma, so that lesions
    that are joined late join others; lesions of other regions are not changed. Lesions linked by a
    chain of shared neighbours all become one.
    """
    grown = {name: dilated(lesions[name] > 0, 1) for name, _ in _TOUCHING}
    touched = {
        (tissue, name): _touched(lesions[tissue], lesions[name], grown[name])
        for tissue, neighbours in _TOUCHING
        for name in neighbours
    }
    # the joined lesion that each lesion belongs to so far
    part_of = {name: list(range(int(lesions[name].max()) + 1)) for name, _ in _TOUCHING}
    for _ in range(2):
        for tissue, neighbours in _TOUCHING:
            keys = [[(tissue, lesion)] for lesion in part_of[tissue]]
            for name in neighbours:
                for lesion, neighbour in touched[tissue, name]:
                    keys[lesion].append((name, part_of[name][neighbour]))
            part_of[tissue] = list(first_of_group(keys))
    joined = {name: np.array(part_of[name], np.int32)[lesions[name]] for name in part_of}
    return {name: joined.get(name, numbered) for name, numbered in lesions.items()}


def _score_region(
    lesions: Lesions, predicted: Lesions, region: ScoredRegion, rules: LesionRules, scale: Scale
) -> LesionScores:
    matches, n_unmatched = _match_lesions(lesions, predicted, region, scale)
    n_false_positive = n_unmatched if rules.counts_false_positives else 0
    worst = (0.0, scale.penalty_mm, *(0.0 for _ in NSD_TOLERANCES_MM))
    rows = [*(match or worst for match in matches), *[worst] * n_false_positive]
    best = (1.0, 0.0, *(1.0 for _ in NSD_TOLERANCES_MM))
    dice, hd95, *nsd = np.mean(rows or [best], axis=0).tolist()
    return LesionScores(
        dice=dice,
        hd95=hd95,
        nsd=tuple(nsd),
        n_lesions=len(matches),
        n_false_positive=n_false_positive,
        n_false_negative=matches.count(None),
    )


def _match_lesions(
    lesions: Lesions, predicted: Lesions, region: ScoredRegion, scale: Scale
) -> tuple[list[tuple[float, ...] | None], int]:
    """Return the scores of each lesion, None if it is missed, and the number of unmatched ones."""
    predicted_boxes = ndimage.find_objects(predicted)
    unmatched = {number for number, box in enumerate(predicted_boxes, 1) if box is not None}
    matches: list[tuple[float, ...] | None] = []
    for number, box in enumerate(ndimage.find_objects(lesions), 1):
        if box is None:
            continue
        near = _grown(box, region.dilation)
        lesion = lesions[near] == number
        touched = np.unique(predicted[near][dilated(lesion, region.dilation)])
        numbers = touched[touched > 0].tolist()
        # a predicted lesion that matches a small one is no false positive
        unmatched -= set(numbers)
        if np.count_nonzero(lesion) * scale.voxel_mm3 <= region.minimum_mm3:
            continue
        around = _union([box, *(predicted_boxes[other - 1] for other in numbers)])
        pair = lesions[around] == number, np.isin(predicted[around], numbers)
        matches.append(_compare(*pair, scale.spacing_mm) if numbers else None)
    return matches, len(unmatched)


def _compare(lesion: Mask, predicted: Mask, spacing_mm: Spacing) -> tuple[float, ...]:
    """Return Dice, HD95 and surface Dice of a lesion and the predicted lesions that match it."""
    counts = map(np.count_nonzero, (lesion & predicted, lesion, predicted))
    return (
        float(dice_of_counts(*counts)),
        hausdorff95(lesion, predicted, spacing_mm),
        *surface_dice(lesion, predicted, spacing_mm, NSD_TOLERANCES_MM),
    )


def _grown(box: Slices, margin: int) -> Slices:
    x, y, z = (slice(max(side.start - margin, 0), side.stop + margin) for side in box)
    return (x, y, z)


def _union(boxes: Sequence[Slices]) -> Slices:
    x, y, z = (
        slice(min(side.start for side in sides), max(side.stop for side in sides))
        for sides in zip(*boxes, strict=True)
    )
    return (x, y, z)


def _touched(lesions: Lesions, neighbours: Lesions, grown: Mask) -> list[tuple[int, int]]:
    """Return the pairs of a lesion and a neighbour whose dilation by one step overlaps it."""
    near = np.argwhere(grown & (lesions > 0))
    offsets = np.argwhere(_DILATION)
    around = np.pad(neighbours, 1)[tuple((near[:, None] + offsets).transpose(2, 0, 1))]
    here = np.broadcast_to(lesions[tuple(near.T)][:, None], around.shape)
    return sorted(set(zip(here[around > 0].tolist(), around[around > 0].tolist(), strict=True)))
