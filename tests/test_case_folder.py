import errno
import os
from pathlib import Path

import pytest

from brats_seg.errors import EnvironmentalError
from brats_seg.files import folder_bytes, free_bytes, whole_folder
from brats_seg.files import remove_folder_leftovers as remove_leftovers

ADVICE = "Buy a disk."


def test_a_folder_appears_once_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "store" / "case"

    with whole_folder(path, when_full=ADVICE) as folder:
        (folder / "a").write_text("new")
        assert not path.exists()

    assert (path / "a").read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["case"]


def test_a_folder_replaces_the_one_before_it_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "case"
    path.mkdir()
    (path / "old").touch()

    with whole_folder(path, when_full=ADVICE) as folder:
        (folder / "new").touch()

    assert [entry.name for entry in path.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["case"]


def test_an_exception_leaves_the_folder_before_it(tmp_path: Path) -> None:
    path = tmp_path / "case"
    path.mkdir()
    (path / "old").touch()

    def fill_half() -> None:
        with whole_folder(path, when_full=ADVICE) as folder:
            (folder / "half").touch()
            raise KeyError("the other half")

    with pytest.raises(KeyError, match="the other half"):
        fill_half()

    assert [entry.name for entry in path.iterdir()] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["case"]


def test_a_failed_renaming_leaves_the_folder_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "case"
    path.mkdir()
    (path / "old").touch()
    rename = Path.rename

    def fail_for_new(self: Path, target: Path) -> Path:
        if "-new-" in self.name:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with (
        pytest.raises(EnvironmentalError, match="Permission denied"),
        whole_folder(path, when_full=ADVICE),
    ):
        pass

    assert [entry.name for entry in path.iterdir()] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["case"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_advice(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(EnvironmentalError, match=r"the disk is full: .*case .* Buy a disk\."),
        whole_folder(tmp_path / "case", when_full=ADVICE),
    ):
        raise OSError(number, "full disk (simulated)")

    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".12-new-a", ".3-old-a", "a", ".hidden", "b-new-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()

    remove_leftovers(tmp_path)

    assert {entry.name for entry in tmp_path.iterdir()} == {"a", ".hidden", "b-new-c"}


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"4567")

    assert folder_bytes(tmp_path) == 7
    assert folder_bytes(tmp_path / "absent") == 0


def test_free_space_is_told_for_folders_still_to_be_made(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > 0
