from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.discovery import find_cases
from brats_seg.cases.index import Inspection, inspect_case
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024
from tests.builders import (
    BRATS_AFFINE,
    SHAPE,
    make_label_map,
    make_volumes,
    write_case,
    write_nifti,
)

CASE_ID = "BraTS2021_00000"


def only_case(root: Path) -> Case:
    [case] = find_cases(root).cases
    return case


def inspected(root: Path) -> Inspection:
    return inspect_case(only_case(root))


def replaced(root: Path, suffix: str, array: npt.NDArray[np.generic], scale: float = 1.0) -> Path:
    """Write another volume in the place of one of the case."""
    folder = root / CASE_ID
    affine = BRATS_AFFINE @ np.diag([scale, scale, scale, 1])
    return write_nifti(folder / f"{CASE_ID}_{suffix}.nii.gz", array, affine)


def test_label_values_are_counted(tmp_path: Path) -> None:
    write_case(tmp_path, CASE_ID)
    labels = make_label_map()
    expected = tuple((value, int((labels == value).sum())) for value in (0, 1, 2, 4))

    found = inspected(tmp_path)

    assert found.label_counts == expected
    assert found.label_values == (0, 1, 2, 4)
    assert found.shape == SHAPE
    assert found.problems == ()


def test_a_label_map_without_background_is_counted(tmp_path: Path) -> None:
    write_case(tmp_path, CASE_ID)
    replaced(tmp_path, "seg", np.full(SHAPE, 2, dtype=np.uint8))

    assert inspected(tmp_path).label_counts == ((2, 24 * 24 * 16),)


def test_a_case_without_label_map_has_no_values(tmp_path: Path) -> None:
    write_case(tmp_path, CASE_ID, labelled=False)

    assert inspected(tmp_path).label_values == ()


def test_the_volume_of_the_tumour_is_that_of_its_region() -> None:
    found = Inspection(
        shape=SHAPE,
        voxel_hash="",
        label_counts=((0, 1000), (1, 10), (2, 20), (3, 300), (4, 4000)),
        label_voxel_mm3=2.5,
        problems=(),
    )

    assert found.tumour_ml(BRATS2017) == (10 + 20 + 4000) * 2.5 / 1000
    assert found.tumour_ml(BRATS2023) == (10 + 20 + 300) * 2.5 / 1000
    # the resection cavity is no tumour
    assert found.tumour_ml(BRATS2024) == (10 + 20 + 300) * 2.5 / 1000


def test_the_volume_of_a_voxel_comes_from_the_affine(tmp_path: Path) -> None:
    write_case(tmp_path, CASE_ID)
    for suffix, array in zip(("t1", "t1ce", "t2", "flair"), make_volumes(), strict=True):
        replaced(tmp_path, suffix, array, scale=2)
    replaced(tmp_path, "seg", make_label_map(), scale=2)

    found = inspected(tmp_path)

    assert found.problems == ()
    assert found.label_voxel_mm3 == pytest.approx(8)


@pytest.mark.parametrize("dtype", ["int32", "float32", "float64", ">i2"])
def test_one_scan_has_one_hash_whatever_it_is_stored_as(tmp_path: Path, dtype: str) -> None:
    write_case(tmp_path, CASE_ID)
    expected = inspected(tmp_path).voxel_hash
    replaced(tmp_path, "t1", make_volumes()[0].astype(dtype))

    assert inspected(tmp_path).voxel_hash == expected


def test_hashes_of_fractions_do_not_depend_on_their_type(tmp_path: Path) -> None:
    write_case(tmp_path, CASE_ID)
    hashes = set()
    for dtype in ("float32", "float64"):
        array = (make_volumes()[0] / 7).astype(np.float32).astype(dtype)
        replaced(tmp_path, "t1", np.where(array == 0, -0.0 if dtype == "float64" else 0.0, array))
        hashes.add(inspected(tmp_path).voxel_hash)

    assert len(hashes) == 1


