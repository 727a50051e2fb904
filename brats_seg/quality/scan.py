"""Judge a scan: is each image the modality that its name says, and is there a fault that spoils predictions.

A label map in the place of a scan, and one image in two places, are refused. Everything else that is
unusual is one line of what to look at, with the measure in brackets. The limits are fixed, whatever
scans a network was trained on: they lie outside all real brains of BraTS and TCGA that were at hand.

All checks but that of the detail work on one sample of the brain, whose voxels are 2 mm apart.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import inf, prod
from typing import NamedTuple

import nibabel as nib
import numpy as np
import numpy.typing as npt
from scipy import fft
from scipy.ndimage import binary_erosion, uniform_filter

from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES, LabelMap
from brats_seg.voxels.box import Mask, background_of, bounding_box, brain_mask, normalised
from brats_seg.voxels.grids import MM3_PER_ML, Spacing

Values = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]


class Limit(NamedTuple):
    """Usual range of a measure, and what to look at if a value is outside."""

    measure: str
    """What was measured, with its unit."""
    low: float
    high: float
    advice: str
    """One line, in which `{of}` is replaced by the source of the values, such as modalities."""


# the sample of the brain
STEP_MM = 2.0
"""Distance between the voxels of a sample; on coarser grids all voxels are taken."""
SMALLEST_BRAIN_ML = 50.0
"""Foreground below which a scan is no brain, but a part of one: a newborn has 300 ml."""
SMALLEST_WHOLE_ML = 100.0
"""Foreground from which size and shape are judged; an adult at half its size has 120 ml or more."""
_LARGEST_Z = 15.0
_IQR_OF_NORMAL = 1.349
"""Interquartile range of the normal distribution of standard deviation 1."""

# what is refused
MOST_LABEL_VALUES = 5
"""Values of an image that may be a label map; a scan has hundreds."""
SAME_IMAGE = 0.995
"""Correlation of two modalities from which they are one image, scaled or rounded. Real pairs reached
0.79, and T1 with 5 % of noise 0.99."""

# what is measured, and its usual ranges
FOREGROUND_ML = "ml of foreground"
SURFACE = "brightness of the surface in t1n, t1c and t2f"
TURN = "degrees between the grid and the axes of the body"
DARKEST = "darkest hundredth of the brain, in standard deviations"
LENGTH = "mean length of the brain in mm"
PROPORTION = "length of the brain as a multiple of its height"
END = "section at an end of the brain, as a share of the largest"
ASYMMETRY = "asymmetry of the brain"
DISPLACEMENT = "mm to where the edges fit best"
DETAIL = "detail of 1 mm as a share of that of 2 mm"
SKULL = (
    # adults have 1000 to 1800 ml, a head with its skull twice as much
    Limit(FOREGROUND_ML, -inf, 2200, "the skull does not seem stripped: look around the brain"),
    # without scalp the surface is fluid and cortex, which are dark in T1 and FLAIR
    Limit(SURFACE, -inf, 0, "the scalp does not seem stripped: look around the brain"),
)
LIMITS = (
    Limit(TURN, -inf, 10, "the scan does not seem to be registered to an atlas: it is rotated"),
    Limit(LENGTH, 131, 165, "the brain has an unusual size: check the voxel size"),
    Limit(PROPORTION, 1.02, 1.44, "the brain has an unusual shape: check the voxel size"),
    Limit(END, -inf, 0.25, "a part of the brain seems to be cut off: look at its ends"),
    Limit(ASYMMETRY, -inf, 0, "the scan may be stored {of}: check its orientation in a viewer"),
    Limit(DARKEST, -7, -2.1, "the intensities may have been changed: use those of the scanner"),
    Limit(
        DISPLACEMENT, -inf, 3, "{of} may be shifted against the other modalities: compare the edges"
    ),
    Limit(DETAIL, 0.38, inf, "{of} may be blurred: look for small vessels and folds"),
    Limit(DETAIL, -inf, 0.76, "{of} may be noisy: look at the grain"),
)
"""Limits of a scan without skull, which none of 24 real ones exceeds. Most lie halfway between those and
the nearest of their damaged copies (`benchmarks/scan_check.py`)."""
_MNI152 = 4
"""Code of NIfTI for the space of the MNI template."""
_SURFACE_MM = 4.0
"""Depth of the surface of the brain."""
_FARTHEST = 12
"""Voxels of background that a sample is padded with, so that its opposite ends do not overlap."""
_EVERY = 16
"""Step between the planes in which detail is measured."""

# which modality an image is
MIXED_UP = "modalities may be mixed up"
"""Beginning of the remark on the order of the modalities."""
MIXED_UP_MARGIN = 4.0
"""Least gain in log-likelihood for which another order of the modalities is reported. The given
order of real brains was better than all others by 8 or more."""
LEAST_UPTAKE = 1.2
"""Least enhancement of the brightest thousandth of a brain, in standard deviations. With contrast
agent it reached 1.65 to 11; a second image without it at most 1.0."""
SAME_TISSUE = 0.65
"""Correlation of the local contrast of two modalities from which they may be the same modality. Pairs
that are not t1n and t1c reached 0.63."""
MODALITY_PAIRS = tuple(combinations(range(len(MODALITIES)), 2))
"""Indices in `MODALITIES` of every pair of modalities."""
_UPPER = tuple(np.transpose(MODALITY_PAIRS))
_LOCAL_MM = 30.0
"""Width of the neighbourhood whose mean is subtracted, because of the bias field of the scanner."""
_TAIL_PERCENT = 0.1
"""Share of the voxels of a brain that are vessels, or as bright."""
_CORRELATIONS = np.array([0.52, -0.62, 0.32, -0.49, 0.14, -0.12])
"""Means of fourteen real brains, for the pairs of modalities in the order of `MODALITY_PAIRS`."""
_TAILS = np.array([-0.51, -0.48, -0.11, -0.20, 0.22, 0.50])
"""Means of the asymmetry of the difference of two modalities, for the same pairs."""
_CORRELATION_SD, _TAIL_SD = 0.17, 0.13


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BrainSample:
    """Every nth voxel of the box around the brain."""

    images: Values
    """Modalities (4, x, y, z), median 0 and interquartile range 1.35 in the brain, 0 outside."""
    brain: Mask
    """Voxels (x, y, z) of the brain."""
    labels: LabelMap
    """Label map (x, y, z), 0 without one."""
    n_labelled: int = 0
    """Labelled voxels of the sample, in the box or outside."""
    spacing_mm: Spacing
    """Distance between neighbours."""

    @property
    def voxel_ml(self) -> float:
        """Volume that a voxel of the sample represents."""
        return prod(self.spacing_mm) / MM3_PER_ML

    @property
    def brain_ml(self) -> float:
        """Volume of the brain."""
        return int(np.count_nonzero(self.brain)) * self.voxel_ml

    @property
    def n_inside(self) -> int:
        """Labelled voxels in the brain."""
        return int(np.count_nonzero(self.labels[self.brain]))

    @property
    def is_brain(self) -> bool:
        """Whether the foreground is large enough to be a brain."""
        return self.brain_ml >= SMALLEST_BRAIN_ML

    @property
    def values(self) -> Values:
        """Intensities (4, n) in the brain."""
        return self.images[:, self.brain]


def sample_brain(volumes: Sequence[Volume], label: Volume | None = None) -> BrainSample | None:
    """Sample volumes of one grid in the axes of BraTS; None if nothing differs from the background."""
    every, between_mm = _steps(volumes[0].geometry.spacing_mm)
    mask = brain_mask([volume.array for volume in volumes], every)
    box = bounding_box(mask)
    if box is None:
        return None
    brain = np.ascontiguousarray(mask[box.slices])
    images = np.zeros((len(volumes), *box.shape), dtype=np.float32)
    for image, volume in zip(images, volumes, strict=True):
        image[brain] = _standardise(volume.array[every][box.slices][brain])
    labels = np.zeros(mask.shape, np.uint8) if label is None else label.array[every]
    return BrainSample(
        images=images,
        brain=brain,
        labels=np.ascontiguousarray(labels[box.slices]),
        n_labelled=int(np.count_nonzero(labels)),
        spacing_mm=between_mm,
    )


def check_modalities(case_id: str, volumes: Mapping[str, Volume], sample: BrainSample) -> None:
    """Raise `CaseError` if a modality is a label map, or two are one image, scaled or rounded."""
    for volume, values in zip(volumes.values(), sample.values, strict=True):
        # a few voxels show nearly always that it is a scan
        if len(np.unique(values[::7])) > MOST_LABEL_VALUES:
            continue
        levels = np.unique(volume.array)
        if len(levels) <= MOST_LABEL_VALUES:
            listed = ", ".join(f"{level:g}" for level in levels)
            problem = f"only the values {listed}, as in a label map"
            next_step = "Put the image of that modality in its place."
            raise CaseError(case_id, volume.file, problem, "a scan", next_step)
    likeness = _correlations(sample.values)
    for (i, first), (j, second) in combinations(enumerate(volumes), 2):
        names, pair = f"{first} and {second}", (volumes[first], volumes[second])
        is_alike = abs(likeness[i, j]) > SAME_IMAGE
        problem = f"the same image for {names}, but for its brightness" if is_alike else ""
        # values that are all equal in the sample have no correlation
        if (is_alike or likeness[i, j] == 0) and np.array_equal(pair[0].array, pair[1].array):
            problem = f"the same voxels for {names}"
        if problem:
            next_step = "One modality was given twice: put the right file in its place."
            files = f"{pair[0].file} and {pair[1].file}"
            raise CaseError(case_id, files, problem, "a different image for each", next_step)


def scan_remarks(volumes: Mapping[str, Volume], sample: BrainSample) -> Iterator[str]:
    """Yield a line for everything that is unusual about a scan.

    Args:
        volumes: The modalities in the axes of BraTS.
        sample: Their sample; they are compared with each other only if all four are there.
    """
    skull = list(skull_remarks(sample))
    yield from skull
    geometry = next(iter(volumes.values())).geometry
    measures = {TURN: {"": _rotation_degrees(geometry)}}
    if sample.is_brain and not skull:
        measures |= measures_of(volumes, sample)
    yield from remarks(LIMITS, measures)
    if sample.is_brain and len(volumes) == len(MODALITIES):
        yield from order_remarks(sample)


def measures_of(volumes: Mapping[str, Volume], sample: BrainSample) -> dict[str, dict[str, float]]:
    """Return the measures of a brain without skull, each by modality or by what its values are of."""
    measures = {DETAIL: {modality: _detail(volume) for modality, volume in volumes.items()}}
    if sample.brain_ml > SMALLEST_WHOLE_ML:
        measures |= _shape(sample)
    geometry = next(iter(volumes.values())).geometry
    if _MNI152 in {geometry.qform_code, geometry.sform_code}:
        # there brains are pitched: 0.06 for one that is the right way up
        measures.pop(ASYMMETRY, None)
    if len(volumes) == len(MODALITIES):
        measures[DARKEST] = {"": float(np.percentile(sample.values, 1, axis=1).min())}
        measures[DISPLACEMENT] = _displacements(sample)
    return measures


def remarks(limits: Sequence[Limit], measures: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield a line for each limit that is exceeded.

    Args:
        limits: Usual ranges; those of measures that are not known do not count.
        measures: Values of each measure by modality, or one of the whole scan.
    """
    for measure, low, high, advice in limits:
        of_modalities = measures.get(measure, {})
        beyond = {key: x for key, x in of_modalities.items() if x < low or x > high}
        if beyond:
            values = ", ".join(f"{value:.3g}" for value in beyond.values())
            usual = f"at most {high:g}" if low == -inf else f"at least {low:g}"
            usual = usual if inf in {-low, high} else f"{low:g} to {high:g}"
            text = advice.format(of=" and ".join(beyond))
            yield f"{text} [{measure}: {values}; usual {usual}]"


