"""Files and folders that a reader never sees half of, locks, and disk space."""

import errno
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from brats_seg import files
from brats_seg.cases.many import worker_pool
from brats_seg.errors import EnvironmentalError, UsageError
from tests.builders import touch

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR)
GONE = (errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENODEV, errno.ENOTCONN)
whole = pytest.mark.parametrize("write", [files.whole_file, files.whole_folder])


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def fill(path: Path, text: str) -> None:
    (path / "a" if path.is_dir() else path).write_text(text)


def content_of(path: Path) -> str:
    """Return what a file, or the one file of a folder, holds; nothing else may be beside it."""
    assert list(path.parent.iterdir()) == [path]
    return (path / "a" if path.is_dir() else path).read_text()


@whole
def test_files_and_folders_appear_as_a_whole(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    path = tmp_path / "below" / "a"

    def tear() -> None:
        with write(path) as beside:
            fill(beside, "half")
            raise ValueError("torn")

    for text, was_there in (("old", False), ("new", True)):
        with write(path) as beside:
            fill(beside, text)
            assert path.exists() == was_there
        assert content_of(path) == text
        with pytest.raises(ValueError, match="torn"):
            tear()
        assert content_of(path) == text


@whole
@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        *((number, EnvironmentalError, "disk is full: .*a could not") for number in FULL),
        (errno.EFBIG, EnvironmentalError, "a could not be written: it would be larger"),
        *((number, EnvironmentalError, "a cannot be written: .*Choose a f") for number in REFUSED),
        *((number, EnvironmentalError, "a could not be written: .* still conn") for number in GONE),
        # as `np.save` reports a short write
        (None, EnvironmentalError, "could not be written: 9 requested and 3 written"),
        (errno.EINVAL, OSError, "Invalid argument"),
    ],
)
def test_an_error_of_the_drive_says_what_to_do(tmp_path, write, number, error, message):
    arguments = ("9 requested and 3 written",) if number is None else (number, os.strerror(number))
    with pytest.raises(error, match=message) as raised, write(tmp_path / "a"):
        raise OSError(*arguments)
    assert type(raised.value) is error
    assert list(tmp_path.iterdir()) == []


