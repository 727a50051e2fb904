"""Read prepared cases from the disk, one box at a time.

A case is a folder: `image` and `labels` (plain arrays, or compressed in small blocks), of which a
part is read without the rest, `foreground.npy`, and the manifest `case.json`, which says what the
case was made from and where the crop lies in the scan. It is complete or missing (see `prepare`).
The crop is `(x, y, z)`, smaller than the scan `(X, Y, Z)`.

`Buffers` reuse memory: a patch of 128 voxels an edge takes 17 to 34 MB, and a new array of that size
is returned to the system when it is freed; to get its pages again takes longer than to fill them.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from errno import ENOMEM
from math import prod
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.nifti import Geometry
from brats_seg.errors import CaseError, EnvironmentalError
from brats_seg.labels import (
    REGIONS,
    LabelConvention,
    LabelMap,
    RegionMasks,
    convention_named,
    regions_of,
)
from brats_seg.voxels.box import Box, Triple

_CHUNK = 64
"""Edge of the chunks of blosc2 in voxels; a chunk is divided into blocks."""
_BLOCK = 32
"""Edge of a block, which is unpacked as a whole: a patch of 64 voxels an edge touches at most 27."""


class StoredArray(Protocol):
    """An array on disk, read by slicing."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of every axis."""
        ...

    def __getitem__(self, key: tuple[slice, ...]) -> npt.NDArray[Any]: ...


def array_name(stem: str, *, compressed: bool) -> str:
    """Return the name of the file that holds an array."""
    return f"{stem}.b2nd" if compressed else f"{stem}.npy"


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array in the format of the file name, and sync it to the disk."""
    with path.open("wb") as file:
        if path.suffix == ".b2nd":
            file.write(_compress(array))
        else:
            # not np.save: it reports a full disk without saying so
            array = np.ascontiguousarray(array)
            header = np.lib.format.header_data_from_array_1_0(array)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def open_array(path: Path) -> StoredArray:
    """Open an array for reading.

    Raises:
        EnvironmentalError: It is compressed, and the extra `compressed` is not installed.
    """
    if path.suffix == ".b2nd":
        return _blosc2().open(str(path), mode="r", mmap_mode="r", dparams={"nthreads": 1})
    # a plain array: np.memmap would run its own code at every slice
    return np.load(path, mmap_mode="r").view(np.ndarray)


def check_compression() -> None:
    """Raise `EnvironmentalError` unless compressed arrays can be written and read."""
    _blosc2()


def _compress(array: npt.NDArray[Any]) -> bytes:
    blosc2 = _blosc2()
    n_outer = array.ndim - 3
    # zstd 1 with shuffled bytes: a third of the size, and as fast to read as weaker codecs
    packed = blosc2.asarray(
        np.ascontiguousarray(array),
        chunks=(1,) * n_outer + tuple(min(_CHUNK, n) for n in array.shape[n_outer:]),
        blocks=(1,) * n_outer + tuple(min(_BLOCK, n) for n in array.shape[n_outer:]),
        cparams={
            "codec": blosc2.Codec.ZSTD,
            "clevel": 1,
            "filters": [blosc2.Filter.SHUFFLE],
            "nthreads": 1,
        },
        contiguous=True,
    )
    return packed.to_cframe()


def _blosc2() -> Any:
    try:
        import blosc2
    except ImportError as error:
        msg = (
            "compressed cases need the package blosc2, which is not installed. Run "
            "`pip install brats_seg[compressed]`, or set store.compressed to false."
        )
        raise EnvironmentalError(msg) from error
    return blosc2


FORMAT_VERSION = 2
"""Version of prepared cases; those of another version are prepared again."""

MANIFEST_NAME = "case.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """State of a file when a case was prepared from it."""

    name: str
    """Relative to the data folder, with `#2` for a volume of a 4-D file, as in the case table."""
    n_bytes: int
    mtime_ns: int
    """Time of the last change, nanoseconds since 1970."""

    @classmethod
    def of(cls, root: Path, scan: ScanFile) -> Self:
        """Look at a file; raises `OSError` if it cannot be found."""
        status = (root / scan.path).stat()
        return cls(name=str(scan), n_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a prepared case, without its voxels."""

    version: int = FORMAT_VERSION
    compressed: bool
    convention: str
    """Name of the label convention; empty without a label map."""
    sources: tuple[SourceFile, ...]
    """The modalities in their order, then the label map if there is one."""
    contents: tuple[str, ...]
    """SHA-256 of each source, with the index of the volume in a 4-D file."""
    box: Box
    """Position of the crop in the scan, in the axes of BraTS."""
    geometry: Geometry
    """Grid of the scan in the axes of BraTS."""
    means: tuple[float, ...]
    """Mean of each modality inside the brain, before normalisation."""
    stds: tuple[float, ...]
    """Standard deviation of each modality inside the brain, before normalisation."""

    @property
    def key(self) -> str:
        """Hash of the scans and the convention; independent of file names and compression."""
        text = "\n".join([str(self.version), self.convention, *self.contents])
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return text that `read_manifest` reads."""
        return json.dumps(asdict(self), default=np.ndarray.tolist, indent=1)


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a prepared case; None if there is none, or not of this version."""
    try:
        values = json.loads((folder / MANIFEST_NAME).read_text())
        return _parse(values) if values["version"] == FORMAT_VERSION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sources_of(case: Case) -> tuple[SourceFile, ...]:
    """Look at the modalities of a case, then its label map, without reading them.

    Raises:
        OSError: One of them cannot be found.
    """
    scans = case.images if case.label is None else (*case.images, case.label)
    return tuple(SourceFile.of(case.root, scan) for scan in scans)


