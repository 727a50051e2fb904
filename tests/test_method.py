"""Test the preparation of new cases, and the way back to their grid."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from brats_seg.cases.find import find_inputs
from brats_seg.cases.index import index_cases
from brats_seg.config import StoreConfig
from brats_seg.data.prepare import prepare_cases
from brats_seg.data.store import open_case
from brats_seg.errors import CaseError
from brats_seg.inference.method import Scan
from brats_seg.voxels.box import Box
from tests.builders import BRATS_AFFINE, SHAPE, make_volumes, write_case, write_nifti
from tests.inference_builders import read_scan

NAMES = ("t1", "t1ce", "t2", "flair")


def read(folder: Path) -> Scan:
    (found,) = find_inputs([folder])
    return read_scan(found)


def write_scan(
    root: Path, images: np.ndarray, affine: np.ndarray = BRATS_AFFINE, case_id: str = "case"
) -> Path:
    for name, image in zip(NAMES, images, strict=True):
        write_nifti(root / case_id / f"{case_id}_{name}.nii.gz", image, affine)
    return root / case_id


def test_the_network_is_given_what_it_was_given_in_training(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "scans", labelled=False)
    index = index_cases(tmp_path / "scans")
    failures = prepare_cases(index.cases, tmp_path / "prepared", StoreConfig(), n_workers=0)
    prepared = open_case(tmp_path / "prepared", "BraTS2021_00000")

    scan = read(folder)

    assert failures == ()
    assert scan.box == prepared.box
    whole = Box.at((0, 0, 0), prepared.shape)
    assert np.array_equal(scan.image, prepared.read_image(whole).astype(np.float32))


TURNED = [
    np.diag([1.0, 1.0, 1.0, 1.0]),
    np.diag([-1.0, 1.0, -1.0, 1.0]),
    np.array([[0, 0, 1.0, 3], [-1, 0, 0, 4], [0, 1, 0, 5], [0, 0, 0, 1]]),
]


@pytest.mark.parametrize("affine", TURNED)
def test_what_comes_back_lies_where_the_scan_lies(tmp_path: Path, affine: np.ndarray) -> None:
    """A modality that is brought back is the one in the file, inside the crop."""
    images = make_volumes(seed=3)
    scan = read(write_scan(tmp_path, images, affine))

    back = scan.on_scan_grid(scan.on_scan_spacing(scan.image[3:])[0])

    assert back.shape == SHAPE
    inside = images[3] > 0
    assert np.corrcoef(back[inside], images[3][inside])[0, 1] > 0.9999
    assert not back[(images == 0).all(axis=0)].any()


def test_a_scan_is_turned_to_the_axes_of_brats_for_the_network(tmp_path: Path) -> None:
    images = make_volumes(seed=3)
    usual = read(write_scan(tmp_path / "a", images))
    flipped = read(write_scan(tmp_path / "b", images[:, ::-1, ::-1], np.diag([1.0, 1.0, 1.0, 1.0])))

    assert np.array_equal(usual.image, flipped.image)


def test_thick_slices_are_resampled_there_and_back_and_said_aloud(tmp_path: Path) -> None:
    images = make_volumes(shape=(24, 24, 8), seed=3)
    scan = read(write_scan(tmp_path, images, np.diag([-1.0, -1.0, 2.0, 1.0])))

    back = scan.on_scan_grid(scan.on_scan_spacing(scan.image[3:])[0])

    assert scan.resampling.after == (24, 24, 16)
    assert any("voxels of 1.00x1.00x2.00 mm were resampled" in one for one in scan.warnings)
    assert back.shape == (24, 24, 8)
    inside = (images > 0).all(axis=0)
    assert np.corrcoef(back[inside], images[3][inside])[0, 1] > 0.95


def test_a_negative_background_is_not_brain(tmp_path: Path) -> None:
    images = make_volumes(seed=3)
    usual = read(write_scan(tmp_path / "a", images))
    negative = np.where((images == 0).all(axis=0), -1000, images)

    scan = read(write_scan(tmp_path / "b", negative))

    assert scan.box == usual.box
    assert np.array_equal(scan.image, usual.image)


def test_slope_and_intercept_change_nothing(tmp_path: Path) -> None:
    images = make_volumes(seed=3)
    usual = read(write_scan(tmp_path / "a", images))
    folder = write_scan(tmp_path / "b", images)
    for path in folder.iterdir():
        image = nib.load(path)
        header = image.header.copy()
        header.set_slope_inter(0.5, 10)
        raw = np.asarray(image.dataobj)
        scaled = nib.Nifti1Image(raw * 0.5 + 10, BRATS_AFFINE, header)
        scaled.to_filename(path)

    scan = read(folder)

    assert np.allclose(scan.image, usual.image, atol=2e-3)


def test_a_turned_grid_is_mentioned(tmp_path: Path) -> None:
    cosine, sine = np.cos(0.35), np.sin(0.35)
    turned = np.array([[cosine, -sine, 0, 0], [sine, cosine, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])

    scan = read(write_scan(tmp_path, make_volumes(), turned))

    assert any("turned by 20 degrees against the axes of the body" in w for w in scan.warnings)


@pytest.mark.real
def test_four_grids_of_one_patient_are_refused(real_data: Path) -> None:
    with pytest.raises(CaseError, match="Register and resample all files of the case to one grid"):
        read(real_data / "unlabelled" / "TCGA-FG-6692_native")


@pytest.mark.real
@pytest.mark.parametrize("name", ["BraTS-GLI-00001-000", "TCGA-FG-6692_atlas"])
def test_real_scans_without_labels_are_read_without_a_warning(real_data: Path, name: str) -> None:
    scan = read(real_data / "unlabelled" / name)

    assert scan.warnings == ()
    assert all(120 < n < 200 for n in scan.box.shape)
