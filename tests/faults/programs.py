"""Run the command line in forked processes, which a fault may hit at any moment of their work.

A server process imports torch, MONAI and the package once, and each command is forked from it, which
takes milliseconds instead of seconds. A moment is counted in calls that change files below the
folder of the command: opening a file to write, `fsync`, renaming, removing, making folders. Workers
of the command count along with it.
"""

import ctypes
import errno
import fcntl
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tests.builders import FORKS

Fault: TypeAlias = Callable[[Path], None]
"""Prepares the process of a command, in its folder, for what is to happen to it."""
Act: TypeAlias = Callable[[int, str], object]
"""Called with the number of a moment, from 1 on, and the name of the change."""

PATIENCE_S = 120.0
"""Time after which a command counts as hung; the slowest takes 4 s on an idle machine."""
_CHANGES = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"})
_TAKES_SPACE = frozenset({"open", "os.mkdir", "fsync"})
_NETWORK = frozenset({"socket.__new__", "socket.connect", "socket.getaddrinfo", "socket.sendto"})
NETWORK_USED = "the network was used"
_WRITING = os.O_WRONLY | os.O_RDWR
_SHOWN_BYTES = 1 << 20
"""Most that a command may print."""
_N_SHOWN = 250
"""Characters of its end that a problem shows."""
_TRACEBACK = "Traceback (most recent call last)"
_BUG = "This is a bug of brats_seg"


class Ended(NamedTuple):
    code: int
    """Exit code; negative if a signal ended it."""
    shown: str

    @property
    def problem(self) -> str:
        """Why this end breaks a promise of every command: a traceback or a hang; or nothing."""
        if self.code == -signal.SIGALRM:
            return f"it hung: {self.shown[-_N_SHOWN:]}"
        if _TRACEBACK in self.shown or _BUG in self.shown:
            return f"it ended in a traceback: {self.shown[-_N_SHOWN:]}"
        return ""

    def expect(self, *codes: int) -> str:
        """Return the problem, also if the exit code is none of those."""
        if not self.problem and self.code not in codes:
            return f"exit code {self.code}, expected {codes}: {self.shown[-_N_SHOWN:]}"
        return self.problem


