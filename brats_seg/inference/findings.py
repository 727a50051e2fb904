"""What looks unusual about a scan that can be predicted all the same.

Findings are sentences for the person who will look at the result. Every limit was set on fifteen
real cases of BraTS and TCGA, none of which it names.
"""

from collections.abc import Iterator
from itertools import permutations

import nibabel as nib
import numpy as np
import numpy.typing as npt

from brats_seg.cases.nifti import Geometry
from brats_seg.labels import MODALITIES

LARGEST_BRAIN_ML = 2200.0
"""Adult brains take 1000 to 1800 ml, a head with its skull twice as much."""
LARGEST_TURN_DEGREES = 10.0
"""A scan that is registered to an atlas is not turned against its axes."""
MIXED_UP_MARGIN = 0.1
"""How much better another order of the modalities must fit before it is mentioned."""

_EVERY = 5
"""Voxels are highly alike to their neighbours: a fifth of them tells as much as all."""
_CORRELATIONS = np.array(
    [
        [0, 0.67, -0.21, 0.50],
        [0.67, 0, -0.13, 0.30],
        [-0.21, -0.13, 0, 0.21],
        [0.50, 0.30, 0.21, 0],
    ]
)
"""Medians over fourteen real brains, in the order of `MODALITIES`."""
_SKEWNESS_WEIGHT = 0.05
"""Of how much longer the bright tail of T1 becomes by the contrast agent."""


def findings(geometry: Geometry, image: npt.NDArray[np.float32], voxel_ml: float) -> Iterator[str]:
    """Say what is unusual about a scan.

    Args:
        geometry: Of the scan as it came.
        image: (4, x, y, z), normalised; 0 around the brain.
        voxel_ml: Of the image.
    """
    angle = _turn_degrees(geometry)
    if angle > LARGEST_TURN_DEGREES:
        yield (
            f"the grid is turned by {angle:.0f} degrees against the axes of the body: the scan "
            "does not seem to be registered to an atlas"
        )
    inside = (image != 0).any(axis=0)
    brain_ml = np.count_nonzero(inside) * voxel_ml
    if brain_ml > LARGEST_BRAIN_ML:
        yield (
            f"what differs from the background measures {brain_ml:.0f} ml, more than a brain: the "
            "skull does not seem to be stripped"
        )
    order = likeliest_order(image[:, inside])
    if order != MODALITIES:
        pairs = [
            f"{named} looks like {seen}"
            for named, seen in zip(MODALITIES, order, strict=True)
            if named != seen
        ]
        yield f"modalities may be mixed up: {', '.join(pairs)}"


def likeliest_order(values: npt.NDArray[np.float32]) -> tuple[str, ...]:
    """Say what each of four modalities looks like, from their normalised values (4, n) in the brain.

    Fluid is dark in T1, bright in T2 and dark in FLAIR, so modalities resemble each other in a
    pattern of their own. The order they came in is kept unless another fits clearly better.
    """
    some = values[:, ::_EVERY].astype(np.float64)
    if some.shape[1] < 2 or (some.std(axis=1) == 0).any():
        return MODALITIES
    correlations = np.asarray(np.corrcoef(some))
    skewness = [_skewness(modality) for modality in some]
    fits = {}
    # order[i] is the modality that the file in place i really is
    for order in permutations(range(len(MODALITIES))):
        places = np.argsort(order)
        likeness = (_CORRELATIONS * correlations[np.ix_(places, places)]).sum() / 2
        fits[order] = likeness + _SKEWNESS_WEIGHT * (skewness[places[1]] - skewness[places[0]])
    best = max(fits, key=fits.__getitem__)
    given = tuple(range(len(MODALITIES)))
    if fits[best] - fits[given] <= MIXED_UP_MARGIN:
        return MODALITIES
    return tuple(MODALITIES[place] for place in best)


def _skewness(values: npt.NDArray[np.float64]) -> float:
    return float(((values - values.mean()) ** 3).mean() / values.std() ** 3)


def _turn_degrees(geometry: Geometry) -> float:
    """Return the largest angle between an axis of the grid and the axis of the body next to it."""
    directions = geometry.affine[:3, :3] / geometry.spacing_mm
    nearest = nib.orientations.io_orientation(geometry.affine)[:, 0].astype(int)
    cosines = np.abs(directions[nearest, range(3)])
    return float(np.degrees(np.arccos(cosines.min().clip(max=1))))
