"""Judge whether a predicted label map can be a tumour, and say what speaks against it.

The sentences are warnings for the person who reviews the result. Their limits are about twice the
extremes of the reference label maps of 12 patients of BraTS 2018 and 2021 and of the predictions of a
good network for 8 of them (Dice of the whole tumour 0.89 to 0.98), none of which has a warning.

Necrosis, oedema or core without enhancing tumour are usual, and no region can lie outside the one
around it, because regions are nested. Nothing is said about a foreground that is no brain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import pi, prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_dilation, binary_erosion

from brats_seg.labels import MODALITIES, LabelConvention, LabelMap, RegionMasks, regions_of
from brats_seg.quality.expected_dice import dice_lines, mean_probabilities, predicted_dice
from brats_seg.quality.scan import SMALLEST_BRAIN_ML
from brats_seg.voxels.box import Mask, bounding_box
from brats_seg.voxels.grids import MM3_PER_ML, Spacing
from brats_seg.voxels.shapes import number_components, surface_mm2
from brats_seg.wings import Judgement, Notes, PredictedDice

if TYPE_CHECKING:
    from brats_seg.inference.method import Scan
    from brats_seg.inference.predict import PartVolume

LIMITS: tuple[tuple[str, float, str], ...] = (
    # at most 0.17 in the real cases
    (
        "share",
        1 / 3,
        "the whole tumour measures {ml:.0f} ml, {share:.0%} of the brain; expected at most {limit:.0%}",
    ),
    # at most 0.49 in the real cases
    (
        "enhancing",
        0.9,
        "{enhancing:.0%} of the tumour is enhancing, without the necrosis or oedema of a glioma; "
        "expected at most {limit:.0%}, except for meningiomas",
    ),
    # at most 29 in the references and 86 in the predictions
    ("n_parts", 200, "the whole tumour has {n_parts} separate parts; expected at most {limit}"),
    # in surfaces of a ball of the same volume: 1.4 to 2.9 in the real cases; 125 equal balls have 5
    (
        "surface",
        5,
        "the whole tumour is scattered: its surface is {surface:.1f} times that of a ball of its "
        "volume; expected at most {limit:.0f}",
    ),
    # outside the largest part: at most 0.01 in the references and 0.03 in the predictions; in those
    # of weak networks for held-out patients up to 0.5
    (
        "apart",
        0.15,
        "{apart:.0%} of the whole tumour lies apart from its largest part; expected at most "
        "{limit:.0%}, except for tumours in several places",
    ),
    # at most 0.05 in the real cases
    (
        "rim",
        0.25,
        "{rim:.0%} of the whole tumour lies in the outermost 2 voxels of the brain; expected at most "
        "{limit:.0%}",
    ),
)
"""Measures of a tumour, the largest usual value of each, and the warning about a larger one."""
LEAST_UPTAKE = 0.4
"""Least enhancement of enhancing tumour above that around it, in standard deviations of the brain:
0.79 or more in ten of the eleven patients who have any, and 0.21 in one with a weak contrast agent. Of 36
predictions of weak networks for held-out patients, ten were below; their Dice of ET was at most 0.14."""

_RIM_VOXELS = 2
_UNDECIDED = (0.25, 0.75)
"""Probabilities between which a network is undecided, in a volume no larger than the tumour."""
_AROUND_VOXELS = 3
"""Width of the surroundings that enhancing tumour is compared with."""
_LEAST_ENHANCING_ML = 0.05
"""Volume below which enhancing tumour is not compared with its surroundings."""
_LEAST_ML = 1.0
"""Volume below which a tumour has no shape to judge, and undecided voxels do not count."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JudgedPrediction:
    """The prediction of a case, and what is needed to judge it; all of one grid."""

    regions: RegionMasks
    """Region masks (3, x, y, z)."""
    probabilities: npt.NDArray[np.float32]
    """Probabilities (3, x, y, z)."""
    brain: Mask
    """Voxels (x, y, z) of the brain."""
    volumes: tuple["PartVolume", ...]
    """Volumes and numbers of components of the regions."""
    spacing_mm: Spacing
    """Voxel size."""
    predicted_dice: tuple[PredictedDice, ...] = ()
    """Dice that is expected of it, where the model has a fit."""
    uptake: npt.NDArray[np.float32] | None = None
    """t1c minus t1n (x, y, z), each of standard deviation 1 in the brain; None if one is missing."""
    is_unusual: bool = False
    """Whether there are remarks on the scan."""


