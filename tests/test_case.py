"""Loading a case: what is read, what is checked, what is found out."""

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from brats_seg.cases import nifti
from brats_seg.cases.case import Case, case_of_arrays, check_one_grid, load_case, read_case_files
from brats_seg.cases.find import find_cases
from brats_seg.cases.index import index_cases
from brats_seg.errors import CaseError, LabelError
from brats_seg.labels import BRATS2017, BRATS2024, MODALITIES, MSD
from tests import builders
from tests.builders import SHAPE
from tests.check_builders import geometry

FLIPPED = builders.BRATS_AFFINE @ nib.affines.from_matvec(np.diag([-1, 1, 1]), [SHAPE[0] - 1, 0, 0])


def written(root: Path, case_id: str = "BraTS2021_00000", **values: object) -> Case:
    builders.write_case(root, case_id, **values)
    (case,) = find_cases(root).cases
    return case


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    read_packed = nifti.read_packed

    def counted(path: Path, *, case_id: str) -> bytes:
        counts[path.name] += 1
        return read_packed(path, case_id=case_id)

    monkeypatch.setattr(nifti, "read_packed", counted)
    return counts


def test_a_case_is_turned_to_the_axes_of_brats(tmp_path: Path) -> None:
    case = written(tmp_path)
    arrays = [*builders.make_volumes(), builders.make_label_map()]
    for scan, array in zip((*case.images, case.label), arrays, strict=True):
        builders.write_nifti(case.path_of(scan), array[::-1], FLIPPED)
    loaded = load_case(case)
    for volume, expected in zip((*loaded.volumes, loaded.label), arrays, strict=True):
        np.testing.assert_array_equal(volume.array, expected)
    assert (loaded.case.release, loaded.convention) == ("brats2021", BRATS2017)
    np.testing.assert_allclose(loaded.volumes[0].geometry.affine, builders.BRATS_AFFINE)
    np.testing.assert_allclose(loaded.geometry.affine, FLIPPED)


def test_files_of_one_grid_may_be_stored_along_different_axes(tmp_path: Path) -> None:
    case = written(tmp_path)
    arrays = [*builders.make_volumes(), builders.make_label_map()]
    for index, scan in ((1, case.files["t1c"]), (4, case.files["label"])):
        builders.write_nifti(case.path_of(scan), arrays[index][::-1], FLIPPED)
    loaded = load_case(case)
    for volume, expected in zip((*loaded.volumes, loaded.label), arrays, strict=True):
        np.testing.assert_array_equal(volume.array, expected)
    np.testing.assert_allclose(loaded.geometry.affine, builders.BRATS_AFFINE)
    # moved by a voxel, it is another grid
    moved = nib.affines.from_matvec(np.eye(3), [1, 0, 0]) @ FLIPPED
    builders.write_nifti(case.path_of(case.files["t1c"]), arrays[1][::-1], moved)
    with pytest.raises(CaseError, match=r"24x24x16 .*, axes RPS.*the grid of .*axes LPS"):
        load_case(case)


def test_every_file_is_read_once_a_label_map_if_wanted(tmp_path: Path, reads: Counter[str]) -> None:
    case = written(tmp_path)
    paths = [case.path_of(scan) for scan in (*case.images, case.label)]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    hashes = tuple(f"{digest}#None" for digest in digests)
    assert load_case(case, files=read_case_files(case)).hashes == hashes
    assert reads == {path.name: 1 for path in paths}
    loaded = load_case(case, with_label=False)
    assert loaded.label is loaded.convention is None
    assert (loaded.hashes, reads[paths[-1].name]) == (hashes[:-1], 1)


def test_a_file_of_four_volumes_is_read_once(tmp_path: Path, reads: Counter[str]) -> None:
    builders.write_decathlon_case(tmp_path)
    loaded = load_case(find_cases(tmp_path).cases[0])
    assert reads["BRATS_001.nii.gz"] == 2  # the volumes, and the label map of the same name
    for volume, expected in zip(loaded.volumes, builders.make_volumes(), strict=True):
        np.testing.assert_array_equal(volume.array, expected)
    assert loaded.convention == MSD


