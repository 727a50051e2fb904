"""Give a command something that was made to break it, and say what breaks its promises."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from tests.faults.programs import Ended, LimitedMemory, run

MEMORY = LimitedMemory(2 << 30)
TIMEOUT_S = 40.0
OWNED = "owned"
"""File that hostile code would write."""

Break: TypeAlias = Callable[[Path], object]
"""Makes something hostile at a path."""


def attack(words: str, folder: Path) -> Ended:
    """Run a command that is given something hostile, with little memory and time."""
    return run(words, folder, MEMORY, timeout_s=TIMEOUT_S)


def harmless(ended: Ended, folder: Path, *codes: int) -> tuple[str, ...]:
    """Return the problems of an end that should have one of those codes."""
    outside = any(OWNED in path.name for path in folder.parent.iterdir())
    owned = (
        "code was run, or a file written outside" if (folder / OWNED).exists() or outside else ""
    )
    silent = "" if ended.code == 0 or ended.shown.strip() else "it said nothing"
    return ended.expect(*codes), owned, silent


def make_loop(path: Path) -> None:
    """Make a link to itself."""
    path.symlink_to(path.name)


def make_device(path: Path) -> None:
    """Make a link to a file without end."""
    path.symlink_to("/dev/zero")


def make_fifo(path: Path) -> None:
    """Make a file that waits for ever to be written."""
    os.mkfifo(path)
