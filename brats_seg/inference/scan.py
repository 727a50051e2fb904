"""Prepare a new case for a network, and put results back on the grid of its files.

A scan `(X, Y, Z)` is turned to the axes of BraTS, resampled if its voxels do not have the size of
those in training, and cut to the brain crop `(x, y, z)`.

Findings are warnings about scans that can be predicted but are unusual, for the person who reviews
the result. Their limits were set on fifteen real cases of BraTS and TCGA, none of which has a
finding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import (
    Case,
    CaseFiles,
    LoadedCase,
    check_all_different,
    check_right_angles,
    check_volumes,
    load_case,
)
from brats_seg.cases.conventions import resolve
from brats_seg.cases.layouts import parse_case_id
from brats_seg.cases.nifti import Geometry, Volume, oriented, planned_resampling, resampled
from brats_seg.data.transforms import apply_transforms, prediction_transforms
from brats_seg.labels import MODALITIES
from brats_seg.voxels.box import Box
from brats_seg.voxels.orientation import turn_of, turned_back
from brats_seg.voxels.resampling import Resampling, Spacing

LARGEST_BRAIN_ML = 2200.0
"""Largest volume of a brain: adults have 1000 to 1800 ml, a head with its skull twice as much."""
LARGEST_TURN_DEGREES = 10.0
"""Largest angle to the axes of the body of a scan that is registered to an atlas."""
MIXED_UP_MARGIN = 0.1
"""Least gain in likeness for which another order of the modalities is reported."""

_EVERY = 5
"""Step between the voxels that are used: neighbours are highly correlated."""
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
"""Weight of the increase in the skewness of T1 by the contrast agent."""


_MM3_PER_ML = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scan:
    """A case prepared for a network."""

    case_id: str
    release: str
    image: npt.NDArray[np.float32]
    """(4, x, y, z): the brain crop, normalised as in training."""
    box: Box
    """Position of the crop in the turned and resampled scan."""
    geometry: Geometry
    """Grid of the files."""
    resampling: Resampling | None
    """None where the voxels have the size of those in training."""
    warnings: tuple[str, ...]
    """Remarks of loading, and findings."""

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel of the files."""
        return prod(self.geometry.spacing_mm)

    def on_scan_spacing(self, field: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return values (n, x, y, z) of the crop at the spacing of the files.

        The result is the crop itself, or the whole turned scan where it was resampled.
        """
        if self.resampling is None:
            return field
        whole = self.resampling.after
        return np.stack([self.resampling.back(self.box.placed(values, whole)) for values in field])

    def on_scan_grid(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array (x, y, z) of `on_scan_spacing` on the grid of the files, 0 around it."""
        turn = turn_of(self.geometry.affine)
        if self.resampling is None:
            x, y, z = (self.geometry.shape[int(axis)] for axis in np.argsort(turn[:, 0]))
            array = self.box.placed(array, (x, y, z))
        return np.ascontiguousarray(turned_back(array, turn))


def read_scan(case: Case, spacing_mm: Spacing, *, files: CaseFiles | None = None) -> Scan:
    """Load the four modalities of a case, and prepare them as training does.

    Args:
        case: A case of `find_inputs` or of an index.
        spacing_mm: Voxel size that the network was trained on.
        files: Files of the case, if they have been read already.

    Raises:
        CaseError: The case cannot be predicted.
    """
    return prepare_scan(load_case(case, with_label=False, files=files), spacing_mm)


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
        for modality, image in zip(MODALITIES, images, strict=False)
    ]
    check_volumes(case_id, volumes, None)
    check_right_angles(case_id, volumes[0])
    check_all_different(case_id, volumes)
    loaded = LoadedCase(
        case=Case(case_id=case_id, patient_id=name.patient_id, release=name.release),
        volumes=tuple(oriented(volume) for volume in volumes),
        label=None,
        geometry=geometry,
        release=resolve(release=name.release, shape=geometry.shape, values=()).release,
        convention=None,
        remarks=(),
        contents=(),
    )
    return prepare_scan(loaded, spacing_mm)


def prepare_scan(loaded: LoadedCase, spacing_mm: Spacing) -> Scan:
    """Resample, crop and normalise a case that has been loaded.

    Args:
        loaded: The case; its label map is not used.
        spacing_mm: Voxel size that the network was trained on.

    Raises:
        CaseError: The scan holds no brain, or its grid at that spacing is too large.
    """
    volumes, warnings = loaded.volumes, list(loaded.remarks)
    resampling = planned_resampling(volumes[0], spacing_mm, case_id=loaded.case.case_id)
    if resampling is not None:
        volumes = tuple(resampled(volume, resampling) for volume in volumes)
        warnings.append(_resampled_words(loaded.geometry, spacing_mm))
    case_id = loaded.case.case_id
    data = apply_transforms(prediction_transforms(), {"case_id": case_id, "image": volumes})
    image = data["image"]
    voxel_ml = prod(volumes[0].geometry.spacing_mm) / _MM3_PER_ML
    return Scan(
        case_id=case_id,
        release=loaded.release,
        image=image,
        box=data["box"],
        geometry=loaded.geometry,
        resampling=resampling,
        warnings=(*warnings, *findings(loaded.geometry, image, voxel_ml)),
    )


def findings(geometry: Geometry, image: npt.NDArray[np.float32], voxel_ml: float) -> Iterator[str]:
    """Yield a sentence for everything that is unusual about a scan.

    Args:
        geometry: Grid of the files.
        image: (4, x, y, z), normalised; 0 outside the brain.
        voxel_ml: Volume of a voxel of the image.
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
            f"the foreground measures {brain_ml:.0f} ml, more than a brain: the "
            "skull does not seem to be stripped"
        )
    order = likeliest_order(image[:, inside])
    if order != MODALITIES:
        pairs = [
            f"{named} looks like {likely}"
            for named, likely in zip(MODALITIES, order, strict=True)
            if named != likely
        ]
        yield f"modalities may be mixed up: {', '.join(pairs)}"


def likeliest_order(values: npt.NDArray[np.float32]) -> tuple[str, ...]:
    """Return the modality that each of four images most likely is.

    Fluid is dark in T1, bright in T2 and dark in FLAIR, so that the correlations between modalities
    have a typical pattern. The given order is kept unless another fits clearly better.

    Args:
        values: (4, n), normalised intensities in the brain.
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


def _resampled_words(geometry: Geometry, spacing_mm: Spacing) -> str:
    own, wanted = (
        "x".join(f"{mm:.2f}" for mm in edges) for edges in (geometry.spacing_mm, spacing_mm)
    )
    return (
        f"voxels of {own} mm were resampled to {wanted} mm for the network and the result back: "
        "expect a worse result than on scans of that voxel size"
    )


def _skewness(values: npt.NDArray[np.float64]) -> float:
    return float(((values - values.mean()) ** 3).mean() / values.std() ** 3)


def _turn_degrees(geometry: Geometry) -> float:
    """Return the largest angle between an axis of the grid and the axis of the body next to it."""
    directions = geometry.affine[:3, :3] / geometry.spacing_mm
    nearest = nib.orientations.io_orientation(geometry.affine)[:, 0].astype(int)
    cosines = np.abs(directions[nearest, range(3)])
    return float(np.degrees(np.arccos(cosines.min().clip(max=1))))