def skull_remarks(sample: BrainSample) -> Iterator[str]:
    """Yield a line if the skull or the scalp does not seem stripped.

    The scalp is looked for on a whole brain where all four modalities are there.
    """
    measures = {FOREGROUND_ML: {"": sample.brain_ml}}
    if sample.is_brain and len(sample.images) == len(MODALITIES):
        measures[SURFACE] = {"": _surface_brightness(sample)}
    yield from list(remarks(SKULL, measures))[:1]


def has_skull(volumes: Sequence[Volume]) -> bool:
    """Return whether the skull or the scalp does not seem stripped from volumes of one grid."""
    sample = sample_brain(volumes)
    return sample is not None and any(skull_remarks(sample))


def order_remarks(sample: BrainSample) -> Iterator[str]:
    """Yield a line if the four modalities of a brain are not what they are called."""
    local = local_contrast(sample)
    if not local.size:
        return
    order, enhancement = likeliest_order(local), uptake(local)
    likeness = _correlations(local[:2])[0, 1]
    # a second image of what t1n shows fits no order of modalities
    is_native_twice = abs(enhancement) < LEAST_UPTAKE and likeness > SAME_TISSUE
    if is_native_twice or (order == MODALITIES and enhancement < LEAST_UPTAKE):
        yield (
            "t1c shows no contrast agent: compare its vessels with those of t1n [enhancement of the "
            f"brightest voxels: {enhancement:.2f} standard deviations; usual at least {LEAST_UPTAKE}]"
        )
    elif order != MODALITIES:
        pairs = zip(MODALITIES, order, strict=True)
        swaps = [f"{named} looks like {likely}" for named, likely in pairs if named != likely]
        yield f"{MIXED_UP}: {', '.join(swaps)}"


