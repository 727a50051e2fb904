"""Write NIfTI files with random faults, and try to read each and to write a label map on its grid.

The content of a file depends on its number alone. Any error but `CaseError` in reading it is a fault
of the package.
"""

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np

from brats_seg.cases import nifti
from brats_seg.cases.case import Case, LoadedCase, ScanFile, load_case
from brats_seg.cases.index import inspect_case
from brats_seg.errors import CaseError
from brats_seg.inference.method import prepare_scan
from brats_seg.labels import MODALITIES
from brats_seg.voxels.grids import find_orientation, reorient_back
from tests.builders import make_case

SHAPE = (9, 8, 7)
AFFINES = (
    np.diag([-1.0, -1.0, 1.0, 1.0]),
    np.array([[-0.9, 0, 0.3, 90], [0, 0.86, 0, -71], [0.3, 0, 0.9, -98], [0, 0, 0, 1.0]]),
    np.diag([2.0, 2.0, 3.0, 1.0]),
)
TYPES = ("<i2", ">i2", "u1", "<f4", "<f8", ">f4", "<u2", "<i8")
SPACING_MM = (1.0, 1.0, 1.0)
_SMALL = 100_000
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -1.0, 1.0, 1e30, -1e30, 1e-30, 1e300, 0.5, 348.0, 1e9)
FIELDS = (
    *("dim", "intent_code", "datatype", "bitpix", "slice_start", "pixdim", "vox_offset"),
    *("scl_slope", "scl_inter", "slice_end", "slice_code", "xyzt_units", "cal_max", "cal_min"),
    *("slice_duration", "toffset", "qform_code", "sform_code", "quatern_b", "quatern_c"),
    *("quatern_d", "qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z", "dim_info"),
)


def mutated_file(number: int) -> tuple[str, bytes]:
    rng = np.random.default_rng(number)
    content = bytearray(_whole_file(rng))
    for _ in range(rng.integers(1, 4)):
        _CHANGES[rng.integers(len(_CHANGES))](content, rng)
    if rng.random() < 0.5:
        return "scan.nii", bytes(content)
    packed = bytearray(gzip.compress(bytes(content), 1))
    if rng.random() < 0.3:
        _PACKED_CHANGES[rng.integers(len(_PACKED_CHANGES))](packed, rng)
    return "scan.nii.gz", bytes(packed)


def read_and_write_back(path: Path) -> bool:
    """Return whether any way of reading a file takes it, and its label map lies where the file does."""
    readers = (
        lambda: nifti.read_volume(path, case_id="case").geometry,
        lambda: nifti.read_geometry(path, case_id="case"),
        lambda: nifti.read_volume(path, case_id="case", volume=1).geometry,
        lambda: nifti.read_label_map(path, case_id="case").geometry,
        lambda: _loaded(path).geometry,
    )
    inspect_case(_case(path))
    is_read = False
    for read in readers:
        try:
            geometry = read()
        except CaseError as error:
            str(error).encode()
            continue
        is_read = True
        label_map = np.zeros(geometry.shape, np.uint8)
        label_map[0, 0, 0] = 1
        written = path.with_name("label.nii.gz")
        nifti.write_volume(written, label_map, geometry)
        again = nifti.read_label_map(written, case_id="case")
        assert np.array_equal(again.array, label_map)
        assert np.allclose(again.geometry.affine, geometry.affine, rtol=1e-5, atol=1e-3)
        assert np.allclose(again.geometry.qform, geometry.qform, rtol=1e-5, atol=1e-3)
        codes = again.geometry.qform_code, again.geometry.sform_code
        assert codes == (geometry.qform_code, geometry.sform_code)
    return is_read


def _loaded(path: Path) -> LoadedCase:
    """Load and prepare a case of four modalities from one file with slightly different voxels."""
    loaded = load_case(_case(path))
    resampling = nifti.plan_resampling(loaded.volumes[0], SPACING_MM, case_id="case")
    if resampling is None or np.prod(resampling.after) < _SMALL:
        scan = prepare_scan(loaded, SPACING_MM)
        assert scan.on_scan_grid(scan.on_scan_spacing(scan.image)[0]).shape == loaded.geometry.shape
    turned = find_orientation(loaded.geometry.affine)
    assert reorient_back(loaded.volumes[0].array, turned).shape == loaded.geometry.shape
    return loaded


