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
    from brats_seg.inference.decode import PartVolume
    from brats_seg.inference.method import Scan

LARGEST_SHARE = 1 / 3
"""Largest share of the brain that is tumour: at most 0.17 in the real cases."""
MOST_COMPONENTS = 200
"""Largest number of separate parts: at most 29 in the references and 86 in the predictions."""
LARGEST_SURFACE = 5.0
"""Largest surface, in surfaces of a ball of the same volume: 1.4 to 2.9 in the real cases; 5 are that
of 125 equal balls."""
LARGEST_RIM = 0.25
"""Largest share of the tumour in the outermost voxels of the brain: at most 0.05 in the real cases."""
LARGEST_ENHANCING = 0.9
"""Largest share of the tumour that is enhancing: at most 0.49 in the real cases."""
LARGEST_UNDECIDED = 1.0
"""Largest volume in which the network is undecided, as a share of the tumour."""

LARGEST_SHARE_APART = 0.15
"""Largest share of the tumour outside its largest part: at most 0.01 in the references and 0.03 in the
predictions. In those of weak networks for held-out patients it was up to 0.5."""
LEAST_UPTAKE = 0.4
"""Least enhancement of enhancing tumour above that around it, in standard deviations of the brain:
0.79 or more in ten of the eleven patients who have any, and 0.21 in one with a weak contrast agent. Of 36
predictions of weak networks for held-out patients, ten were below; their Dice of ET was at most 0.14."""

_RIM_VOXELS = 2
_UNDECIDED = (0.25, 0.75)
"""Probabilities between which a network is undecided."""
_AROUND_VOXELS = 3
"""Width of the surroundings that enhancing tumour is compared with."""
_LEAST_ENHANCING_ML = 0.05
"""Volume below which enhancing tumour is not compared with its surroundings."""
_LEAST_ML = 1.0
"""Volume below which a tumour has no shape to judge, and undecided voxels do not count."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
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
    """Dice that is expected of it, where the model tells it."""
    uptake: npt.NDArray[np.float32] | None = None
    """t1c minus t1n (x, y, z), each of standard deviation 1 in the brain; None if one is missing."""
    is_unusual: bool = False
    """Whether there are remarks on the scan."""

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel."""
        return prod(self.spacing_mm) / MM3_PER_ML

    @property
    def brain_ml(self) -> float:
        """Volume of the brain."""
        return int(np.count_nonzero(self.brain)) * self.voxel_ml


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
    prediction = Prediction(
        regions=regions,
        probabilities=probabilities,
        brain=_brain_of(scan),
        volumes=volumes,
        spacing_mm=scan.spacing_mm,
        predicted_dice=expected,
        uptake=_uptake(scan) if is_whole and notes else None,
        is_unusual=bool(scan.warnings),
    )
    return Judgement(warnings=tuple(implausibilities(prediction)), predicted_dice=expected)


def _brain_of(scan: "Scan") -> Mask:
    """Return the voxels of the brain at the spacing of the files."""
    brain = (scan.image != 0).any(axis=0)
    return scan.on_scan_spacing(brain[None].astype(np.float32))[0] > 0.5


def _uptake(scan: "Scan") -> npt.NDArray[np.float32] | None:
    """Return t1c minus t1n (x, y, z) at the spacing of the files; None if one of them is missing."""
    t1n, t1c = (scan.image[MODALITIES.index(name)] for name in ("t1n", "t1c"))
    return scan.on_scan_spacing((t1c - t1n)[None])[0] if t1n.any() and t1c.any() else None


def implausibilities(prediction: Prediction) -> Iterator[str]:
    """Yield a sentence for everything that makes a prediction hard to believe."""
    if prediction.brain_ml < SMALLEST_BRAIN_ML:
        return
    ml = {part.name: part.ml for part in prediction.volumes}
    if ml["wt"] == 0:
        yield "no tumour was found"
    else:
        yield from _wrong_size(prediction, ml)
        if ml["wt"] >= _LEAST_ML:
            yield from _wrong_shape(prediction)
        if ml["et"] >= _LEAST_ENHANCING_ML:
            yield from _not_enhancing(prediction)
    yield from _undecided(prediction, ml["wt"])
    yield from _low_dice(prediction)