def _shape(sample: BrainSample) -> dict[str, dict[str, float]]:
    """Return the measures of the size and the shape of a brain in the axes of BraTS."""
    lengths = np.multiply(sample.brain.shape, sample.spacing_mm)
    sections = [sample.brain.sum(axis=axes) for axes in ((1, 2), (0, 2), (0, 1))]
    ends = [max(section[:2].max(), section[-2:].max()) / section.max() for section in sections]
    _, length, height = map(_asymmetry, sections)
    return {
        LENGTH: {"": float(lengths.prod() ** (1 / 3))},
        PROPORTION: {"": float(lengths[1] / lengths[2])},
        END: {"": float(max(ends))},
        ASYMMETRY: {"front to back": length, "upside down": height},
    }


def _asymmetry(section: npt.NDArray[np.int64]) -> float:
    """Return the skewness of the positions of voxels, by their number at each position."""
    at = np.arange(len(section)) - np.average(np.arange(len(section)), weights=section)
    spread = np.sqrt(np.average(at**2, weights=section)) or 1.0
    return float(np.average((at / spread) ** 3, weights=section))


def _displacements(sample: BrainSample) -> dict[str, float]:
    """Return for each modality how far it is from where its edges fit those of the others best."""
    inner = binary_erosion(sample.brain, iterations=3)
    if not inner.any():
        return {}
    shape = [fft.next_fast_len(n + _FARTHEST, real=True) for n in inner.shape]
    edges = []
    for image in sample.images:
        steepness = np.sqrt(sum(np.square(along) for along in np.gradient(image)))
        inside = steepness[inner]
        steepness[:] = 0
        steepness[inner] = normalised(inside.clip(max=np.percentile(inside, 99)))[0]
        edges.append(fft.rfftn(steepness, shape))
    every = sum(edges)
    distances = []
    for edge in edges:
        fit = fft.irfftn(edge * np.conj(every - edge), shape)
        best = np.unravel_index(fit.argmax(), fit.shape)
        # the second half of the positions are displacements backwards
        voxels = [min(at, n - at) for at, n in zip(best, shape, strict=True)]
        # the sample does not tell a voxel from its neighbours
        mm = np.multiply(voxels, sample.spacing_mm) if max(voxels) > 1 else 0.0
        distances.append(float(np.linalg.norm(mm)))
    return dict(zip(MODALITIES, distances, strict=True))


