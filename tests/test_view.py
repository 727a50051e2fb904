"""Test reading a case for figures: axes of BraTS and label conventions."""

from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.layouts import OUTPUT_MARKER
from brats_seg.errors import CaseError, LabelError, UsageError
from brats_seg.figures.sections import Grid
from brats_seg.figures.view import drawn_of, open_view, with_prediction, with_uncertainty
from brats_seg.labels import BRATS2017, BRATS2023
from tests.builders import SHAPE, make_label_map, make_volumes, write_nifti


def test_the_first_case_is_read_with_its_reference(brats_root: Path) -> None:
    view = open_view(brats_root)

    assert view.case_id == "BraTS2021_00000"
    np.testing.assert_array_equal(view.image("FLAIR"), make_volumes()[3])
    assert view.reference is not None
    np.testing.assert_array_equal(view.reference.label_map, make_label_map())
    assert view.reference.convention == BRATS2017


def test_a_prediction_is_found_by_the_name_of_its_case(brats_root: Path, tmp_path: Path) -> None:
    """In a convention of its own: 3 is ET there."""
    predicted = make_label_map(convention=BRATS2023, seed=7)
    write_nifti(tmp_path / "p" / "BraTS2021_00001.nii.gz", predicted)

    view = with_prediction(open_view(brats_root, "BraTS2021_00001"), tmp_path / "p")

    assert view.prediction is not None
    assert view.prediction.convention == BRATS2023
    assert [*drawn_of(view)] == ["reference", "prediction"]
    np.testing.assert_array_equal(drawn_of(view)["prediction"][2], predicted == 3)


@pytest.mark.parametrize(
    ("draw", "error", "words"),
    [
        (lambda root: open_view(root, "X"), UsageError, "it has BraTS2021_00000, .* and 1 more"),
        (lambda root: with_prediction(open_view(root), root / "p"), UsageError, "it has other"),
        (lambda root: with_prediction(open_view(root), root / "no"), UsageError, "does not exist"),
        (
            lambda root: with_prediction(open_view(root), root / "p" / "other.nii.gz"),
            CaseError,
            "expected the grid of the scans",
        ),
        (lambda root: open_view(root).image("swi"), UsageError, "no swi; there are t1n, t1c"),
        (lambda root: open_view(root, labels="brats2023"), LabelError, r"label values \[4\]"),
        (
            lambda root: with_uncertainty(open_view(root), root / "p"),
            UsageError,
            "predict the case with --uncertainty",
        ),
    ],
    ids=["case", "folder", "file", "grid", "modality", "labels", "uncertainty"],
)
def test_what_cannot_be_read_is_said(brats_root: Path, draw, error, words: str) -> None:
    write_nifti(brats_root / "p" / "other.nii.gz", make_label_map()[:, :, :-1])
    (brats_root / "p" / OUTPUT_MARKER).touch()

    with pytest.raises(error, match=words):
        draw(brats_root)


def test_the_directions_come_from_the_files_and_the_background_is_0(tmp_path: Path) -> None:
    # 2 mm to the right, 3 mm to the head, 1 mm to the front
    affine = np.array([[2.0, 0, 0, 0], [0, 0, 1, 0], [0, 3, 0, 0], [0, 0, 0, 1]])
    for name, image in zip(("t1", "t1ce", "t2", "flair"), make_volumes(), strict=True):
        write_nifti(tmp_path / "a" / f"a_{name}.nii.gz", np.where(image == 0, -5, image), affine)

    view = open_view(tmp_path)
    grid = view.grid

    # R S A instead of L P S
    np.testing.assert_array_equal(view.images[0], np.swapaxes(make_volumes()[0], 1, 2)[::-1, ::-1])
    assert grid == Grid(spacing_mm=(2.0, 1.0, 3.0), directions=("L", "P", "S"))
    assert grid.voxel_ml == 0.006


def test_the_uncertainty_is_found_in_the_folder_of_a_prediction_or_refused(
    brats_root: Path, tmp_path: Path
) -> None:
    entropy = np.random.default_rng(0).uniform(0, 1, SHAPE).astype(np.float32)
    view, path = open_view(brats_root), tmp_path / "uncertainty" / "BraTS2021_00000.nii.gz"
    write_nifti(path, entropy)
    np.testing.assert_array_equal(with_uncertainty(view, tmp_path).uncertainty, entropy)
    for other, message in (
        (np.full(SHAPE, 3.0), r"values from 3 to 3; expected entropies from 0 to 1 bit"),
        (np.full(SHAPE, np.nan), r"values from nan to nan; expected entropies"),
        (np.zeros(SHAPE)[:-1], r"expected the grid of the scans"),
    ):
        write_nifti(path, other)
        with pytest.raises(CaseError, match=message):
            with_uncertainty(view, tmp_path)