def _case(path: Path) -> Case:
    """Return a case whose modalities differ in the last byte of their voxels."""
    files = {}
    content = path.read_bytes()
    for index, modality in enumerate(MODALITIES):
        name = f"{modality}-{path.name}"
        changed = bytearray(content)
        if path.suffix == ".nii" and content:
            changed[-1 - index] ^= 3
        path.with_name(name).write_bytes(changed)
        volume = index if path.suffix == ".gz" else None
        files[modality] = ScanFile(path=Path(name), volume=volume)
    return make_case(root=path.parent, files=files, release="unknown")


def _whole_file(rng: np.random.Generator) -> bytes:
    dtype = np.dtype(TYPES[rng.integers(len(TYPES))])
    shape = (*SHAPE, 4) if rng.random() < 0.4 else SHAPE
    if rng.random() < 0.2:
        array = (rng.random(shape) > 0.7).astype(dtype)
    else:
        array = rng.integers(0, 100, shape).astype(dtype)
        array[:2] = 0
    kind = nib.Nifti1Image if rng.random() < 0.7 else nib.Nifti2Image
    header = kind.header_class(endianness=dtype.byteorder.replace("|", "<"))
    header.set_data_dtype(dtype)
    affine = AFFINES[rng.integers(len(AFFINES))]
    image = kind(array, affine, header)
    image.set_qform(affine, code=int(rng.integers(0, 3)))
    image.set_sform(affine, code=int(rng.integers(0, 3)))
    if rng.random() < 0.2:
        image.header.extensions.append(nib.nifti1.Nifti1Extension(6, b"made by hand " * 9))
    if rng.random() < 0.2:
        image.header["xyzt_units"] = 10
    return bytes(image.to_bytes())


def _header_of(content: bytearray) -> nib.Nifti1Header:
    for kind in (nib.Nifti1Header, nib.Nifti2Header):
        if len(content) >= kind.sizeof_hdr and kind.may_contain_header(content):
            return kind(bytes(content[: kind.sizeof_hdr]), check=False)
    return nib.Nifti1Header()


def _change_field(content: bytearray, rng: np.random.Generator) -> None:
    header = _header_of(content)
    field = header.structarr[FIELDS[rng.integers(len(FIELDS))]]
    index = rng.integers(field.size) if rng.random() < 0.8 else slice(None)
    with np.errstate(all="ignore"):
        flat = field.reshape(-1)
        if field.dtype.kind == "f":
            flat[index] = rng.choice([*SPECIAL, *rng.normal(0, 3, 3)])
        else:
            limits = np.iinfo(field.dtype)
            values = (0, 1, 2, 3, 5, 7, 9, 77, limits.max, limits.min, int(rng.integers(-9, 300)))
            value = values[rng.integers(len(values))]
            flat[index] = min(max(value, limits.min), limits.max)
    content[: header.sizeof_hdr] = header.binaryblock


def _flip_bit(content: bytearray, rng: np.random.Generator) -> None:
    if content:
        # half of them in the header
        n_bytes = min(len(content), rng.choice([360, len(content)]))
        content[rng.integers(n_bytes)] ^= 1 << rng.integers(8)


def _splice(content: bytearray, rng: np.random.Generator) -> None:
    """Replace a stretch by one from elsewhere in the file: nothing, some bytes, or all to the end."""
    starts = rng.integers(len(content) + 1, size=2)
    stops = starts + rng.choice([0, rng.integers(64), rng.integers(1000), len(content)], size=2)
    content[starts[0] : stops[0]] = content[starts[1] : stops[1]]


_PACKED_CHANGES = (_flip_bit, _splice)
_CHANGES = (*(_change_field,) * 5, _flip_bit, *_PACKED_CHANGES)
