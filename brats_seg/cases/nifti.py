"""Read and write NIfTI volumes with their position in space.

The content of a file shows whether it is compressed, not its name: some copies of the releases have
compressed `.nii` files or uncompressed `.nii.gz` files. Files are decompressed with libdeflate, because
zlib, which nibabel uses, takes 2.6 to 3.1 times as long. nibabel parses the headers.
"""

import gzip
import math
import os
import zlib
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
from brats_seg.files import whole_file
from brats_seg.voxels.orientation import Affine, turn_of, turned
from brats_seg.voxels.resampling import Resampling

_FETCH_AGAIN = "Copy or download the file again."

WHOLE_NUMBER_TOLERANCE = 1e-3
"""Largest distance of a label value from a whole number: rounding errors of scaled storage."""

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
_LENGTH_BYTES = 4
_SPARE_BYTES = 1 << 20
"""Most bytes that may follow the voxels."""

_Header: TypeAlias = Any  # nibabel has no types

_HEADER_BYTES = 540
"""Length of the header of NIfTI-2, the longer one."""
_SINGLE_FILE_MAGICS = (b"n+1", b"n+2")
_COMPRESSION_LEVEL = 6

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

    Args:
        path: A `.nii` or `.nii.gz` file.
        case_id: Id for messages.
        volume: Index along the fourth axis; None for a 3-D file.

    Raises:
        CaseError: The file is empty, damaged, not NIfTI, or has other axes than expected.

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
    """Read a label map as uint8; its whole numbers may be stored in any type.

    Raises:
        CaseError: The file cannot be read, or has fractions, negative values or values over 255.
    """
    packed = read_packed(path, case_id=case_id)
    return unpack_label_map(packed, path, case_id=case_id)


def read_packed(path: Path, *, case_id: str) -> bytes:
    """Read a file as it is on the disk, without decompressing it.

    Raises:
        CaseError: The file cannot be read.
    """
    return PackedFile(case_id=case_id, path=path).read_bytes()


def unpack_volume(packed: bytes, path: Path, *, case_id: str, volume: int | None = None) -> Volume:
    """Return the volume in the bytes of a file, as `read_volume` does."""
    file = PackedFile(case_id=case_id, path=path)
    header = _parse_header(file.head_of(packed, _HEADER_BYTES), file)
    geometry = _geometry(header, volume, file)
    content = file.unpack(packed, _data_end(header))
    dtype, n_voxels = header.get_data_dtype(), math.prod(geometry.shape)
    offset = _data_start(header) + (volume or 0) * n_voxels * dtype.itemsize
    array = np.frombuffer(content, dtype, n_voxels, offset).reshape(geometry.shape, order="F")
    # torch and hashes need the byte order of this machine; a view of a 4-D file would keep the whole
    # content in memory
    array = array.astype(dtype.newbyteorder("="), copy=volume is not None)
    array = apply_read_scaling(array, *header.get_slope_inter())
    array.flags.writeable = False
    return Volume(array=array, geometry=geometry, file=path.name)


def unpack_label_map(packed: bytes, path: Path, *, case_id: str) -> Volume:
    """Return the label map in the bytes of a file, as `read_label_map` does."""
    volume = unpack_volume(packed, path, case_id=case_id)
    labels = _to_labels(volume.array, PackedFile(case_id=case_id, path=path))
    labels.flags.writeable = False
    return Volume(array=labels, geometry=volume.geometry, file=volume.file)


def read_geometry(path: Path, *, case_id: str, volume: int | None = None) -> Geometry:
    """Return the grid of a volume from the header, and check that the file is complete.

    The arguments and errors are those of `read_volume`.
    """
    file = PackedFile(case_id=case_id, path=path)
    header = _parse_header(file.read_head(_HEADER_BYTES), file)
    geometry = _geometry(header, volume, file)
    file.check_length(_data_end(header))
    return geometry


