"""Files that a reader never sees half of: written beside, synced, and renamed."""

# DOC data/case_folder: Folders that a reader never sees half of: filled beside, synced, and renamed.

import errno
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from brats_seg.errors import EnvironmentalError

log = logging.getLogger(__name__)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write to, and rename it to `path` once it is written.

    An exception inside leaves an earlier file as it was. Raises `EnvironmentalError` if the disk
    is full or the folder cannot be written to.
    """
    beside = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explained(error, path) from error
    try:
        yield beside
        sync(beside)
        beside.replace(path)
        sync(path.parent)
    except OSError as error:
        raise explained(error, path) from error
    finally:
        beside.unlink(missing_ok=True)


def writable_folder(wanted: Path) -> Path:
    """Return a folder to write to, made if need be: the one wanted, or else a temporary one.

    For work that is looked at as it is made, such as a notebook's; a warning says where it went.
    """
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        instead = Path(tempfile.mkdtemp(prefix=f"{wanted.name}-"))
        log.warning(
            "%s cannot be written to (%s): results go to %s, which may not last. Name a folder that "
            "is yours to write.",
            wanted.absolute(),
            error.strerror,
            instead,
        )
        return instead


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed had begun to write into a folder."""
    for path in folder.iterdir():
        if _BESIDE.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


_BESIDE = re.compile(r"\.\d+-.+")


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explained(error: OSError, path: Path) -> Exception:
    """Turn a system's error about writing `path` into one that says what to try."""
    if error.errno == errno.ENOSPC:
        return EnvironmentalError(
            f"the disk is full: {path} could not be written. Free some space, or choose another "
            "folder; nothing that was there before is lost."
        )
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}:
        return EnvironmentalError(
            f"{path} cannot be written: {error.strerror}. Choose a folder that is yours to write."
        )
    return error


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def whole_folder(path: Path, *, when_full: str) -> Iterator[Path]:
    """Give an empty folder beside `path` to fill, and put it in the place of `path` when full.

    An exception inside leaves an earlier folder as it was. Files inside are to be synced by whoever
    writes them. Killed at any moment, it leaves the earlier folder, the new one, or none, and
    leftovers that `remove_folder_leftovers` knows.

    Args:
        path: What to make or to replace.
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
        if error.errno in _DISK_FULL:
            msg = f"the disk is full: {path} could not be written. {when_full}"
            raise EnvironmentalError(msg) from error
        raise explained(error, path) from error
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def remove_folder_leftovers(folder: Path) -> None:
    """Remove what killed processes left half done; nothing else may be writing there meanwhile."""
    for kind in ("new", "old"):
        for leftover in folder.glob(f".*-{kind}-*"):
            shutil.rmtree(leftover)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files right in a folder; 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.glob("*"))


def free_bytes(folder: Path) -> int:
    """Return the room on the disk that holds a folder, which need not be there yet."""
    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free
