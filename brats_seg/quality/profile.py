"""Measure scans, and describe the training set of a network by the range of each measure.

The profile is stored with the network, so that a new scan can be compared with the scans that the
network knows. A scan is measured as the network sees it: the crop (4, x, y, z) of the brain, with
mean 0 and standard deviation 1 in each modality. Factors and offsets of the intensities are removed by
that, and are therefore not measured. Spacing and label convention are in `ModelIdentity`.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue
from scipy.ndimage import binary_erosion
from scipy.special import stdtrit

from brats_seg.cases.many import evenly_spread
from brats_seg.config import Section
from brats_seg.data.normalisation import grid_of
from brats_seg.errors import counted
from brats_seg.labels import MODALITIES
from brats_seg.quality.scan import (
    MIXED_UP,
    MODALITY_PAIRS,
    NO_AGENT,
    NOT_STRIPPED,
    BrainSample,
    local_contrast,
    pair_contrasts,
    sample_crop,
    surface_layers,
    uptake,
)
from brats_seg.voxels.box import Triple
from brats_seg.voxels.grids import Spacing
from brats_seg.wings import Notes

if TYPE_CHECKING:
    from brats_seg.inference.method import Scan

FEWEST_CASES = 4
"""Training cases from which a range is known."""
FALSE_ALARMS = 0.05
"""Largest share of scans like those of training in which any measure is reported, if measures are
normally distributed. Of twelve real cases, each compared with the other eleven, none was reported, and
2 % in random splits with eight cases to train on (`benchmarks/scan_check.py`)."""
_MOST_CASES = 100
"""Cases that a profile is made from at most; with 24 the intervals are 12 % wider."""
_NOTE = "profile"
"""Entry of the notes of a model."""
_VERSION = 1
"""Version of the measures, to be raised when one is computed in another way."""
_MOST_MEASURES = 1000
_MOST_GRIDS = 3
"""Grids from which a training set has no grid of its own."""
_PERCENTILES = (1, 5, 95, 99)
_EVERY = 8
"""Step between the planes whose sharpness is measured."""
_SMOOTH = 0.01
"""Sharpness below which an image counts as smooth, such as between slices that were interpolated."""
_SINGLE_CAUSE = ("uptake", "size")
"""Kinds that are reported first: few faults change them, and most faults change the others."""
_MOST_SENTENCES = 3

_PAIRS = [f"{MODALITIES[first]} and {MODALITIES[second]}" for first, second in MODALITY_PAIRS]
_CONTRASTS = ("correlation", "asymmetry of the difference", "correlation of the edges")
_SHARPNESS = (
    "sharpness",
    "sharpness of the sharpest axis",
    "sharpness of the least sharp axis, against that of the sharpest,",
)
_NAMES = {
    "size": ["brain volume (ml)", *(f"length of the brain along {axis} (mm)" for axis in "xyz")],
    "intensities": [
        f"percentile {p} of the intensities of {m}" for m in MODALITIES for p in _PERCENTILES
    ],
    "contrast": [f"{contrast} of {pair}" for contrast in _CONTRASTS for pair in _PAIRS],
    "uptake": ["uptake of t1c"],
    "surface": [f"brightness of the surface in {m}" for m in MODALITIES],
    "sharpness": [f"{kind} of {m}" for m in (*MODALITIES, "all modalities") for kind in _SHARPNESS],
}
MEASURES = {name: kind for kind, names in _NAMES.items() for name in names}
"""Kind of each measure by its name, in the order of the results of `measure_crop`."""
_LEAST_SD = dict(zip(_NAMES, (0.02, 0.1, 0.03, 0.1, 0.1, 0.05), strict=True))
"""Standard deviation below which differences do no harm, even where all training cases agree."""
_LOGARITHMIC = ("size", "uptake", "sharpness")
"""Kinds whose logarithms are compared."""
_CAUSES = {
    "size": "another atlas, a wrong voxel size, or a brain that is cut or not stripped",
    "intensities": "another normalisation, or another modality in its place",
    "contrast": "modalities that are swapped, shifted against each other, or normalised otherwise",
    "uptake": "no contrast agent, or t1n and t1c swapped",
    "surface": "a brain that is not stripped, or stripped otherwise",
    "sharpness": "thick slices, smoothing, resampling or noise",
}
"""Usual causes of a deviation of each kind."""
_REMARKS = {"contrast": MIXED_UP, "uptake": NO_AGENT, "size": NOT_STRIPPED, "surface": NOT_STRIPPED}
"""Words of the remark that says the same of any scan."""


class MeasureRange(Section):
    """Distribution of a measure over the training cases; of its logarithm, where that is compared."""

    name: str
    mean: float
    sd: Annotated[float, Field(ge=0)]
    """Standard deviation over the cases."""
    low: float
    """Smallest value."""
    high: float
    """Largest value."""


class TrainingProfile(Section):
    """Description of a training set by its scans."""

    n_cases: Annotated[int, Field(ge=FEWEST_CASES)]
    """Cases that were measured."""
    ranges: Annotated[tuple[MeasureRange, ...], Field(max_length=_MOST_MEASURES)]
    """Ranges by the name of the measure; those that this version does not know are not compared."""
    grids: Annotated[tuple[Triple, ...], Field(max_length=_MOST_GRIDS)] = ()
    """Voxels of the grids of the files along X, Y and Z; none if they have more than a few."""

    def limit(self, rate: float) -> float:
        """Return the deviation, in standard deviations, that one measure of a new case exceeds at a rate.

        It is that of the prediction interval of a normal distribution whose mean and standard
        deviation are known from `n_cases` cases.
        """
        return float(stdtrit(self.n_cases - 1, 1 - rate / 2) * (1 + 1 / self.n_cases) ** 0.5)


def notes_of_training(folder: Path, case_ids: Sequence[str]) -> dict[str, JsonValue]:
    """Return the notes of a model with the profile of its prepared cases; empty without brains.

    Raises:
        CaseError: A case is not prepared, or is damaged.
    """
    profile = profile_of_cases(folder, case_ids)
    return {} if profile is None else {_NOTE: profile.model_dump(mode="json")}


def unlike_training(scan: "Scan", notes: Sequence[Notes], spacing_mm: Spacing) -> tuple[str, ...]:
    """Return a warning for each property that the training sets of a model make unlikely.

    Nothing is said about a foreground that is no brain.

    Args:
        scan: The scan, prepared for the model.
        notes: Notes of each member of the model; none for models of other programs.
        spacing_mm: Voxel size of `scan.image`.
    """
    profile = profile_in(notes)
    if profile is None or scan.modalities != MODALITIES:
        return ()
    values = measure_crop(scan.image, spacing_mm)
    if values is None:
        return ()
    warnings = []
    shape, _ = grid_of(scan.geometry)
    if profile.grids and scan.resampling is None and shape not in profile.grids:
        grid, usual = ("x".join(map(str, voxels)) for voxels in (shape, profile.grids[0]))
        more = f" or {counted(len(profile.grids) - 1, 'other')}" if len(profile.grids) > 1 else ""
        warnings.append(
            f"its grid has {grid} voxels, those of the training scans {usual}{more}: it may be in "
            "another atlas, or cropped"
        )
    by_kind: dict[str, list[str]] = {}
    for kind, text in deviations(profile, values):
        by_kind.setdefault(kind, []).append(text)
    said = [kind for kind, text in _REMARKS.items() if text in " | ".join(scan.warnings)]
    new = [kind for kind in by_kind if kind not in said]
    # the sort is stable, and the others stay in the order of their worst measure
    for kind in sorted(new, key=lambda kind: kind not in _SINGLE_CAUSE)[:_MOST_SENTENCES]:
        worst, *others = by_kind[kind]
        more = f" ({counted(len(others), 'more measure')} of that kind)" if others else ""
        warnings.append(f"unlike the training scans: {worst}{more}; usual causes: {_CAUSES[kind]}")
    return tuple(warnings)


def profile_in(notes: Sequence[Notes]) -> TrainingProfile | None:
    """Return the profile of the training sets of a model; None unless all its members have one.

    Raises:
        ValueError: An entry is unknown, missing or out of range.
    """
    stored = [note[_NOTE] for note in notes if _NOTE in note]
    if not stored or len(stored) < len(notes):
        return None
    return pooled([TrainingProfile.model_validate(values) for values in stored])


def measures_of(image: npt.NDArray[np.generic], spacing_mm: Spacing) -> str:
    """Return the measures of a prepared brain crop (4, x, y, z), as `prepare` stores them."""
    values = measure_crop(image, spacing_mm)
    named = {} if values is None else dict(zip(MEASURES, values.tolist(), strict=True))
    return json.dumps({"version": _VERSION, "values": named}, indent=1)


def profile_of_cases(folder: Path, case_ids: Sequence[str]) -> TrainingProfile | None:
    """Return the profile of prepared cases; None if too few of them are brains.

    The measures are those that `prepare` has stored; of very many cases, evenly spaced ones are taken.

    Raises:
        CaseError: A case is not prepared, or is damaged.
    """
    from brats_seg.data.store import MEASURES_NAME, manifest_of

    measured, grids = [], set[Triple]()
    for case_id in evenly_spread(case_ids, _MOST_CASES):
        if values := _stored_measures(folder / case_id / MEASURES_NAME):
            measured.append(values)
            grids.add(grid_of(manifest_of(folder, case_id).scan)[0])
    if len(measured) < FEWEST_CASES:
        return None
    return profile_of(np.array(measured), grids if len(grids) <= _MOST_GRIDS else ())


def profile_of(values: npt.NDArray[np.float64], grids: Collection[Triple] = ()) -> TrainingProfile:
    """Return the profile of measured cases.

    Args:
        values: (cases, measures), rows from `measure_crop`.
        grids: Voxels of the grids of their files.
    """
    ends = values.min(axis=0), values.max(axis=0)
    spread = np.stack([values.mean(axis=0), values.std(axis=0, ddof=1), *ends], axis=1)
    ranges = [
        MeasureRange(name=name, mean=mean, sd=sd, low=low, high=high)
        for name, (mean, sd, low, high) in zip(MEASURES, spread.tolist(), strict=True)
    ]
    return TrainingProfile(n_cases=len(values), ranges=tuple(ranges), grids=tuple(sorted(grids)))


def pooled(profiles: Sequence[TrainingProfile]) -> TrainingProfile:
    """Return the profile of an ensemble, whose training sets may overlap.

    It is the mixture of the distributions, with as few cases as the smallest training set.
    """
    by_name = [{one.name: one for one in profile.ranges} for profile in profiles]
    ranges = []
    for name in by_name[0]:
        of_name = [known[name] for known in by_name if name in known]
        if len(of_name) == len(profiles):
            means, sds = np.array([(one.mean, one.sd) for one in of_name]).T
            mixture = MeasureRange(
                name=name,
                mean=float(means.mean()),
                sd=float(np.sqrt((sds**2).mean() + means.var())),
                low=min(one.low for one in of_name),
                high=max(one.high for one in of_name),
            )
            ranges.append(mixture)
    grids = {grid for profile in profiles for grid in profile.grids}
    is_known = all(profile.grids for profile in profiles) and len(grids) <= _MOST_GRIDS
    return TrainingProfile(
        n_cases=min(profile.n_cases for profile in profiles),
        ranges=tuple(ranges),
        grids=tuple(sorted(grids)) if is_known else (),
    )


def deviations(
    profile: TrainingProfile, values: npt.NDArray[np.float64]
) -> tuple[tuple[str, str], ...]:
    """Return the kind and a description of each measure that deviates, the worst first.

    Args:
        profile: Profile of the training set; measures that it lacks are not compared.
        values: Measures (n,) of a scan, from `measure_crop`.
    """
    known = [one for one in profile.ranges if one.name in MEASURES]
    measured = dict(zip(MEASURES, values.tolist(), strict=True))
    limit = profile.limit(FALSE_ALARMS / max(1, len(known)))
    deviating = []
    for typical in known:
        kind, value = MEASURES[typical.name], measured[typical.name]
        # as a multiple of the largest likely deviation
        excess = abs(value - typical.mean) / (limit * max(typical.sd, _LEAST_SD[kind]))
        if excess > 1:
            numbers = np.array([value, typical.low, typical.high])
            shown, low, high = np.exp(numbers) if kind in _LOGARITHMIC else numbers
            text = f"{typical.name} is {shown:.3g}, in training {low:.3g} to {high:.3g}"
            deviating.append((excess, kind, text))
    return tuple((kind, text) for _, kind, text in sorted(deviating, key=lambda one: -one[0]))


def measure_crop(
    image: npt.NDArray[np.generic], spacing_mm: Spacing
) -> npt.NDArray[np.float64] | None:
    """Measure a brain crop (4, x, y, z); None unless it is a brain in all four modalities.

    Args:
        image: Intensities of mean 0 and standard deviation 1 in the brain, exactly 0 around it.
        spacing_mm: Voxel size.

    Returns:
        Values (n,) in the order of `MEASURES`.
    """
    sample = sample_crop(image, spacing_mm)
    if len(image) < len(MODALITIES) or not sample.is_brain or not sample.values.any(axis=1).all():
        return None
    inner = binary_erosion(sample.brain, iterations=2)
    if not inner.any():
        return None
    lengths = [n * mm for n, mm in zip(sample.brain.shape, sample.spacing_mm, strict=True)]
    local = local_contrast(sample)
    edges = np.corrcoef([_steepness(one)[inner] for one in sample.images])
    parts = [
        np.log([sample.brain_ml, *lengths]),
        np.percentile(sample.values, _PERCENTILES, axis=1).T.ravel(),
        *pair_contrasts(local),
        edges[tuple(np.transpose(MODALITY_PAIRS))],
        # without contrast agent it may be negative
        [np.log(max(uptake(local), 0.05))],
        _surface_brightness(sample),
        _sharpness(image).ravel(),
    ]
    return np.nan_to_num(np.concatenate(parts))


def _stored_measures(path: Path) -> list[float]:
    """Return the stored measures of a prepared case; none if they are missing, or it is no brain."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    named = stored["values"] if stored["version"] == _VERSION else {}
    return [named[name] for name in MEASURES if named]


