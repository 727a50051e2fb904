"""Listing the files below a folder: scans, others, DICOM, links."""

import os
from pathlib import Path

import pytest

from brats_seg.cases.find import find_cases
from brats_seg.cases.folders import Folder, holds_dicom, walk_folders
from brats_seg.errors import LayoutError
from tests.builders import touch


def test_a_folder_lists_scans_and_other_files_apart(tmp_path: Path) -> None:
    names = ("b_t1.nii.gz", "a_t1.nii", "notes.txt", "b/x.nii", "b/y_t1.nii/x", "b/y_t1.nii/z")
    top, below, *_ = walk_folders(touch(tmp_path, *names))
    assert [str(scan.path) for scan in top.scans] == ["a_t1.nii", "b_t1.nii.gz"]
    assert top.others == ("notes.txt",)
    # a folder called like a file that does not hold a single file is a folder
    assert (below.path, [str(scan.path) for scan in below.scans]) == (Path("b"), ["b/x.nii"])


def test_an_unreadable_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "smith_t1.nii", "locked/x")
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

    locked = Folder(path=Path("locked"), refused="Permission denied")
    assert list(walk_folders(tmp_path))[1] == locked
    assert find_cases(tmp_path).notices == ("the folder locked cannot be read (Permission denied)",)


@pytest.mark.parametrize(
    ("names", "content", "is_dicom"),
    [
        (("IM000001", "IM000002"), bytes(128) + b"DICM" + bytes(100), True),
        (("1.2.840.10008.1", "README.txt"), bytes(128) + b"DICM", True),
        (("DICOMDIR", "README.txt"), b"", True),
        (("IM000001", "LICENSE"), b"plain text", False),
    ],
)
def test_dicom_files_are_known_by_what_they_hold(
    tmp_path: Path, names: tuple[str, ...], content: bytes, is_dicom: bool
) -> None:
    for name in names:
        touch(tmp_path, f"p/{name}").joinpath("p", name).write_bytes(content)
    assert holds_dicom(tmp_path) is is_dicom
    with pytest.raises(LayoutError) as refused:
        find_cases(tmp_path)
    assert ("DICOM files are not read, such as p (1 in all)" in str(refused.value)) is is_dicom
    assert not holds_dicom(touch(tmp_path, "smith_t1.nii"))


def test_links_to_themselves_and_pipes_are_neither_followed_nor_opened(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a_t1.nii", "loop", "folder/loop"):
        (tmp_path / name).symlink_to(Path(name).name)
    os.mkfifo(tmp_path / "0001")
    top, below = walk_folders(tmp_path)
    assert [str(scan.path) for scan in top.scans] == ["a_t1.nii"]
    assert (top.others, below.others) == (("0001", "loop"), ("loop",))
    assert not holds_dicom(tmp_path / "folder")
    assert find_cases(tmp_path).cases[0].modalities == ("t1n",)
