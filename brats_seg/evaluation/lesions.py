"""Score predictions lesion by lesion, and list the lesions of a label map with their diameters.

In 2023 and 2024 each lesion of the reference is compared with the union of all predicted lesions that
touch its dilation, and missed and false positive lesions get the worst score (`score_lesions`). From 2025
on lesions are matched one to one (`match_lesions`). Both are written from descriptions of the programs of
the challenges and checked against their output. `list_lesions` is for a person who reads the list; its
lesions are not merged by dilation. The helpers of each of the three follow it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pandas as pd
import scipy as sp  # imports its modules when they are used
from nibabel.affines import apply_affine, voxel_sizes

from brats_seg.evaluation import metrics, protocols
from brats_seg.evaluation.metrics import Values
from brats_seg.evaluation.protocols import LesionRules, MatchingRules, ScoredRegion, ScoringProtocol
from brats_seg.evaluation.scores import LESION_COLUMNS, MATCHED_COLUMNS
from brats_seg.labels import REGIONS, RegionMasks
from brats_seg.voxels import shapes
from brats_seg.voxels.box import Box, Mask, bounding_box, triple
from brats_seg.voxels.grids import MM3_PER_ML, Affine, Spacing
from brats_seg.voxels.shapes import Lesions, number_components

_DILATION = sp.ndimage.generate_binary_structure(3, 2)

_TOUCHING = (
    ("netc", ("et", "rc")),
    ("et", ("netc", "rc")),
    ("rc", ("et", "netc")),
    ("snfh", ("et", "rc", "netc")),
)
"""Tissues in the order in which their lesions are joined, with the tissues that join them."""
_BEST = (1.0, 0.0, *(1.0 for _ in protocols.NSD_TOLERANCES_MM))
_LEAST_OVERLAP = 1e-6
"""Dice from which two lesions can be matched."""

MOST_LISTED = 10
"""Lesions of a region that are measured at most, the largest first."""
LEAST_LISTED_ML = 0.1
"""Volume from which a lesion is measured, if it is not the largest: the others are small islands."""
LEAST_MM = 10.0
"""Diameter from which a lesion is measurable by RANO, if both diameters have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Size of the voxels of an image, and how distances in it are scored."""

    spacing_mm: Spacing
    penalty_mm: float
    """HD95 of a missed or a false positive lesion."""
    with_distances: bool = True
    """Whether `score_lesions` measures distances, which take nearly all of its time; without, they are NaN."""

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel in mm3."""
        return float(np.prod(self.spacing_mm))


def score_lesions(
    references: list[Lesions], prediction: RegionMasks, protocol: ScoringProtocol, scale: Scale
) -> pd.DataFrame:
    """Score the region masks `(R, X, Y, Z)` of a protocol lesion by lesion: a row for each region.

    `references` are the lesions of the reference, of `group_lesions`. Dice, HD95 in mm and surface Dice at
    each of `protocols.NSD_TOLERANCES_MM` are means over them, without the small ones, and the false positives;
    without either they are the best.
    """
    rules, regions = protocol.lesions, protocol.regions
    assert rules is not None
    predictions: Iterable[Lesions] = map(number_components, prediction)
    if rules.merges_predictions:
        grouped = zip(group_lesions(prediction, protocol), regions, strict=True)
        predictions = [_without_small(*pair, scale) for pair in grouped]
    sides = zip(references, predictions, regions, strict=True)
    rows = [_score_region(*side, rules, scale) for side in sides]
    return pd.DataFrame(rows, columns=list(LESION_COLUMNS))


def group_lesions(masks: RegionMasks, protocol: ScoringProtocol) -> list[Lesions]:
    """Return the lesions of each region by the rules of a protocol, including small ones."""
    assert protocol.lesions is not None
    pairs = zip(protocol.regions, masks, strict=True)
    lesions = {region.name: number_lesions(mask, region.dilation) for region, mask in pairs}
    return list((join_touching(lesions) if protocol.lesions.joins_touching else lesions).values())


def number_lesions(mask: Mask, dilation: int) -> Lesions:
    """Number the components of a mask; components whose dilations touch are one lesion."""
    # two dilations that meet outside the box also meet at its edge
    box = bounding_box(mask) or Box.at((0, 0, 0), (1, 1, 1))
    cut = mask[box.slices]
    lesions = np.where(cut, number_components(dilated(cut, dilation)), 0)
    return box.placed(lesions, triple(mask.shape))


def dilated(mask: Mask, steps: int) -> Mask:
    """Dilate a mask by a number of steps, at least one, over faces and edges."""
    return sp.ndimage.binary_dilation(mask, _DILATION, iterations=steps)


