"""Check that each of the four images of a case is the modality that its name says.

Refused are images that cannot be right: a label map, and one image in two places. Remarks are
sentences about what is unusual but possible: an order of the modalities that another fits better, no
contrast agent in t1c, tissue around the brain. Their limits were set on fourteen real brains of
BraTS and TCGA; none of them has a remark. The wrong orders were also found when each brain was judged
by the means of the other thirteen.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import nibabel as nib
import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_erosion, uniform_filter

from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES
from brats_seg.quality.sample import BrainSample
from brats_seg.voxels.box import Mask

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
agent, vessels and choroid plexus reached 2.3 to 8; a second image without it at most 1.0."""
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
"""Places in `MODALITIES` of every pair of modalities."""
_LOCAL_MM = 30.0
"""Width of the neighbourhood whose mean is subtracted, because of the bias field of the scanner."""
_SURFACE_MM = 4.0
"""Depth of the surface of the brain."""
_TAIL_PERCENT = 0.1
"""Share of the voxels of a brain that are vessels, or as bright."""
_EVERY = 7
"""Step between the voxels that are looked at for being labels."""
_CORRELATIONS = np.array([0.52, -0.62, 0.32, -0.49, 0.14, -0.12])
"""Means of fourteen real brains, for the pairs of modalities in the order of `MODALITY_PAIRS`."""
_TAILS = np.array([-0.51, -0.48, -0.11, -0.20, 0.22, 0.50])
"""Means of the asymmetry of the difference of two modalities, for the same pairs."""
_CORRELATION_SD = 0.17
_TAIL_SD = 0.13


def check_are_scans(case_id: str, volumes: Sequence[Volume], sample: BrainSample) -> None:
    """Raise `CaseError` if one of the modalities is a label map or a mask."""
    for volume, values in zip(volumes, sample.values, strict=True):
        if len(np.unique(values[::_EVERY])) > MOST_LABEL_VALUES:
            continue
        found = np.unique(volume.array)
        if len(found) <= MOST_LABEL_VALUES:
            shown = ", ".join(f"{value:g}" for value in found)
            raise CaseError(
                case_id,
                volume.file,
                f"only the values {shown}, as in a label map",
                "a scan",
                "Put the image of that modality in its place.",
            )


def check_all_different(
    case_id: str,
    volumes: Sequence[Volume],
    sample: BrainSample,
    modalities: Sequence[str] = MODALITIES,
) -> None:
    """Raise `CaseError` if two of the modalities are one image, even if scaled or rounded."""
    likeness = _correlations(sample.values)
    for one, other in combinations(range(len(modalities)), 2):
        files = f"{volumes[one].file} and {volumes[other].file}"
        names = f"{modalities[one]} and {modalities[other]}"
        found = ""
        if abs(likeness[one, other]) > SAME_IMAGE:
            found = f"the same image for {names}, but for its brightness"
        # values that are all equal in the sample have no correlation
        if (found or likeness[one, other] == 0) and np.array_equal(
            volumes[one].array, volumes[other].array
        ):
            found = f"the same voxels for {names}"
        if found:
            next_step = "One modality was given twice: put the right file in its place."
            raise CaseError(case_id, files, found, "four different modalities", next_step)


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
    if remark := stripping_remark(sample):
        yield remark
    if not sample.is_brain or len(sample.images) < len(MODALITIES):
        return
    local = local_contrast(sample)
    order = likeliest_order(local)
    if _is_native_twice(local) or (order == MODALITIES and uptake(local) < LEAST_UPTAKE):
        yield f"{NO_AGENT}: its vessels are no brighter than those of t1n"
    elif order != MODALITIES:
        pairs = [
            f"{named} looks like {likely}"
            for named, likely in zip(MODALITIES, order, strict=True)
            if named != likely
        ]
        yield f"{MIXED_UP}: {', '.join(pairs)}"


def stripping_remark(sample: BrainSample) -> str:
    """Return a sentence if the skull or the scalp does not seem to be stripped; else nothing.

    The scalp is looked for where all four modalities are there.
    """
    if sample.brain_ml > LARGEST_BRAIN_ML:
        return (
            f"the foreground measures {sample.brain_ml:.0f} ml, more than a brain: the "
            f"skull {NOT_STRIPPED}"
        )
    if len(sample.images) == len(MODALITIES) and surface_brightness(sample) > BRIGHT_SURFACE:
        return (
            f"the surface of the foreground is bright in t1n, t1c and t2f: the scalp {NOT_STRIPPED}"
        )
    return ""