def _wrong_size(prediction: Prediction, ml: dict[str, float]) -> Iterator[str]:
    share = ml["wt"] / prediction.brain_ml
    if share > LARGEST_SHARE:
        yield (
            f"the whole tumour measures {ml['wt']:.0f} ml, {share:.0%} of the brain; expected at most "
            f"{LARGEST_SHARE:.0%}"
        )
    enhancing = ml["et"] / ml["wt"]
    if enhancing > LARGEST_ENHANCING and ml["wt"] >= _LEAST_ML:
        yield (
            f"{enhancing:.0%} of the tumour is enhancing, without the necrosis or oedema of a glioma; "
            f"expected at most {LARGEST_ENHANCING:.0%}, except for meningiomas"
        )


def _wrong_shape(prediction: Prediction) -> Iterator[str]:
    wt = prediction.regions[0]
    n_components = prediction.volumes[0].n_components
    if n_components > MOST_COMPONENTS:
        yield (
            f"the whole tumour has {n_components} separate parts; expected at most {MOST_COMPONENTS}"
        )
    ml = prediction.volumes[0].ml
    of_ball = (36 * pi) ** (1 / 3) * (ml * MM3_PER_ML) ** (2 / 3)
    surface = surface_mm2(wt, prediction.spacing_mm) / of_ball
    if surface > LARGEST_SURFACE:
        yield (
            f"the whole tumour is scattered: its surface is {surface:.0f} times that of a ball of its "
            f"volume; expected at most {LARGEST_SURFACE:.0f}"
        )
    _, sizes = np.unique(number_components(wt)[wt], return_counts=True)
    apart = 1 - float(sizes.max() / sizes.sum())
    if apart > LARGEST_SHARE_APART:
        yield (
            f"{apart:.0%} of the whole tumour lies apart from its largest part; expected at most "
            f"{LARGEST_SHARE_APART:.0%}, except for tumours in several places"
        )
    rim = _rim_share(wt, prediction.brain)
    if rim > LARGEST_RIM:
        yield (
            f"{rim:.0%} of the whole tumour lies in the outermost {_RIM_VOXELS} voxels of the brain; "
            f"expected at most {LARGEST_RIM:.0%}"
        )


def _not_enhancing(prediction: Prediction) -> Iterator[str]:
    et = prediction.regions[2]
    box = bounding_box(et)
    if prediction.uptake is None or box is None:
        return
    around = box.grown(_AROUND_VOXELS + 1).within(et.shape)
    et, uptake = et[around.slices], prediction.uptake[around.slices]
    near = binary_dilation(et, iterations=_AROUND_VOXELS)
    beside = near & ~et & prediction.brain[around.slices]
    if not beside.any():
        return
    found = float(np.median(uptake[et]) - np.median(uptake[beside]))
    if found < LEAST_UPTAKE:
        yield (
            f"the enhancing tumour is hardly brighter in t1c than what is around it ({found:.2f} "
            f"standard deviations, expected {LEAST_UPTAKE} or more): it may be false, or the contrast "
            "agent weak"
        )


def _undecided(prediction: Prediction, tumour_ml: float) -> Iterator[str]:
    low, high = _UNDECIDED
    undecided = (prediction.probabilities > low) & (prediction.probabilities < high)
    ml = int(np.count_nonzero(undecided.any(axis=0))) * prediction.voxel_ml
    if ml > max(LARGEST_UNDECIDED * tumour_ml, _LEAST_ML):
        yield (
            f"the network is undecided in {ml:.0f} ml (a probability of {low} to {high}), more than "
            f"the {tumour_ml:.0f} ml of the tumour"
        )


def _low_dice(prediction: Prediction) -> Iterator[str]:
    if prediction.predicted_dice and prediction.is_unusual:
        yield (
            "the predicted Dice was fitted on scans without such remarks, and may be too high for "
            "this one"
        )
    low = [str(one) for one in prediction.predicted_dice if one.is_low]
    if low:
        yield (
            "the predicted Dice is low, as in the worst fifth of the held-out cases of the model: "
            f"{', '.join(low)}"
        )


def _rim_share(wt: Mask, brain: Mask) -> float:
    """Return the share of the tumour that lies at the border of the brain or outside."""
    box = bounding_box(brain)
    if box is None:
        return 1.0
    inner = np.zeros_like(brain)
    inner[box.slices] = binary_erosion(brain[box.slices], iterations=_RIM_VOXELS)
    return float(np.count_nonzero(wt & ~inner) / np.count_nonzero(wt))
