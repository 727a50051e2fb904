"""A scan and its label map on one grid."""

from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.inputs import find_inputs
from brats_seg.cases.nifti import read_label_map
from brats_seg.errors import CaseError, LabelError
from brats_seg.inference.scan import Scan, read_scan
from brats_seg.labels import BRATS2017, BRATS2023
from brats_seg.survival.radiomics import Tumour, measure_shape, tumour_of
from tests.builders import BRATS_AFFINE, make_label_map, make_volumes, write_case, write_nifti

SUFFIXES = ("_t1", "_t1ce", "_t2", "_flair")
MM = (1.0, 1.0, 1.0)


def read_case(root: Path, spacing_mm=MM) -> tuple[Scan, Path]:
    (case,) = find_inputs([root])
    label = case.label
    return read_scan(case, spacing_mm), root / label.path


def read_tumour(root: Path, convention=BRATS2017, spacing_mm=MM) -> Tumour:
    scan, label_path = read_case(root, spacing_mm)
    return tumour_of(scan, read_label_map(label_path, case_id=scan.case_id), convention)


def write_turned(root: Path, affine, turn=lambda array: array, spacing=(1, 1, 1)) -> None:
    """Write the small case as another scanner would have stored it."""
    folder = root / "BraTS2021_00000"
    affine = affine @ np.diag([*spacing, 1.0])
    for suffix, image in zip(SUFFIXES, make_volumes(), strict=True):
        write_nifti(folder / f"{folder.name}{suffix}.nii.gz", turn(image), affine)
    write_nifti(folder / f"{folder.name}_seg.nii.gz", turn(make_label_map()), affine)


def shape_of(tumour: Tumour) -> dict[str, float]:
    return {one.name: one.value for one in measure_shape(tumour)}


def test_labels_lie_where_the_tissue_is(tmp_path):
    write_case(tmp_path)

    tumour = read_tumour(tmp_path)

    # enhancing tumour is the brightest in T1 with contrast agent
    bright = tumour.image[1][tumour.regions[2]]
    assert bright.min() > tumour.image[1][tumour.brain & ~tumour.regions[0]].max()
    assert np.count_nonzero(tumour.label_map) == np.count_nonzero(make_label_map())


def test_another_orientation_gives_the_same_numbers(tmp_path):
    write_case(tmp_path / "a")
    swapped = BRATS_AFFINE[:, [1, 0, 2, 3]] * [1, 1, -1, 1]
    write_turned(tmp_path / "b", swapped, lambda array: array.transpose(1, 0, 2)[:, :, ::-1])

    one, other = (shape_of(read_tumour(tmp_path / name)) for name in "ab")

    assert one == pytest.approx(other)


def test_labels_outside_the_brain_are_kept(tmp_path):
    folder = write_case(tmp_path)
    labels = make_label_map()
    labels[0, 0, 0] = 2
    write_nifti(folder / "BraTS2021_00000_seg.nii.gz", labels)

    tumour = read_tumour(tmp_path)

    assert tumour.regions[0].sum() == np.count_nonzero(labels)
    assert not tumour.brain[0, 0, 0]


def test_a_resampled_scan_is_measured_in_the_voxels_of_its_files(tmp_path):
    write_turned(tmp_path, BRATS_AFFINE, spacing=(1, 1, 2))

    tumour = read_tumour(tmp_path)

    assert tumour.spacing_mm == (1, 1, 2)
    assert tumour.label_map.shape == (24, 24, 16)
    assert shape_of(tumour)["wt_ml"] == pytest.approx(np.count_nonzero(make_label_map()) * 0.002)


def test_a_label_map_of_another_grid_is_refused(tmp_path):
    folder = write_case(tmp_path)
    scan, _ = read_case(tmp_path)
    other = write_nifti(tmp_path / "other.nii.gz", make_label_map((20, 24, 16)))

    with pytest.raises(CaseError, match=r"file other.nii.gz: found 20x24x16.*expected the grid"):
        tumour_of(scan, read_label_map(other, case_id=folder.name), BRATS2017)


def test_values_of_another_convention_are_refused(tmp_path):
    write_case(tmp_path)

    with pytest.raises(
        LabelError, match=r"values \[4\]; expected those of the convention brats2023"
    ):
        read_tumour(tmp_path, BRATS2023)