def join_touching(lesions: Mapping[str, Lesions]) -> dict[str, Lesions]:
    """Join the lesions of a tissue that touch the same lesion of another tissue.

    Visits `netc`, `et`, `rc` and `snfh` twice, as BraTS 2024 does for adult glioma, so that lesions
    that are joined late join others; lesions of other regions are not changed. Lesions linked by a
    chain of shared neighbours all become one.
    """
    grown = {name: dilated(lesions[name] > 0, 1) for name, _ in _TOUCHING}
    joined = {**lesions}
    for tissue, neighbours in 2 * _TOUCHING:
        numbers = np.arange(joined[tissue].max() + 1, dtype=np.int32)
        touched = [[(tissue, number)] for number in numbers.tolist()]
        for name in neighbours:
            for number, neighbour in _find_touching(joined[tissue], joined[name], grown[name]):
                touched[number].append((name, neighbour))
        for group in shapes.group_by(range(len(touched)), touched.__getitem__):
            numbers[group] = group[0]
        joined[tissue] = numbers[joined[tissue]]
    return joined


def _find_touching(lesions: Lesions, neighbours: Lesions, grown: Mask) -> list[tuple[int, int]]:
    """Return the pairs of a lesion and a neighbour whose dilation by one step overlaps it."""
    voxels = np.argwhere(grown & (lesions > 0))
    offsets = np.argwhere(_DILATION)
    around = np.pad(neighbours, 1)[tuple((voxels[:, None] + offsets).transpose(2, 0, 1))]
    labels = np.broadcast_to(lesions[tuple(voxels.T)][:, None], around.shape)
    return sorted(set(zip(labels[around > 0].tolist(), around[around > 0].tolist(), strict=True)))


def _without_small(lesions: Lesions, region: ScoredRegion, scale: Scale) -> Lesions:
    kept = np.bincount(lesions.ravel()) * scale.voxel_mm3 > region.minimum_mm3
    return np.where(kept[lesions], lesions, 0)


def _score_region(
    lesions: Lesions, predicted: Lesions, region: ScoredRegion, rules: LesionRules, scale: Scale
) -> tuple[float, ...]:
    """Return the scores of a region, in the order of `LESION_COLUMNS`."""
    predicted_boxes = _boxes(predicted)
    untouched, n_missed = {*predicted_boxes}, 0
    worst = (0.0, scale.penalty_mm, *(0.0 for _ in protocols.NSD_TOLERANCES_MM))
    scores = list[tuple[float, ...]]()
    for number, box in _boxes(lesions).items():
        neighbourhood = box.grown(region.dilation).within(triple(lesions.shape)).slices
        lesion = lesions[neighbourhood] == number
        touched = np.unique(predicted[neighbourhood][dilated(lesion, region.dilation)])
        numbers = touched[touched > 0].tolist()
        # a predicted lesion that touches a small one is no false positive
        untouched -= {*numbers}
        if np.count_nonzero(lesion) * scale.voxel_mm3 > region.minimum_mm3:
            around = reduce(Box.joined, map(predicted_boxes.__getitem__, numbers), box).slices
            pair = lesions[around] == number, np.isin(predicted[around], numbers)
            scores.append(_score_lesion(*pair, scale) if numbers else worst)
            n_missed += not numbers
    n_false_positive = len(untouched) if rules.counts_false_positives else 0
    means = np.mean([*scores, *[worst] * n_false_positive] or [_BEST], axis=0).tolist()
    return (*means, len(scores), n_false_positive, n_missed)


def _score_lesion(lesion: Mask, predicted: Mask, scale: Scale) -> tuple[float, ...]:
    """Return Dice, HD95 and surface Dice of a lesion and the predicted lesions that touch it."""
    counts = map(np.count_nonzero, (lesion & predicted, lesion, predicted))
    dice = float(metrics.dice_of_counts(*counts))
    if not scale.with_distances:
        return (dice, *(np.nan for _ in _BEST[1:]))
    sides = metrics.surface_distances(lesion, predicted, scale.spacing_mm)
    return (
        dice,
        metrics.hausdorff95(lesion, predicted, scale.spacing_mm),
        *(metrics.surface_dice(sides, tolerance) for tolerance in protocols.NSD_TOLERANCES_MM),
    )


