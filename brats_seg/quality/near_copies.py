"""Find near copies: one scan under the ids of two patients, with small changes.

Equal voxels have equal hashes, but not a copy whose intensities were scaled, or that was moved,
cropped, mirrored, resampled or smoothed. The fingerprint of a scan has a bit for each of 1,088 points
of a grid that is laid over the brain by its centre and its extent along each axis. The bit tells
whether the point is brighter than its surroundings, by more than at half of the points. Neither the
position nor changes of the intensities that keep their order alter many of the bits.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import prod

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case
from brats_seg.cases.nifti import Volume, oriented
from brats_seg.voxels.box import Array, bounding_box, edge_voxels

Field = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]

LEAST_AGREEMENT = 0.82
"""Share of equal bits from which two scans are near copies. On 14 real cases of BraTS and TCGA, two
patients agree in 55 to 71 % (91 pairs; mean 62, standard deviation 3.5), a scan and its copy with one
of 33 changes in 88 % or more. Of copies whose histogram was equalised 2 of 14 are below the limit, of
those turned by 5 degrees 5, and of those without the lowest 25 mm of the brain 13."""

_N_POINTS = 16
"""Points of the grid along each axis."""
_REACH = 2.1
"""Distance of the outermost points from the centre, in standard deviations of the positions of the
voxels of the brain along an axis; the surface of an ellipsoid is at 2.24."""
_RADIUS = 1.8
"""Radius of the ball of the points that are compared, in the same unit."""
_POINT, _SURROUNDINGS = 0.08, 0.16
"""Widths of the Gaussian windows that are compared, in the same unit: 3 and 6 mm in an adult."""
_LEAST_FILL = 0.3
"""Share of the window of a point that must lie in the brain for the point to be compared."""
_LEAST_VOXELS = _N_POINTS
"""Voxels of the brain along each axis below which neighbouring points would share them."""
_LEAST_CONTRAST = 0.15
"""Least difference of the brain from the background, as a share of the median difference: a smoothed
scan has a shell of lower intensities."""
_FINENESS = 64
"""Least number of blocks along each axis that voxels are averaged to."""
_N_COMPARED = 512
"""Cases that are compared with all others at once, which bounds the memory."""

_LEVELS: Numbers = np.linspace(0.01, 0.99, 33)
"""Ranks between which intensities are interpolated."""
_AT: Numbers = np.linspace(-_REACH, _REACH, _N_POINTS)
_IN_BALL = np.square(np.meshgrid(_AT, _AT, _AT)).sum(axis=0) <= _RADIUS**2


def fingerprint_of(volume: Volume) -> str:
    """Return the fingerprint of a scan in hexadecimal digits; empty if there is no brain to compare.

    Args:
        volume: The scan in any orientation, with finite voxels.
    """
    # the largest floating-point numbers cannot be subtracted from each other
    with np.errstate(over="ignore", invalid="ignore"):
        brain = _brain(oriented(volume).array)
    if brain is None:
        return ""
    values, inside = brain
    counts = [inside.sum(axis=axes, dtype=np.float64) for axes in ((1, 2), (0, 2), (0, 1))]
    means = []
    for width in (_SURROUNDINGS, _POINT):
        windows = [_windows(along, width) for along in counts]
        fill = _average(inside, windows)
        means.append(_average(values, windows) / fill.clip(min=_LEAST_FILL))
    # that of the points
    compared = fill >= _LEAST_FILL
    detail = means[1] - means[0]
    if not detail[compared].any():
        return ""
    return np.packbits(compared & (detail > np.median(detail[compared]))).tobytes().hex()


def near_copies(cases: Sequence[Case]) -> tuple[tuple[int, int], ...]:
    """Return the indices of each two cases of different patients whose scans are near copies.

    Two time points of a patient may be alike without being copies, and are in one fold anyway.
    Mirrored copies and those with exchanged axes are found too.
    """
    compared = [index for index, case in enumerate(cases) if case.facts.fingerprint]
    pairs = _pairs(_signs([cases[index].facts.fingerprint for index in compared]))
    copies = sorted((compared[i], compared[j]) for i, j in pairs)
    return tuple((a, b) for a, b in copies if cases[a].patient_id != cases[b].patient_id)


def with_near_copies(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the cases with the ids of their near copies, and a remark if there are any."""
    marked = list(cases)
    copies: defaultdict[int, list[str]] = defaultdict(list)
    for first, second in near_copies(cases):
        copies[first].append(cases[second].case_id)
        copies[second].append(cases[first].case_id)
    for index, case_ids in copies.items():
        remark = (
            f"nearly the same scan as {', '.join(sorted(case_ids))}, under the id of another patient: "
            "they are kept in one fold; remove the copies"
        )
        facts = replace(cases[index].facts, near_copies=tuple(sorted(case_ids)))
        remarks = (*cases[index].remarks, remark)
        marked[index] = replace(cases[index], facts=facts, remarks=remarks)
    return tuple(marked)


