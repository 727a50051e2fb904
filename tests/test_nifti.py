"""Reading and writing NIfTI files, whole and damaged ones."""

import gzip
import itertools
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest

from brats_seg.cases import nifti
from brats_seg.errors import CaseError
from tests.builders import BRATS_AFFINE, SHAPE, make_label_map, make_volumes, write_nifti
from tests.faults.test_hostile_inputs import UNREADABLE

OBLIQUE = np.array(
    [
        [-0.897, 0.0, 0.3157, 90.7199],
        [-0.0147, 0.861, -1.5689, -71.3685],
        [0.0494, 0.2567, 5.262, -98.396],
        [0.0, 0.0, 0.0, 1.0],
    ]
)
CONTENT = nib.Nifti1Image(make_volumes()[0], BRATS_AFFINE).to_bytes()
"""A NIfTI file of 18,784 bytes."""
PACKED = gzip.compress(CONTENT, mtime=0)
TYPES = ["uint8", "int8", "uint16", "int32", "float32", "float64", ">i2", ">f4"]


def geometry(affine: np.ndarray = BRATS_AFFINE, **codes: int) -> nifti.Geometry:
    return replace(nifti.Geometry.at(affine, SHAPE, qform_code=1), **codes)


def read(path: Path) -> npt.NDArray[np.generic]:
    return nifti.read_volume(path, case_id="case_1").array


def oracle(path: Path) -> npt.NDArray[np.generic]:
    return np.asanyarray(nib.load(path).dataobj)


def broken_header(path: Path, **fields: object) -> Path:
    header = nib.Nifti1Header(CONTENT[:348], check=False)
    for field, value in fields.items():
        header[field] = value
    path.write_bytes(header.binaryblock + CONTENT[348:])
    return path


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("dtype", TYPES)
def test_voxels_are_what_nibabel_reads(tmp_path: Path, dtype: str, suffix: str) -> None:
    array = (make_volumes()[1] % 100).astype(dtype)
    header = nib.Nifti1Header(endianness=">" if dtype.startswith(">") else "<")
    header.set_data_dtype(array.dtype)
    path = tmp_path / f"scan{suffix}"
    nib.save(nib.Nifti1Image(array, BRATS_AFFINE, header), path)
    found = read(path)
    np.testing.assert_array_equal(found, oracle(path))
    assert (found.dtype, found.flags.writeable) == (np.dtype(dtype).newbyteorder("="), False)


@pytest.mark.parametrize(("slope", "intercept"), [(2.0, 0.0), (0.5, -3.0), (1.0, 7.0)])
def test_scaled_voxels_are_those_of_nibabel(tmp_path: Path, slope: float, intercept: float) -> None:
    path = broken_header(tmp_path / "scan.nii", scl_slope=slope, scl_inter=intercept)
    assert (nib.load(path).dataobj.slope, nib.load(path).dataobj.inter) == (slope, intercept)
    np.testing.assert_array_equal(read(path), oracle(path))


def test_nifti_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "scan.nii.gz"
    nib.save(nib.Nifti2Image(make_volumes()[2], OBLIQUE), path)
    volume = nifti.read_volume(path, case_id="case_1")
    np.testing.assert_array_equal(volume.array, make_volumes()[2])
    np.testing.assert_array_equal(volume.geometry.affine, OBLIQUE)
    nib.save(nib.Nifti2Image(np.zeros((40_000, 2, 2), np.uint8), np.eye(4)), path)
    with pytest.raises(CaseError, match="axes of 1 to 32767 voxels"):
        read(path)


def test_one_volume_of_a_4d_file_is_read(tmp_path: Path) -> None:
    volumes = make_volumes().astype(np.float32)
    path = write_nifti(tmp_path / "BRATS_001.nii.gz", np.moveaxis(volumes, 0, -1))
    for index, expected in enumerate(volumes):
        found = nifti.read_volume(path, case_id="BRATS_001", volume=index)
        np.testing.assert_array_equal(found.array, expected)
        assert found.geometry.shape == SHAPE
        # nothing keeps the other volumes in memory
        assert found.array.base is None
        assert nifti.read_geometry(path, case_id="BRATS_001", volume=index) == found.geometry