def judge_result(
    scan: "Scan",
    probabilities: npt.NDArray[np.float32],
    label_map: LabelMap,
    convention: LabelConvention,
    *,
    volumes: tuple["PartVolume", ...],
    notes: Sequence[Notes],
) -> Judgement:
    """Return what speaks against a predicted label map, and the Dice that is expected of it.

    Args:
        scan: The scan that was predicted, with the warnings about it.
        probabilities: (3, x, y, z) at the spacing of the files.
        label_map: Label map (x, y, z) that was decoded from them.
        convention: Label convention of the label map.
        volumes: Volumes and numbers of components of the regions.
        notes: Notes of each member of the model; none for models of other programs.
    """
    regions = regions_of(label_map, convention)
    # both are known of all four modalities alone
    is_whole = scan.modalities == MODALITIES
    lines = dice_lines(notes) if is_whole else ()
    expected = predicted_dice(lines, mean_probabilities(probabilities, regions)) if lines else ()
    uptake, (t1n, t1c) = None, scan.image[:2]
    if is_whole and notes and t1n.any() and t1c.any():
        uptake = scan.on_scan_spacing((t1c - t1n)[None])[0]
    brain = (scan.image != 0).any(axis=0)[None].astype(np.float32)
    prediction = JudgedPrediction(
        regions=regions,
        probabilities=probabilities,
        brain=scan.on_scan_spacing(brain)[0] > 0.5,
        volumes=volumes,
        spacing_mm=scan.spacing_mm,
        predicted_dice=expected,
        uptake=uptake,
        is_unusual=bool(scan.warnings),
    )
    return Judgement(warnings=tuple(implausibilities(prediction)), predicted_dice=expected)


def implausibilities(prediction: JudgedPrediction) -> Iterator[str]:
    """Yield a sentence for everything that makes a prediction hard to believe."""
    voxel_ml = prod(prediction.spacing_mm) / MM3_PER_ML
    brain_ml = int(np.count_nonzero(prediction.brain)) * voxel_ml
    if brain_ml < SMALLEST_BRAIN_ML:
        return
    ml = {part.name: part.ml for part in prediction.volumes}
    if ml["wt"] == 0:
        yield "no tumour was found"
    measured = {"ml": ml["wt"], "share": ml["wt"] / brain_ml}
    if ml["wt"] >= _LEAST_ML:
        measured |= {"enhancing": ml["et"] / ml["wt"], **_shape(prediction)}
    for name, limit, sentence in LIMITS:
        if measured.get(name, 0) > limit:
            yield sentence.format(limit=limit, **measured)
    if ml["et"] >= _LEAST_ENHANCING_ML:
        yield from _not_enhancing(prediction)
    low, high = _UNDECIDED
    undecided = (prediction.probabilities > low) & (prediction.probabilities < high)
    undecided_ml = int(np.count_nonzero(undecided.any(axis=0))) * voxel_ml
    if undecided_ml > max(ml["wt"], _LEAST_ML):
        yield (
            f"the network is undecided in {undecided_ml:.0f} ml (a probability of {low} to {high}), "
            f"more than the {ml['wt']:.0f} ml of the tumour"
        )
    yield from _doubtful_dice(prediction)


def _shape(prediction: JudgedPrediction) -> dict[str, float]:
    """Return the measures of the shape and the position of the whole tumour."""
    wt, volume = prediction.regions[0], prediction.volumes[0]
    of_ball = (36 * pi) ** (1 / 3) * (volume.ml * MM3_PER_ML) ** (2 / 3)
    _, sizes = np.unique(number_components(wt)[wt], return_counts=True)
    inner = binary_erosion(prediction.brain, iterations=_RIM_VOXELS)
    return {
        "n_parts": volume.n_components,
        "surface": surface_mm2(wt, prediction.spacing_mm) / of_ball,
        "apart": 1 - float(sizes.max() / sizes.sum()),
        "rim": float(np.count_nonzero(wt & ~inner) / np.count_nonzero(wt)),
    }


def _not_enhancing(prediction: JudgedPrediction) -> Iterator[str]:
    et = prediction.regions[2]
    box = bounding_box(et)
    if prediction.uptake is None or box is None:
        return
    nearby = box.grown(_AROUND_VOXELS + 1).within(et.shape).slices
    et, uptake = et[nearby], prediction.uptake[nearby]
    around = binary_dilation(et, iterations=_AROUND_VOXELS) & ~et & prediction.brain[nearby]
    if not around.any():
        return
    enhancement = float(np.median(uptake[et]) - np.median(uptake[around]))
    if enhancement < LEAST_UPTAKE:
        yield (
            "the enhancing tumour is hardly brighter in t1c than what is around it "
            f"({enhancement:.2f} standard deviations, expected {LEAST_UPTAKE} or more): it may be "
            "false, or the contrast agent weak"
        )


def _doubtful_dice(prediction: JudgedPrediction) -> Iterator[str]:
    if prediction.predicted_dice and prediction.is_unusual:
        yield (
            "the predicted Dice was fitted on scans without such remarks, and may be too high for "
            "this one"
        )
    if low := ", ".join(str(one) for one in prediction.predicted_dice if one.is_low):
        yield f"the predicted Dice is low, as in the worst fifth of the held-out cases of the model: {low}"
