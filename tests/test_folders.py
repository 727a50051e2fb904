import os
from pathlib import Path

import pytest

from brats_seg.cases.folders import Folder, walk_folders


def test_a_folder_lists_scans_and_other_files_apart(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b_t1.nii.gz", "a_t1.nii", "notes.txt", "b/x.nii"):
        (tmp_path / name).touch()

    top, below = walk_folders(tmp_path)

    assert [str(scan.path) for scan in top.scans] == ["a_t1.nii", "b_t1.nii.gz"]
    assert top.others == ("notes.txt",)
    assert (below.path, [str(scan.path) for scan in below.scans]) == (Path("b"), ["b/x.nii"])


@pytest.mark.parametrize("inside", [[], ["a.nii", "b.nii"], ["folder/a.nii"]])
def test_a_folder_called_like_a_file_that_holds_no_single_file_is_a_folder(
    tmp_path: Path, inside: list[str]
) -> None:
    (tmp_path / "x_t1.nii").mkdir()
    for name in inside:
        (tmp_path / "x_t1.nii" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "x_t1.nii" / name).touch()

    top, *below = walk_folders(tmp_path)

    assert top.scans == ()
    assert Path("x_t1.nii") in {folder.path for folder in below}


def test_a_folder_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

    assert list(walk_folders(tmp_path)) == [
        Folder(path=Path()),
        Folder(path=Path("locked"), refused="Permission denied"),
    ]