@whole
@pytest.mark.parametrize("kind", [stat.S_ISDIR, stat.S_ISREG])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_drive_need_not_flush_the_names_in_folders(tmp_path, monkeypatch, write, kind, number):
    def sync(descriptor: int) -> None:
        if kind(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", sync)
    is_well = (kind, number) == (stat.S_ISDIR, errno.EINVAL)
    refused = pytest.raises((OSError, EnvironmentalError))
    with nullcontext() if is_well else refused, write(tmp_path / "a") as beside:
        fill(beside, "new")
        files.sync(beside / "a" if beside.is_dir() else beside)


def test_two_writers_with_the_same_process_id_do_not_share_a_file(tmp_path: Path) -> None:
    """Processes of two containers have the same ids."""
    with files.whole_file(tmp_path / "a") as first, files.whole_file(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")
    assert content_of(tmp_path / "a") == "first"


def test_the_clean_up_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder of a notebook may have been removed."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    files.check_current_folder()
    (tmp_path / "gone").rmdir()
    with pytest.raises(EnvironmentalError, match=r"current folder is gone .*Change to a folder"):
        files.check_current_folder()
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ValueError, match="the error that matters"), files.whole_file(Path("a.txt")):
        raise ValueError("the error that matters")


@pytest.mark.parametrize("folders", [False, True])
def test_only_what_killed_processes_left_is_removed(tmp_path: Path, folders: bool) -> None:
    killed, mine = (
        {".12-0a1b2c-new-a", ".3-ffffff-old-a"},
        {"a", ".hidden", "b-new-c", ".2024-trial"},
    )
    touch(tmp_path, *(f"{name}/file" for name in killed | mine), ".2024-notes.txt")
    touch(tmp_path, ".5-123abc-folds.csv")  # with folders, another process may be writing it
    before = set(tmp_path.iterdir())
    files.remove_leftovers(tmp_path, folders=folders, name="new-b")
    assert set(tmp_path.iterdir()) == before
    files.remove_leftovers(tmp_path, folders=folders)
    left = {".5-123abc-folds.csv"} if folders else killed
    assert {entry.name for entry in tmp_path.iterdir()} == {*mine, ".2024-notes.txt", *left}


def test_a_link_to_a_folder_leads_to_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(touch(tmp_path, "disk/case/old") / "disk" / "case")
    with files.whole_folder(tmp_path / "link") as folder:
        fill(folder, "new")
    files.remove_leftovers(tmp_path, folders=True)
    assert (tmp_path / "link").is_symlink()
    assert content_of(tmp_path / "disk" / "case") == "new"


def test_the_current_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = pytest.raises(EnvironmentalError, match=f"{tmp_path} cannot be written: it is no reg")
    with refused, files.alone_at(Path()), files.whole_file(Path()):
        pytest.fail("it is replaced")


def test_a_failed_renaming_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = touch(tmp_path, "case/old") / "case"
    rename = Path.rename

    def fail_for_new(self: Path, target: Path) -> Path:
        if "-new-" in self.name:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(EnvironmentalError, match="Permission denied"), files.whole_folder(path):
        pass
    assert list(tmp_path.rglob("*")) == [path, path / "old"]


def wait_for(is_true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_true():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within a minute")


@pytest.mark.parametrize("lock", [files.locked, partial(files.alone_at, wait=True)])
def test_a_taken_lock_is_waited_for(tmp_path, caplog, lock):
    caplog.set_level("INFO")
    order, n_open = [], len([*Path("/dev/fd").iterdir()])

    def second() -> None:
        with lock(tmp_path / "a"):
            order.append("second")

    with lock(tmp_path / "a"):
        thread = threading.Thread(target=second)
        thread.start()
        wait_for(lambda: "waiting for another process" in caplog.text)
        time.sleep(4 * files._POLL_S)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    # however often it was tried
    assert caplog.text.count(f"waiting for another process that works in {tmp_path}") == 1
    assert len([*Path("/dev/fd").iterdir()]) <= n_open


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    path, flock, removals = tmp_path / ".lock", fcntl.flock, iter([Path.unlink])

    def remove_first(descriptor: int, kind: int) -> None:
        next(removals, Path.exists)(path)
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with files.locked(path):
        assert path.exists()


def hold_with_a_child_and_die(path: Path) -> None:
    with files.locked(path), worker_pool(1) as pool:
        pool.submit(os.getpid).result()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_and_its_workers_hold_no_lock(tmp_path, monkeypatch):
    process = multiprocessing.Process(target=hold_with_a_child_and_die, args=(tmp_path / ".lock",))
    process.start()
    process.join()
    # a busy machine ends the worker late
    monkeypatch.setattr(files, "_GRACE_S", 60)
    with files.locked(tmp_path / ".lock", when_taken=UsageError("taken")):
        assert process.exitcode == -signal.SIGKILL


@whole
def test_a_pipe_or_device_is_never_replaced(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(EnvironmentalError, match="pipe cannot be written: it is no"), write(path):
        pass
    assert path.is_fifo()


def test_a_drive_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def have_none(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", have_none)
    with files.locked(tmp_path / ".lock", when_taken=UsageError("taken")):
        assert "has no locks (No locks available): start no second process" in caplog.text


@pytest.mark.parametrize("is_folder", [False, True])
def test_writers_are_alone(tmp_path, monkeypatch, is_folder):
    monkeypatch.setattr("brats_seg.files._GRACE_S", 0.1)
    path = tmp_path / "results"
    second = pytest.raises(UsageError, match=r"another process is writing .*results\. Wait for it")
    reader = pytest.raises(UsageError, match="it is read")
    alone = partial(files.alone_at, path, is_folder=is_folder)
    with alone(), second, alone():
        pytest.fail("both write")
    # nothing is left over
    assert [entry.name for entry in tmp_path.rglob("*")] == ["results"] * is_folder
    replaced = files.locked(tmp_path / files.READING_NAME, when_taken=UsageError("it is read"))
    with files.reading(tmp_path), files.reading(tmp_path), reader, replaced:
        pytest.fail("it is replaced while it is read")


def test_errors_name_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = re.escape(f"{tmp_path} cannot be written: Read-only file system. Choose")
    with pytest.raises(EnvironmentalError, match=found), files.explained_writing(Path()):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_folder_that_does_not_exist_is_on_the_disk_of_the_one_above(tmp_path, monkeypatch):
    file = touch(tmp_path, "file") / "file"
    usage = {tmp_path: shutil.disk_usage(tmp_path)._replace(free=2**30, total=2**31)}
    monkeypatch.setattr(shutil, "disk_usage", usage.__getitem__)
    assert files.size_text(files.free_bytes(tmp_path / "a" / "b")) == "1.0 GiB"
    assert files.size_text(2**30 - 2**20) == "1023 MiB"
    with pytest.raises(EnvironmentalError, match="below cannot be written: Not a directory"):
        files.check_writable(file / "below")
    # what cannot be written to is read without a lock
    with files.reading(file):
        pass


def test_a_file_is_read_up_to_a_size_and_its_state_tells_a_change(tmp_path: Path) -> None:
    path = tmp_path / "a"
    states = {files.file_state(path)}
    for text, changed_ns in (("a", 10**9), ("ab", 10**9), ("ab", 2 * 10**9)):
        path.write_text(text)
        os.utime(path, ns=(changed_ns, changed_ns))
        states.add(files.file_state(path))
    assert len(states) == 4
    # a path below a file
    assert files.file_state(path / "b") == ""
    assert files.read_bounded(path, 2) == b"ab"
    with pytest.raises(ValueError, match="it has 2 bytes, expected at most 1"):
        files.read_bounded(path, 1)
    with pytest.raises(OSError, match="it is a folder"):
        files.read_bounded(tmp_path, 2**30)