def _detail(volume: Volume) -> float:
    """Return the detail of 1 mm as a share of that of 2 mm, along the axis with most of it.

    It is the ratio of mean second differences: 0.25 of a smooth image, and 1 of white noise. NaN
    without a voxel that has neighbours.
    """
    shares = [np.nan]
    background = background_of(volume.array)
    for axis, mm in enumerate(volume.geometry.spacing_mm):
        planes = np.moveaxis(volume.array, axis, 0)
        step = max(1, round(1 / mm))
        middle = np.arange(2 * step, len(planes) - 2 * step, _EVERY)
        around = [planes[middle + by * step] for by in (-2, -1, 0, 1, 2)]
        inside = np.logical_and.reduce([block != background for block in around])
        a, b, c, d, e = (block[inside].astype(np.float64) for block in around)
        # differences of huge intensities are not known
        with np.errstate(over="ignore", invalid="ignore"):
            coarse = np.abs(2 * c - a - e).sum()
            shares += [float(np.abs(2 * c - b - d).sum() / coarse)] if coarse > 0 else []
    return float(np.fmax.reduce(shares))


def likeliest_order(local: Values) -> tuple[str, ...]:
    """Return the modality that each of the four images most likely is, by `local_contrast` (4, n).

    Fluid is dark in T1, bright in T2 and dark in FLAIR, so that the correlations between modalities
    have a typical pattern. A few voxels are much brighter in one modality than in another, vessels in
    t1c and fluid in t2w, so that their differences are skewed. The given order is kept unless
    another fits clearly better.
    """
    correlations, tails = _correlations(local), _asymmetries(local)
    fits = {}
    # order[i] is the modality that image i really is
    for order in permutations(range(len(MODALITIES))):
        images = np.argsort(order)
        pairs = np.ix_(images, images)
        of_correlations = ((correlations[pairs][_UPPER] - _CORRELATIONS) / _CORRELATION_SD) ** 2
        of_tails = ((tails[pairs][_UPPER] - _TAILS) / _TAIL_SD) ** 2
        fits[order] = float(-(of_correlations.sum() + of_tails.sum()) / 2)
    best = max(fits, key=fits.__getitem__)
    if fits[best] - fits[0, 1, 2, 3] <= MIXED_UP_MARGIN:
        return MODALITIES
    return tuple(MODALITIES[modality] for modality in best)


