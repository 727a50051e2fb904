"""Prepare a new case for a network, and put results back on the grid of its files.

A scan `(X, Y, Z)` is turned to the axes of BraTS, resampled if its voxels do not have the size of
those in training, and cut to the brain crop `(x, y, z)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case, CaseFiles, LoadedCase, case_of_arrays, load_case
from brats_seg.cases.nifti import Geometry
from brats_seg.data.normalisation import at_spacing, extract_brain
from brats_seg.labels import MODALITIES
from brats_seg.voxels.box import Box
from brats_seg.voxels.grids import Resampling, Spacing, turn_of, turned_back


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scan:
    """A case prepared for a network."""

    case_id: str
    release: str
    image: npt.NDArray[np.float32]
    """(4, x, y, z): the brain crop, normalised as in training, 0 for modalities that are missing."""
    box: Box
    """Position of the crop in the turned and resampled scan."""
    geometry: Geometry
    """Grid of the files."""
    resampling: Resampling | None
    """None where the voxels have the size of those in training."""
    warnings: tuple[str, ...]
    """Remarks of loading, and whether it was resampled."""
    modalities: tuple[str, ...] = MODALITIES
    """Modalities of the scan: all four, but for models that predict without some."""

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel of the files."""
        return prod(self.geometry.spacing_mm)

    @property
    def spacing_mm(self) -> Spacing:
        """Voxel size of `on_scan_spacing`."""
        stored = self.geometry.spacing_mm
        x, y, z = (stored[int(axis)] for axis in np.argsort(turn_of(self.geometry.affine)[:, 0]))
        return x, y, z

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
    return prepare_scan(case_of_arrays(case_id, images, affine), spacing_mm)


def prepare_scan(loaded: LoadedCase, spacing_mm: Spacing) -> Scan:
    """Resample, crop and normalise a case that has been loaded.

    Args:
        loaded: The case; its label map is not used. Channels of modalities that it lacks are 0, as
            in training with `training.modality_dropout`; other models refuse the scan.
        spacing_mm: Voxel size that the network was trained on.

    Raises:
        CaseError: The scan holds no brain, or its grid at that spacing is too large.
    """
    warnings = list(loaded.remarks)
    there, resampling = at_spacing(replace(loaded, label=None), spacing_mm)
    volumes = there.volumes
    if resampling is not None:
        warnings.append(_resampled_words(loaded.geometry, spacing_mm))
    case_id = loaded.case.case_id
    brain = extract_brain(case_id, volumes, None)
    return Scan(
        case_id=case_id,
        release=loaded.release,
        image=_all_channels(brain.image.astype(np.float32), loaded.modalities),
        box=brain.box,
        geometry=loaded.geometry,
        resampling=resampling,
        warnings=tuple(warnings),
        modalities=loaded.modalities,
    )


def _all_channels(
    image: npt.NDArray[np.float32], modalities: Sequence[str]
) -> npt.NDArray[np.float32]:
    """Return an image (4, x, y, z) whose other channels are 0."""
    if len(modalities) == len(MODALITIES):
        return image
    whole = np.zeros((len(MODALITIES), *image.shape[1:]), dtype=np.float32)
    whole[[MODALITIES.index(modality) for modality in modalities]] = image
    return whole


def _resampled_words(geometry: Geometry, spacing_mm: Spacing) -> str:
    own, wanted = (
        "x".join(f"{mm:.2f}" for mm in edges) for edges in (geometry.spacing_mm, spacing_mm)
    )
    return (
        f"voxels of {own} mm were resampled to {wanted} mm for the network and the result back: "
        "expect a worse result than on scans of that voxel size"
    )
