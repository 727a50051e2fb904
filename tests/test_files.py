"""Files that a reader never sees half of."""

import os
from pathlib import Path

import pytest

from brats_seg.errors import EnvironmentalError
from brats_seg.files import remove_leftovers, whole_file, writable_folder


def test_the_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "below" / "a.txt"

    with whole_file(path) as beside:
        beside.write_text("whole")
        assert not path.exists()

    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_inside_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail() -> None:
        with whole_file(path) as beside:
            beside.write_text("half")
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        fail()

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentalError, match="Free some space"), whole_file(tmp_path / "a"):
        raise OSError(28, os.strerror(28))


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("in the way")

    with (
        pytest.raises(EnvironmentalError, match=r"a/b cannot be written"),
        whole_file(tmp_path / "a" / "b"),
    ):
        pytest.fail("there is nowhere to write to")


def test_other_errors_of_the_system_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"), whole_file(tmp_path / "a"):
        raise OSError(5, os.strerror(5))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".4711-last.pt").write_text("half")
    (tmp_path / ".hidden").write_text("somebody's")
    (tmp_path / "last.pt").write_text("whole")

    remove_leftovers(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {".hidden", "last.pt"}


def test_the_folder_that_is_wanted_is_made(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"

    assert writable_folder(wanted) == wanted
    assert list(wanted.iterdir()) == []


def test_work_goes_elsewhere_where_it_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").touch()

    instead = writable_folder(tmp_path / "file" / "work")

    assert instead.is_dir()
    assert instead.name.startswith("work-")
    assert "cannot be written to (Not a directory): results go to" in caplog.text
    assert "Name a folder that is yours to write" in caplog.text


def test_a_folder_that_is_there_but_takes_no_files_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)

    assert writable_folder(tmp_path) != tmp_path
