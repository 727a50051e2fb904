"""Files and folders that a reader never sees half of, locks, and disk space."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from brats_seg.cases.many import worker_pool
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.files import (
    READING_NAME,
    alone_at,
    check_current_folder,
    explained,
    free_bytes,
    locked,
    reading,
    remove_leftovers,
    whole_file,
    whole_folder,
    writable_folder,
)
from tests.builders import limited_files

FULL = (errno.ENOSPC, errno.EDQUOT)


def fill(place: Path, name: str) -> None:
    """Write a file, or a folder with one file, under the temporary name that is given."""
    (place / name if place.is_dir() else place).write_text(name)


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def content_of(path: Path) -> str:
    assert list(path.parent.iterdir()) == [path]
    if path.is_dir():
        (path,) = path.iterdir()
    return path.read_text()


@pytest.mark.parametrize("write", [whole_file, whole_folder])
def test_a_file_or_folder_appears_or_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, write
) -> None:
    path = tmp_path / "below" / "a"
    for name in ("old", "new"):
        with write(path) as beside:
            fill(beside, name)
            assert path.exists() == (name == "new")
    assert content_of(path) == "new"

    def fail() -> None:
        with write(path) as beside:
            fill(beside, "half")
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        fail()
    assert content_of(path) == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(EnvironmentalError, match="pipe cannot be written: it is no"), write(pipe):
        pass
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        *((number, EnvironmentalError, "disk is full: .*a could not") for number in FULL),
        (errno.ENOTDIR, EnvironmentalError, "a cannot be written: .*Choose a folder"),
        *(
            (number, EnvironmentalError, "a could not be written: .* still connected")
            for number in (errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENODEV, errno.ENOTCONN)
        ),
        # as `np.save` reports a short write
        (None, EnvironmentalError, "could not be written: 9 requested and 3 written"),
        (errno.EINVAL, OSError, "Invalid argument"),
    ],
)
def test_an_error_of_the_drive_says_what_to_do(
    tmp_path: Path, number: int | None, error: type[Exception], message: str
) -> None:
    arguments = ("9 requested and 3 written",) if number is None else (number, os.strerror(number))
    for write in (whole_file, whole_folder):
        with pytest.raises(error, match=message) as raised, write(tmp_path / "a"):
            raise OSError(*arguments)
        assert type(raised.value) is error
    assert list(tmp_path.iterdir()) == []


def test_a_file_above_the_limit_of_the_process_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    with (
        limited_files(1000),
        pytest.raises(EnvironmentalError, match=r"a could not be written: .*ulimit -f"),
        whole_file(path) as beside,
    ):
        beside.write_bytes(bytes(2000))

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_with_the_same_process_id_do_not_share_a_file(tmp_path: Path) -> None:
    """Processes of two containers have the same ids."""
    with whole_file(tmp_path / "a") as first, whole_file(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")

    assert (tmp_path / "a").read_text() == "first"


@pytest.mark.parametrize("folders", [False, True])
def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path, folders) -> None:
    for name in (".12-new-a", ".3-old-a", "a", ".hidden", "b-new-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".5-folds.csv").touch()  # with folders, another process may be writing it

    remove_leftovers(tmp_path, folders=folders)

    left = {".5-folds.csv"} if folders else {".12-new-a", ".3-old-a"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", ".hidden", "b-new-c", *left}


def test_the_folder_that_is_wanted_is_made_and_taken_if_it_takes_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tmp_path / "a" / "b"
    assert free_bytes(wanted) > 0
    assert writable_folder(wanted) == wanted
    assert list(wanted.iterdir()) == []

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert [writable_folder(wanted)] == [*tmp_path.glob("b-*")]
    assert "cannot be written to (Permission denied): results are written to" in caplog.text


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
    with pytest.raises(EnvironmentalError, match="Permission denied"), whole_folder(path):
        pass

    assert [entry.name for entry in path.iterdir()] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["case"]


def test_a_lock_that_is_taken_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    order = []

    def second() -> None:
        with locked(tmp_path / ".lock"):
            order.append("second")

    with locked(tmp_path / ".lock"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.2)
        order.append("first")
    thread.join()

    assert order == ["first", "second"]
    assert f"waiting for another process that works in {tmp_path}" in caplog.text


def hold_with_a_child_and_die(path: Path) -> None:
    with locked(path), worker_pool(1, when_killed="") as pool:
        pool.submit(os.getpid).result()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_and_its_workers_hold_no_lock(tmp_path: Path) -> None:
    """Workers share the lock, and end by themselves."""
    process = multiprocessing.Process(target=hold_with_a_child_and_die, args=(tmp_path / ".lock",))
    process.start()
    process.join()

    with locked(tmp_path / ".lock", when_taken=UsageError("taken")):
        assert process.exitcode == -signal.SIGKILL


def test_a_drive_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)

    with locked(tmp_path / ".lock", when_taken=UsageError("taken")):
        assert "has no locks (No locks available): start no second process" in caplog.text


@pytest.mark.parametrize("is_folder", [False, True])
def test_results_are_written_by_one_process_at_a_time(tmp_path: Path, is_folder: bool) -> None:
    path = tmp_path / "results"

    with (
        alone_at(path, is_folder=is_folder),
        pytest.raises(UsageError, match=r"another process is writing .*results\. Wait for it"),
        alone_at(path, is_folder=is_folder),
    ):
        pytest.fail("both write")

    # nothing is left over
    assert [entry.name for entry in tmp_path.rglob("*")] == ["results"] * is_folder


def test_readers_share_a_folder_that_nobody_replaces_meanwhile(tmp_path: Path) -> None:
    with (
        reading(tmp_path),
        reading(tmp_path),
        pytest.raises(UsageError, match="it is read"),
        locked(tmp_path / READING_NAME, when_taken=UsageError("it is read")),
    ):
        pytest.fail("it is replaced while it is read")


def test_errors_of_the_current_folder_name_it_also_when_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)

    error = explained(OSError(errno.EROFS, os.strerror(errno.EROFS)), Path())
    assert str(error).startswith(f"{gone} cannot be written: Read-only file system. Choose")
    check_current_folder()
    gone.rmdir()
    with pytest.raises(EnvironmentalError, match=r"current folder is gone .*Change to a folder"):
        check_current_folder()
    # the clean-up of a file does not hide the error inside
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ValueError, match="the error that matters"), whole_file(Path("a.txt")):
        raise ValueError("the error that matters")
