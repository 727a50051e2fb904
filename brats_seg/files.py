"""Write whole files and folders, lock folders, and report disk space.

Files and folders are written under a temporary name in the same folder, synced, and then renamed: a
reader never sees an incomplete one. The temporary name starts with a dot and the process id;
`remove_leftovers` removes the files or folders that a killed process has left.
"""

import errno
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from brats_seg.errors import EnvironmentalError

log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.\d+-.+")
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})
_SPECIAL_FILES = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_WHEN_FULL = "Free some space, or choose another folder; nothing that was there before is lost."


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Provide a path beside `path` to write to, and rename it to `path` at the end.

    The folder is created if it does not exist. An exception inside leaves an earlier file as it was.

    Raises:
        EnvironmentalError: The disk is full, or the folder cannot be written to.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with whole_file(folder / "notes.txt") as beside:
        ...     _ = beside.write_text("complete")
        >>> [path.name for path in folder.iterdir()]
        ['notes.txt']
    """
    beside = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        sync(beside)
        beside.replace(path)
        sync(path.parent)
    except OSError as error:
        raise explained(error, path) from error
    finally:
        # an error of the clean-up would hide the one that matters
        with suppress(OSError):
            beside.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path, *, when_full: str = _WHEN_FULL) -> Iterator[Path]:
    """Provide an empty folder beside `path` to fill, and move it to `path` at the end.

    An exception inside leaves an earlier folder as it was. The caller must sync the files inside. If
    the process is killed, the earlier folder exists, or the new one, or neither; `remove_leftovers`
    removes the temporary ones.

    Args:
        path: Folder to create or to replace.
        when_full: What to do if the disk is full, for the message.

    Raises:
        EnvironmentalError: The disk is full, or the place cannot be written to.
    """
    new, old = (path.with_name(f".{os.getpid()}-{word}-{path.name}") for word in ("new", "old"))
    try:
        new.mkdir(parents=True)
        yield new
        sync(new)
        if path.exists():
            path.rename(old)
        new.rename(path)
        sync(path.parent)
    except OSError as error:
        raise explained(error, path, when_full=when_full) from error
    finally:
        with suppress(OSError):
            if old.exists() and not path.exists():
                old.rename(path)
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def remove_leftovers(folder: Path, *, folders: bool = False) -> None:
    """Remove the temporary files that killed processes have left in a folder.

    No other process may be writing there at the same time.

    Args:
        folder: Folder to clean.
        folders: Whether to remove temporary folders instead of files.
    """
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() == folders:
            if folders:
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, *, when_taken: Exception | None = None) -> Iterator[None]:
    """Hold a lock, which the system releases when the process ends, even if it is killed.

    Args:
        path: File of the lock; its folder is created if it does not exist.
        when_taken: Error to raise if another process holds the lock; None waits for that process.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        if when_taken is not None:
            raise when_taken from None
        log.info("waiting for another process that works in %s", path.parent)
        lock.acquire()
    except OSError as error:
        raise explained(error, path.parent) from error
    try:
        yield
    finally:
        lock.release()


def writable_folder(wanted: Path) -> Path:
    """Return a folder that can be written to: the one wanted, or else a temporary one.

    The folder is created if it does not exist. A warning says where a temporary one is.
    """
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        instead = Path(tempfile.mkdtemp(prefix=f"{wanted.name}-"))
        log.warning(
            "%s cannot be written to (%s): results are written to %s, which may be deleted later. "
            "Choose a folder that you can write to.",
            wanted.absolute(),
            error.strerror,
            instead,
        )
        return instead


def folder_bytes(folder: Path) -> int:
    """Return the size of the files directly in a folder; 0 if the folder does not exist."""
    return sum(path.stat().st_size for path in folder.glob("*"))


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that holds a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free


def check_regular(path: Path) -> None:
    """Raise `OSError` if a path does not lead to a file that can be read to an end.

    Opening a named pipe waits for a writer, and a device such as `/dev/zero` never ends.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kinds = (name for holds, name in _SPECIAL_FILES if holds(mode))
        raise OSError(errno.EINVAL, f"it is {next(kinds, 'no regular file')}", str(path))


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explained(error: OSError, path: Path, *, when_full: str = _WHEN_FULL) -> Exception:
    """Return the error to raise for a system error that occurred while writing `path`."""
    if error.errno in _DISK_FULL:
        return EnvironmentalError(f"the disk is full: {path} could not be written. {when_full}")
    if error.errno in _NOT_WRITABLE:
        return EnvironmentalError(
            f"{path} cannot be written: {error.strerror}. Choose a folder that you can write to."
        )
    return error
