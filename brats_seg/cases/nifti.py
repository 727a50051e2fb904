"""Read and write NIfTI volumes with their position in space.

nibabel parses the headers. What a header states is checked when it is read, so that everything that
can be read can be written on the same grid: fields that the standard defines a repair for are
repaired, and all others are refused. The content shows whether a file is compressed, not its name.
A small file can unpack to gigabytes: no more than `SPARE_BYTES` beyond the voxels that the header
states are ever read or unpacked.
"""

import gzip
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

import deflate
import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.spatialimages import HeaderDataError
from nibabel.volumeutils import apply_read_scaling

from brats_seg.errors import MORE_MEMORY, CaseError
from brats_seg.files import check_regular, whole_file
from brats_seg.voxels import grids
from brats_seg.voxels.box import Triple, shape_text, triple
from brats_seg.voxels.grids import LARGEST_GRID, Affine, Resampling, Spacing

WHOLE_NUMBER_TOLERANCE = 1e-3
"""Largest distance of a label value from a whole number: rounding errors of scaled storage."""
VOXEL_EDGES_MM = (0.01, 100.0)
"""Shortest and longest edge of a voxel: ten times beyond the scanners for mice and for the heart."""
SPARE_BYTES = 1 << 20
"""Most bytes that may follow the voxels."""

_LARGEST_ORIGIN_MM = 1e6
"""Largest distance of a volume from the origin: float32 holds it to a tenth of a millimetre."""
_LONGEST_AXIS = 2**15 - 1
"""Voxels along an axis that the header of a label map, NIfTI-1, can state."""
_MOST_VOLUMES = 16
"""Volumes of a 4-D file; the decathlon has four, one for each modality."""
_LONGEST_EXTENSIONS = 1 << 26
"""Most bytes between the header and the voxels."""
_LARGEST_XFORM_CODE = 5
_LEAST_DETERMINANT = 1e-6
"""Smallest volume of a voxel in relation to a cuboid of the same edges."""
_UNIT_BITS = 7
"""Bits of the field `xyzt_units` that hold the unit of length."""
_OTHER_UNITS = {1: "metres", 3: "micrometres"}
"""Units of length in the standard other than millimetres and none."""
_NUMBER_TYPES = frozenset({2, 4, 8, 16, 64, 256, 512, 768, 1024, 1280})
"""Codes of the standard for integers and floats of 8 to 64 bits; others are colours, complex or longer."""
_HEADER_BYTES = 540
"""Length of the header of NIfTI-2, the longer one."""
_COMPRESSION_LEVEL = 6
_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_BYTES = 1 << 18
"""Bytes of a compressed file that hold its first bytes: the longest gzip header has about 64 KiB."""
_LARGEST_RATIO = 1032
"""Largest ratio of unpacked to packed bytes in the format deflate (https://zlib.net/zlib_tech.html)."""
_EXPECTED_AXES = (
    f"three axes of 1 to {_LONGEST_AXIS} voxels, at most {LARGEST_GRID} voxels in at most "
    f"{_MOST_VOLUMES} volumes"
)
_FETCH_AGAIN = "Copy or download the file again."
_CONVERT_AGAIN = "Convert or write the file again."
_OTHER_FILE = "Give the label map itself, not an image or probabilities."

