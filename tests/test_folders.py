"""Folders below a data folder, and files that are not read."""

import os
from pathlib import Path

import pytest

from brats_seg.cases.find import Folder, _notes_on_unread, walk_folders


def _noted(root: Path, folders: list[Folder]) -> tuple[str, ...]:
    return tuple(_notes_on_unread(root, folders))


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


DICOM = bytes(128) + b"DICM" + bytes(100)


@pytest.mark.parametrize(
    "names", [["IM000001", "IM000002"], ["1.2.840.10008.1", "1.2.840.10008.2"]]
)
def test_dicom_files_are_known_by_what_they_hold(tmp_path: Path, names: list[str]) -> None:
    folder = Folder(path=Path(), others=(*names, "README.txt"))
    for name in names:
        (tmp_path / name).write_bytes(DICOM)

    [advice] = _noted(tmp_path, [folder])
    assert advice.startswith(f"DICOM files are not read, such as {names[0]} (2 in all): convert")

    (tmp_path / names[0]).write_bytes(b"plain text")
    assert _noted(tmp_path, [folder]) == ()


def test_a_dicomdir_and_its_files_are_counted_once(tmp_path: Path) -> None:
    names = ("DICOMDIR", "a.dcm", "b.IMA")
    for name in names:
        (tmp_path / name).write_bytes(DICOM)

    [advice] = _noted(tmp_path, [Folder(path=Path(), others=names)])

    assert "(3 in all)" in advice


def test_a_file_that_is_gone_is_no_dicom_file(tmp_path: Path) -> None:
    assert _noted(tmp_path, [Folder(path=Path(), others=("LICENSE",))]) == ()


def test_a_folder_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert _noted(tmp_path, [Folder(path=Path("a/b"), refused="Permission denied")]) == (
        "the folder a/b cannot be read (Permission denied)",
    )


def test_ordinary_files_are_not_mentioned(tmp_path: Path) -> None:
    names = ("survival_info.csv", "dataset.json", "notes.txt", "figure.png", "LICENSE")
    (tmp_path / "LICENSE").write_text("Apache")

    assert _noted(tmp_path, [Folder(path=Path(), others=names)]) == ()


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a_t1.nii", "loop", "folder/loop"):
        (tmp_path / name).symlink_to(Path(name).name)

    top, below = walk_folders(tmp_path)

    assert [str(scan.path) for scan in top.scans] == ["a_t1.nii"]
    assert (top.others, below.others) == (("loop",), ("loop",))


def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    for name in ("0001", "scan.dcm"):
        os.mkfifo(tmp_path / name)

    (folder,) = walk_folders(tmp_path)

    assert "scan.dcm (1 in all)" in _noted(tmp_path, [folder])[0]


def test_names_in_a_notice_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9\n.zip")).touch()

    assert r"such as caf\xe9\n.zip (1 in all)" in _noted(tmp_path, list(walk_folders(tmp_path)))[0]