@pytest.mark.parametrize("codes", [(1, 1), (1, 0), (0, 2), (0, 0)])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("affine", [BRATS_AFFINE, OBLIQUE], ids=["lps", "oblique"])
def test_a_label_map_lies_where_the_scan_lies(tmp_path, affine, codes, suffix):
    path = tmp_path / f"label{suffix}"
    scan = nib.Nifti1Image(make_volumes()[0], None)
    scan.header.set_qform(affine, code=codes[0])
    scan.header.set_sform(affine, code=codes[1])
    nib.save(scan, tmp_path / "scan.nii.gz")
    grid = nifti.read_geometry(tmp_path / "scan.nii.gz", case_id="case_1")
    nifti.write_volume(path, make_label_map(), grid)
    before, after = nib.load(tmp_path / "scan.nii.gz"), nib.load(path)
    np.testing.assert_allclose(after.affine, before.affine, atol=1e-5)
    if codes[0]:
        np.testing.assert_allclose(after.get_qform(), before.get_qform(), atol=1e-5)
    np.testing.assert_allclose(after.header.get_zooms(), before.header.get_zooms(), rtol=1e-6)
    assert (after.header["qform_code"], after.header["sform_code"]) == codes
    assert nib.aff2axcodes(after.affine) == nib.aff2axcodes(before.affine)
    assert (after.header.get_xyzt_units()[0], after.get_data_dtype()) == ("mm", np.uint8)
    label = nifti.read_label_map(path, case_id="case_1")
    np.testing.assert_array_equal(label.array, make_label_map())
    assert (label.geometry, label.array.dtype, label.file) == (grid, np.uint8, path.name)


def test_other_qforms_are_kept_and_equal_volumes_give_equal_bytes(tmp_path: Path) -> None:
    scan = nib.Nifti1Image(make_volumes()[0], None)
    scan.header.set_qform(np.eye(4), code=1)
    scan.header.set_sform(BRATS_AFFINE, code=4)
    nib.save(scan, tmp_path / "scan.nii.gz")
    grid = nifti.read_geometry(tmp_path / "scan.nii.gz", case_id="case_1")
    for name in ("a.nii.gz", "b.nii.gz"):
        nifti.write_volume(tmp_path / name, make_label_map(), grid)
    np.testing.assert_array_equal(grid.affine, BRATS_AFFINE)
    np.testing.assert_array_equal(grid.qform, np.eye(4))
    assert nifti.read_geometry(tmp_path / "a.nii.gz", case_id="case_1") == grid
    assert (tmp_path / "a.nii.gz").read_bytes() == (tmp_path / "b.nii.gz").read_bytes()


def test_geometries_are_equal_when_all_their_parts_are() -> None:
    assert geometry() == geometry(BRATS_AFFINE.copy())
    for other in (geometry(OBLIQUE), geometry(qform_code=2), geometry(sform_code=0), "geometry"):
        assert geometry() != other
    # edges of voxels along the axes of the array
    np.testing.assert_allclose(geometry(OBLIQUE).spacing_mm, (0.8985, 0.8985, 5.4999), atol=1e-4)


def test_the_geometry_is_read_without_the_voxels(tmp_path: Path) -> None:
    # a fourth axis of length one is ignored
    path = write_nifti(tmp_path / "scan.nii", make_volumes()[0][..., None], OBLIQUE)
    np.testing.assert_array_equal(read(path), make_volumes()[0])
    whole = nifti.read_volume(path, case_id="case_1").geometry
    os.truncate(path, 352)
    assert nifti.read_geometry(path, case_id="case_1") == whole


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"not a scan at all\n" * 100, r"no NIfTI header \(the file begins with b'not a scan at"),
        (gzip.compress(b"text " * 500, mtime=0), "no NIfTI header .*text text"),
        (b"n+1", "no NIfTI header"),
    ],
)
def test_a_file_that_is_no_scan_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "BraTS2021_00001_t1.nii.gz"
    path.write_bytes(content)
    for reader in (nifti.read_volume, nifti.read_label_map, nifti.read_geometry):
        with pytest.raises(CaseError, match=rf"^case c, file {path.name}: found {found}.*NIfTI"):
            reader(path, case_id="c")


