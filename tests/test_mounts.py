"""Finding the scans on mounts: any depth, several data sets, and none."""

import logging
from pathlib import Path

import pytest

from brats_seg.cases.discovery import find_data
from tests.builders import write_case


def test_the_folder_above_the_case_folders_is_found_at_any_depth(tmp_path: Path) -> None:
    """As BraTS 2020 lies on Kaggle, whose newer mounts put the owner in between."""
    scans = (
        tmp_path / "input" / "datasets" / "owner" / "brats20" / "BraTS2020_TrainingData" / "MICCAI"
    )
    for number in (1, 2):
        write_case(scans, f"BraTS20_Training_{number:03d}")

    assert find_data([tmp_path / "input"]) == scans


def test_the_release_with_most_labelled_cases_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_case(tmp_path / "a", "BraTS2021_00000")
    for number in (1, 2):
        write_case(tmp_path / "b", f"BraTS-GLI-{number:05d}-000")
    for number in range(3):
        write_case(tmp_path / "c", f"BraTS20_Validation_{number:03d}", labelled=False)

    assert find_data([tmp_path]) == tmp_path / "b"
    assert "2 cases of brats2023-gli; ignored: 1 of brats2021" in caplog.text


def test_a_release_in_two_parts_has_the_folder_of_both(tmp_path: Path) -> None:
    write_case(tmp_path / "input" / "part-1" / "x", "BraTS-GLI-00001-000")
    write_case(tmp_path / "input" / "part-2" / "x", "BraTS-GLI-00002-000")

    assert find_data([tmp_path / "input"]) == tmp_path / "input"


def test_one_case_is_data_too(tmp_path: Path) -> None:
    write_case(tmp_path / "scans")

    assert find_data([tmp_path]) == tmp_path / "scans"


def test_files_side_by_side_in_one_folder_are_found(tmp_path: Path) -> None:
    for number in range(2):
        folder = write_case(tmp_path / "made", f"BraTS2021_{number:05d}")
        for file in folder.iterdir():
            (tmp_path / "flat").mkdir(exist_ok=True)
            file.rename(tmp_path / "flat" / file.name)
        folder.rmdir()

    assert find_data([tmp_path]) == tmp_path / "flat"


def test_the_first_place_with_labelled_cases_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "empty").mkdir()
    write_case(tmp_path / "unlabelled" / "x", labelled=False)
    write_case(tmp_path / "labelled" / "x")
    places = [tmp_path / name for name in ("absent", "empty", "unlabelled", "labelled")]

    assert find_data(places) == tmp_path / "labelled" / "x"
    assert "empty holds no cases" in caplog.text
    assert "unlabelled holds 1 cases, none of them with a label map" in caplog.text


def test_nowhere_is_none(tmp_path: Path) -> None:
    assert find_data([tmp_path / "absent"]) is None
    assert find_data([]) is None
