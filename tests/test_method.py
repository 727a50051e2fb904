"""Test the preparation of new cases, and the way back to their grid."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from brats_seg.data.store import open_case, read_case_manifest
from brats_seg.errors import CaseError
from brats_seg.voxels.box import Box
from tests.builders import BRATS_AFFINE, make_volumes
from tests.inference_builders import CASES, read_scan, write_scan

IMAGES = make_volumes(seed=3)


def test_the_input_is_that_of_training(tiny_scans: Path, tiny_prepared: Path) -> None:
    prepared = open_case(tiny_prepared, CASES[0])
    scan = read_scan(tiny_scans / CASES[0])
    assert scan.box == read_case_manifest(tiny_prepared, CASES[0]).box
    whole = Box.at((0, 0, 0), prepared.shape)
    assert np.array_equal(scan.image, whole.read(prepared.image).astype(np.float32))


def test_thick_slices_are_resampled_and_brought_back_with_a_warning(tmp_path: Path) -> None:
    images = make_volumes(shape=(24, 24, 8), seed=3)
    scan = read_scan(write_scan(tmp_path / "case", images, np.diag([-1.0, -1.0, 2.0, 1.0])))
    back = scan.on_scan_grid(scan.on_scan_spacing(scan.image[3:])[0])
    assert scan.resampling.after == (24, 24, 16)
    assert any("voxels of 1x1x2 mm were resampled to 1x1x1 mm" in one for one in scan.case.remarks)
    assert back.shape == (24, 24, 8)
    inside = (images > 0).all(axis=0)
    assert np.corrcoef(back[inside], images[3][inside])[0, 1] > 0.95
    # finer voxels, and little larger ones, are resampled without a word
    for number, mm in enumerate((0.8, 1.1, 1.25)):
        fine = write_scan(tmp_path / str(number), IMAGES, np.diag([-mm, -mm, mm, 1.0]))
        assert read_scan(fine).resampling is not None
        assert any("resampled" in one for one in read_scan(fine).case.remarks) == (mm == 1.25)


def test_direction_background_slope_and_intercept_change_nothing(tmp_path: Path) -> None:
    usual = read_scan(write_scan(tmp_path / "a", IMAGES))
    flipped = read_scan(write_scan(tmp_path / "b", IMAGES[:, ::-1, ::-1], np.eye(4)))
    # a negative background is no brain
    background = np.where((IMAGES == 0).all(axis=0), -1000, IMAGES)
    negative = read_scan(write_scan(tmp_path / "c", background))
    folder = write_scan(tmp_path / "d", IMAGES)
    for path in folder.iterdir():
        image = nib.load(path)
        header = image.header.copy()
        header.set_slope_inter(0.5, 10)
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj) * 0.5 + 10, BRATS_AFFINE, header), path)
    assert np.array_equal(usual.image, flipped.image)
    assert negative.box == usual.box
    assert np.array_equal(negative.image, usual.image)
    assert np.allclose(read_scan(folder).image, usual.image, atol=2e-3)


def test_a_rotated_grid_has_a_warning(tmp_path: Path) -> None:
    cosine, sine = np.cos(0.35), np.sin(0.35)
    turned = np.array([[cosine, -sine, 0, 0], [sine, cosine, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    scan = read_scan(write_scan(tmp_path / "case", make_volumes(), turned))
    assert any(w.startswith("the scan does not seem to be registered") for w in scan.case.remarks)


@pytest.mark.real
def test_real_scans_have_no_warning_and_four_grids_are_refused(real_data: Path) -> None:
    for name in ("BraTS-GLI-00001-000", "TCGA-FG-6692_atlas"):
        scan = read_scan(real_data / "unlabelled" / name)
        assert scan.case.remarks == ()
        assert all(120 < n < 200 for n in scan.box.shape)
    with pytest.raises(CaseError, match="Register all files to one grid"):
        read_scan(real_data / "unlabelled" / "TCGA-FG-6692_native")
