"""Define prepared cases on disk: their files and manifest, their verification, and reading boxes of them.

A case is a folder with the arrays `image.npy` and `labels.npy`, `foreground.npy`, and the manifest
`case.json`: state of the scans, grid and check sums. `prepare` replaces folders atomically, so a case is complete
or missing. A changed bit would be learnt without a sign of it: all cases of a run are verified when it
begins and resumes, and a held-out case whenever it is read as a whole, by CRC-32, which finds damage and
not forgery. The crop is `(x, y, z)`, smaller than the scan `(X, Y, Z)`.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOMEM
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import deflate
import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from brats_seg.cases.nifti import Geometry
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.normalisation import USUAL_MM
from brats_seg.errors import CaseError, UsageError, some_of
from brats_seg.files import write_json
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, LabelMap, convention_named
from brats_seg.progress import Track, untracked
from brats_seg.voxels.box import Box, Triple, triple
from brats_seg.voxels.grids import Spacing

Array = TypeVar("Array")
Scalar = TypeVar("Scalar", bound=np.generic)
VoxelIndices: TypeAlias = npt.NDArray[np.int32]
FORMAT_VERSION = 4
"""Version of the format; cases of another version are prepared again."""
MANIFEST_NAME = "case.json"
IMAGE_NAME, LABELS_NAME = "image.npy", "labels.npy"
FOREGROUND_NAME = "foreground.npy"
"""File of an array (n, 4) int32: index of the region, then the voxel in the crop."""
PREPARE_AGAIN = "Prepare it again with `brats-seg prepare --repair`, which needs the scans."
_WRITTEN = (MANIFEST_NAME, IMAGE_NAME, LABELS_NAME, FOREGROUND_NAME)
_SELF = "check_sum"
"""Entry of `case.json` with the check sum of the others."""
_CHUNK_BYTES = 2**20
"""Bytes that are read at a time."""
_N_THREADS = 8
"""Largest number of threads: more do not make a disk faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of a prepared case as it was written."""

    name: str
    n_bytes: int
    crc32: int
    """Check sum: it differs after any change of up to 32 neighbouring bits, and after all other damage but
    one in four billion."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the state of a file; raise `OSError` if it cannot be read."""
        return cls(name=path.name, n_bytes=path.stat().st_size, crc32=check_sum(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a prepared case, without its voxels."""

    version: int = FORMAT_VERSION
    convention: str
    """Name of the label convention; empty without a label map."""
    files_key: str = ""
    """Hash of names, sizes and times of change of the scans, that of `CaseFacts` when they were prepared."""
    contents: tuple[str, ...]
    """SHA-256 of each scan and of the label map, with the index of the volume in a 4-D file."""
    spacing_mm: Spacing
    """Spacing that the case was prepared at; its own may differ by `SPACING_TOLERANCE`."""
    scan: Geometry
    """Grid of the files in the axes of BraTS, before resampling."""
    geometry: Geometry
    """Grid at the spacing; that of the files if they were not resampled."""
    box: Box
    """Position of the crop in that grid."""
    files: tuple[StoredFile, ...]
    """The files beside `case.json`."""

    @property
    def key(self) -> str:
        """Hash of scans, convention and spacing; independent of file names."""
        parts = ["2", self.convention, *self.contents]
        is_resampled = self.geometry != self.scan
        if is_resampled or self.spacing_mm != USUAL_MM:
            parts.append(f"{self.spacing_mm} mm, resampled: {is_resampled}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write `case.json` into the folder of the case."""
        values = _MANIFEST.dump_python(self, mode="json", fallback=np.ndarray.tolist)
        write_json(folder / MANIFEST_NAME, {**values, _SELF: _own_check_sum(values)})


_MANIFEST = TypeAdapter(Manifest)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a prepared case, or None if there is none of this version.

    A damaged one counts as none: its check sum covers every value.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        values = json.loads((folder / MANIFEST_NAME).read_text())
        if values["version"] == FORMAT_VERSION and values.pop(_SELF) == _own_check_sum(values):
            return _MANIFEST.validate_python(values)
    return None


def read_case_manifest(folder: Path, case_id: str) -> Manifest:
    """Return the manifest of a case in a folder of prepared cases.

    Raises:
        CaseError: There is none of this version, or it is damaged.
    """
    manifest = read_manifest(folder / case_id)
    if manifest is None:
        path = str(folder / case_id / MANIFEST_NAME)
        problem = "no prepared case of this version, or a damaged one"
        next_step = "Prepare the cases of this data folder with `brats-seg prepare`."
        raise CaseError(case_id, path, problem, "a prepared case", next_step)
    return manifest


def check_sum(path: Path) -> int:
    """Return the CRC-32 of a file.

    Raises:
        OSError: The file cannot be read.
    """
    crc32, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while n_bytes := file.readinto(chunk):
            crc32 = deflate.crc32(chunk[:n_bytes], crc32)
    return crc32


def verify_case(folder: Path, case_id: str) -> None:
    """Compare every file of a prepared case with its check sum.

    Args:
        folder: Folder of all prepared cases.
        case_id: Id of the case.

    Raises:
        CaseError: A file is missing or damaged.
    """
    if error := _find_damage(folder, case_id):
        raise error


def verify_cases(
    case_ids: Sequence[str], folder: Path, *, track: Track = untracked
) -> tuple[CaseError, ...]:
    """Verify prepared cases, several at a time, and return the errors of the damaged ones.

    Args:
        case_ids: Ids of the cases.
        folder: Folder of all prepared cases.
        track: Shows the progress.
    """
    with ThreadPoolExecutor(min(_N_THREADS, available_cpus())) as pool:
        errors = pool.map(partial(_find_damage, folder), case_ids)
        verified = track(errors, what="verifying prepared cases", total=len(case_ids))
        return tuple(error for error in verified if error is not None)


def prepared_ids(folder: Path) -> tuple[str, ...]:
    """Return the ids of the prepared cases in a folder, damaged or not.

    Raises:
        UsageError: There are none.
    """
    paths = (path for path in folder.glob("*") if not path.name.startswith("."))
    case_ids = tuple(sorted(path.name for path in paths if _has_files(path)))
    if not case_ids:
        msg = f"{folder} holds no prepared cases: give the folder of `brats-seg prepare`"
        raise UsageError(msg)
    return case_ids


def is_replaceable(path: Path) -> bool:
    """Return whether a folder is a prepared case, damaged or not, or empty."""
    return path.is_dir() and (_has_files(path) or not any(path.iterdir()))


def raise_damage(errors: Collection[CaseError]) -> None:
    """Raise the first of the errors of `verify_cases`, if any; its message names the other cases."""
    if not errors:
        return
    first, *rest = errors
    also = some_of([error.case_id for error in rest])
    problem = f"{first.found} (damaged too: {also})" if rest else first.found
    raise CaseError(first.case_id, first.file, problem, first.expected, first.next_step)


def _own_check_sum(values: dict[str, Any]) -> int:
    return deflate.crc32(json.dumps(values).encode())


def _has_files(path: Path) -> bool:
    """Return whether a folder has a file of a prepared case."""
    return any((path / name).exists() for name in _WRITTEN)


def _find_damage(folder: Path, case_id: str) -> CaseError | None:
    """Return the error of the first file of a case that is not as it was written."""
    try:
        files = read_case_manifest(folder, case_id).files
    except CaseError as error:
        return error
    for written in files:
        path = folder / case_id / written.name
        expected = f"the check sum {written.crc32:08x} of {written.n_bytes} bytes as written"
        try:
            now = StoredFile.of(path)
        except OSError as error:
            problem = f"a file that cannot be read ({error.strerror})"
        else:
            problem = f"the check sum {now.crc32:08x} of {now.n_bytes} bytes: the file is damaged"
            if now == written:
                continue
        return CaseError(case_id, str(path), problem, expected, PREPARE_AGAIN)
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedCase:
    """A labelled case on disk, cropped to the brain and normalised."""

    case_id: str
    convention: LabelConvention
    """Convention of the label map."""
    image: npt.NDArray[np.float16]
    """(4, x, y, z), mean 0 and standard deviation 1 inside the brain, exactly 0 around it."""
    labels: LabelMap
    """(x, y, z)"""
    foreground: tuple[VoxelIndices, ...]
    """Indices (n, 3) in the crop of some voxels of each region."""

    @property
    def shape(self) -> Triple:
        """Voxels of the crop along X, Y and Z."""
        return triple(self.image.shape[1:])


def open_case(folder: Path, case_id: str) -> PreparedCase:
    """Open a prepared case without reading its voxels.

    Raises:
        CaseError: The case is not in the folder, has another version, no label map, or is damaged.
    """
    path, manifest = folder / case_id, read_case_manifest(folder, case_id)
    if not manifest.convention:
        expected = "a label map to train on or to score against"
        next_step = "Leave the case out, or add its label map and prepare it again."
        raise CaseError(case_id, MANIFEST_NAME, "no label map", expected, next_step)
    shape = manifest.box.shape
    rows = _read(case_id, path / FOREGROUND_NAME, np.load)
    return PreparedCase(
        case_id=case_id,
        convention=convention_named(manifest.convention),
        image=_open(case_id, path / IMAGE_NAME, (len(MODALITIES), *shape)),
        labels=_open(case_id, path / LABELS_NAME, shape),
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

    A large array goes back to the operating system when it is freed, and allocating its pages again takes
    longer than filling them. An array is in use as long as it, a view of it, or a tensor made from it
    exists. As much memory is kept as has been in use at one time.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[tuple[memoryview, weakref.ref[npt.NDArray[np.uint8]]]]] = {}

    def take(self, shape: tuple[int, ...], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
        """Return an array of a given shape and type; its content is arbitrary."""
        n_bytes = prod(shape) * np.dtype(dtype).itemsize
        # sizes are powers of two, so that boxes of similar size share blocks; unused pages are free
        size = 1 << (n_bytes - 1).bit_length()
        blocks = self._blocks.setdefault(size, [])
        free = [index for index, (_, lent) in enumerate(blocks) if lent() is None]
        memory = blocks.pop(free[0])[0] if free else np.empty(size, dtype=np.uint8).data
        # a numpy view refers to the array at the end of its chain of bases. The memoryview ends the
        # chain at this array, which therefore lives exactly as long as its views
        array = np.frombuffer(memory, dtype=np.uint8, count=n_bytes)
        blocks.append((memory, weakref.ref(array)))
        return array.view(dtype).reshape(shape)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle without the memory: in another process the buffers start empty."""
        return type(self), ()


def open_array(path: Path) -> npt.NDArray[Any]:
    """Open an array for reading, without reading its values."""
    # a view as ndarray: np.memmap runs code of its own for every slice
    return np.load(path, mmap_mode="r").view(np.ndarray)


def _open(case_id: str, path: Path, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    array = _read(case_id, path, open_array)
    if array.shape != shape:
        problem = f"an array of shape {array.shape}"
        raise CaseError(case_id, str(path), problem, f"shape {shape}", PREPARE_AGAIN)
    return array


def _read(case_id: str, path: Path, read: Callable[[Path], Array]) -> Array:
    try:
        return read(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == ENOMEM:
            raise MemoryError(str(error)) from error  # the file itself is not damaged
        problem = f"a file that cannot be read ({error})"
        raise CaseError(case_id, str(path), problem, "a prepared case", PREPARE_AGAIN) from error