def members(*ends: int) -> bytes:
    """Return the content as a gzip file of members that end at these bytes, and one for the rest."""
    bounds = itertools.pairwise((0, *ends, len(CONTENT)))
    return b"".join(gzip.compress(CONTENT[start:stop], mtime=0) for start, stop in bounds)


@pytest.mark.parametrize(
    "content",
    [CONTENT, PACKED, members(100), members(18_000), members(10, 9_000, 9_010), CONTENT + b"x"],
    ids=["plain", "one member", "short first", "short last", "four members", "a byte too many"],
)
def test_content_comes_whole_however_it_is_packed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "scan.nii.gz").write_bytes(content)
    np.testing.assert_array_equal(read(tmp_path / "scan.nii.gz"), make_volumes()[0])


MIDDLE = len(PACKED) // 2
FLIPPED = PACKED[:MIDDLE] + bytes([PACKED[MIDDLE] ^ 1]) + PACKED[MIDDLE + 1 :]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        *((PACKED[:n], "cut off or damaged") for n in (3, 15, 500, MIDDLE, -9, -1)),
        (FLIPPED, "cut off or damaged"),
        # the last four bytes state 4 GB
        (PACKED[:-4] + b"\xff" * 4, "cut off or damaged"),
        # flag 8: a name follows, up to a NUL, of which there is none
        (b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * 3_000_000, "cut off or damaged"),
        (CONTENT[:9392], "9392 bytes; expected the 18784 that its header states"),
        (gzip.compress(CONTENT[:700], mtime=0), "700 bytes; expected the 18784 that its header"),
        (CONTENT + bytes(nifti.SPARE_BYTES + 1), "more than 1067360 bytes; expected the 18784"),
    ],
    ids=range(12),
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "scan.nii.gz"
    path.write_bytes(content)
    for reader in (nifti.read_volume, nifti.read_label_map):
        with pytest.raises(CaseError, match=f"case c, file scan.nii.gz: found .*{found}"):
            reader(path, case_id="c")


def test_no_more_is_unpacked_than_the_header_asks_for(tmp_path: Path) -> None:
    packed = gzip.compress(CONTENT + bytes(100 * nifti.SPARE_BYTES), 1)
    # the last four bytes state the length, or a likely one
    for content in (packed, packed[:-4] + len(CONTENT).to_bytes(4, "little")):
        (tmp_path / "bomb.nii.gz").write_bytes(content)
        tracemalloc.start()
        with pytest.raises(CaseError, match=rf"more than \d+ bytes; expected the {len(CONTENT)}"):
            read(tmp_path / "bomb.nii.gz")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5 * nifti.SPARE_BYTES
    # nor is a sparse file of a terabyte read
    path = write_nifti(tmp_path / "scan.nii", make_volumes()[0])
    os.truncate(path, 1 << 40)
    with pytest.raises(CaseError, match="found more than"):
        read(path)


NO_FILES = {
    "a link to nothing": "No such file",
    "a FIFO": "it is a named pipe",
    "a socket": "it is a socket",
    "a device": "it is a device",
    "a link to itself": "Too many levels of symbolic links",
    "a folder": "it is a folder",
}