def match_lesions(
    reference: RegionMasks, prediction: RegionMasks, rules: MatchingRules, scale: Scale
) -> pd.DataFrame:
    """Score the region masks `(R, X, Y, Z)` of a protocol by matched lesions: a row for each region.

    Where the program of the challenges differs from its description, this follows the program: the
    whole region is measured in voxels, and the spacing of X is taken for Z and that of Z for X.
    """
    sides = (np.ascontiguousarray(masks.swapaxes(1, 3)) for masks in (reference, prediction))
    rows = [_match_region(true, found, rules, scale) for true, found in zip(*sides, strict=True)]
    return pd.DataFrame(rows, columns=list(MATCHED_COLUMNS[: len(rows[0])]))


def _match_region(
    reference: Mask, prediction: Mask, rules: MatchingRules, scale: Scale
) -> tuple[float, ...]:
    """Return the scores of a region whose lesions are matched, in the order of `MATCHED_COLUMNS`."""
    reference, prediction = metrics.cropped(reference, prediction)
    lesions, predicted = number_components(reference), number_components(prediction)
    sizes, dices = _dice_of_pairs(lesions, predicted)
    scores = _score_matches(lesions, predicted, dices, scale.spacing_mm)
    n_lesions, n_predicted = dices.shape
    n_matched = np.count_nonzero(scores[:, 0] > 0)
    n_false = n_predicted - n_matched
    is_large = sizes * scale.voxel_mm3 >= rules.large_mm3
    is_found = scores[:, 0] >= rules.found_dice
    worst = (0.0, scale.penalty_mm, 0.0)
    by_size = [is_large, ~is_large] if rules.large_mm3 else []
    return (
        *_score_whole(reference, prediction, worst),
        *_mean_scores(scores, is_large, n_false, rules, worst),
        *(n_lesions, n_false, n_lesions - n_matched),
        2 * n_matched / (n_lesions + n_predicted) if n_lesions or n_predicted else np.nan,
        *(count for chosen in by_size for count in _count_found(is_found[chosen], n_false)),
    )


def _dice_of_pairs(lesions: Lesions, predicted: Lesions) -> tuple[Values, Values]:
    """Return the voxels of each of n lesions, and the Dice `(n, m)` with each of m predicted ones."""
    n, m = (int(side.max(initial=0)) + 1 for side in (lesions, predicted))
    inside = (lesions > 0) | (predicted > 0)
    shared = metrics.shared_voxels(lesions[inside], predicted[inside], (n, m))
    sizes, predicted_sizes = shared.sum(axis=1)[1:], shared.sum(axis=0)[1:]
    return sizes, 2 * shared[1:, 1:] / (sizes[:, None] + predicted_sizes)


def _score_matches(
    lesions: Lesions, predicted: Lesions, dices: Values, spacing_mm: Spacing
) -> Values:
    """Return Dice, HD95 and NSD `(n, 3)` of each lesion with its match, NaN where it has none.

    The matches are those whose Dice have the largest sum.
    """
    scores = np.full((len(dices), 3), np.nan)
    overlap = dices >= _LEAST_OVERLAP
    boxes, predicted_boxes = _boxes(lesions), _boxes(predicted)
    pairs = sp.optimize.linear_sum_assignment(np.where(overlap, 1 - dices, 1 + _LEAST_OVERLAP))
    for lesion, match in zip(*pairs, strict=True):
        if overlap[lesion, match]:
            box = boxes[lesion + 1].joined(predicted_boxes[match + 1]).slices
            masks = lesions[box] == lesion + 1, predicted[box] == match + 1
            distances = _hd95_and_nsd(*masks, spacing_mm, min(spacing_mm))
            scores[lesion] = dices[lesion, match], *distances
    return scores


def _score_whole(reference: Mask, prediction: Mask, worst: tuple[float, ...]) -> tuple[float, ...]:
    """Return Dice, HD95 and NSD of a region; NaN if both are empty, the worst if they do not overlap."""
    counts = [np.count_nonzero(mask) for mask in (reference & prediction, reference, prediction)]
    if not counts[0]:
        return worst if any(counts) else (np.nan,) * 3
    # half a voxel: only voxels that both surfaces share
    distances = _hd95_and_nsd(reference, prediction, (1.0, 1.0, 1.0), 0.5)
    return float(metrics.dice_of_counts(*counts)), *distances


def _hd95_and_nsd(
    reference: Mask, prediction: Mask, spacing_mm: Spacing, tolerance_mm: float
) -> tuple[float, float]:
    """Return the 95th percentile of the distances of both surfaces together, and the surface Dice."""
    sides = metrics.surface_distances(reference, prediction, spacing_mm)
    hd95 = float(np.percentile(np.concatenate(sides), 95))
    return hd95, metrics.surface_dice(sides, tolerance_mm)


