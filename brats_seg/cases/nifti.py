"""Read and write NIfTI volumes with their position in space.

nibabel parses the headers. What a header states is checked when it is read, so that everything that
can be read can be written on the same grid: fields that the standard defines a repair for are
repaired, as in its reference library, and all others are refused. The content shows whether a file is
compressed, not its name. A small file can unpack to gigabytes: no more than `SPARE_BYTES` beyond the
voxels that the header states are ever read or unpacked.
"""

import gzip
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import deflate
import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.spatialimages import HeaderDataError
from nibabel.volumeutils import apply_read_scaling

from brats_seg.errors import CaseError
from brats_seg.files import check_regular, whole_file
from brats_seg.voxels.grids import LARGEST_GRID, Affine, Resampling, Spacing, turn_of, turned

WHOLE_NUMBER_TOLERANCE = 1e-3
"""Largest distance of a label value from a whole number: rounding errors of scaled storage."""
VOXEL_EDGES_MM = (0.01, 100.0)
"""Shortest and longest edge of a voxel: ten times beyond the scanners for mice and for the heart."""

_LARGEST_ORIGIN_MM = 1e6
"""Largest distance of a volume from the origin: float32 holds it to a tenth of a millimetre."""
_LONGEST_AXIS = 2**15 - 1
"""Voxels along an axis that the header of a label map, NIfTI-1, can state."""
_MOST_VOLUMES = 16
"""Volumes of a 4-D file; the decathlon has four, one for each modality."""
_LONGEST_EXTENSIONS = 1 << 26
"""Most bytes between the header and the voxels."""
_XFORM_CODES = range(6)
"""Codes of the standard for the meaning of a qform or an sform."""
_LEAST_DETERMINANT = 1e-6
"""Smallest volume of a voxel in relation to a cuboid of the same edges."""
_UNIT_BITS = 7
"""Bits of the field `xyzt_units` that hold the unit of length."""
_OTHER_UNITS = {1: "metres", 3: "micrometres"}
"""Units of length in the standard other than millimetres and none."""

_NUMBER_TYPES = frozenset({2, 4, 8, 16, 64, 256, 512, 768, 1024, 1280})
"""Codes of the standard for integers and floats of 8 to 64 bits; others are colours, complex or longer."""

_Header: TypeAlias = Any  # nibabel has no types

_HEADER_BYTES = 540
"""Length of the header of NIfTI-2, the longer one."""
_SINGLE_FILE_MAGICS = (b"n+1", b"n+2")
_COMPRESSION_LEVEL = 6

SPARE_BYTES = 1 << 20
"""Most bytes that may follow the voxels."""
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
_LENGTH_BYTES = 4
"""Bytes at the end of a gzip file that state the length of its content."""
_HEAD_BYTES = 1 << 18
"""Bytes of a compressed file that hold its first bytes: the longest gzip header has about 64 KiB."""
_CHUNK_BYTES = 1 << 20
_LARGEST_RATIO = 1032
"""Largest ratio of unpacked to packed bytes in the format deflate (https://zlib.net/zlib_tech.html)."""

