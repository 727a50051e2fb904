"""One volume in and out, with everything that places it in space."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import deflate
import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.spatialimages import HeaderDataError
from nibabel.volumeutils import apply_read_scaling

from brats_seg.cases.packed import FETCH_AGAIN, PackedFile
from brats_seg.files import whole_file

Affine: TypeAlias = npt.NDArray[np.float64]
_Header: TypeAlias = Any  # nibabel has no types

WHOLE_NUMBER_TOLERANCE = 1e-3
"""How far a label value may lie from a whole number: what scaled storage leaves behind."""

_HEADER_BYTES = 540
"""Of NIfTI-2, the longer one."""
_SINGLE_FILE_MAGICS = (b"n+1", b"n+2")
_COMPRESSION_LEVEL = 6

_CONVERT_AGAIN = "Convert the scan again."
_OTHER_FILE = "Give the label map itself, not an image or probabilities."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Geometry:
    """The grid of a volume, and how its file says so."""

    shape: tuple[int, int, int]
    affine: Affine
    """Voxel indices to millimetres, (4, 4): from the sform where its code is set, else the qform."""
    qform: Affine
    """(4, 4); equal to the affine where the code of the qform is not set."""
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
        """Edge lengths of a voxel."""
        x, y, z = np.linalg.norm(self.affine[:3, :3], axis=0)
        return float(x), float(y), float(z)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Volume:
    """Voxels that know where they are."""

    array: npt.NDArray[Any]
    """(X, Y, Z), read-only, in the stored type unless the file asks for scaling."""
    geometry: Geometry
    file: str
    """Name for messages."""


def read_volume(path: Path, *, case_id: str, volume: int | None = None) -> Volume:
    """Read a 3-D file, or one volume of a 4-D file.

    Args:
        path: A `.nii` or `.nii.gz` file.
        case_id: For messages.
        volume: Index along the fourth axis; None for a 3-D file.

    Raises:
        CaseError: The file is empty, damaged, not NIfTI, or has other axes than asked for.
    """
    file = PackedFile(case_id=case_id, path=path)
    packed = file.read_bytes()
    header = _parse_header(file.head_of(packed, _HEADER_BYTES), file)
    geometry = _geometry(header, volume, file)
    content = file.unpack(packed, _data_end(header))
    dtype, n_voxels = header.get_data_dtype(), math.prod(geometry.shape)
    offset = _data_start(header) + (volume or 0) * n_voxels * dtype.itemsize
    array = np.frombuffer(content, dtype, n_voxels, offset).reshape(geometry.shape, order="F")
    # torch and hashes want the byte order of this machine; a view of a 4-D file would keep all of
    # it in memory
    array = array.astype(dtype.newbyteorder("="), copy=volume is not None)
    array = apply_read_scaling(array, *header.get_slope_inter())
    array.flags.writeable = False
    return Volume(array=array, geometry=geometry, file=path.name)


def read_label_map(path: Path, *, case_id: str) -> Volume:
    """Read a label map as uint8; whole numbers may be stored in any type.

    Raises:
        CaseError: As `read_volume`, and for fractions, negative values and values over 255.
    """
    volume = read_volume(path, case_id=case_id)
    file = PackedFile(case_id=case_id, path=path)
    labels = _to_labels(volume.array, file)
    labels.flags.writeable = False
    return Volume(array=labels, geometry=volume.geometry, file=volume.file)


def read_geometry(path: Path, *, case_id: str, volume: int | None = None) -> Geometry:
    """Read the header alone, and see whether the file is cut off; otherwise as `read_volume`."""
    file = PackedFile(case_id=case_id, path=path)
    header = _parse_header(file.read_head(_HEADER_BYTES), file)
    geometry = _geometry(header, volume, file)
    file.check_length(_data_end(header))
    return geometry


def write_volume(path: Path, array: npt.NDArray[Any], geometry: Geometry) -> None:
    """Write an array `(X, Y, Z)` on its grid, compressed if the name ends in `.gz`.

    Equal input gives equal bytes.

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


def _parse_header(head: bytes, file: PackedFile) -> _Header:
    for kind in (nib.Nifti1Header, nib.Nifti2Header):
        if kind.may_contain_header(head):
            header = kind(head[: kind.sizeof_hdr], check=False)
            if header["magic"].item() in _SINGLE_FILE_MAGICS:
                # the standard reads anything but -1 as 1 here, nibabel refuses it
                header["pixdim"][0] = -1 if header["pixdim"][0] == -1 else 1
                return header
    found = f"no NIfTI header (the file begins with {head[:16]!r})"
    raise file.refuse(found=found, expected="a NIfTI file", next_step=FETCH_AGAIN)


def _geometry(header: _Header, volume: int | None, file: PackedFile) -> Geometry:
    shape = _grid_shape(header, volume, file)
    try:
        affine = header.get_best_affine()
        qform_code, sform_code = int(header["qform_code"]), int(header["sform_code"])
        qform = header.get_qform() if qform_code > 0 else affine
        header.get_slope_inter()
        holds_numbers = header.get_data_dtype().kind in "iuf"
    except (HeaderDataError, ValueError, KeyError) as error:
        found = f"a header that makes no sense ({error})"
        raise file.refuse(
            found=found, expected="a NIfTI header", next_step=_CONVERT_AGAIN
        ) from error
    found = ""
    if not holds_numbers:
        found = "colours or complex numbers"
    elif not np.isfinite(affine).all() or np.linalg.det(affine[:3, :3]) == 0:
        found = f"an affine that spans no space: {affine[:3].tolist()}"
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
        # NaN fails this comparison, as it should; infinity minus itself is NaN
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