def _surface_brightness(sample: BrainSample) -> list[float]:
    """Return the median of each modality in the second layer below the surface of the brain."""
    # half of the outermost layer may be background
    layer = surface_layers(sample)[-1]
    return [float(np.median(image[layer])) if layer.any() else 0.0 for image in sample.images]


def _steepness(image: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the length of the gradient of an image (x, y, z)."""
    return np.sqrt(sum(np.square(along) for along in np.gradient(image)))


def _sharpness(image: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return logarithms (5, 3) of the sharpness of each modality, and of their mean.

    The columns are the mean over the axes, the sharpest axis, and the least sharp one against that.
    """
    along = np.array([[_roughness(one, axis) for axis in range(3)] for one in image])
    logs = np.log(along + _SMOOTH)
    best, worst = logs.max(axis=1), logs.min(axis=1)
    of_modalities = np.stack([logs.mean(axis=1), best, worst - best], axis=1)
    return np.concatenate([of_modalities, of_modalities.mean(axis=0, keepdims=True)])


def _roughness(image: npt.NDArray[np.generic], axis: int) -> float:
    """Return the median second difference along an axis of an image of standard deviation 1."""
    planes = np.moveaxis(image, axis, 0)
    n = max(0, (len(planes) - 2 + _EVERY - 1) // _EVERY)
    low, middle, high = (planes[start::_EVERY][:n].astype(np.float32) for start in range(3))
    inside = (low != 0) & (middle != 0) & (high != 0)
    differences = np.abs(2 * middle[inside] - low[inside] - high[inside])
    return float(np.median(differences)) if differences.size else 0.0
