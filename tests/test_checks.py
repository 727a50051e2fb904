from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from brats_seg.cases.case import check_one_grid, check_volumes, check_voxels, have_one_grid
from brats_seg.cases.nifti import Geometry, Volume, read_geometry
from brats_seg.errors import CaseError
from tests.builders import BRATS_AFFINE, SHAPE, make_label_map, make_volumes

FILES = ("t1.nii.gz", "t1ce.nii.gz", "t2.nii.gz", "flair.nii.gz")


def grid(
    shape: tuple[int, int, int] = SHAPE, affine: npt.NDArray[np.float64] = BRATS_AFFINE
) -> Geometry:
    return Geometry(shape=shape, affine=affine, qform=affine, qform_code=1, sform_code=1)


def moved(mm: float) -> Geometry:
    affine = BRATS_AFFINE.copy()
    affine[1, 3] += mm
    return grid(affine=affine)


def volumes(dtype: str = "int16") -> list[Volume]:
    return [
        Volume(array=array.astype(dtype), geometry=grid(), file=file)
        for file, array in zip(FILES, make_volumes(), strict=True)
    ]


def label() -> Volume:
    return Volume(array=make_label_map(), geometry=grid(), file="seg.nii.gz")


@pytest.mark.parametrize("dtype", ["int16", "uint16", "float32", "float64"])
def test_a_sound_case_passes(dtype: str) -> None:
    check_volumes("case_1", volumes(dtype), label())
    check_volumes("case_1", volumes(dtype), None)


def test_three_modalities_are_too_few() -> None:
    with pytest.raises(
        CaseError,
        match=r"case_1, file t1\.nii\.gz, t1ce\.nii\.gz, t2\.nii\.gz: found 3 modalities; expected "
        "the four t1n, t1c, t2w, t2f. Add what is missing",
    ):
        check_volumes("case_1", volumes()[:3], None)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(4))
def test_voxels_that_are_not_finite_are_refused(which: int, value: float) -> None:
    images = volumes("float32")
    array = images[which].array.copy()
    array[3, 4, 5:7] = value
    images[which] = replace(images[which], array=array)

    with pytest.raises(CaseError, match=f"{FILES[which]}: found 2 voxels that are NaN or infinite"):
        check_volumes("case_1", images, label())


@pytest.mark.parametrize("value", [0, 7])
def test_a_constant_volume_is_refused(value: int) -> None:
    volume = replace(volumes()[0], array=np.full(SHAPE, value, dtype=np.int16))

    with pytest.raises(CaseError, match=f"t1.nii.gz: found a constant volume, {value} everywhere"):
        check_voxels("case_1", volume)


def test_a_label_map_without_tumour_is_no_constant_volume() -> None:
    check_volumes("case_1", volumes(), replace(label(), array=np.zeros(SHAPE, dtype=np.uint8)))


def test_two_shapes_in_a_case_are_refused() -> None:
    images = volumes()
    images[2] = replace(images[2], geometry=grid(shape=(24, 24, 17)))

    with pytest.raises(
        CaseError,
        match=r"file t2\.nii\.gz: found 24x24x17 voxels of 1.00x1.00x1.00 mm, axes LPS, origin "
        r"\(0.00, 239.00, 0.00\); expected the grid of t1\.nii\.gz: 24x24x16 voxels .* Register",
    ):
        check_volumes("case_1", images, label())


def test_a_label_map_on_another_grid_is_refused() -> None:
    with pytest.raises(CaseError, match=r"file seg\.nii\.gz: .*affine off by up to 5; expected"):
        check_volumes("case_1", volumes(), replace(label(), geometry=moved(5)))


def test_every_file_off_the_grid_is_named() -> None:
    grids = [("a", grid()), ("b", grid((1, 2, 3))), ("c", grid()), ("d", grid((4, 5, 6)))]

    with pytest.raises(CaseError, match=r"file b and d: found 1x2x3 .* and 4x5x6 .*the grid of a"):
        check_one_grid("case_1", grids)


def test_no_grid_and_one_grid_are_one_grid() -> None:
    check_one_grid("case_1", [])
    check_one_grid("case_1", [("a", grid())])


@pytest.mark.parametrize(("mm", "same"), [(0.0, True), (0.0009, True), (0.0011, False), (1, False)])
def test_affines_may_differ_by_rounding_only(mm: float, *, same: bool) -> None:
    assert have_one_grid(grid(), moved(mm)) is same


def test_a_flip_is_another_grid() -> None:
    flipped = BRATS_AFFINE @ np.diag([-1.0, 1, 1, 1])

    assert not have_one_grid(grid(), grid(affine=flipped))


def test_codes_of_the_header_do_not_matter() -> None:
    # the releases code the label map otherwise than the scans
    assert have_one_grid(grid(), replace(grid(), qform_code=2, sform_code=0))


@pytest.mark.real
def test_the_grids_of_a_scan_as_it_was_taken_do_not_match(real_data: Path) -> None:
    paths = sorted((real_data / "unlabelled" / "TCGA-FG-6692_native").glob("*.nii.gz"))
    grids = [(path.name, read_geometry(path, case_id="native")) for path in paths]

    with pytest.raises(CaseError, match=r"208x256x26 voxels of 0\.90x0\.90x5\.50 mm, axes LAS"):
        check_one_grid("native", grids)