def _mean_scores(
    scores: Values, is_large: Mask, n_false: int, rules: MatchingRules, worst: tuple[float, ...]
) -> list[float]:
    """Return the means over the matched lesions, or over the large ones and all false positives."""
    if rules.large_mm3:
        large = [*np.where(np.isnan(scores), worst, scores)[is_large]]
        rows = [*large, *[worst] * n_false] if large else []
    else:
        # without a match, the table of the program has no penalty
        unmatched = [(0.0, np.inf, 0.0)] if len(scores) or n_false else []
        rows = [*scores[~np.isnan(scores[:, 0])]] or unmatched
    return np.mean(rows or [(np.nan,) * 3], axis=0).tolist()


def _count_found(is_found: Mask, n_false: int) -> tuple[float, ...]:
    """Return how many lesions are found and missed, and F1; NaN without lesions."""
    if not is_found.size:
        return (np.nan,) * 3
    n_found = int(is_found.sum())
    return n_found, is_found.size - n_found, 2 * n_found / (is_found.size + n_found + n_false)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesion:
    """One connected component of a region."""

    ml: float
    centre_mm: tuple[float, float, float]
    """Centre of mass in the coordinates of the file (NIfTI: to the right, to the front, up)."""
    longest_mm: float
    """Longest diameter in space."""
    axial: shapes.SectionDiameters
    """Perpendicular diameters in the axial section where their product is largest."""

    @property
    def is_measurable(self) -> bool:
        """Whether both axial diameters have the 10 mm that RANO asks for."""
        # as it is shown: 9.98 mm is no other measurement than 10.0
        return round(self.axial.perpendicular_mm, 1) >= LEAST_MM


@dataclass(frozen=True, kw_only=True, slots=True)
class LesionList:
    """The lesions of a region."""

    region: str
    """One of `REGIONS`."""
    lesions: tuple[Lesion, ...]
    """The largest, and others from `LEAST_LISTED_ML`; at most `MOST_LISTED`."""
    n_others: int
    """Lesions that are not listed."""
    others_ml: float
    """Their volume."""


def list_lesions(regions: RegionMasks, affine: Affine) -> tuple[LesionList, ...]:
    """List the lesions of each region of a label map, the largest first.

    Args:
        regions: Region masks (3, X, Y, Z), in the axes of BraTS: Z is across axial sections.
        affine: (4, 4), from the voxels of the masks to millimetres.

    Example:
        >>> regions = np.zeros((3, 8, 8, 8), bool)
        >>> regions[0, 2:5, 3, 3] = True
        >>> (wt, tc, et) = list_lesions(regions, np.eye(4))
        >>> wt.lesions[0].ml, wt.lesions[0].centre_mm, wt.lesions[0].longest_mm, et.lesions
        (0.003, (3.0, 3.0, 3.0), 3.0, ())
    """
    return tuple(_list_region(*pair, affine) for pair in zip(REGIONS, regions, strict=True))


def _list_region(region: str, mask: Mask, affine: Affine) -> LesionList:
    components = number_components(mask)
    x_mm, y_mm, z_mm = map(float, voxel_sizes(affine))
    ml = np.bincount(components.ravel())[1:] * (x_mm * y_mm * z_mm / MM3_PER_ML)
    order = np.argsort(-ml, kind="stable").tolist()
    n_listed = min(MOST_LISTED, max(1, int(np.count_nonzero(ml >= LEAST_LISTED_ML))))
    boxes, lesions = _boxes(components), []
    for index in order[:n_listed]:
        box = boxes[index + 1]
        lesion = components[box.slices] == index + 1
        centre = np.argwhere(lesion).mean(axis=0) + box.start
        measured = Lesion(
            ml=float(ml[index]),
            centre_mm=triple(apply_affine(affine, centre).tolist()),
            longest_mm=shapes.longest_diameter_mm(lesion, (x_mm, y_mm, z_mm)),
            axial=shapes.section_diameters(lesion, (x_mm, y_mm, z_mm)),
        )
        lesions.append(measured)
    others_ml = ml[order[n_listed:]]
    return LesionList(
        region=region,
        lesions=tuple(lesions),
        n_others=len(others_ml),
        others_ml=float(others_ml.sum()),
    )


def _boxes(lesions: Lesions) -> dict[int, Box]:
    """Return the box around each lesion, by its number."""
    return {
        number: Box(start=triple(s.start for s in slices), stop=triple(s.stop for s in slices))
        for number, slices in enumerate(sp.ndimage.find_objects(lesions), 1)
        if slices is not None
    }
