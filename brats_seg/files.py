"""Write whole files and folders, lock folders, and report disk space.

Files and folders are written under a temporary name in the same folder, synced, and then renamed: a
reader never sees an incomplete one. The temporary name starts with a dot, the process id and six random
digits; `remove_leftovers` removes the files or folders that a killed process has left.

Locks belong to the process: the system releases them when it ends, however it ends. They hold
between the processes of one machine, and between machines on network drives that pass locks on, as
NFS and Lustre do unless they are mounted without. On a drive that has no locks a warning is logged.
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from brats_seg.errors import EnvironmentalError, UsageError

log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.\d+-[0-9a-f]{6}-(.+)")
_SPECIAL_FILES = {"d": "a folder", "p": "a named pipe", "s": "a socket"}
"""Kinds of files that are not regular, by the first letter of their mode; the others are devices."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
READING_NAME = ".reading.lock"
"""Lock of those who read a folder; who replaces what is in it takes it alone."""
_NOTHING_LOST = "nothing that was there before is lost."
_WHEN_FULL = f"Free some space, or choose another folder; {_NOTHING_LOST}"
_GRACE_S = 2.0
"""Time to wait for a lock before it counts as taken: worker processes, which share the lock of the
process that started them, take up to a second to end after it was killed."""
_POLL_S = 0.05


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Provide a path next to `path` to write to, and rename it to `path` at the end.

    The folder is created if it does not exist. An exception inside leaves an earlier file as it was; a
    full disk and a folder that cannot be written to are an `EnvironmentalError`.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with whole_file(folder / "notes.txt") as temporary:
        ...     _ = temporary.write_text("complete")
        >>> [path.name for path in folder.iterdir()]
        ['notes.txt']
    """
    temporary = _temporary(path)
    try:
        with explained_writing(path):
            if path.exists() and not path.is_file():
                # a device such as /dev/null would be replaced by a file
                raise OSError(errno.EEXIST, "it is no regular file", str(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        # an error of the clean-up would hide the one that matters
        with suppress(OSError):
            temporary.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write a value as JSON; a reader never sees an incomplete file."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def whole_folder(path: Path, *, when_full: str = _WHEN_FULL) -> Iterator[Path]:
    """Provide an empty folder beside `path` to fill, and move it to `path` at the end.

    An exception inside leaves an earlier folder as it was. The caller must sync the files inside. If
    the process is killed, the earlier folder exists, or the new one, or neither; `remove_leftovers`
    removes the temporary ones. `when_full` tells the user what to do if the disk is full.
    """
    # if `path` is a link, the folder that it leads to is replaced, and not the link
    path = path.resolve() if path.is_symlink() else path
    new, old = _temporary(path, "new-"), _temporary(path, "old-")
    try:
        with explained_writing(path, when_full=when_full):
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(path))
            new.mkdir(parents=True)
            yield new
            sync(new)
            if path.exists():
                path.rename(old)
            new.rename(path)
            sync(path.parent)
    finally:
        with suppress(OSError):
            if old.exists() and not path.exists():
                old.rename(path)
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)


def remove_leftovers(folder: Path, *, folders: bool = False, name: str = "") -> None:
    """Remove the temporary files, or with `folders` the temporary folders, of killed processes.

    Only those of the file or folder `name`, if it is given. No other process may be writing them.
    """
    for path in folder.iterdir():
        if (leftover := _LEFTOVER.fullmatch(path.name)) and name in ("", leftover[1]):
            if folders and path.is_dir():
                shutil.rmtree(path)
            elif not folders and not path.is_dir():
                path.unlink(missing_ok=True)


@contextmanager
def locked(
    path: Path, *, when_taken: Exception | None = None, is_shared: bool = False
) -> Iterator[None]:
    """Hold a lock, which the system releases when the process ends, even if it is killed.

    If another process holds the lock, `when_taken` is raised; None waits for that process. Processes
    that share a lock hold it at the same time.
    """
    with explained_writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire_lock(path, when_taken, is_shared=is_shared)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def alone_at(path: Path, *, is_folder: bool = False, wait: bool = False) -> Iterator[None]:
    """Keep other processes from writing the same results at the same time.

    For results of several files, which would otherwise come from two processes. The lock is in a
    folder, and beside a file. Another process that is writing is an error; work of seconds waits for it.
    """
    lock = path / ".writing.lock" if is_folder else path.parent / f".{path.name}.lock"
    msg = f"another process is writing {path}. Wait for it to end, or choose another --output."
    with locked(lock, when_taken=None if wait else UsageError(msg)):
        try:
            yield
        finally:
            # while the lock is held: another process never finds the file of a lock that has ended
            with suppress(OSError):
                lock.unlink()


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Keep other processes from replacing what is in a folder as long as it is read.

    Any number of processes may read at the same time. A folder that cannot be written to is read
    without a lock.
    """
    with ExitStack() as stack:
        with suppress(EnvironmentalError):
            stack.enter_context(locked(folder / READING_NAME, is_shared=True))
        yield