def write_volume(path: Path, array: npt.NDArray[Any], geometry: Geometry) -> None:
    """Write an array `(X, Y, Z)` on its grid, compressed if the name ends in `.gz`.

    Equal input results in equal bytes.

    Raises:
        EnvironmentalError: The file cannot be written.
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


def resampled(volume: Volume, resampling: Resampling) -> Volume:
    """Return the volume at another spacing, interpolated in float32."""
    affine = resampling.affine_there(volume.geometry.affine)
    return Volume(
        array=resampling.there(volume.array),
        geometry=Geometry(
            shape=resampling.after, affine=affine, qform=affine, qform_code=0, sform_code=1
        ),
        file=volume.file,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFile:
    """A file of a case, compressed or not."""

    case_id: str
    path: Path

    def refuse(self, *, found: str, expected: str, next_step: str) -> CaseError:
        """Return an error that says what is wrong with the file."""
        return CaseError(self.case_id, self.path.name, found, expected, next_step)

    def read_bytes(self) -> bytes:
        """Read the file as it is on the disk."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from error

    def read_head(self, n_bytes: int) -> bytes:
        """Return the first bytes of the decompressed content, fewer if it is shorter."""
        try:
            with self.path.open("rb") as stream:
                return self._head(stream, n_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def head_of(self, packed: bytes, n_bytes: int) -> bytes:
        """Return the first bytes of the decompressed content, given the result of `read_bytes`."""
        return self._head(BytesIO(packed), n_bytes)

    def check_length(self, n_bytes: int) -> None:
        """Raise `CaseError` if the unpacked content is shorter than `n_bytes`.

        The last bytes of a gzip file state the length; it is decompressed only if they are implausible.
        """
        try:
            with self.path.open("rb") as stream:
                magic = stream.read(len(_GZIP_MAGIC))
                n_stated = stream.seek(0, os.SEEK_END)
                if magic == _GZIP_MAGIC:
                    stream.seek(max(0, n_stated - _LENGTH_BYTES))
                    n_stated = _stated_length(stream.read())
        except OSError as error:
            raise self._unreadable(error) from error
        if not _is_likely(n_stated, n_bytes):
            self.unpack(self.read_bytes(), n_bytes)

    def unpack(self, packed: bytes, n_bytes: int) -> bytes:
        """Decompress the result of `read_bytes`, if it is compressed, and check its length."""
        content = packed
        if packed.startswith(_GZIP_MAGIC):
            content = _unpack_at_once(packed, n_bytes) or self._unpack_members(packed)
        if len(content) < n_bytes:
            raise self.refuse(
                found=f"{len(content)} bytes",
                expected=f"the {n_bytes} that its header states",
                next_step=_FETCH_AGAIN,
            )
        return content

    def _head(self, stream: BinaryIO, n_bytes: int) -> bytes:
        magic = stream.read(len(_GZIP_MAGIC))
        stream.seek(0)
        if not magic:
            raise self.refuse(
                found="an empty file", expected="a NIfTI file", next_step=_FETCH_AGAIN
            )
        if magic != _GZIP_MAGIC:
            return stream.read(n_bytes)
        try:
            with gzip.GzipFile(fileobj=stream) as unpacked:
                return unpacked.read(n_bytes)
        except _GZIP_ERRORS as error:
            raise self._damaged() from error

    def _unpack_members(self, packed: bytes) -> bytes:
        try:
            return gzip.decompress(packed)
        except _GZIP_ERRORS as error:
            raise self._damaged() from error

    def _damaged(self) -> CaseError:
        return self.refuse(
            found="a gzip file that is cut off or damaged",
            expected="a whole one",
            next_step=_FETCH_AGAIN,
        )

    def _unreadable(self, error: OSError) -> CaseError:
        return self.refuse(
            found=f"a file that cannot be read ({error.strerror})",
            expected="a NIfTI file",
            next_step="Check its name, its permissions and the disk.",
        )


def _parse_header(head: bytes, file: PackedFile) -> _Header:
    for kind in (nib.Nifti1Header, nib.Nifti2Header):
        if kind.may_contain_header(head):
            header = kind(head[: kind.sizeof_hdr], check=False)
            if header["magic"].item() in _SINGLE_FILE_MAGICS:
                # the standard reads any value but -1 as 1 here, where nibabel raises an error
                header["pixdim"][0] = -1 if header["pixdim"][0] == -1 else 1
                return header
    found = f"no NIfTI header (the file begins with {head[:16]!r})"
    raise file.refuse(found=found, expected="a NIfTI file", next_step=_FETCH_AGAIN)


def _geometry(header: _Header, volume: int | None, file: PackedFile) -> Geometry:
    shape = _grid_shape(header, volume, file)
    try:
        affine = header.get_best_affine()
        qform_code, sform_code = int(header["qform_code"]), int(header["sform_code"])
        qform = header.get_qform() if qform_code > 0 else affine
        header.get_slope_inter()
        holds_numbers = header.get_data_dtype().kind in "iuf"
    except (HeaderDataError, ValueError, KeyError) as error:
        found = f"an invalid header ({error})"
        raise file.refuse(
            found=found, expected="a NIfTI header", next_step=_CONVERT_AGAIN
        ) from error
    found = ""
    if not holds_numbers:
        found = "colours or complex numbers"
    elif not np.isfinite(affine).all() or np.linalg.det(affine[:3, :3]) == 0:
        found = f"an affine that is singular or not finite: {affine[:3].tolist()}"
    if found:
        raise file.refuse(found=found, expected="numbers on a grid", next_step=_CONVERT_AGAIN)
    return Geometry(
        shape=shape, affine=affine, qform=qform, qform_code=qform_code, sform_code=sform_code
    )


def _grid_shape(header: _Header, volume: int | None, file: PackedFile) -> tuple[int, int, int]:
    stored = tuple(map(int, header.get_data_shape()))
    if volume is None:
        # some programs store a 3-D volume with a fourth axis of length one
        fits = len(stored) >= 3 and math.prod(stored[3:]) == 1
        expected = "three axes"
    else:
        fits = len(stored) == 4 and volume < stored[3]
        expected = f"four axes, with a volume {volume} along the last"
    if not fits or min(stored) < 1:
        found = f"{len(stored)}-D data of shape {' x '.join(map(str, stored))}"
        raise file.refuse(found=found, expected=expected, next_step=_CONVERT_AGAIN)
    return stored[0], stored[1], stored[2]


def _data_start(header: _Header) -> int:
    return max(int(header["vox_offset"]), int(header.single_vox_offset))


def _data_end(header: _Header) -> int:
    n_voxels = math.prod(map(int, header.get_data_shape()))
    return _data_start(header) + n_voxels * int(header.get_data_dtype().itemsize)


def _to_labels(array: npt.NDArray[Any], file: PackedFile) -> npt.NDArray[np.uint8]:
    whole = array
    if array.dtype.kind == "f":
        whole = np.rint(array)
        # NaN fails this comparison, as intended; infinity minus itself is NaN
        with np.errstate(invalid="ignore"):
            broken = ~(np.abs(array - whole) <= WHOLE_NUMBER_TOLERANCE)
        if broken.any():
            found = f"the value {array[broken][0]}"
            raise file.refuse(found=found, expected="whole numbers", next_step=_OTHER_FILE)
    low, high = whole.min(), whole.max()
    if low < 0 or high > np.iinfo(np.uint8).max:
        found = f"values from {low} to {high}"
        raise file.refuse(found=found, expected="label values", next_step=_OTHER_FILE)
    return whole.astype(np.uint8)


def _unpack_at_once(packed: bytes, n_bytes: int) -> bytes:
    """Decompress with libdeflate, which supports one member only; return nothing if that fails.

    It allocates the length that the last four bytes state. They are arbitrary in a file that is cut
    off or has several members.
    """
    if not _is_likely(_stated_length(packed), n_bytes):
        return b""
    try:
        return deflate.gzip_decompress(packed)
    except (deflate.DeflateError, ValueError):
        return b""


def _stated_length(packed: bytes) -> int:
    """Return the length of the content of a gzip file, as its last bytes state it."""
    return int.from_bytes(packed[-_LENGTH_BYTES:], "little")


def _is_likely(n_stated: int, n_bytes: int) -> bool:
    return n_bytes <= n_stated <= n_bytes + _SPARE_BYTES