def likeliest_order(local: npt.NDArray[np.float32]) -> tuple[str, ...]:
    """Return the modality that each of the four images most likely is.

    Fluid is dark in T1, bright in T2 and dark in FLAIR, so that the correlations between modalities
    have a typical pattern. A few voxels are much brighter in one modality than in another, vessels in
    t1c and fluid in t2w, so that their differences are skewed. The given order is kept unless
    another fits clearly better.

    Args:
        local: (4, n), the result of `local_contrast`.
    """
    correlations, tails = _correlations(local), _tails(local)
    fits = {}
    # order[i] is the modality that the file in place i really is
    for order in permutations(range(len(MODALITIES))):
        places = np.argsort(order)
        of_order = np.ix_(places, places)
        fits[order] = _fit(correlations[of_order], tails[of_order])
    best = max(fits, key=fits.__getitem__)
    given = tuple(range(len(MODALITIES)))
    if fits[best] - fits[given] <= MIXED_UP_MARGIN:
        return MODALITIES
    return tuple(MODALITIES[place] for place in best)


def uptake(local: npt.NDArray[np.float32]) -> float:
    """Return how much brighter t1c is than t1n where the contrast agent is, in standard deviations.

    The darkest voxels of the difference are subtracted from the brightest, so that noise cancels.

    Args:
        local: (4, n), the result of `local_contrast`.
    """
    change = local[MODALITIES.index("t1c")] - local[MODALITIES.index("t1n")]
    low, high = np.percentile(change, [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    return float(high + low)


def pair_contrasts(
    local: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return correlation and asymmetry of the difference (6,) of each of `MODALITY_PAIRS`.

    Args:
        local: (4, n), the result of `local_contrast`.
    """
    upper = tuple(np.transpose(MODALITY_PAIRS))
    return _correlations(local)[upper], _tails(local)[upper]


def local_contrast(sample: BrainSample) -> npt.NDArray[np.float32]:
    """Return intensities (4, n) minus the mean around them, in the brain without its surface."""
    size = [max(3, round(_LOCAL_MM / mm)) for mm in sample.spacing_mm]
    n_layers = max(1, round(_SURFACE_MM / max(sample.spacing_mm)))
    inner = binary_erosion(sample.brain, iterations=n_layers)
    weight = uniform_filter(sample.brain.astype(np.float32), size)[inner]
    return np.stack(
        [image[inner] - uniform_filter(image, size)[inner] / weight for image in sample.images]
    )


def surface_brightness(sample: BrainSample) -> float:
    """Return the brightness of the surface of the foreground in the darkest of t1n, t1c and t2f.

    The brighter of two layers counts, because the outer one holds voxels of half scalp, half air.
    """
    return max(
        min(float(np.median(sample.images[place][layer])) for place in (0, 1, 3))
        for layer in surface_layers(sample)
        if layer.any()
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


def _is_native_twice(local: npt.NDArray[np.float32]) -> bool:
    """Return whether t1c is a second image of what t1n shows, which fits no order of modalities."""
    return bool(abs(uptake(local)) < LEAST_UPTAKE and _correlations(local[:2])[0, 1] > SAME_TISSUE)


def _tails(local: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the asymmetries (4, 4) of the differences between modalities."""
    tails = np.zeros((len(MODALITIES), len(MODALITIES)))
    for one, other in MODALITY_PAIRS:
        tails[one, other] = _asymmetry(local[one] - local[other])
        tails[other, one] = -tails[one, other]
    return tails


def _fit(correlations: npt.NDArray[np.float64], tails: npt.NDArray[np.float64]) -> float:
    """Return the log-likelihood of the patterns of four images in an assumed order."""
    upper = tuple(np.transpose(MODALITY_PAIRS))
    of_correlations = ((correlations[upper] - _CORRELATIONS) / _CORRELATION_SD) ** 2
    of_tails = ((tails[upper] - _TAILS) / _TAIL_SD) ** 2
    return float(-(of_correlations.sum() + of_tails.sum()) / 2)


def _correlations(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the correlations (4, 4) of intensities (4, n); 0 with an image that is constant."""
    centred = values - values.mean(axis=1, keepdims=True, dtype=np.float64)
    length = np.sqrt((centred**2).sum(axis=1))
    centred /= np.where(length > 0, length, 1)[:, None]
    return np.asarray(centred @ centred.T)


def _asymmetry(values: npt.NDArray[np.float32]) -> float:
    """Return from -1 to 1 how much further the upper tail reaches than the lower one."""
    low, middle, high = np.percentile(values, [_TAIL_PERCENT, 50, 100 - _TAIL_PERCENT])
    return float((high + low - 2 * middle) / (high - low)) if high > low else 0.0


def _turn_degrees(geometry: Geometry) -> float:
    """Return the largest angle between an axis of the grid and the axis of the body next to it."""
    directions = geometry.affine[:3, :3] / geometry.spacing_mm
    nearest = nib.orientations.io_orientation(geometry.affine)[:, 0].astype(int)
    cosines = np.abs(directions[nearest, range(3)])
    return float(np.degrees(np.arccos(cosines.min().clip(max=1))))
