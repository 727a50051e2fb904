"""A new case, checked and made ready for a network, and the way of its result back to the scan.

Shapes: the scan is `(X, Y, Z)` as stored; turned to the axes of BraTS, and resampled where its
voxels are of another size, it is what training would have seen; the crop `(x, y, z)` holds the
brain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case
from brats_seg.cases.checks import check_volumes
from brats_seg.cases.layouts import GLI_2023, GLI_2024, GLI_2024_SHAPE
from brats_seg.cases.nifti import Geometry, Volume, read_volume
from brats_seg.cases.orientation import oriented, turn_of, turned_back
from brats_seg.data.box import Box
from brats_seg.data.brain import extract_brain
from brats_seg.errors import CaseError
from brats_seg.inference.findings import findings
from brats_seg.inference.inputs import CaseInput
from brats_seg.inference.resampling import Resampling, Spacing
from brats_seg.labels import MODALITIES

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
    case = case_input.case
    volumes = _read(case_input)
    check_volumes(case.case_id, volumes, None)
    _check_right_angles(case.case_id, volumes[0])
    _check_all_different(case.case_id, volumes)
    geometry = volumes[0].geometry
    resampling, warnings = None, list(case.remarks)
    turned = [oriented(volume) for volume in volumes]
    if needed := Resampling.needed(turned[0].geometry, spacing_mm):
        resampling = needed
        turned = [needed.there(volume) for volume in turned]
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
