"""Check that each of the four images of a case is the modality that its name says.

A label map in the place of a scan, and one image in two places, are refused. Unusual but possible
are an order of the modalities that another fits better, no contrast agent in t1c, and tissue around
the brain. The limits were set on fourteen real brains of BraTS and TCGA, none of which has a remark.

All checks work on one sample of the brain, whose voxels are 2 mm apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import prod

import nibabel as nib
import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_erosion, uniform_filter

from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES, LabelMap
from brats_seg.voxels.box import Mask, bounding_box, brain_mask
from brats_seg.voxels.grids import MM3_PER_ML, Spacing

Values = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]

STEP_MM = 2.0
"""Distance between the voxels of a sample; on coarser grids all voxels are taken."""
SMALLEST_BRAIN_ML = 50.0
"""Foreground below which a scan is no brain, but a part of one: a newborn has 300 ml."""
MOST_LABEL_VALUES = 5
"""Values of an image that may be a label map; a scan has hundreds."""
SAME_IMAGE = 0.995
"""Correlation of two modalities from which they are one image, scaled or rounded. Real pairs reached
0.79, and T1 with 5 % of noise 0.99."""
LARGEST_BRAIN_ML = 2200.0
"""Largest volume of a brain: adults have 1000 to 1800 ml, a head with its skull twice as much."""
LARGEST_TURN_DEGREES = 10.0
"""Largest angle to the axes of the body of a scan that is registered to an atlas."""
LEAST_UPTAKE = 1.5
"""Least enhancement of the brightest thousandth of a brain, in standard deviations. With contrast
agent it reached 2.3 to 8; a second image without it at most 1.0."""
BRIGHT_SURFACE = 0.0
"""Brightness of the surface of the brain from which it is scalp. Without scalp it was at most
-0.5: the surface is fluid and cortex, which are dark in T1 and FLAIR."""
MIXED_UP = "modalities may be mixed up"
"""Beginning of the remark on the order of the modalities."""
NO_AGENT = "t1c shows no contrast agent"
"""Beginning of the remark on a scan without contrast agent."""
NOT_STRIPPED = "does not seem to be stripped"
"""End of the remarks on tissue around the brain."""
MIXED_UP_MARGIN = 4.0
"""Least gain in log-likelihood for which another order of the modalities is reported. The given
order of real brains was better than all others by 8 or more."""
SAME_TISSUE = 0.65
"""Correlation of the local contrast of two modalities from which they may be the same modality. Pairs
that are not t1n and t1c reached 0.63."""

MODALITY_PAIRS = tuple(combinations(range(len(MODALITIES)), 2))
"""Indices in `MODALITIES` of every pair of modalities."""
_UPPER = tuple(np.transpose(MODALITY_PAIRS))
_LOCAL_MM = 30.0
"""Width of the neighbourhood whose mean is subtracted, because of the bias field of the scanner."""
_SURFACE_MM = 4.0
"""Depth of the surface of the brain."""
_TAIL_PERCENT = 0.1
"""Share of the voxels of a brain that are vessels, or as bright."""
_CORRELATIONS = np.array([0.52, -0.62, 0.32, -0.49, 0.14, -0.12])
"""Means of fourteen real brains, for the pairs of modalities in the order of `MODALITY_PAIRS`."""
_TAILS = np.array([-0.51, -0.48, -0.11, -0.20, 0.22, 0.50])
"""Means of the asymmetry of the difference of two modalities, for the same pairs."""
_CORRELATION_SD, _TAIL_SD = 0.17, 0.13
_LARGEST_Z = 15.0
_IQR_OF_NORMAL = 1.349
"""Interquartile range of the normal distribution of standard deviation 1."""


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
        """Volume that a voxel of the sample stands for."""
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
        image[brain] = _standardised(volume.array[every][box.slices][brain])
    labels = np.zeros(mask.shape, np.uint8) if label is None else label.array[every]
    return BrainSample(
        images=images,
        brain=brain,
        labels=np.ascontiguousarray(labels[box.slices]),
        n_labelled=int(np.count_nonzero(labels)),
        spacing_mm=between_mm,
    )


def sample_crop(image: npt.NDArray[np.generic], spacing_mm: Spacing) -> BrainSample:
    """Sample a brain crop (4, x, y, z) that is normalised, and exactly 0 outside the brain.

    The scale of the modalities does not matter, so that the result is that of `sample_brain` for the
    scan that the crop was made from.
    """
    every, between_mm = _steps(spacing_mm)
    images = image[(slice(None), *every)].astype(np.float32)
    brain = (images != 0).any(axis=0)
    for modality in images:
        modality[brain] = _standardised(modality[brain])
    labels = np.zeros(brain.shape, np.uint8)
    return BrainSample(images=images, brain=brain, labels=labels, spacing_mm=between_mm)


def check_modalities(
    case_id: str,
    volumes: Sequence[Volume],
    sample: BrainSample,
    modalities: Sequence[str] = MODALITIES,
) -> None:
    """Raise `CaseError` if a modality is a label map, or two are one image, scaled or rounded."""
    for volume, values in zip(volumes, sample.values, strict=True):
        # a few voxels show nearly always that it is a scan
        if len(np.unique(values[::7])) > MOST_LABEL_VALUES:
            continue
        levels = np.unique(volume.array)
        if len(levels) <= MOST_LABEL_VALUES:
            problem = (
                f"only the values {', '.join(f'{level:g}' for level in levels)}, as in a label map"
            )
            next_step = "Put the image of that modality in its place."
            raise CaseError(case_id, volume.file, problem, "a scan", next_step)
    likeness = _correlations(sample.values)
    for first, second in combinations(range(len(modalities)), 2):
        names = f"{modalities[first]} and {modalities[second]}"
        one, other = volumes[first], volumes[second]
        is_alike = abs(likeness[first, second]) > SAME_IMAGE
        problem = f"the same image for {names}, but for its brightness" if is_alike else ""
        # values that are all equal in the sample have no correlation
        if (is_alike or likeness[first, second] == 0) and np.array_equal(one.array, other.array):
            problem = f"the same voxels for {names}"
        if problem:
            next_step = "One modality was given twice: put the right file in its place."
            expected = "four different modalities"
            raise CaseError(case_id, f"{one.file} and {other.file}", problem, expected, next_step)


def scan_remarks(geometry: Geometry, sample: BrainSample) -> Iterator[str]:
    """Yield a sentence for everything that is unusual about a scan.

    Args:
        geometry: Grid of the files.
        sample: The modalities; they are compared with each other only if all four are there.
    """
    angle = _turn_degrees(geometry)
    if angle > LARGEST_TURN_DEGREES:
        yield (
            f"the grid is turned by {angle:.0f} degrees against the axes of the body: the scan "
            "does not seem to be registered to an atlas"
        )
    yield from stripping_remarks(sample)
    if not sample.is_brain or len(sample.images) < len(MODALITIES):
        return
    local = local_contrast(sample)
    order, enhancement = likeliest_order(local), uptake(local)
    # a second image of what t1n shows fits no order of modalities
    is_native_twice = (
        abs(enhancement) < LEAST_UPTAKE and _correlations(local[:2])[0, 1] > SAME_TISSUE
    )
    if is_native_twice or (order == MODALITIES and enhancement < LEAST_UPTAKE):
        yield f"{NO_AGENT}: its vessels are no brighter than those of t1n"
    elif order != MODALITIES:
        pairs = zip(MODALITIES, order, strict=True)
        swaps = [f"{named} looks like {likely}" for named, likely in pairs if named != likely]
        yield f"{MIXED_UP}: {', '.join(swaps)}"


def has_skull(volumes: Sequence[Volume]) -> bool:
    """Return whether the skull or the scalp does not seem to be stripped from volumes of one grid."""
    sample = sample_brain(volumes)
    return sample is not None and any(stripping_remarks(sample))


def stripping_remarks(sample: BrainSample) -> Iterator[str]:
    """Yield a sentence if the skull or the scalp does not seem to be stripped.

    The scalp is looked for where all four modalities are there.
    """
    if sample.brain_ml > LARGEST_BRAIN_ML:
        tissue = f"the foreground measures {sample.brain_ml:.0f} ml, more than a brain: the skull"
        yield f"{tissue} {NOT_STRIPPED}"
    elif len(sample.images) == len(MODALITIES) and _surface_brightness(sample) > BRIGHT_SURFACE:
        yield f"the surface of the foreground is bright in t1n, t1c and t2f: the scalp {NOT_STRIPPED}"


def likeliest_order(local: Values) -> tuple[str, ...]:
    """Return the modality that each of the four images most likely is, by `local_contrast` (4, n).

    Fluid is dark in T1, bright in T2 and dark in FLAIR, so that the correlations between modalities
    have a typical pattern. A few voxels are much brighter in one modality than in another, vessels in
    t1c and fluid in t2w, so that their differences are skewed. The given order is kept unless
    another fits clearly better.
    """
    correlations, tails = _correlations(local), _tails(local)
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


def pair_contrasts(local: Values) -> tuple[Numbers, Numbers]:
    """Return correlation and asymmetry of the difference (6,) of each of `MODALITY_PAIRS`."""
    return _correlations(local)[_UPPER], _tails(local)[_UPPER]


def local_contrast(sample: BrainSample) -> Values:
    """Return intensities (4, n) minus the mean around them, in the brain without its surface."""
    size = [max(3, round(_LOCAL_MM / mm)) for mm in sample.spacing_mm]
    n_layers = max(1, round(_SURFACE_MM / max(sample.spacing_mm)))
    inner = binary_erosion(sample.brain, iterations=n_layers)
    weight = uniform_filter(sample.brain.astype(np.float32), size)[inner]
    return np.stack(
        [image[inner] - uniform_filter(image, size)[inner] / weight for image in sample.images]
    )


def surface_layers(sample: BrainSample) -> list[Mask]:
    """Return the layers (x, y, z) of voxels at the surface of the brain, from the outermost inwards."""
    inside = np.pad(sample.brain, 1)
    layers = []
    for _ in range(max(1, round(_SURFACE_MM / max(sample.spacing_mm)))):
        smaller = binary_erosion(inside)
        layers.append((inside & ~smaller)[1:-1, 1:-1, 1:-1])
        inside = smaller
    return layers


def _surface_brightness(sample: BrainSample) -> float:
    """Return the brightness of the surface of the foreground in the darkest of t1n, t1c and t2f.

    The brighter of two layers counts, because the outer one holds voxels of half scalp, half air.
    """
    return max(
        min(float(np.median(sample.images[modality][layer])) for modality in (0, 1, 3))
        for layer in surface_layers(sample)
        if layer.any()
    )


def _tails(local: Values) -> Numbers:
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


def _turn_degrees(geometry: Geometry) -> float:
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


def _standardised(values: npt.NDArray[np.generic]) -> Values:
    """Return intensities with median 0 and the spread of a standard deviation of 1.

    Quartiles are not moved by tumours, vessels or a few voxels of the background.
    """
    numbers = values.astype(np.float64)
    low, middle, high = np.percentile(numbers, [25, 50, 75])
    # huge intensities overflow to infinity, which is cut like other outliers
    with np.errstate(over="ignore"):
        spread = (high - low) / _IQR_OF_NORMAL or numbers.std() or 1.0
        return ((numbers - middle) / spread).clip(-_LARGEST_Z, _LARGEST_Z).astype(np.float32)