def test_a_gli_case_of_the_2024_shape_is_of_2024(tmp_path: Path) -> None:
    case_id, values = "BraTS-GLI-00001-000", (0, 1, 2, 4)
    rng = np.random.default_rng(0)
    for modality in (*MODALITIES, "seg"):
        array = np.zeros((182, 218, 182), np.int16)
        array[80:90, 80:90, 80:90] = rng.integers(1, 900, (10, 10, 10))
        if modality == "seg":
            array[:] = 0
            array[80, 80, : len(values)] = values
        builders.write_nifti(tmp_path / case_id / f"{case_id}-{modality}.nii", array)
    loaded = load_case(find_cases(tmp_path).cases[0])
    (indexed,) = index_cases(tmp_path).cases
    assert (loaded.case.release, loaded.convention) == ("brats2024-gli", BRATS2024)
    assert (indexed.release, indexed.convention) == ("brats2024-gli", "brats2024")
    assert load_case(indexed).convention == BRATS2024


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    case = written(tmp_path)
    case.path_of(case.images[2]).unlink()
    with pytest.raises(CaseError, match=r"_t2\.nii\.gz: found a file that cannot be read"):
        load_case(case)
    with pytest.raises(CaseError, match=r"no t2w; two label maps$"):
        load_case(replace(case, problems=("no t2w", "two label maps")))


def test_an_unknown_label_value_is_refused_and_no_tumour_is_not(tmp_path: Path) -> None:
    case = written(tmp_path)
    label_map = np.zeros(SHAPE, np.uint8)
    builders.write_nifti(case.path_of(case.label), label_map)
    assert load_case(case).label is not None
    label_map[0, 0, 0] = 9
    builders.write_nifti(case.path_of(case.label), label_map)
    with pytest.raises(LabelError, match=r"BraTS2021_00000_seg.*label values \[9\]"):
        load_case(case)


@pytest.mark.parametrize("dtype", ["int16", "uint16", "float32", "float64"])
def test_a_case_of_arrays_is_checked_and_turned_as_one_of_files(dtype: str) -> None:
    flipped = builders.BRATS_AFFINE @ np.diag([-1, 1, 1, 1])
    images = builders.make_volumes().astype(dtype)[:, ::-1]
    loaded = case_of_arrays("BraTS2021_00000", images, flipped)
    of_lists = case_of_arrays("case_1", images.tolist(), flipped.tolist())
    assert np.array_equal(of_lists.volumes[3].array, loaded.volumes[3].array)
    assert (loaded.case.release, loaded.case.modalities) == ("brats2021", MODALITIES)
    for volume, expected in zip(loaded.volumes, builders.make_volumes(), strict=True):
        np.testing.assert_array_equal(volume.array, expected)
    for wrong in (images[:3], images[..., 0], images[..., None], images[:, :0]):
        with pytest.raises(CaseError, match=r"an array of shape \(.* for .*; expected an image"):
            case_of_arrays("case_1", wrong, flipped)


@pytest.mark.parametrize(
    ("value", "where", "found"),
    [
        *((value, np.s_[3, 4, 5:7], "NaN or infinity in 2 voxels") for value in (np.nan, -np.inf)),
        (2e30, np.s_[3, 4, 5:7], "intensities from 0 to 2e.30"),
        *((value, ..., f"a constant volume, {value}.0 everywhere") for value in (0, 7)),
    ],
)
@pytest.mark.parametrize("which", range(4))
def test_impossible_voxels_are_refused(which: int, value: float, where: object, found: str) -> None:
    images = builders.make_volumes().astype(np.float32)
    images[which][where] = value
    with pytest.raises(CaseError, match=f"file {MODALITIES[which]}: found {found}"):
        case_of_arrays("case_1", images, builders.BRATS_AFFINE)


def test_a_missing_modality_is_refused_unless_it_is_not_asked_for(tmp_path: Path) -> None:
    case = written(tmp_path, labelled=False)
    for modality in ("t1c", "t2w"):
        case.path_of(case.files[modality]).unlink()
    (case,) = find_cases(tmp_path).cases
    with pytest.raises(CaseError, match=r"file BraTS2021_00000/: found no t1c, t2w; expected t1n"):
        load_case(case)
    assert len(load_case(case, modalities=("t1n", "t2f")).volumes) == 2
    assert not case.usable


def test_every_file_off_the_grid_of_the_first_is_named() -> None:
    shapes = {"a": SHAPE, "b": (1, 2, 3), "c": SHAPE, "d": (4, 5, 6)}
    grids = [(name, geometry(shape)) for name, shape in shapes.items()]
    with pytest.raises(CaseError, match=r"file b and d: found 1x2x3 .* and 4x5x6 .*the grid of a"):
        check_one_grid("case_1", grids)