class Running:
    def __init__(self, words: str, folder: Path, fault: Fault | None = None) -> None:
        # a pipe: limits on the size of files do not apply to it
        self._shown, shown = FORKS.Pipe(duplex=False)
        fcntl.fcntl(self._shown.fileno(), fcntl.F_SETPIPE_SZ, _SHOWN_BYTES)
        arguments = (words.split(), folder, shown, fault)
        self._process: ForkServerProcess = FORKS.Process(target=_command, args=arguments)
        self._process.start()
        shown.close()

    def wait_until_ended(self, timeout_s: float) -> None:
        self._process.join(timeout_s)

    def wait(self, timeout_s: float = PATIENCE_S) -> Ended:
        """Wait for the end; a command that takes longer has hung, and is killed."""
        self._process.join(timeout_s)
        hung = self._process.exitcode is None
        self.signal(signal.SIGKILL)
        self._process.join()
        code = -signal.SIGALRM if hung else self._process.exitcode or 0
        with self._shown:
            os.set_blocking(self._shown.fileno(), False)
            shown = b""
            with suppress(BlockingIOError):
                shown = os.read(self._shown.fileno(), _SHOWN_BYTES)
        return Ended(code=code, shown=shown.decode(errors="replace"))

    def wait_until_paused(self) -> bool:
        """Wait until `pause` has stopped it; return whether it did before it ended."""
        until_s = time.monotonic() + PATIENCE_S
        status = Path(f"/proc/{self._process.pid}/stat")
        while time.monotonic() < until_s and self._process.exitcode is None:
            with suppress(OSError):
                if status.read_text().rpartition(")")[2].split()[0] == "T":
                    return True
            time.sleep(0.005)
        return False

    def signal(self, number: int) -> None:
        """Send a signal to it and its workers, if they are there; SIGCONT ends a pause."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, number)


def run(
    words: str, folder: Path, fault: Fault | None = None, *, timeout_s: float = PATIENCE_S
) -> Ended:
    return Running(words, folder, fault).wait(timeout_s)


def n_moments(words: str, folder: Path) -> int:
    counted = folder.with_name(f"{folder.name}-moments")
    ended = run(words, folder, partial(_count, counted))
    if ended.code:
        raise RuntimeError(ended.shown)
    return len(counted.read_bytes())


def _count(path: Path, folder: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    at_each_moment(folder, lambda number, event: os.write(descriptor, b"."))


def _command(words: list[str], folder: Path, shown: Connection, fault: Fault | None) -> None:
    """Run a command in this process, which was made for it."""
    from brats_seg.cli import main

    # workers are forked too, and so share the fault
    multiprocessing.set_start_method("fork", force=True)
    os.setsid()
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(shown.fileno(), stream)
    shown.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["brats-seg", *words]
    logging.lastResort = None
    if fault is not None:
        fault(folder)
    try:
        main()
    except Exception:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        raise SystemExit(1) from None


def at_each_moment(folder: Path, act: Act) -> None:
    count = multiprocessing.get_context("fork").Value(ctypes.c_long, 0)
    inside = f"{folder.resolve()}{os.sep}"

    def note(event: str) -> None:
        with count.get_lock():
            count.value += 1
            number = count.value
        act(number, event)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if _changes_files(event, arguments) and _is_inside(arguments[0], inside):
            note(event)

    sync = os.fsync

    def noted_sync(descriptor: int) -> None:
        note("fsync")
        sync(descriptor)

    sys.addaudithook(audit)
    os.fsync = noted_sync


def _changes_files(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        return bool(arguments[2] & _WRITING)
    # a folder that is there already is no change, and no disk refuses it
    return event in _CHANGES and not (event == "os.mkdir" and Path(arguments[0]).is_dir())


def _is_inside(path: object, folder: str) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False  # a descriptor: of a file that was open before
    # not `resolve`: a link is changed itself
    return os.path.abspath(os.fsdecode(path)).startswith(folder)  # noqa: PTH100


def at(moment: int, happen: Callable[[Path], None], folder: Path) -> None:
    """Let something happen to the command, which is given its folder, at one moment."""
    at_each_moment(folder, lambda n, event: happen(folder) if n == moment else None)


def kill_all(folder: Path) -> None:
    os.killpg(0, signal.SIGKILL)


def limit_files(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def pause(folder: Path) -> None:
    os.kill(os.getpgrp(), signal.SIGSTOP)


def unplug(name: str, folder: Path) -> None:
    """Rename a folder away, like a disk that is unplugged."""
    if (folder / name).exists():
        (folder / name).rename(away_from(folder / name))


def kill_writing(moment: int, folder: Path) -> None:
    """Let the system kill the process in the middle of the first write after a moment."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    at(moment, limit_files, folder)


def kill_after(seconds: float, folder: Path) -> None:
    timer = threading.Timer(seconds, os.killpg, (0, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def refuse_from(moment: int, error: int, folder: Path) -> None:
    """Let the disk refuse changes: if it is full, new files and `fsync`, else every change."""

    def act(number: int, event: str) -> None:
        if number >= moment and (error != errno.ENOSPC or event in _TAKES_SPACE):
            raise OSError(error, os.strerror(error))

    at_each_moment(folder, act)


def away_from(path: Path) -> Path:
    return path.with_name(f"{path.name}-gone")


def without_network(folder: Path) -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.__new__" and arguments[1] == socket.AF_UNIX:
            return  # processes of one machine
        if event in _NETWORK:
            os.write(1, f"{NETWORK_USED}: {event}\n".encode())
            raise PermissionError(errno.EPERM, NETWORK_USED)

    sys.addaudithook(audit)


def limit_memory(n_bytes: int, folder: Path) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + n_bytes, held + n_bytes))
