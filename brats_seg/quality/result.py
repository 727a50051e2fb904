"""Judge whether a predicted label map can be a tumour, and say what speaks against it.

The sentences are remarks for the person who reviews the result. Their limits are about twice the
extremes of the reference label maps of 22 patients of BraTS 2018 and 2021 and of the predictions of a
good network for 8 of them (Dice of the whole tumour 0.89 to 0.98). One patient has a remark in both,
whose contrast agent is weak.

The Dice of a region rises with the mean probability of its voxels, by a line that was fitted on held-out
cases. Its interval is conformal (Lei et al. 2018, doi:10.1080/01621459.2017.1307116): a quantile of the
errors of these cases, each predicted from the others. It holds for cases like those.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, nan, pi, prod
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue, TypeAdapter, ValidationError
from scipy.ndimage import binary_dilation, binary_erosion

from brats_seg.config import Section, validation_problems
from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import RegionCounts, dice
from brats_seg.labels import MODALITIES, REGIONS, RegionMasks
from brats_seg.quality.scan import SMALLEST_BRAIN_ML, Limit, remarks
from brats_seg.voxels.box import Mask, bounding_box
from brats_seg.voxels.grids import MM3_PER_ML, Spacing
from brats_seg.voxels.regions import PartVolume
from brats_seg.voxels.shapes import number_components, surface_mm2
from brats_seg.wings import Judgement, Notes, PredictedDice

if TYPE_CHECKING:
    from brats_seg.inference.method import Scan

SHARE = "share of the brain"
ENHANCING = "share of the tumour that is enhancing"
PARTS = "separate parts"
SURFACE = "surface as a multiple of that of a ball of the same volume"
APART = "share outside the largest part"
RIM = "share in the outermost 2 voxels of the brain"
UPTAKE = "brightness above what is around it, in standard deviations"
UNDECIDED = "voxels with a probability of 0.25 to 0.75, as a multiple of those of the tumour"
LIMITS = (
    # at most 0.17 in the real cases
    Limit(SHARE, -inf, 0.33, "the tumour is very large: look for healthy tissue in it"),
    # at most 0.49 in the real cases
    Limit(ENHANCING, -inf, 0.9, "nearly all of the tumour enhances: look for necrosis and oedema"),
    # at most 29 in the references and 86 in the predictions
    Limit(PARTS, -inf, 200, "the tumour has very many parts: look for false positives"),
    # 1.4 to 3.6 in the real cases; 125 equal balls have 5
    Limit(SURFACE, -inf, 5, "the tumour is scattered: look for specks that are no tumour"),
    # at most 0.01 in the references and 0.03 in the predictions; in those of weak networks for
    # held-out patients up to 0.5
    Limit(APART, -inf, 0.15, "the tumour lies in several places: look at each of them"),
    # at most 0.05 in the real cases
    Limit(
        RIM, -inf, 0.25, "the tumour lies at the border of the brain: is it a remnant of the skull?"
    ),
    # 0.48 or more in 19 of the 20 patients who have any, and 0.21 in one with a weak contrast
    # agent; of 36 predictions of weak networks, ten were below, with a Dice of ET of at most 0.14
    Limit(UPTAKE, 0.4, inf, "the enhancing tumour is hardly brighter in t1c than its surroundings"),
    Limit(UNDECIDED, -inf, 1, "the network is undecided in very many voxels: look at the borders"),
)
"""Usual ranges of the measures of a predicted tumour."""

COVERAGE = 0.9
"""Share of the cases whose Dice is in the interval."""
LEAST_DICE = 0.7
"""Dice from which nothing is low."""
FEWEST_CASES = round(COVERAGE / (1 - COVERAGE))
"""Smallest number of cases, 9, whose largest error bounds that share of new errors."""
_NOTE = "predicted_dice"
"""Entry of the notes of a model."""

Values = npt.NDArray[np.float64]
Share = Annotated[float, Field(ge=0, le=1)]


_RIM_VOXELS = 2
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
    volumes: tuple[PartVolume, ...]
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
    regions: RegionMasks,
    *,
    volumes: tuple[PartVolume, ...],
    notes: Sequence[Notes],
) -> Judgement:
    """Return what speaks against a predicted tumour, and the Dice that is expected of it.

    Args:
        scan: The scan that was predicted, with the remarks on it.
        probabilities: (3, x, y, z) at the spacing of the files.
        regions: Region masks (3, x, y, z) that were decoded from them.
        volumes: Volumes and numbers of components of the regions.
        notes: Notes of each member of the model; none for models of other programs.
    """
    # both are known of all four modalities alone
    is_whole = scan.case.modalities == MODALITIES
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
        is_unusual=bool(scan.case.remarks),
    )
    return Judgement(remarks=tuple(implausibilities(prediction)), predicted_dice=expected)


def implausibilities(prediction: JudgedPrediction) -> Iterator[str]:
    """Yield a sentence for everything that makes a prediction hard to believe."""
    voxel_ml = prod(prediction.spacing_mm) / MM3_PER_ML
    brain_ml = int(np.count_nonzero(prediction.brain)) * voxel_ml
    if brain_ml < SMALLEST_BRAIN_ML:
        return
    ml = {part.name: part.ml for part in prediction.volumes}
    if ml["wt"] == 0:
        yield "no tumour was found"
    undecided = (prediction.probabilities > 0.25) & (prediction.probabilities < 0.75)
    undecided_ml = int(np.count_nonzero(undecided.any(axis=0))) * voxel_ml
    measures = {SHARE: ml["wt"] / brain_ml, UNDECIDED: undecided_ml / max(ml["wt"], _LEAST_ML)}
    if ml["wt"] >= _LEAST_ML:
        measures |= {ENHANCING: ml["et"] / ml["wt"], **_shape(prediction)}
    if ml["et"] >= _LEAST_ENHANCING_ML:
        measures[UPTAKE] = _enhancement(prediction)
    yield from remarks(LIMITS, {name: {"": value} for name, value in measures.items()})
    if prediction.predicted_dice and prediction.is_unusual:
        yield "the predicted Dice may be too high: it was fitted on scans without remarks"
    if low_dice := ", ".join(str(line) for line in prediction.predicted_dice if line.is_low):
        yield (
            "the predicted Dice is low: look closely at the regions [as in the worst fifth of the "
            f"held-out cases of the model: {low_dice}]"
        )


def _shape(prediction: JudgedPrediction) -> dict[str, float]:
    """Return the measures of the shape and the position of the whole tumour."""
    wt, volume = prediction.regions[0], prediction.volumes[0]
    of_ball = (36 * pi) ** (1 / 3) * (volume.ml * MM3_PER_ML) ** (2 / 3)
    _, sizes = np.unique(number_components(wt)[wt], return_counts=True)
    inner = binary_erosion(prediction.brain, iterations=_RIM_VOXELS)
    return {
        PARTS: volume.n_components,
        SURFACE: surface_mm2(wt, prediction.spacing_mm) / of_ball,
        APART: 1 - float(sizes.max() / sizes.sum()),
        RIM: float(np.count_nonzero(wt & ~inner) / np.count_nonzero(wt)),
    }


def _enhancement(prediction: JudgedPrediction) -> float:
    """Return how much brighter enhancing tumour is than what is around it; NaN if that is not known."""
    et = prediction.regions[2]
    box = bounding_box(et)
    if prediction.uptake is None or box is None:
        return nan
    nearby = box.grown(_AROUND_VOXELS + 1).within(et.shape).slices
    et, uptake = et[nearby], prediction.uptake[nearby]
    around = binary_dilation(et, iterations=_AROUND_VOXELS) & ~et & prediction.brain[nearby]
    return float(np.median(uptake[et]) - np.median(uptake[around])) if around.any() else nan


class DiceLine(Section):
    """Relation of the Dice of one region to the mean probability in it."""

    region: Annotated[str, Field(pattern="^(wt|tc|et)$")]
    n_cases: Annotated[int, Field(ge=FEWEST_CASES)]
    """Held-out cases that it was fitted to."""
    intercept: float
    """Dice at a mean probability of 0."""
    slope: Annotated[float, Field(ge=0)]
    """Rise of the Dice from a mean probability of 0 to one of 1."""
    width: Annotated[float, Field(ge=0)]
    """Half width of the interval where a Dice of 0.1 is expected; less where more is expected."""
    worst_fifth: Share
    """Largest Dice that was predicted of the worst fifth of the held-out cases."""
    mean_error: Share
    """Mean absolute error in the held-out cases, each predicted from the others."""

    def at(self, probability: float) -> PredictedDice:
        """Return the Dice that is expected at a mean probability."""
        middle = float(np.clip(self.intercept + self.slope * probability, 0, 1))
        half = self.width * _difficulty(middle)
        return PredictedDice(
            region=self.region,
            dice=round(middle, 4),
            low=round(max(middle - half, 0.0), 4),
            high=round(min(middle + half, 1.0), 4),
            is_low=middle < LEAST_DICE and middle <= self.worst_fifth,
        )


_LINES = TypeAdapter(tuple[DiceLine, ...])


def mean_probabilities(probabilities: npt.NDArray[np.float32], regions: RegionMasks) -> Values:
    """Return the mean probability (3,) of the voxels of each region; NaN where it is empty.

    Args:
        probabilities: (3, x, y, z)
        regions: Region masks (3, x, y, z) that were decoded from them.
    """
    inside = [values[mask] for values, mask in zip(probabilities, regions, strict=True)]
    return np.array([x.mean(dtype=np.float64) if x.size else np.nan for x in inside])


def fit_predicted_dice(
    probabilities: Sequence[Values], counts: Sequence[RegionCounts]
) -> tuple[DiceLine, ...]:
    """Fit the Dice of each region to the mean probability in it, over held-out cases.

    Cases without the region in the prediction do not count: their Dice is 0 or 1. A region that too few
    cases have is left out.

    Args:
        probabilities: Result of `mean_probabilities` for each case.
        counts: Voxels of each case.
    """
    lines = []
    scores = np.array([*map(dice, counts)])
    for region, x, y in zip(REGIONS, np.transpose(probabilities), scores.T, strict=True):
        has_region = np.isfinite(x)
        if np.count_nonzero(has_region) >= FEWEST_CASES:
            lines.append(_fit(region, x[has_region], y[has_region]))
    return tuple(lines)


def predicted_dice(lines: Sequence[DiceLine], probabilities: Values) -> tuple[PredictedDice, ...]:
    """Return the expected Dice of the regions that were predicted and have a fit.

    Args:
        lines: Result of `fit_predicted_dice`.
        probabilities: Result of `mean_probabilities`.
    """
    by_region = dict(zip(REGIONS, probabilities.tolist(), strict=True))
    return tuple(
        line.at(by_region[line.region]) for line in lines if np.isfinite(by_region[line.region])
    )


def notes_of_held_out(
    probabilities: Sequence[Values], counts: Sequence[RegionCounts]
) -> dict[str, JsonValue]:
    """Return the notes of a model with the fit of its Dice; the arguments are those of the fit."""
    return {_NOTE: [line.model_dump() for line in fit_predicted_dice(probabilities, counts)]}


def dice_lines(notes: Sequence[Notes]) -> tuple[DiceLine, ...]:
    """Return the fit that all members of a model have in their notes; none if they differ.

    Raises:
        UsageError: An entry is unknown, missing or out of range.
    """
    first, *rest = [note.get(_NOTE, ()) for note in notes] or [()]
    try:
        return _LINES.validate_python(first) if all(lines == first for lines in rest) else ()
    except ValidationError as error:
        wrong = "; ".join(validation_problems(error))
        msg = f"the model has a damaged note {_NOTE}: {wrong}. Run `brats-seg tune` on its runs again."
        raise UsageError(msg) from None


def _fit(region: str, x: Values, y: Values) -> DiceLine:
    predicted = np.empty(len(x))
    for index in range(len(x)):
        intercept, slope = _line(np.delete(x, index), np.delete(y, index))
        predicted[index] = np.clip(intercept + slope * x[index], 0, 1)
    errors = abs(predicted - y)
    intercept, slope = _line(x, y)
    # of n errors and that of a new case, each rank is equally likely for the new one
    rank = ceil(COVERAGE * (len(x) + 1)) - 1
    return DiceLine(
        region=region,
        n_cases=len(x),
        intercept=intercept,
        slope=slope,
        worst_fifth=float(np.quantile(predicted, 0.2, method="lower")),
        width=float(np.sort(errors / _difficulty(predicted))[rank]),
        mean_error=float(errors.mean()),
    )


def _difficulty(dice: Any) -> Any:
    """Return what errors are proportional to: the distance to a Dice a little above a perfect one."""
    return 1.1 - dice


def _line(x: Values, y: Values) -> tuple[float, float]:
    """Return intercept and slope by least squares; a slope below 0 becomes 0, which is the mean."""
    spread = float(np.square(x - x.mean()).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread > 0 else 0.0
    slope = max(slope, 0.0)
    return float(y.mean() - slope * x.mean()), slope
