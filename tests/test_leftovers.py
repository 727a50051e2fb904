from pathlib import Path

import pytest

from brats_seg.cases.folders import Folder, advise

DICOM = bytes(128) + b"DICM" + bytes(100)


@pytest.mark.parametrize(
    "names", [["IM000001", "IM000002"], ["1.2.840.10008.1", "1.2.840.10008.2"]]
)
def test_dicom_files_are_known_by_what_they_hold(tmp_path: Path, names: list[str]) -> None:
    folder = Folder(path=Path(), others=(*names, "README.txt"))
    for name in names:
        (tmp_path / name).write_bytes(DICOM)

    [advice] = advise(tmp_path, [folder])
    assert advice.startswith(f"DICOM files are not read, such as {names[0]} (2 in all): convert")

    (tmp_path / names[0]).write_bytes(b"plain text")
    assert advise(tmp_path, [folder]) == ()


def test_a_dicomdir_and_its_files_are_counted_once(tmp_path: Path) -> None:
    names = ("DICOMDIR", "a.dcm", "b.IMA")
    for name in names:
        (tmp_path / name).write_bytes(DICOM)

    [advice] = advise(tmp_path, [Folder(path=Path(), others=names)])

    assert "(3 in all)" in advice


def test_a_file_that_is_gone_is_no_dicom_file(tmp_path: Path) -> None:
    assert advise(tmp_path, [Folder(path=Path(), others=("LICENSE",))]) == ()


def test_a_folder_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert advise(tmp_path, [Folder(path=Path("a/b"), refused="Permission denied")]) == (
        "the folder a/b cannot be read (Permission denied)",
    )


def test_ordinary_files_are_not_mentioned(tmp_path: Path) -> None:
    names = ("survival_info.csv", "dataset.json", "notes.txt", "figure.png", "LICENSE")
    (tmp_path / "LICENSE").write_text("Apache")

    assert advise(tmp_path, [Folder(path=Path(), others=names)]) == ()
