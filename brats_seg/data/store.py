"""Define the format of prepared cases, and read boxes of them.

A case is a folder with the arrays `image.npy` and `labels.npy`, `foreground.npy`, and the manifest
`case.json` (see `manifest`). `prepare` replaces folders atomically, so a case is complete or missing.
The crop is `(x, y, z)`, smaller than the scan `(X, Y, Z)`.

`Buffers` reuse the memory of patches: a large array goes back to the operating system when it is
freed, and allocating its pages again takes longer than filling them.
"""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from errno import ENOMEM
from math import prod
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from brats_seg.cases.nifti import Geometry
from brats_seg.data.manifest import (
    FOREGROUND_NAME,
    IMAGE_NAME,
    LABELS_NAME,
    MANIFEST_NAME,
    PREPARE_AGAIN,
    manifest_of,
)
from brats_seg.errors import CaseError
from brats_seg.labels import (
    REGIONS,
    LabelConvention,
    LabelMap,
    RegionMasks,
    convention_named,
    regions_of,
)
from brats_seg.voxels.box import Box, Triple
from brats_seg.voxels.grids import Spacing

Array = TypeVar("Array")
Scalar = TypeVar("Scalar", bound=np.generic)
Voxels: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedCase:
    """A case on disk, cropped to the brain and normalised."""

    case_id: str
    key: str
    """Hash of scans, convention and spacing: see `Manifest.key`."""
    convention: LabelConvention | None
    """Convention of the label map; None without one."""
    spacing_mm: Spacing
    """Spacing that the case was prepared at: see `Manifest`."""
    box: Box
    """Position of the crop in the grid."""
    geometry: Geometry
    """Grid of the scan in the axes of BraTS, at the spacing."""
    image: npt.NDArray[np.float16]
    """(4, x, y, z), mean 0 and standard deviation 1 inside the brain, exactly 0 around it."""
    labels: LabelMap | None
    """(x, y, z), or None without a label map."""
    foreground: tuple[Voxels, ...]
    """Indices (n, 3) in the crop of some voxels of each region."""

    @property
    def shape(self) -> Triple:
        """Voxels of the crop along X, Y and Z."""
        return self.box.shape

    def read_image(
        self, box: Box, out: npt.NDArray[np.float16] | None = None
    ) -> npt.NDArray[np.float16]:
        """Return the image (4, ...) in a box of the crop, with 0 where the box extends beyond it.

        Args:
            box: Voxels of the crop.
            out: Array to write to; it may be any view, such as one with a reversed axis. Reusing an
                array saves most of the time, because a new one takes longer to allocate than to fill.
        """
        return _copied(self.image, box, out)

    def read_labels(self, box: Box, out: LabelMap | None = None) -> LabelMap:
        """Return the labels in a box of the crop; the arguments are those of `read_image`.

        Raises:
            CaseError: The case has no label map.
        """
        if self.labels is None:
            raise self.unlabelled()
        return _copied(self.labels, box, out)

    def regions_of(self, labels: LabelMap) -> RegionMasks:
        """Convert labels of this case `(x, y, z)` to region masks `(3, x, y, z)`.

        Raises:
            CaseError: The case has no label map.
        """
        if self.convention is None:
            raise self.unlabelled()
        return regions_of(labels, self.convention)

    def unlabelled(self) -> CaseError:
        """Return the error to raise for a case without a label map."""
        expected = "a label map to train on or to score against"
        next_step = "Leave the case out, or add its label map and prepare it again."
        return CaseError(self.case_id, MANIFEST_NAME, "no label map", expected, next_step)


def open_case(folder: Path, case_id: str) -> PreparedCase:
    """Open a prepared case without reading its voxels.

    Raises:
        CaseError: The case is not in the folder, has another version, or is damaged.
    """
    path, manifest = folder / case_id, manifest_of(folder, case_id)
    convention = convention_named(manifest.convention) if manifest.convention else None
    shape = manifest.box.shape
    rows = _read(case_id, path / FOREGROUND_NAME, np.load)
    return PreparedCase(
        case_id=case_id,
        key=manifest.key,
        convention=convention,
        spacing_mm=manifest.spacing_mm,
        box=manifest.box,
        geometry=manifest.geometry,
        image=_open(case_id, path / IMAGE_NAME, (len(manifest.means), *shape)),
        labels=None if convention is None else _open(case_id, path / LABELS_NAME, shape),
        foreground=tuple(rows[rows[:, 0] == region, 1:] for region in range(len(REGIONS))),
    )


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array, and sync it to the disk."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        # np.save does not report a full disk as such
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


class Buffers:
    """Allocate arrays, and reuse the memory of arrays that nothing refers to any more.

    An array is in use as long as it, a view of it, or a tensor made from it exists. As much memory
    is kept as has been in use at one time.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}

    def take(self, shape: tuple[int, ...], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
        """Return an array of a given shape and type; its content is arbitrary."""
        n_bytes = prod(shape) * np.dtype(dtype).itemsize
        # sizes are powers of two, so that boxes of similar size share blocks; unused pages are free
        size = 1 << (n_bytes - 1).bit_length()
        blocks = self._blocks.setdefault(size, [])
        block = next((block for block in blocks if block.is_free), None)
        if block is None:
            block = _Block(size)
            blocks.append(block)
        return block.lend(n_bytes).view(dtype).reshape(shape)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle without the memory: in another process the buffers start empty."""
        return type(self), ()


class _Block:
    """A block of memory, and a weak reference to the array that uses it."""

    def __init__(self, n_bytes: int) -> None:
        # a numpy view refers to the array at the end of its chain of bases. The memoryview ends the
        # chain at the array that `lend` returns, which therefore lives exactly as long as its views
        self._memory = np.empty(n_bytes, dtype=np.uint8).data
        self._lent: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        lent = np.frombuffer(self._memory, dtype=np.uint8, count=n_bytes)
        self._lent = weakref.ref(lent)
        return lent


def open_array(path: Path) -> npt.NDArray[Any]:
    """Open an array for reading, without reading its values."""
    # a view as ndarray: np.memmap runs code of its own for every slice
    return np.load(path, mmap_mode="r").view(np.ndarray)


def _open(case_id: str, path: Path, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    array = _read(case_id, path, open_array)
    if array.shape != shape:
        found = f"an array of shape {array.shape}"
        raise CaseError(case_id, str(path), found, f"shape {shape}", PREPARE_AGAIN)
    return array


def _read(case_id: str, path: Path, read: Callable[[Path], Array]) -> Array:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == ENOMEM:
            raise MemoryError(str(error)) from error  # the file itself is not damaged
        found = f"a file that cannot be read ({error})"
        raise CaseError(case_id, str(path), found, "a prepared case", PREPARE_AGAIN) from error


def _copied(
    source: npt.NDArray[Scalar], box: Box, out: npt.NDArray[Scalar] | None
) -> npt.NDArray[Scalar]:
    x, y, z = source.shape[-3:]
    if out is None:
        out = np.empty((*source.shape[:-3], *box.shape), dtype=source.dtype)
    inside = box.within((x, y, z))
    if inside != box:
        out[...] = 0
    out[..., *inside.seen_from(box.start).slices] = source[..., *inside.slices]
    return out
