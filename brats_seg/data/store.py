"""Prepared cases on disk, read a box at a time.

A case is a folder: `image` and `labels` (plain arrays or compressed ones), `foreground.npy`, and
`case.json`. It is there whole or not at all (see `prepare`). Shapes: the crop is `(x, y, z)`,
smaller than the scan `(X, Y, Z)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOMEM
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from brats_seg.cases.nifti import Geometry
from brats_seg.data.arrays import StoredArray, array_name, open_array
from brats_seg.data.box import Box, Triple
from brats_seg.data.manifest import MANIFEST_NAME, read_manifest
from brats_seg.errors import CaseError
from brats_seg.labels import (
    REGIONS,
    LabelConvention,
    LabelMap,
    RegionMasks,
    convention_named,
    regions_of,
)

Array = TypeVar("Array")
Voxels: TypeAlias = npt.NDArray[np.int32]
FOREGROUND_NAME = "foreground.npy"
"""(n, 4) int32: index of the region, then the voxel in the crop."""

PREPARE_AGAIN = "Delete this folder and prepare the cases again."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedCase:
    """A case on disk, cut to the brain and normalised."""

    case_id: str
    key: str
    """Changes with the scans of the case and what is made of them."""
    convention: LabelConvention | None
    """None without a label map."""
    box: Box
    """Where the crop lies in the scan, once that is turned as all cases are."""
    geometry: Geometry
    """Of the scan, turned so."""
    image: StoredArray
    """(4, x, y, z) float16: mean 0 and standard deviation 1 inside the brain, 0 around it."""
    labels: StoredArray | None
    """(x, y, z) uint8, or None without a label map."""
    foreground: tuple[Voxels, ...]
    """(n, 3) for each region: a selection of its voxels, counted in the crop."""

    @property
    def shape(self) -> Triple:
        """Voxels of the crop along X, Y and Z."""
        return self.box.shape

    def read_image(
        self, box: Box, out: npt.NDArray[np.float16] | None = None
    ) -> npt.NDArray[np.float16]:
        """Return the image (4, ...) in a box of the crop, with 0 where the box reaches beyond it.

        Writing to an `out` that was used before saves most of the time: a new array costs the
        system more than the copy. `out` may be any view, such as one with an axis turned round.
        """
        if out is None:
            out = np.empty((self.image.shape[0], *box.shape), dtype=np.float16)
        _copy(self.image, box, out)
        return out

    def read_labels(self, box: Box, out: LabelMap | None = None) -> LabelMap:
        """Return the labels in a box of the crop, as `read_image` does.

        Raises:
            CaseError: The case has no label map.
        """
        if self.labels is None:
            raise self._unlabelled()
        if out is None:
            out = np.empty(box.shape, dtype=np.uint8)
        _copy(self.labels, box, out)
        return out

    def regions_of(self, labels: LabelMap) -> RegionMasks:
        """Turn labels of this case `(x, y, z)` into region masks `(3, x, y, z)`.

        Raises:
            CaseError: The case has no label map.
        """
        if self.convention is None:
            raise self._unlabelled()
        return regions_of(labels, self.convention)

    def _unlabelled(self) -> CaseError:
        expected = "a label map to learn from or to compare with"
        next_step = "Leave the case out, or add its label map and prepare it again."
        return CaseError(self.case_id, MANIFEST_NAME, "no label map", expected, next_step)


def open_case(folder: Path, case_id: str) -> PreparedCase:
    """Open a prepared case without reading its voxels.

    Raises:
        CaseError: The case is not in the folder, was prepared by another version, or is damaged.
        EnvironmentalError: It is compressed, and the extra `compressed` is not installed.
    """
    path = folder / case_id
    manifest = read_manifest(path)
    if manifest is None:
        found = "no prepared case of this version"
        next_step = "Prepare the cases of this data folder first."
        raise CaseError(case_id, str(path / MANIFEST_NAME), found, "a prepared case", next_step)
    convention = convention_named(manifest.convention) if manifest.convention else None
    shape = manifest.box.shape
    image_path, labels_path = (
        path / array_name(stem, compressed=manifest.compressed) for stem in ("image", "labels")
    )
    return PreparedCase(
        case_id=case_id,
        key=manifest.key,
        convention=convention,
        box=manifest.box,
        geometry=manifest.geometry,
        image=_open(case_id, image_path, (len(manifest.means), *shape)),
        labels=None if convention is None else _open(case_id, labels_path, shape),
        foreground=_read_foreground(case_id, path / FOREGROUND_NAME),
    )


def _open(case_id: str, path: Path, shape: tuple[int, ...]) -> StoredArray:
    array = _whole(case_id, path, open_array)
    if tuple(array.shape) != shape:
        found = f"an array of shape {array.shape}"
        raise CaseError(case_id, str(path), found, f"one of shape {shape}", PREPARE_AGAIN)
    return array


def _read_foreground(case_id: str, path: Path) -> tuple[Voxels, ...]:
    rows = _whole(case_id, path, np.load)
    return tuple(rows[rows[:, 0] == region, 1:] for region in range(len(REGIONS)))


def _whole(case_id: str, path: Path, read: Callable[[Path], Array]) -> Array:
    try:
        return read(path)
    # blosc2 reports damage as RuntimeError
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == ENOMEM:
            raise MemoryError(str(error)) from error  # nothing is wrong with the file
        found = f"a file that cannot be read ({error})"
        raise CaseError(case_id, str(path), found, "a prepared case", PREPARE_AGAIN) from error


def _copy(source: StoredArray, box: Box, out: npt.NDArray[Any]) -> None:
    shape = source.shape[-3], source.shape[-2], source.shape[-1]
    inside = box.within(shape)
    if inside != box:
        out[...] = 0
    outer = (slice(None),) * (len(source.shape) - 3)
    out[(*outer, *inside.seen_from(box.start).slices)] = source[(*outer, *inside.slices)]