def _brain(array: Array) -> tuple[Field, Field] | None:
    """Find the brain in a scan (X, Y, Z), averaged to blocks; None if it is small or has no contrast.

    Returns:
        Ranks of the intensities in a box (x, y, z) around the brain, from 0 to 1, and 0 outside the
        brain; and where the brain is, 1 or 0.
    """
    background, noise = _background(array)
    steps = _steps(array)
    sample = array[tuple(slice(None, None, step) for step in steps)].astype(np.float64)
    contrast = np.abs(sample - background)
    if not (contrast > noise).any():
        return None
    threshold = max(noise, _LEAST_CONTRAST * float(np.median(contrast[contrast > noise])))
    bright = contrast > threshold
    box = bounding_box(bright)
    levels = np.quantile(sample[bright], _LEVELS) if box else np.zeros(2)
    if box is None or not 0 < levels[-1] - levels[0] < np.inf:
        return None
    around = (
        slice(max(0, step * (first - 1)), step * last + 1)
        for first, last, step in zip(box.start, box.stop, steps, strict=True)
    )
    blocks = _block_means(array[tuple(around)])
    if min(blocks.shape) < _LEAST_VOXELS:
        return None
    inside = np.abs(blocks - background) > threshold
    values = np.interp(blocks, levels, _LEVELS) * inside
    return values.astype(np.float32), inside.astype(np.float32)


def _background(array: Array) -> tuple[float, float]:
    """Return the value around the brain on the edges of a volume, and the range of its noise."""
    values = edge_voxels(array).astype(np.float64)
    background = float(np.median(values))
    return background, 2 * float(np.quantile(np.abs(values - background), 0.9))


def _steps(array: Array) -> tuple[int, ...]:
    """Return the size of blocks, at least `_FINENESS` along each axis with that many voxels."""
    return tuple(max(1, n // _FINENESS) for n in array.shape)


def _block_means(array: Array) -> Array:
    """Return the means of blocks of voxels; those that fill no block at the end are left out."""
    steps = _steps(array)
    whole = array[tuple(slice(n - n % step) for n, step in zip(array.shape, steps, strict=True))]
    total = np.zeros([n // step for n, step in zip(whole.shape, steps, strict=True)], np.float64)
    for offsets in product(*map(range, steps)):
        total += whole[tuple(map(slice, offsets, [None] * 3, steps))]
    return total / prod(steps)


def _windows(counts: Numbers, width: float) -> Field:
    """Return the weights (points, n) of the voxels along an axis, which add up to 1.

    Args:
        counts: Voxels of the brain in each plane across the axis.
        width: Standard deviation of the Gaussian, in standard deviations of the brain.
    """
    at = np.arange(counts.size)
    centre = np.average(at, weights=counts)
    extent = np.sqrt(np.average((at - centre) ** 2, weights=counts))
    distances = (at - (centre + extent * _AT)[:, None]) / (width * extent)
    weights = np.exp(-(distances**2) / 2) / (width * extent * np.sqrt(2 * np.pi))
    return weights.astype(np.float32)


def _average(field: Field, windows: Sequence[Field]) -> Field:
    """Return the weighted sums of a field (x, y, z) at the points of the ball."""
    x, y, z = windows
    planes = np.tensordot(field, z, (2, 1))
    sums = np.tensordot(x, np.tensordot(y, planes, (1, 1)), (1, 1))
    return sums[_IN_BALL]


def _signs(fingerprints: Sequence[str]) -> Field:
    """Return fingerprints as numbers (cases, bits) of -1 and 1."""
    packed = np.frombuffer(bytes.fromhex("".join(fingerprints)), dtype=np.uint8)
    # the bits of a fingerprint fill whole bytes
    bits = np.unpackbits(packed).reshape(-1, np.count_nonzero(_IN_BALL))
    return 2 * bits.astype(np.float32) - 1


def _pairs(signs: Field) -> Iterator[tuple[int, int]]:
    """Yield the indices of each two of the signs (cases, bits) that agree, the smaller first."""
    smallest = np.float32((2 * LEAST_AGREEMENT - 1) * signs.shape[1])
    for start in range(0, len(signs), _N_COMPARED):
        block, following = signs[start : start + _N_COMPARED], signs[start:].T
        agree = np.zeros((len(block), following.shape[1]), dtype=bool)
        for turn in _turns():
            agree |= block[:, turn] @ following >= smallest
        yield from ((start + int(a), start + int(b)) for a, b in np.argwhere(agree) if a < b)


def _turns() -> Iterator[npt.NDArray[np.intp]]:
    """Yield the index of each bit in a scan whose axes are exchanged and mirrored."""
    positions = np.zeros(_IN_BALL.shape, dtype=np.intp)
    positions[_IN_BALL] = np.arange(np.count_nonzero(_IN_BALL))
    for axes in permutations(range(3)):
        for x, y, z in product((1, -1), repeat=3):
            yield positions.transpose(axes)[::x, ::y, ::z][_IN_BALL]
