"""Folders that a reader never sees half of: filled beside, synced, and renamed."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from brats_seg.errors import EnvironmentalError
from brats_seg.files import explained, sync

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def whole_folder(path: Path, *, when_full: str) -> Iterator[Path]:
    """Give an empty folder beside `path` to fill, and put it in the place of `path` when full.

    An exception inside leaves an earlier folder as it was. Files inside are to be synced by whoever
    writes them. Killed at any moment, it leaves the earlier folder, the new one, or none, and
    leftovers that `remove_leftovers` knows.

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


def remove_leftovers(folder: Path) -> None:
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