_FETCH_AGAIN = "Copy or download the file again."
_CONVERT_AGAIN = "Convert the scan again."
_OTHER_FILE = "Give the label map itself, not an image or probabilities."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Geometry:
    """Grid of a volume, as its file states it."""

    shape: tuple[int, int, int]
    affine: Affine
    """Matrix (4, 4) from voxel indices to millimetres: the sform if its code is set, else the qform."""
    qform: Affine
    """Matrix (4, 4); equal to the affine if the code of the qform is not set."""
    qform_code: int
    sform_code: int

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Geometry)
            and (self.shape, self.qform_code, self.sform_code)
            == (other.shape, other.qform_code, other.sform_code)
            and np.array_equal(self.affine, other.affine)
            and np.array_equal(self.qform, other.qform)
        )

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Edge lengths of a voxel along X, Y and Z."""
        x, y, z = np.linalg.norm(self.affine[:3, :3], axis=0)
        return float(x), float(y), float(z)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Volume:
    """Voxels with their position in space."""

    array: npt.NDArray[Any]
    """Voxels (X, Y, Z), read-only, in the stored type unless the file specifies a scaling."""
    geometry: Geometry
    file: str
    """File name for messages."""


def read_volume(path: Path, *, case_id: str, volume: int | None = None) -> Volume:
    """Read a 3-D file, or one volume of a 4-D file.

    Example:
        >>> import tempfile
        >>> eye = np.eye(4)
        >>> grid = Geometry(shape=(2, 2, 2), affine=eye, qform=eye, qform_code=1, sform_code=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "scan.nii.gz")
        ...     write_volume(path, np.arange(8, dtype=np.int16).reshape(2, 2, 2), grid)
        ...     volume = read_volume(path, case_id="example")
        >>> volume.array.shape, volume.geometry.spacing_mm
        ((2, 2, 2), (1.0, 1.0, 1.0))
    """
    packed = read_packed(path, case_id=case_id)
    return unpack_volume(packed, path, case_id=case_id, volume=volume)


def read_label_map(path: Path, *, case_id: str) -> Volume:
    """Read a label map as uint8; its whole numbers may be stored in any type."""
    packed = read_packed(path, case_id=case_id)
    return unpack_label_map(packed, path, case_id=case_id)


def read_packed(path: Path, *, case_id: str) -> bytes:
    """Read a file as it is on the disk, without decompressing it."""
    file = _File(case_id=case_id, path=path)
    with file.opened() as stream:
        header = _parse_header(file.unpacked_head(stream.read(_HEAD_BYTES)), file)
        file.check_size(os.fstat(stream.fileno()).st_size, _data_end(header))
        stream.seek(0)
        return stream.read()


def unpack_volume(packed: bytes, path: Path, *, case_id: str, volume: int | None = None) -> Volume:
    """Return the volume in the bytes of a file, as `read_volume` does."""
    file = _File(case_id=case_id, path=path)
    header = _parse_header(file.unpacked_head(packed[:_HEAD_BYTES]), file)
    geometry = _geometry(header, volume, file)
    try:
        array = _voxels(header, file.unpack(packed, _data_end(header)), geometry.shape, volume)
    except MemoryError:
        found = f"{_data_end(header)} bytes of voxels, for which there is no memory"
        next_step = "Close other programs, or use a machine with more memory."
        raise file.refuse(found, "a volume that fits in memory", next_step) from None
    array.flags.writeable = False
    return Volume(array=array, geometry=geometry, file=path.name)


def unpack_label_map(packed: bytes, path: Path, *, case_id: str) -> Volume:
    """Return the label map in the bytes of a file, as `read_label_map` does."""
    volume = unpack_volume(packed, path, case_id=case_id)
    labels = _to_labels(volume.array, _File(case_id=case_id, path=path))
    labels.flags.writeable = False
    return Volume(array=labels, geometry=volume.geometry, file=volume.file)


def read_geometry(path: Path, *, case_id: str, volume: int | None = None) -> Geometry:
    """Return the grid of a volume from the header alone; the arguments are those of `read_volume`."""
    file = _File(case_id=case_id, path=path)
    with file.opened() as stream:
        header = _parse_header(file.unpacked_head(stream.read(_HEAD_BYTES)), file)
    return _geometry(header, volume, file)


def write_volume(path: Path, array: npt.NDArray[Any], geometry: Geometry) -> None:
    """Write an array `(X, Y, Z)` on its grid, compressed if the name ends in `.gz`.

    Equal input results in equal bytes.
    """
    header = nib.Nifti1Header()
    header.set_data_dtype(array.dtype)
    header.set_data_shape(array.shape)
    header.set_qform(geometry.qform, code=geometry.qform_code)
    header.set_sform(geometry.affine, code=geometry.sform_code)
    header.set_xyzt_units("mm")
    content = nib.Nifti1Image(array, None, header).to_bytes()
    if path.suffix.lower() == ".gz":
        content = deflate.gzip_compress(content, _COMPRESSION_LEVEL)
    with whole_file(path) as beside:
        beside.write_bytes(content)


def oriented(volume: Volume) -> Volume:
    """Return the volume in the axes of BraTS; the array is a view."""
    geometry = volume.geometry
    turn = turn_of(geometry.affine)
    affine = geometry.affine @ nib.orientations.inv_ornt_aff(turn, geometry.shape)
    array = turned(volume.array, turn)
    x, y, z = array.shape
    return Volume(
        array=array,
        geometry=Geometry(shape=(x, y, z), affine=affine, qform=affine, qform_code=0, sform_code=1),
        file=volume.file,
    )


def planned_resampling(volume: Volume, spacing_mm: Spacing, *, case_id: str) -> Resampling | None:
    """Return the resampling of a volume to a spacing, or None if its own is close enough."""
    geometry = volume.geometry
    resampling = Resampling.needed(geometry.shape, geometry.spacing_mm, spacing_mm)
    if resampling is not None and math.prod(resampling.after) > LARGEST_GRID:
        edges, wanted = (
            "x".join(f"{mm:g}" for mm in mms) for mms in (geometry.spacing_mm, spacing_mm)
        )
        grid = " x ".join(map(str, resampling.after))
        found = f"voxels of {edges} mm, which give {grid} voxels of {wanted} mm"
        expected = f"at most {LARGEST_GRID} voxels"
        next_step = "Correct the spacing in the header, or convert the scan again."
        raise CaseError(case_id, volume.file, found, expected, next_step)
    return resampling


def resampled(volume: Volume, resampling: Resampling) -> Volume:
    """Return the volume at another spacing, interpolated in float32."""
    affine = resampling.forward_affine(volume.geometry.affine)
    return Volume(
        array=resampling.forward(volume.array),
        geometry=Geometry(
            shape=resampling.after, affine=affine, qform=affine, qform_code=0, sform_code=1
        ),
        file=volume.file,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A file of a case, compressed or not."""

    case_id: str
    path: Path

    def refuse(self, found: str, expected: str, next_step: str) -> CaseError:
        """Return an error that says what is wrong with the file."""
        return CaseError(self.case_id, self.path.name, found, expected, next_step)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file, unless it is a pipe or a device, which may never end."""
        try:
            check_regular(self.path)
            with self.path.open("rb") as stream:
                yield stream
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or str(error)
            found = f"a file that cannot be read ({reason})"
            next_step = "Check its name, its permissions and the disk."
            raise self.refuse(found, "a NIfTI file", next_step) from error

    def unpacked_head(self, start: bytes) -> bytes:
        """Return the bytes of the header, given the first `_HEAD_BYTES` of the file."""
        if not start:
            found = "an empty file"
            raise self.refuse(found, "a NIfTI file", _FETCH_AGAIN)
        if not start.startswith(_GZIP_MAGIC):
            return start[:_HEADER_BYTES]
        try:
            with gzip.GzipFile(fileobj=BytesIO(start)) as unpacked:
                return unpacked.read(_HEADER_BYTES)
        except _GZIP_ERRORS as error:
            raise self._damaged() from error

    def unpack(self, packed: bytes, n_bytes: int) -> bytes | bytearray:
        """Decompress the content, if it is compressed, and check its length against the header."""
        content: bytes | bytearray = packed
        if packed.startswith(_GZIP_MAGIC):
            if n_bytes > _LARGEST_RATIO * len(packed):
                raise self._damaged()
            content = _unpack_at_once(packed, n_bytes) or self._unpack_members(packed, n_bytes)
        if len(content) < n_bytes:
            found, expected = f"{len(content)} bytes", f"the {n_bytes} that its header states"
            raise self.refuse(found, expected, _FETCH_AGAIN)
        self.check_size(len(content), n_bytes)
        return content

    def check_size(self, n_found: int, n_bytes: int) -> None:
        """Refuse a file or a content of more than `SPARE_BYTES` beyond what the header states."""
        if n_found > n_bytes + SPARE_BYTES:
            found = f"more than {n_bytes + SPARE_BYTES} bytes"
            expected = f"the {n_bytes} that its header states"
            next_step = f"The header or the file is wrong. {_FETCH_AGAIN}"
            raise self.refuse(found, expected, next_step)

    def _unpack_members(self, packed: bytes, n_bytes: int) -> bytearray:
        """Decompress a file of any number of members, and stop at the first byte that is too many."""
        content = bytearray()
        limit = n_bytes + SPARE_BYTES + 1
        try:
            with gzip.GzipFile(fileobj=BytesIO(packed)) as stream:
                while chunk := stream.read(min(_CHUNK_BYTES, limit - len(content))):
                    content += chunk
        except _GZIP_ERRORS as error:
            raise self._damaged() from error
        return content

    def _damaged(self) -> CaseError:
        found = "a gzip file that is cut off or damaged"
        return self.refuse(found, "a whole one", _FETCH_AGAIN)


def _unpack_at_once(packed: bytes, n_bytes: int) -> bytes:
    """Decompress with libdeflate, 2.6 to 3.1 times as fast as zlib; return nothing if that fails.

    It supports one member only, and allocates the length that the last bytes state, which are
    arbitrary in a file that is cut off or has several members.
    """
    n_stated = int.from_bytes(packed[-_LENGTH_BYTES:], "little")
    if not n_bytes <= n_stated <= n_bytes + SPARE_BYTES:
        return b""
    try:
        return deflate.gzip_decompress(packed)
    except (deflate.DeflateError, ValueError):
        return b""


def _parse_header(head: bytes, file: _File) -> _Header:
    """Return the header of a file whose voxels are numbers, at a place that the header states."""
    for kind in (nib.Nifti1Header, nib.Nifti2Header):
        size = head[:4]
        for endianness in ("little", "big"):
            is_complete = len(head) >= kind.sizeof_hdr
            if is_complete and int.from_bytes(size, endianness) == kind.sizeof_hdr:
                header = kind(head[: kind.sizeof_hdr], endianness=endianness, check=False)
                if header["magic"].item() in _SINGLE_FILE_MAGICS:
                    _check_layout(header, file)
                    return header
    found = f"no NIfTI header (the file begins with {head[:16]!r})"
    raise file.refuse(found, "a NIfTI file", _FETCH_AGAIN)


def _check_layout(header: _Header, file: _File) -> None:
    """Raise `CaseError` unless a header states how many voxels of which type there are, and where."""
    shape, datatype, start = _stored_shape(header), int(header["datatype"]), header["vox_offset"]
    found = ""
    if not shape or min(shape) < 1:
        found, expected = _shape_words(header), "three axes"
    elif max(shape) > _LONGEST_AXIS:
        found, expected = _shape_words(header), f"at most {_LONGEST_AXIS} voxels along an axis"
    elif math.prod(shape[:3]) > LARGEST_GRID or math.prod(shape[3:]) > _MOST_VOLUMES:
        found = _shape_words(header)
        expected = f"at most {LARGEST_GRID} voxels, in at most {_MOST_VOLUMES} volumes"
    elif datatype not in _NUMBER_TYPES:
        found, expected = f"voxels of datatype {datatype}", "whole or real numbers of up to 64 bits"
    # NaN fails the comparison
    elif start != 0 and not (
        header.single_vox_offset <= start <= _LONGEST_EXTENSIONS and float(start).is_integer()
    ):
        found = f"voxels that begin at byte {start}"
        expected = f"a whole number from {header.single_vox_offset} to {_LONGEST_EXTENSIONS}"
    if found:
        raise file.refuse(found, expected, _CONVERT_AGAIN)


def _stored_shape(header: _Header) -> tuple[int, ...]:
    """Return the axes that a header states; none if it states an impossible number of them.

    `get_data_shape` of nibabel reads some shapes as those of surfaces in FreeSurfer.
    """
    n_axes, *lengths = map(int, header["dim"])
    return tuple(lengths[:n_axes]) if 1 <= n_axes <= len(lengths) else ()


def _shape_words(header: _Header) -> str:
    n_axes, shape = int(header["dim"][0]), _stored_shape(header)
    return f"{n_axes}-D data" + (f" of shape {' x '.join(map(str, shape))}" if shape else "")


def _geometry(header: _Header, volume: int | None, file: _File) -> Geometry:
    _check_axes(header, volume, file)
    try:
        # overflows are found below, as numbers that are not finite
        with np.errstate(all="ignore"):
            geometry = _position(header)
        header.get_slope_inter()
    except (HeaderDataError, ValueError) as error:
        found = f"an invalid header ({error})"
        raise file.refuse(found, "a NIfTI header", _CONVERT_AGAIN) from error
    if found := "; ".join(_wrong_position(header, geometry)):
        raise file.refuse(found, "a position in millimetres", _CONVERT_AGAIN)
    return geometry


def _check_axes(header: _Header, volume: int | None, file: _File) -> None:
    shape = _stored_shape(header)
    if volume is None:
        # some programs store a 3-D volume with a fourth axis of length one
        fits = len(shape) >= 3 and math.prod(shape[3:]) == 1
        expected = "three axes"
    else:
        fits = len(shape) == 4 and volume < shape[3]
        expected = f"four axes, with a volume {volume} along the last"
    if not fits:
        raise file.refuse(_shape_words(header), expected, _CONVERT_AGAIN)


def _position(header: _Header) -> Geometry:
    # the standard reads any value but -1 as 1 here, where nibabel raises an error
    header["pixdim"][0] = -1 if header["pixdim"][0] == -1 else 1
    qform_code, sform_code = int(header["qform_code"]), int(header["sform_code"])
    affine = header.get_best_affine()
    qform = affine
    if qform_code:
        try:
            qform = header.get_qform()
            is_usable = not any(_wrong_affine(qform))
        except (HeaderDataError, ValueError):
            is_usable = False
        # the sform comes first: a qform that no program can use is omitted beside it
        if not is_usable:
            qform, qform_code = affine, 0
    x, y, z = _stored_shape(header)[:3]
    return Geometry(
        shape=(x, y, z), affine=affine, qform=qform, qform_code=qform_code, sform_code=sform_code
    )


def _wrong_position(header: _Header, geometry: Geometry) -> Iterator[str]:
    for kind in ("qform", "sform"):
        code = int(header[f"{kind}_code"])
        if code not in _XFORM_CODES:
            yield f"the {kind}_code {code}, where the standard has 0 to {_XFORM_CODES[-1]}"
    unit = int(header["xyzt_units"]) & _UNIT_BITS
    if unit in _OTHER_UNITS:
        yield f"lengths in {_OTHER_UNITS[unit]}"
    yield from _wrong_affine(geometry.affine)


def _wrong_affine(affine: Affine) -> Iterator[str]:
    with np.errstate(all="ignore"):
        edges_mm, origin_mm = np.linalg.norm(affine[:3, :3], axis=0), affine[:3, 3]
        # in relation to the edges: tiny voxels have a tiny determinant
        volume = abs(np.linalg.det(affine[:3, :3] / edges_mm))
    # NaN fails the comparison
    if not (np.isfinite(affine).all() and volume > _LEAST_DETERMINANT):
        yield f"an affine that is singular or not finite: {affine[:3].tolist()}"
        return
    shortest, longest = VOXEL_EDGES_MM
    if not shortest <= edges_mm.min() <= edges_mm.max() <= longest:
        edges = "x".join(f"{mm:g}" for mm in edges_mm)
        yield f"voxels of {edges} mm, where edges have {shortest:g} to {longest:g} mm"
    if np.abs(origin_mm).max() > _LARGEST_ORIGIN_MM:
        yield f"an origin at {origin_mm.tolist()} mm"


def _voxels(
    header: _Header, content: bytes | bytearray, shape: tuple[int, int, int], volume: int | None
) -> npt.NDArray[Any]:
    dtype, n_voxels = header.get_data_dtype(), math.prod(shape)
    offset = _data_start(header) + (volume or 0) * n_voxels * dtype.itemsize
    array = np.frombuffer(content, dtype, n_voxels, offset).reshape(shape, order="F")
    # torch and hashes need the byte order of this machine; a view of a 4-D file would keep the whole
    # content in memory
    array = array.astype(dtype.newbyteorder("="), copy=volume is not None)
    # infinite intensities are found by the checks of the case
    with np.errstate(over="ignore", invalid="ignore"):
        return apply_read_scaling(array, *header.get_slope_inter())


def _data_start(header: _Header) -> int:
    return max(int(header["vox_offset"]), int(header.single_vox_offset))


def _data_end(header: _Header) -> int:
    n_voxels = math.prod(_stored_shape(header))
    return _data_start(header) + n_voxels * int(header.get_data_dtype().itemsize)


def _to_labels(array: npt.NDArray[Any], file: _File) -> npt.NDArray[np.uint8]:
    whole = array
    if array.dtype.kind == "f":
        whole = np.rint(array)
        # NaN fails this comparison, as intended; infinity minus itself is NaN
        with np.errstate(invalid="ignore"):
            broken = ~(np.abs(array - whole) <= WHOLE_NUMBER_TOLERANCE)
        if broken.any():
            found = f"the value {array[broken][0]}"
            raise file.refuse(found, "whole numbers", _OTHER_FILE)
    low, high = whole.min(), whole.max()
    if low < 0 or high > np.iinfo(np.uint8).max:
        found = f"values from {low} to {high}"
        raise file.refuse(found, "label values", _OTHER_FILE)
    return whole.astype(np.uint8)