def _parse(values: dict[str, Any]) -> Manifest:
    box, geometry = values["box"], values["geometry"]
    lists: dict[str, Any] = {name: tuple(values[name]) for name in ("contents", "means", "stds")}
    parts: dict[str, Any] = {
        "box": Box(start=tuple(box["start"]), stop=tuple(box["stop"])),
        "geometry": Geometry(
            shape=tuple(geometry["shape"]),
            affine=np.array(geometry["affine"]),
            qform=np.array(geometry["qform"]),
            qform_code=geometry["qform_code"],
            sform_code=geometry["sform_code"],
        ),
        "sources": tuple(SourceFile(**source) for source in values["sources"]),
    }
    return Manifest(**{**values, **lists, **parts})


Array = TypeVar("Array")
Voxels: TypeAlias = npt.NDArray[np.int32]
FOREGROUND_NAME = "foreground.npy"
"""File of an array (n, 4) int32: index of the region, then the voxel in the crop."""

PREPARE_AGAIN = "Delete this folder and prepare the cases again."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedCase:
    """A case on disk, cropped to the brain and normalised."""

    case_id: str
    key: str
    """Hash of the scans and the convention: see `Manifest.key`."""
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
    """(n, 3) for each region: indices in the crop of some of its voxels."""

    @property
    def shape(self) -> Triple:
        """Voxels of the crop along X, Y and Z."""
        return self.box.shape

    def read_image(
        self, box: Box, out: npt.NDArray[np.float16] | None = None
    ) -> npt.NDArray[np.float16]:
        """Return the image (4, ...) in a box of the crop, with 0 where the box reaches beyond it.

        An `out` that was used before saves most of the time: to allocate a new array costs more
        than the copy. `out` may be any view, such as one with a reversed axis.
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
            raise self.unlabelled()
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
            raise self.unlabelled()
        return regions_of(labels, self.convention)

    def unlabelled(self) -> CaseError:
        """Return the error that the case has no label map."""
        expected = "a label map to train on or to compare with"
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


Scalar = TypeVar("Scalar", bound=np.generic)


class Buffers:
    """Allocate arrays, and reuse their memory when nothing refers to them any more.

    Memory is not reused while there is an array, a view of it, or a tensor made from it. As much
    memory is kept as was in use at the same time.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}

    def take(self, shape: tuple[int, ...], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
        """Return an array with arbitrary contents."""
        n_bytes = prod(shape) * np.dtype(dtype).itemsize
        # powers of two: boxes of many sizes share blocks, and untouched pages cost nothing
        size = 1 << (n_bytes - 1).bit_length()
        blocks = self._blocks.setdefault(size, [])
        block = next((block for block in blocks if block.is_free), None)
        if block is None:
            block = _Block(size)
            blocks.append(block)
        return block.lend(n_bytes).view(dtype).reshape(shape)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle no memory: a copy in another process starts empty."""
        return type(self), ()


class _Block:
    """A block of memory, and the array that uses it."""

    def __init__(self, n_bytes: int) -> None:
        # numpy makes every view refer to the array that owns the memory, but a memoryview stops it:
        # all views of what is lent keep that alive, and nothing else does
        self._memory = np.empty(n_bytes, dtype=np.uint8).data
        self._lent: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        lent = np.frombuffer(self._memory, dtype=np.uint8, count=n_bytes)
        self._lent = weakref.ref(lent)
        return lent