_Header: TypeAlias = Any  # nibabel has no types


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Geometry:
    """Grid of a volume, as its file states it."""

    shape: Triple
    affine: Affine
    """Matrix (4, 4) from voxel indices to millimetres: the sform if its code is set, else the qform."""
    qform: Affine
    """Matrix (4, 4); equal to the affine if the code of the qform is not set."""
    qform_code: int
    sform_code: int

    @classmethod
    def at(cls, affine: Affine, shape: tuple[int, ...], *, qform_code: int = 0) -> Self:
        """Return the grid of a shape (X, Y, Z) whose position is its sform."""
        codes = {"qform_code": qform_code, "sform_code": 1}
        return cls(shape=triple(shape), affine=affine, qform=affine, **codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Geometry) and all(
            map(np.array_equal, astuple(self), astuple(other))
        )

    @property
    def spacing_mm(self) -> Spacing:
        """Edge lengths of a voxel along X, Y and Z."""
        return triple(np.linalg.norm(self.affine[:3, :3], axis=0).tolist())


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
        >>> grid = Geometry.at(np.eye(4), (2, 2, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "scan.nii.gz")
        ...     write_volume(path, np.arange(8, dtype=np.int16).reshape(2, 2, 2), grid)
        ...     volume = read_volume(path, case_id="example")
        >>> volume.array.shape, volume.geometry.spacing_mm
        ((2, 2, 2), (1.0, 1.0, 1.0))
    """
    return unpack_volume(read_packed(path, case_id=case_id), path, case_id, volume)


def read_label_map(path: Path, *, case_id: str) -> Volume:
    """Read a label map as uint8; its whole numbers may be stored in any type."""
    return unpack_volume(read_packed(path, case_id=case_id), path, case_id, is_label_map=True)


def read_packed(path: Path, *, case_id: str) -> bytes:
    """Read a file as it is on the disk, without decompressing it."""
    with _explain_errors(path, case_id):
        check_regular(path)
        with path.open("rb") as stream:
            header = _read_header(stream.read(_HEAD_BYTES))
            _check_size(os.fstat(stream.fileno()).st_size, _data_end(header))
            stream.seek(0)
            return stream.read()


def read_geometry(path: Path, *, case_id: str, volume: int | None = None) -> Geometry:
    """Return the grid of a volume from the header alone; the arguments are those of `read_volume`."""
    with _explain_errors(path, case_id):
        check_regular(path)
        with path.open("rb") as stream:
            return _geometry(_read_header(stream.read(_HEAD_BYTES)), volume)


def unpack_volume(
    packed: bytes,
    path: Path,
    case_id: str,
    volume: int | None = None,
    *,
    is_label_map: bool = False,
) -> Volume:
    """Return the volume in the bytes of a file, as `read_volume` or `read_label_map` does."""
    with _explain_errors(path, case_id):
        header = _read_header(packed[:_HEAD_BYTES])
        geometry = _geometry(header, volume)
        array = _voxels(header, _unpack(packed, _data_end(header)), geometry.shape, volume)
        array = _to_labels(array) if is_label_map else array
    array.flags.writeable = False
    return Volume(array=array, geometry=geometry, file=path.name)


def write_volume(path: Path, array: npt.NDArray[Any], geometry: Geometry) -> None:
    """Write an array `(X, Y, Z)` on its grid, compressed if the name ends in `.gz`.

    Equal input results in equal bytes.
    """
    image = nib.Nifti1Image(array, None, dtype=array.dtype)
    image.set_qform(geometry.qform, code=geometry.qform_code)
    image.set_sform(geometry.affine, code=geometry.sform_code)
    image.header.set_xyzt_units("mm")
    content = image.to_bytes()
    if path.suffix.lower() == ".gz":
        content = deflate.gzip_compress(content, _COMPRESSION_LEVEL)
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def oriented(volume: Volume) -> Volume:
    """Return the volume in the axes of BraTS; the array is a view."""
    geometry = volume.geometry
    orientation = grids.find_orientation(geometry.affine)
    affine = geometry.affine @ nib.orientations.inv_ornt_aff(orientation, geometry.shape)
    array = grids.reorient(volume.array, orientation)
    grid = replace(geometry, shape=array.shape, affine=affine, qform=affine)
    return Volume(array=array, geometry=grid, file=volume.file)


def plan_resampling(volume: Volume, spacing_mm: Spacing, *, case_id: str) -> Resampling | None:
    """Return the resampling of a volume to a spacing, or None if its own is close enough."""
    geometry = volume.geometry
    resampling = Resampling.needed(geometry.shape, geometry.spacing_mm, spacing_mm)
    if resampling is not None and math.prod(resampling.after) > LARGEST_GRID:
        after = f"{shape_text(resampling.after)} voxels of {_edges_text(spacing_mm)} mm"
        problem = f"voxels of {_edges_text(geometry.spacing_mm)} mm, which give {after}"
        expected = f"at most {LARGEST_GRID} voxels"
        next_step = "Correct the spacing in the header."
        raise CaseError(case_id, volume.file, problem, expected, next_step)
    return resampling


def resampled(volume: Volume, resampling: Resampling) -> Volume:
    """Return the volume at another spacing, interpolated in float32."""
    geometry = Geometry.at(resampling.forward_affine(volume.geometry.affine), resampling.after)
    return Volume(array=resampling.forward(volume.array), geometry=geometry, file=volume.file)


class _UnusableFileError(Exception):
    """A file cannot be used; the arguments are what was found, what was expected, the next step."""


def _refuse(problem: str, expected: str, next_step: str) -> NoReturn:
    raise _UnusableFileError(problem, expected, next_step)


@contextmanager
def _explain_errors(path: Path, case_id: str) -> Iterator[None]:
    """Turn whatever is wrong with a file into an error that names the case and the file."""
    try:
        yield
    except _UnusableFileError as error:
        raise CaseError(case_id, path.name, *error.args) from error.__cause__
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = "a gzip file that is cut off or damaged"
        raise CaseError(case_id, path.name, problem, "a whole one", _FETCH_AGAIN) from error
    except MemoryError as error:
        problem, expected = "more voxels than there is memory for", "a volume that fits in memory"
        raise CaseError(case_id, path.name, problem, expected, MORE_MEMORY) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"a file that cannot be read ({reason})"
        next_step = "Check its name, its permissions and the disk."
        raise CaseError(case_id, path.name, problem, "a NIfTI file", next_step) from error


def _unpack(packed: bytes, n_bytes: int) -> bytes:
    """Decompress a content, if it is compressed, and check its length against that of the header."""
    content = packed
    if packed.startswith(_GZIP_MAGIC):
        if n_bytes > _LARGEST_RATIO * len(packed):
            raise EOFError
        # libdeflate fails on several members, and on damaged ones
        content = _unpack_at_once(packed, n_bytes) or _gunzip(packed, n_bytes + SPARE_BYTES + 1)
    if len(content) < n_bytes:
        _refuse(f"{len(content)} bytes", f"the {n_bytes} that its header states", _FETCH_AGAIN)
    _check_size(len(content), n_bytes)
    return content


def _unpack_at_once(packed: bytes, n_bytes: int) -> bytes:
    """Decompress with libdeflate, which is faster than zlib; return nothing if that fails.

    It supports one member only, and allocates the length that the last four bytes state, which are
    arbitrary in a file that is cut off or has several members.
    """
    n_stated = int.from_bytes(packed[-4:], "little")
    if not n_bytes <= n_stated <= n_bytes + SPARE_BYTES:
        return b""
    try:
        return deflate.gzip_decompress(packed)
    except (deflate.DeflateError, ValueError):
        return b""


def _gunzip(packed: bytes, n_bytes: int) -> bytes:
    """Return at most that many of the first bytes of a gzip file."""
    with gzip.GzipFile(fileobj=BytesIO(packed)) as stream:
        return stream.read(n_bytes)


def _check_size(n_found: int, n_bytes: int) -> None:
    """Refuse a file or a content of more than `SPARE_BYTES` beyond what the header states."""
    if n_found > n_bytes + SPARE_BYTES:
        expected = f"the {n_bytes} that its header states"
        _refuse(f"more than {n_bytes + SPARE_BYTES} bytes", expected, _FETCH_AGAIN)


def _read_header(start: bytes) -> _Header:
    """Return the header of a file whose voxels are numbers, given its first `_HEAD_BYTES` bytes."""
    if not start:
        _refuse("an empty file", "a NIfTI file", _FETCH_AGAIN)
    is_packed = start.startswith(_GZIP_MAGIC)
    head = _gunzip(start, _HEADER_BYTES) if is_packed else start[:_HEADER_BYTES]
    for kind in (nib.Nifti1Header, nib.Nifti2Header):
        for endianness in ("little", "big"):
            if len(head) >= kind.sizeof_hdr == int.from_bytes(head[:4], endianness):
                header = kind(head[: kind.sizeof_hdr], endianness=endianness, check=False)
                # another magic is that of a header whose voxels are in a second file
                if header["magic"].item() in (b"n+1", b"n+2"):
                    _check_layout(header)
                    return header
    _refuse(f"no NIfTI header (the file begins with {head[:16]!r})", "a NIfTI file", _FETCH_AGAIN)


def _check_layout(header: _Header) -> None:
    """Refuse a header that does not state how many voxels of which type there are, and where."""
    shape, datatype, start = _stored_shape(header), int(header["datatype"]), header["vox_offset"]
    if (
        min(shape, default=0) < 1
        or max(shape) > _LONGEST_AXIS
        or math.prod(shape[:3]) > LARGEST_GRID
        or math.prod(shape[3:]) > _MOST_VOLUMES
    ):
        _refuse(_axes_text(header), _EXPECTED_AXES, _CONVERT_AGAIN)
    if datatype not in _NUMBER_TYPES:
        expected = "whole or real numbers of up to 64 bits"
        _refuse(f"voxels of datatype {datatype}", expected, _CONVERT_AGAIN)
    first = header.single_vox_offset
    # NaN fails the comparison
    has_start = first <= start <= _LONGEST_EXTENSIONS and float(start).is_integer()
    if start != 0 and not has_start:
        expected = f"a whole number from {first} to {_LONGEST_EXTENSIONS}"
        _refuse(f"voxels that begin at byte {start}", expected, _CONVERT_AGAIN)


def _stored_shape(header: _Header) -> tuple[int, ...]:
    """Return the axes that a header states; none if it states an impossible number of them.

    `get_data_shape` of nibabel reads some shapes as those of surfaces in FreeSurfer.
    """
    n_axes, *lengths = map(int, header["dim"])
    return tuple(lengths[:n_axes]) if 1 <= n_axes <= len(lengths) else ()


def _axes_text(header: _Header) -> str:
    n_axes, shape = int(header["dim"][0]), _stored_shape(header)
    return f"{n_axes}-D data" + (f" of shape {shape_text(shape)}" if shape else "")


def _edges_text(edges_mm: Spacing) -> str:
    return "x".join(f"{mm:g}" for mm in edges_mm)


def _geometry(header: _Header, volume: int | None) -> Geometry:
    """Return the grid of a volume; refuse other axes than asked for, and an unusable position."""
    shape = _stored_shape(header)
    # some programs store a 3-D volume with a fourth axis of length one
    fits, expected = len(shape) >= 3 and math.prod(shape[3:]) == 1, "three axes"
    if volume is not None:
        fits = len(shape) == 4 and volume < shape[3]
        expected = f"four axes, with a volume {volume} along the last"
    if not fits:
        _refuse(_axes_text(header), expected, _CONVERT_AGAIN)
    # the standard reads any value but -1 as 1 here, where nibabel raises an error
    header["pixdim"][0] = -1 if header["pixdim"][0] == -1 else 1
    if not (header["qform_code"] or header["sform_code"]):
        # lengths, as in the reference library: a negative one would be written as a positive one
        header["pixdim"][1:4] = np.abs(header["pixdim"][1:4])
    try:
        # overflows are found below, as numbers that are not finite
        with np.errstate(all="ignore"):
            affine, qform = header.get_best_affine(), _usable_qform(header)
        header.get_slope_inter()
    except (HeaderDataError, ValueError) as error:
        _refuse(f"an invalid header ({error})", "a NIfTI header", _CONVERT_AGAIN)
    if problem := "; ".join([*_wrong_fields(header), *_wrong_affine(affine)]):
        _refuse(problem, "a position in millimetres", _CONVERT_AGAIN)
    return Geometry(
        shape=triple(shape[:3]),
        affine=affine,
        qform=affine if qform is None else qform,
        qform_code=0 if qform is None else int(header["qform_code"]),
        sform_code=int(header["sform_code"]),
    )


def _usable_qform(header: _Header) -> Affine | None:
    """Return the qform; None if there is none, or one that no program can use."""
    try:
        qform: Affine | None = header.get_qform(coded=True)[0]
    except (HeaderDataError, ValueError):
        return None
    return None if qform is None or any(_wrong_affine(qform)) else qform


def _wrong_fields(header: _Header) -> Iterator[str]:
    for kind in ("qform", "sform"):
        code = int(header[f"{kind}_code"])
        if not 0 <= code <= _LARGEST_XFORM_CODE:
            yield f"the {kind}_code {code}, where the standard has 0 to {_LARGEST_XFORM_CODE}"
    unit = int(header["xyzt_units"]) & _UNIT_BITS
    if unit in _OTHER_UNITS:
        yield f"lengths in {_OTHER_UNITS[unit]}"


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
        yield f"voxels of {_edges_text(edges_mm)} mm, where edges have {shortest:g} to {longest:g} mm"
    if np.abs(origin_mm).max() > _LARGEST_ORIGIN_MM:
        yield f"an origin at {origin_mm.tolist()} mm"


def _voxels(header: _Header, content: bytes, shape: Triple, volume: int | None) -> npt.NDArray[Any]:
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


def _to_labels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    whole = array
    if array.dtype.kind == "f":
        whole = np.rint(array)
        # NaN fails this comparison, as intended; infinity minus itself is NaN
        with np.errstate(invalid="ignore"):
            broken = ~(np.abs(array - whole) <= WHOLE_NUMBER_TOLERANCE)
        if broken.any():
            _refuse(f"the value {array[broken][0]}", "whole numbers", _OTHER_FILE)
    low, high = whole.min(), whole.max()
    if low < 0 or high > np.iinfo(np.uint8).max:
        _refuse(f"values from {low} to {high}", "label values", _OTHER_FILE)
    return whole.astype(np.uint8)