def check_writable(folder: Path) -> None:
    """Raise an error if a folder, or the first one above it that exists, cannot be written to."""
    with explained_writing(folder), tempfile.TemporaryFile(dir=_existing(folder)):
        pass


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that holds a folder, which need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def size_text(n_bytes: float) -> str:
    """Return a number of bytes for a message, such as `1.5 GiB`."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def check_current_folder() -> None:
    """Raise `EnvironmentalError` if the current folder was removed, or its drive is gone.

    Every relative path would fail without naming the reason, and torch would end the process.
    """
    try:
        Path.cwd()
    except OSError as error:
        msg = f"the current folder is gone ({error.strerror}). Change to a folder that exists (cd)."
        raise EnvironmentalError(msg) from error


def file_state(path: Path) -> str:
    """Return size and time of change of a file, which differ once it is replaced; empty if unreadable."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def check_regular(path: Path) -> None:
    """Raise `OSError` if a path does not lead to a file that can be read to an end.

    Opening a named pipe waits for a writer, and a device such as `/dev/zero` never ends.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        kind = _SPECIAL_FILES.get(stat.filemode(path.stat().st_mode)[0], "a device")
        raise OSError(errno.EINVAL, f"it is {kind}", str(path))


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file; one of more bytes is a `ValueError`."""
    check_regular(path)
    n_bytes = path.stat().st_size
    if n_bytes > most_bytes:
        msg = f"it has {n_bytes} bytes, expected at most {most_bytes}"
        raise ValueError(msg)
    return path.read_bytes()


def table_beside(module: str) -> dict[str, Any]:
    """Return the table in the TOML file beside a module, given by its `__file__`, that has its name."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # folders that a virtual machine shares with its host, and those of older SMB drives, have no `fsync`
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextmanager
def explained_writing(path: Path, *, when_full: str = _WHEN_FULL) -> Iterator[None]:
    """Turn an error of the system while a path is written into one that says what to do about it."""
    try:
        yield
    except OSError as error:
        # "." does not tell the user which folder it is
        shown, reason = path if path != Path() else path.absolute(), error.strerror or str(error)
        for numbers, message in _MESSAGES:
            if error.errno in numbers:
                msg = message.format(path=shown, reason=reason, when_full=when_full)
                raise EnvironmentalError(msg) from error
        raise


_MESSAGES: tuple[tuple[set[int | None], str], ...] = (
    ({errno.ENOSPC, errno.EDQUOT}, "the disk is full: {path} could not be written. {when_full}"),
    (
        {errno.EFBIG},
        "{path} could not be written: it would be larger than a file may be here. Raise the limit "
        f"(`ulimit -f`), or choose a folder on another disk; {_NOTHING_LOST}",
    ),
    (
        {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST},
        "{path} cannot be written: {reason}. Choose a folder that you can write to.",
    ),
    (
        # None: libraries that notice by themselves that less was written than they gave
        {None, errno.EIO, errno.ENODEV, errno.ENOENT, errno.ENOTCONN, errno.ENXIO}
        | {errno.ESTALE, errno.ETIMEDOUT},
        "{path} could not be written: {reason}. Check that its drive has space and is still "
        f"connected, and start the same command again; {_NOTHING_LOST}",
    ),
)
"""Message for the errors of the system, by their numbers."""


def _existing(folder: Path) -> Path:
    """Return a folder, or the first one above it that exists."""
    path = folder.absolute()
    return next(above for above in (path, *path.parents) if above.exists())


def _temporary(path: Path, word: str = "") -> Path:
    # processes of two containers may have the same id; the current folder, ".", has no name
    return path.parent / f".{os.getpid()}-{secrets.token_hex(3)}-{word}{path.name}"


def _acquire_lock(path: Path, when_taken: Exception | None, *, is_shared: bool) -> int:
    """Return the open file of a lock, once no other process holds it."""
    started_s, is_waiting = time.monotonic(), False
    while (lock := _try_to_lock(path, is_shared=is_shared)) is None:
        if when_taken is None and not is_waiting:
            log.info("waiting for another process that works in %s", path.parent)
            is_waiting = True
        elif when_taken is not None and time.monotonic() - started_s > _GRACE_S:
            raise when_taken
        time.sleep(_POLL_S)
    return lock


def _try_to_lock(path: Path, *, is_shared: bool) -> int | None:
    """Return the open file of a lock; None if another process holds it."""
    mode, kind = (os.O_RDONLY, fcntl.LOCK_SH) if is_shared else (os.O_RDWR, fcntl.LOCK_EX)
    lock = os.open(path, mode | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            text = "the drive of %s has no locks (%s): start no second process that writes there"
            log.warning(text, path.parent, error.strerror)
            return lock
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    # the holder before may have removed the file, so that the next one locks another
    if os.fstat(lock).st_nlink:
        return lock
    os.close(lock)
    return None
