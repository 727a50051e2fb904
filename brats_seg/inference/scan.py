"""A new case, checked and made ready for a network, and the way of its result back to the scan.

Shapes: the scan is `(X, Y, Z)` as stored; turned to the axes of BraTS, and resampled where its
voxels are of another size, it is what training would have seen; the crop `(x, y, z)` holds the
brain.
"""

# DOC inference/findings: What looks unusual about a scan that can be predicted all the same.
#
# Findings are sentences for the person who will look at the result. Every limit was set on fifteen
# real cases of BraTS and TCGA, none of which it names.
#

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case, check_volumes
from brats_seg.cases.inputs import CaseInput
from brats_seg.cases.layouts import GLI_2023, GLI_2024, GLI_2024_SHAPE, parse_case_id
from brats_seg.cases.nifti import Geometry, Volume, oriented, read_volume, resampled
from brats_seg.data.brain import extract_brain
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES
from brats_seg.voxels.box import Box
from brats_seg.voxels.orientation import turn_of, turned_back
from brats_seg.voxels.resampling import Resampling, Spacing

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


SKEW_TOLERANCE = 0.01
"""Largest cosine between two axes of a grid that passes for a right angle."""
_MM3_PER_ML = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scan:
    """A case that a network can be given."""

    case_id: str
    release: str
    image: npt.NDArray[np.float32]
    """(4, x, y, z): the brain crop, normalised as in training."""
    box: Box
    """Where the crop lies in the turned and resampled scan."""
    geometry: Geometry
    """Of the files."""
    resampling: Resampling | None
    """None where the voxels are those of training."""
    warnings: tuple[str, ...]
    """What was unusual, for the person who looks at the result."""

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel of the files."""
        return prod(self.geometry.spacing_mm)

    def on_scan_spacing(self, field: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return values (n, x, y, z) of the crop at the spacing of the files.

        That is the crop itself, or the whole turned scan where it was resampled.
        """
        if self.resampling is None:
            return field
        whole = self.resampling.after
        return np.stack([self.resampling.back(self.box.placed(values, whole)) for values in field])

    def on_scan_grid(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array (x, y, z) of `on_scan_spacing` as the files lie, 0 around it."""
        turn = turn_of(self.geometry.affine)
        if self.resampling is None:
            x, y, z = (self.geometry.shape[int(axis)] for axis in np.argsort(turn[:, 0]))
            array = self.box.placed(array, (x, y, z))
        return np.ascontiguousarray(turned_back(array, turn))


def read_scan(case_input: CaseInput, spacing_mm: Spacing) -> Scan:
    """Read the four modalities of a case, check them, and prepare them as training does.

    Args:
        case_input: A case and where its files are.
        spacing_mm: Of the scans that the network learnt on.

    Raises:
        CaseError: The case cannot be predicted.
    """
    return _prepared(case_input.case, _read(case_input), spacing_mm)


def scan_of_arrays(
    case_id: str,
    images: npt.NDArray[Any],
    affine: npt.NDArray[np.float64],
    spacing_mm: Spacing,
) -> Scan:
    """Prepare a case given as arrays, as `read_scan` does.

    Args:
        case_id: Id of the case, which may name a release.
        images: (4, X, Y, Z), in the order of `MODALITIES`.
        affine: (4, 4), from voxel indices to millimetres.
        spacing_mm: Voxel size that the network was trained on.

    Raises:
        CaseError: The case cannot be predicted.
    """
    name = parse_case_id(case_id)
    geometry = Geometry(
        shape=images.shape[1:], affine=affine, qform=affine, qform_code=1, sform_code=1
    )
    volumes = [
        Volume(array=image, geometry=geometry, file=modality)
        for modality, image in zip(MODALITIES, images, strict=True)
    ]
    case = Case(
        case_id=case_id,
        patient_id=name.patient_id,
        timepoint=name.timepoint,
        release=name.release,
        t1n=None,
        t1c=None,
        t2w=None,
        t2f=None,
    )
    return _prepared(case, volumes, spacing_mm)


def _prepared(case: Case, volumes: Sequence[Volume], spacing_mm: Spacing) -> Scan:
    check_volumes(case.case_id, volumes, None)
    _check_right_angles(case.case_id, volumes[0])
    _check_all_different(case.case_id, volumes)
    geometry = volumes[0].geometry
    resampling, warnings = None, list(case.remarks)
    turned = [oriented(volume) for volume in volumes]
    if needed := _resampling(turned[0].geometry, spacing_mm):
        resampling = needed
        turned = [resampled(volume, needed) for volume in turned]
        warnings.append(_resampled_words(geometry, spacing_mm))
    brain = extract_brain(case.case_id, turned, None)
    # prepared cases are stored in half precision: networks have seen nothing finer
    image = brain.image.astype(np.float16).astype(np.float32)
    voxel_ml = prod(turned[0].geometry.spacing_mm) / _MM3_PER_ML
    return Scan(
        case_id=case.case_id,
        release=_release(case, geometry),
        image=image,
        box=brain.box,
        geometry=geometry,
        resampling=resampling,
        warnings=(*warnings, *findings(geometry, image, voxel_ml)),
    )


def _resampling(geometry: Geometry, spacing_mm: Spacing) -> Resampling | None:
    return Resampling.needed(geometry.shape, geometry.spacing_mm, spacing_mm)


def _read(case_input: CaseInput) -> list[Volume]:
    case = case_input.case
    return [
        read_volume(case_input.root / scan.path, case_id=case.case_id, volume=scan.volume)
        for scan in case.images
    ]


def _check_right_angles(case_id: str, volume: Volume) -> None:
    directions = volume.geometry.affine[:3, :3] / volume.geometry.spacing_mm
    cosine = float(np.abs(np.triu(directions.T @ directions, k=1)).max())
    if cosine > SKEW_TOLERANCE:
        degrees = 90 - float(np.degrees(np.arccos(min(cosine, 1.0))))
        found = f"a sheared grid, whose axes are {degrees:.1f} degrees off a right angle"
        next_step = "Resample the four modalities to a grid of right angles."
        raise CaseError(case_id, volume.file, found, "axes at right angles", next_step)


def _check_all_different(case_id: str, volumes: Sequence[Volume]) -> None:
    for place, volume in enumerate(volumes):
        for earlier, other in enumerate(volumes[:place]):
            if np.array_equal(volume.array, other.array):
                found = f"the same voxels for {MODALITIES[earlier]} and {MODALITIES[place]}"
                next_step = "One modality was given twice: put the right file in its place."
                files = f"{other.file} and {volume.file}"
                raise CaseError(case_id, files, found, "four different modalities", next_step)


def _resampled_words(geometry: Geometry, spacing_mm: Spacing) -> str:
    own, wanted = (
        "x".join(f"{mm:.2f}" for mm in edges) for edges in (geometry.spacing_mm, spacing_mm)
    )
    return (
        f"voxels of {own} mm were resampled to {wanted} mm for the network and the result back: "
        "expect less than on scans of that size"
    )


def _release(case: Case, geometry: Geometry) -> str:
    is_gli_2024 = case.release == GLI_2023 and geometry.shape == GLI_2024_SHAPE
    return GLI_2024 if is_gli_2024 else case.release
