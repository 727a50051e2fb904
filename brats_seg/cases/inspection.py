"""Looking into the files of a case, as far as an index needs it.

The label map and the first modality are read, of the other modalities the headers.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case
from brats_seg.cases.checks import check_one_grid, check_voxels
from brats_seg.cases.nifti import Volume, read_geometry, read_label_map, read_volume
from brats_seg.errors import CaseError
from brats_seg.labels import LabelConvention, LabelMap

_MM3_PER_ML = 1000.0
_INT16 = np.iinfo(np.int16)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What the files of one case hold."""

    shape: tuple[int, int, int] | None
    """Of the first modality, None if it cannot be read."""
    voxel_hash: str
    """Of the first modality, whatever number type it is stored in; empty if it cannot be read."""
    label_counts: tuple[tuple[int, int], ...]
    """Label values and how many voxels have them; empty without a label map."""
    label_voxel_mm3: float
    problems: tuple[str, ...]
    """Everything that is wrong, file by file."""

    @property
    def label_values(self) -> tuple[int, ...]:
        """The values that occur, ascending."""
        return tuple(value for value, _ in self.label_counts)

    def tumour_ml(self, convention: LabelConvention) -> float:
        """Return the volume of the whole tumour."""
        whole_tumour = convention.regions[0]
        n_voxels = sum(n for value, n in self.label_counts if value in whole_tumour)
        return n_voxels * self.label_voxel_mm3 / _MM3_PER_ML


def inspect_case(case: Case, root: Path) -> Inspection:
    """Look into the files of a case; what is wrong with them is collected, not raised."""
    problems: list[str] = []
    first, *others = case.images
    image = _attempt(
        problems, read_volume, root / first.path, case_id=case.case_id, volume=first.volume
    )
    label = case.label and _attempt(
        problems, read_label_map, root / case.label.path, case_id=case.case_id
    )
    grids = [(volume.file, volume.geometry) for volume in (image, label) if volume]
    for scan in others:
        geometry = _attempt(
            problems, read_geometry, root / scan.path, case_id=case.case_id, volume=scan.volume
        )
        if geometry:
            grids.append((scan.path.name, geometry))
    _attempt(problems, check_one_grid, case.case_id, grids)
    if image:
        _attempt(problems, check_voxels, case.case_id, image)
    return Inspection(
        shape=image.geometry.shape if image else None,
        voxel_hash=_hash(image.array) if image else "",
        label_counts=_count(label.array) if label else (),
        label_voxel_mm3=_voxel_mm3(label) if label else 0.0,
        problems=tuple(problems),
    )


def _attempt(
    problems: list[str],
    work: Callable[Parameters, Result],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Result | None:
    try:
        return work(*args, **kwargs)
    except CaseError as error:
        problems.append(str(error))
        return None


def _hash(array: npt.NDArray[Any]) -> str:
    """Hash an array (X, Y, Z) by its shape and its numbers.

    A release stores as float32 what another stores as int16: whole numbers of that range are
    hashed as such, all others in single precision.
    """
    low, high = array.min(), array.max()
    fits = low >= _INT16.min and high <= _INT16.max
    canonical = array.astype(np.int16 if fits else np.float32, copy=False)
    if not np.array_equal(canonical, array):
        with np.errstate(over="ignore"):
            # the sum turns the negative zero into the other
            canonical = array.astype(np.float32) + np.float32(0)
    key = hashlib.sha256(str(array.shape).encode())
    key.update(np.asfortranarray(canonical).T.data)
    return key.hexdigest()[:32]


def _count(label_map: LabelMap) -> tuple[tuple[int, int], ...]:
    flat = label_map.ravel(order="K")
    # counting the few voxels of the tumour is a quarter of the work of counting all
    tumour = flat[flat != 0]
    counts = np.bincount(tumour, minlength=1)
    counts[0] = flat.size - tumour.size
    return tuple((int(value), int(counts[value])) for value in np.flatnonzero(counts))


def _voxel_mm3(volume: Volume) -> float:
    return float(abs(np.linalg.det(volume.geometry.affine[:3, :3])))