@pytest.mark.parametrize(("what", "found"), NO_FILES.items())
def test_what_is_no_file_is_refused_without_opening_it(tmp_path, what: str, found: str) -> None:
    path = tmp_path / "scan.nii.gz"
    UNREADABLE[what](path)
    for reader in (nifti.read_volume, nifti.read_geometry):
        with pytest.raises(CaseError, match=rf"scan\.nii\.gz: found .* \({found}"):
            reader(path, case_id="c")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CaseError, match="found a file that cannot be read"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("shape", "volume", "message"),
    [
        ((4, 5, 6, 4), None, "found 4-D data of shape 4x5x6x4; expected three axes"),
        ((4, 5), None, "found 2-D data of shape 4x5; expected three axes"),
        ((4, 5, 6), 0, "found 3-D data of shape 4x5x6; expected four axes, with a volume 0"),
        ((4, 5, 6, 2), 2, "found 4-D data .*; expected four axes, with a volume 2 along the last"),
    ],
)
def test_axes_other_than_asked_for_are_refused(tmp_path, shape, volume, message):
    path = write_nifti(tmp_path / "scan.nii.gz", np.zeros(shape, dtype=np.int16))
    for reader in (nifti.read_volume, nifti.read_geometry):
        with pytest.raises(CaseError, match=message):
            reader(path, case_id="case_1", volume=volume)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"magic": b"ni1"}, "no NIfTI header"),
        *(({"datatype": code}, f"voxels of datatype {code}") for code in (32, 77, 128)),
        ({"scl_slope": 2.0, "scl_inter": np.inf}, "an invalid header"),
        ({"sform_code": 1, "srow_x": np.nan}, "an affine that is singular or not finite"),
        ({"sform_code": 1, "srow_x": 0.0}, "an affine that is singular or not finite"),
        ({"dim": [3, 24, 24, 0, 1, 1, 1, 1]}, "3-D data of shape 24x24x0"),
        ({"dim": [3, 24, 24, -1, 1, 1, 1, 1]}, "3-D data of shape 24x24x-1"),
        ({"sform_code": 0, "qform_code": 1, "quatern_b": 5.0}, "an invalid header"),
        *(
            ({"vox_offset": byte}, f"voxels that begin at byte {byte}.*; expected .* from 352 to")
            for byte in (np.nan, np.inf, -352, 352.5, 3_000_000_000)
        ),
        ({"sform_code": 6}, "the sform_code 6, where the standard has 0 to 5"),
        ({"qform_code": -1}, "the qform_code -1, where the standard has 0 to 5"),
        ({"xyzt_units": 1}, "lengths in metres; expected a position in millimetres"),
        ({"xyzt_units": 11}, "lengths in micrometres"),
        ({"sform_code": 1, "srow_x": [1e30, 0, 0, 0]}, "voxels of 1e\\+30x1x1 mm"),
        ({"sform_code": 1, "srow_x": [1e-3, 0, 0, 0]}, "voxels of 0.001x1x1 mm"),
        ({"sform_code": 1, "srow_x": [1, 0, 0, 1e9]}, "an origin at .* mm"),
        ({"dim": [8, 24, 24, 16, 1, 1, 1, 1]}, "8-D data; expected three axes"),
        ({"dim": [-3, 24, 24, 16, 1, 1, 1, 1]}, "-3-D data; expected three axes"),
        ({"dim": [3, 4000, 4000, 600, 1, 1, 1, 1]}, ".* at most 536870912 voxels"),
        ({"dim": [4, 24, 24, 16, 999, 1, 1, 1]}, ".* in at most 16 volumes"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, fields: dict[str, object], found: str) -> None:
    path = broken_header(tmp_path / "scan.nii", **fields)
    for reader in (nifti.read_volume, nifti.read_geometry):
        with pytest.raises(CaseError, match=f"found {found}"):
            reader(path, case_id="case_1")


BAD_QFORM = {"qform_code": 1, "sform_code": 2}