def test_other_scans_have_other_hashes(tmp_path: Path) -> None:
    write_case(tmp_path, CASE_ID)
    array = make_volumes()[0]
    changed = array.copy()
    changed[12, 12, 8] += 1
    hashes = set()
    # the same bytes along other axes
    turned = array.reshape((16, 24, 24), order="F")
    for one in (array, changed, array * 200.0, array[::-1], turned, array / 7):
        replaced(tmp_path, "t1", np.ascontiguousarray(one))
        hashes.add(inspected(tmp_path).voxel_hash)

    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("suffix", "array", "problem"),
    [
        ("t1", make_volumes()[0][..., None].repeat(2, axis=3), "found 4-D data of shape"),
        ("flair", make_volumes()[0][..., None].repeat(2, axis=3), "found 4-D data of shape"),
        ("seg", make_label_map()[..., None].repeat(3, axis=3), "found 4-D data of shape"),
        ("t1", np.full(SHAPE, np.nan, dtype=np.float32), "found 9216 voxels that are NaN"),
        ("t1", np.zeros(SHAPE, dtype=np.int16), "found a constant volume, 0 everywhere"),
        ("t2", make_volumes()[0][:20], "found 20x24x16 voxels"),
        ("seg", make_label_map()[:, :20], "found 24x20x16 voxels"),
        ("seg", make_label_map() * 0.5, "found the value 0.5; expected whole numbers"),
        ("seg", make_label_map().astype(np.int16) - 1, "found values from -1 to 3"),
    ],
)
def test_what_is_wrong_with_a_file_is_a_problem(
    tmp_path: Path, suffix: str, array: npt.NDArray[np.generic], problem: str
) -> None:
    write_case(tmp_path, CASE_ID)
    replaced(tmp_path, suffix, array)

    [found] = inspected(tmp_path).problems

    assert found.startswith(f"case {CASE_ID}, file {CASE_ID}_{suffix}.nii.gz: {problem}")


@pytest.mark.parametrize("suffix", ["t1", "t1ce", "seg"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "found an empty file"),
        (b"\x1f\x8b\x08", "found a gzip file that is cut off"),
        (b"text" * 200, "found no NIfTI header (the file begins with b'texttext"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_problem(
    tmp_path: Path, suffix: str, content: bytes, problem: str
) -> None:
    path = write_case(tmp_path, CASE_ID) / f"{CASE_ID}_{suffix}.nii.gz"
    path.write_bytes(content)

    [found] = inspected(tmp_path).problems

    assert problem in found


def test_a_modality_that_is_cut_off_is_a_problem_though_only_its_header_is_read(
    tmp_path: Path,
) -> None:
    path = write_case(tmp_path, CASE_ID) / f"{CASE_ID}_flair.nii.gz"
    path.write_bytes(path.read_bytes()[:-100])

    [found] = inspected(tmp_path).problems

    assert f"{CASE_ID}_flair.nii.gz: found a gzip file that is cut off" in found


def test_all_problems_of_a_case_are_told_at_once(tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASE_ID)
    for suffix in ("t1", "t1ce", "seg"):
        (folder / f"{CASE_ID}_{suffix}.nii.gz").write_bytes(b"")
    replaced(tmp_path, "flair", make_volumes()[3][:10])

    problems = inspected(tmp_path).problems

    assert [problem.split(": ")[0].split("_")[-1] for problem in problems] == [
        "t1.nii.gz",
        "seg.nii.gz",
        "t1ce.nii.gz",
        "flair.nii.gz",
    ]


def test_a_scan_that_cannot_be_read_has_no_hash(tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASE_ID)
    (folder / f"{CASE_ID}_t1.nii.gz").write_bytes(b"")

    found = inspected(tmp_path)

    assert (found.voxel_hash, found.shape) == ("", None)
    assert found.label_values == (0, 1, 2, 4)