def uptake(local: Values) -> float:
    """Return how much brighter t1c is than t1n where the contrast agent is, in standard deviations.

    The darkest voxels of the difference are subtracted from the brightest, so that noise cancels.
    """
    change = local[MODALITIES.index("t1c")] - local[MODALITIES.index("t1n")]
    low, high = np.percentile(change, [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    return float(high + low)


def local_contrast(sample: BrainSample) -> Values:
    """Return intensities (4, n) minus the mean around them, in the brain without its surface."""
    size = [max(3, round(_LOCAL_MM / mm)) for mm in sample.spacing_mm]
    n_layers = max(1, round(_SURFACE_MM / max(sample.spacing_mm)))
    inner = binary_erosion(sample.brain, iterations=n_layers)
    weight = uniform_filter(sample.brain.astype(np.float32), size)[inner]
    return np.stack(
        [image[inner] - uniform_filter(image, size)[inner] / weight for image in sample.images]
    )


def _surface_brightness(sample: BrainSample) -> float:
    """Return the brightness of the surface of the foreground in the darkest of t1n, t1c and t2f.

    The brighter of the layers counts, because the outer one holds voxels of half scalp, half air. It
    is -inf in a few slices, which are all surface.
    """
    inside, brightest = sample.brain, -inf
    for _ in range(max(1, round(_SURFACE_MM / max(sample.spacing_mm)))):
        smaller = binary_erosion(inside)
        layer = sample.images[:, inside & ~smaller]
        if layer.size:
            brightest = max(brightest, float(np.median(layer, axis=1)[[0, 1, 3]].min()))
        inside = smaller
    return brightest if inside.any() else -inf


def _asymmetries(local: Values) -> Numbers:
    """Return the asymmetries (4, 4) of the differences between modalities.

    An asymmetry is from -1 to 1: how much further the upper tail reaches than the lower one.
    """
    tails = np.zeros((len(MODALITIES), len(MODALITIES)))
    for first, second in MODALITY_PAIRS:
        difference = local[first] - local[second]
        low, middle, high = np.percentile(difference, [_TAIL_PERCENT, 50, 100 - _TAIL_PERCENT])
        tails[first, second] = (high + low - 2 * middle) / (high - low) if high > low else 0.0
        tails[second, first] = -tails[first, second]
    return tails


def _correlations(values: Values) -> Numbers:
    """Return the correlations (4, 4) of intensities (4, n); 0 with an image that is constant."""
    centred = values - values.mean(axis=1, keepdims=True, dtype=np.float64)
    length = np.sqrt((centred**2).sum(axis=1))
    centred /= np.where(length > 0, length, 1)[:, None]
    return np.asarray(centred @ centred.T)


def _rotation_degrees(geometry: Geometry) -> float:
    """Return the largest angle between an axis of the grid and the axis of the body next to it."""
    directions = geometry.affine[:3, :3] / geometry.spacing_mm
    nearest = nib.orientations.io_orientation(geometry.affine)[:, 0].astype(int)
    cosines = np.abs(directions[nearest, range(3)])
    return float(np.degrees(np.arccos(cosines.min().clip(max=1))))


def _steps(spacing_mm: Spacing) -> tuple[tuple[slice, slice, slice], Spacing]:
    """Return which voxels are in a sample, and the distance between them."""
    x, y, z = (max(1, round(STEP_MM / mm)) for mm in spacing_mm)
    every = (slice(None, None, x), slice(None, None, y), slice(None, None, z))
    return every, (spacing_mm[0] * x, spacing_mm[1] * y, spacing_mm[2] * z)


def _standardise(values: npt.NDArray[np.generic]) -> Values:
    """Return intensities with median 0 and the spread of a standard deviation of 1.

    Quartiles are not moved by tumours, vessels or a few voxels of the background.
    """
    numbers = values.astype(np.float64)
    low, middle, high = np.percentile(numbers, [25, 50, 75])
    # huge intensities overflow to infinity, which is cut like other outliers
    with np.errstate(over="ignore"):
        spread = (high - low) / _IQR_OF_NORMAL or numbers.std() or 1.0
        return ((numbers - middle) / spread).clip(-_LARGEST_Z, _LARGEST_Z).astype(np.float32)