@pytest.mark.parametrize(
    "fields",
    [
        *({"sform_code": 5}, {"xyzt_units": 0}, {"bitpix": 7}),
        # without codes the position is the spacing, whose signs say nothing
        {"sform_code": 0, "qform_code": 0, "pixdim": [1, 2, -2, -3, 1, 1, 1, 1]},
        # a qfac of zero is read as one
        {"sform_code": 0, "qform_code": 1, "pixdim": [0, 1, 1, 1, 1, 1, 1, 1]},
        # a qform that is invalid is omitted beside a good sform
        BAD_QFORM | {"quatern_b": np.nan},
        BAD_QFORM | {"quatern_c": 7.0},
        BAD_QFORM | {"qoffset_x": np.inf},
        BAD_QFORM | {"pixdim": [-1] * 8},
    ],
    ids=str,
)
def test_an_unusual_header_is_read_and_written(tmp_path: Path, fields: dict[str, object]) -> None:
    path = broken_header(tmp_path / "scan.nii", **fields)
    volume = nifti.read_volume(path, case_id="c")
    nifti.write_volume(tmp_path / "label.nii.gz", make_label_map(), volume.geometry)
    np.testing.assert_array_equal(volume.array, make_volumes()[0])
    assert nifti.read_geometry(tmp_path / "label.nii.gz", case_id="c") == volume.geometry
    if "qform_code" in fields and any(fields[code] for code in ("qform_code", "sform_code")):
        np.testing.assert_array_equal(volume.geometry.affine, BRATS_AFFINE)
        assert volume.geometry.qform_code == (fields["sform_code"] == 0)


def test_a_grid_that_resampling_makes_too_large_is_refused_before(tmp_path: Path) -> None:
    affine = np.diag([80.0, 80.0, 80.0, 1.0])
    path = write_nifti(tmp_path / "scan.nii", make_volumes()[0], affine)
    volume = nifti.read_volume(path, case_id="c")
    assert nifti.plan_resampling(volume, (80.0, 80.0, 80.0), case_id="c") is None
    assert nifti.plan_resampling(volume, (20.0, 20.0, 20.0), case_id="c") is not None
    with pytest.raises(CaseError, match=r"1920x1920x1280 voxels of 1x1x1 mm; expected at most"):
        nifti.plan_resampling(volume, (1.0, 1.0, 1.0), case_id="c")


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", ">f4"])
def test_whole_numbers_of_any_type_are_a_label_map(tmp_path: Path, dtype: str) -> None:
    path = write_nifti(tmp_path / "seg.nii.gz", make_label_map().astype(dtype))
    # the slope has no exact form in the float32 of the header: rounding is no fraction
    image = nib.Nifti1Image(make_label_map() * np.uint8(63), BRATS_AFFINE)
    image.header.set_slope_inter(1 / 63, 0)
    nib.save(image, tmp_path / "scaled.nii.gz")
    for name in (path.name, "scaled.nii.gz"):
        labels = nifti.read_label_map(tmp_path / name, case_id="case_1").array
        assert (labels.dtype, labels.flags.writeable) == (np.uint8, False)
        np.testing.assert_array_equal(labels, make_label_map())
    assert not np.array_equal(oracle(tmp_path / "scaled.nii.gz"), make_label_map())


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (0.5, "float32", "found the value 0.5; expected whole numbers"),
        (np.nan, "float32", "found the value nan"),
        (np.inf, "float32", "found the value inf"),
        (-1.0, "float32", "found values from -1.0 to 4.0; expected label values"),
        (256, "int16", "found values from 0 to 256"),
    ],
)
def test_no_label_map_is_refused(tmp_path: Path, value: float, dtype: str, message: str) -> None:
    array = make_label_map().astype(dtype)
    array[1, 2, 3] = value
    path = write_nifti(tmp_path / "c_seg.nii.gz", array)
    with pytest.raises(CaseError, match=rf"c_seg\.nii\.gz: {message}.*not an image"):
        nifti.read_label_map(path, case_id="c")


@pytest.mark.real
@pytest.mark.slow
def test_real_volumes_are_what_nibabel_reads(real_data: Path) -> None:
    paths = sorted(real_data.rglob("*.nii.gz"))[::7]
    assert len(paths) > 5
    for path in paths:
        volume = nifti.read_volume(path, case_id="real")
        np.testing.assert_array_equal(volume.array, oracle(path))
        np.testing.assert_array_equal(volume.geometry.affine, nib.load(path).affine)
