"""A disk that is full, read-only, failing or gone ends a command with a named error and loses nothing.

The error says what could not be written and what to do (exit code 3, or a row in `failures.csv`);
what was there before stays; once the disk is well, the same command ends with equal results.
"""

import errno
import shutil
from collections.abc import Callable
from functools import partial

import pytest

from tests.faults.campaign import Campaign
from tests.faults.programs import Fault, at, away_from, limit_files, refuse_from, run, unplug
from tests.faults.stages import COMMANDS, differences, ending, lost, results

DISKS: dict[str, Callable[[int], Fault]] = {
    "full": lambda n: partial(refuse_from, n, errno.ENOSPC),
    "read-only": lambda n: partial(refuse_from, n, errno.EROFS),
    "failing": lambda n: partial(refuse_from, n, errno.EIO),
    "limited by ulimit -f": lambda n: partial(at, n, limit_files),
}
"""What happens to a disk at a moment."""
THRICE, TWICE = (0.0, 0.45, 0.9), (0.0, 0.5)
MOMENTS = {
    **dict.fromkeys(("index", "prepare", "train", "tune", "predict", "features", "export"), THRICE),
    # it takes seconds: while it trains, and while it predicts; what it calls is tried with every disk
    "crossval": (0.45, 0.85),
    **dict.fromkeys(("certify", "evaluate", "figure sample", "figure history", "phantom"), TWICE),
}
"""When it happens to each command, as shares of the changes that it makes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "disk", "shares"),
    [(n, d, s) for d in DISKS for n, s in MOMENTS.items() if n != "crossval" or d == "full"],
)
def test_bad_disks(name: str, disk: str, shares: tuple[float, ...], campaign: Campaign) -> None:
    command = COMMANDS[name]
    alone = campaign.undisturbed(command)
    for share in shares:
        folder = campaign.start(command.stage, f"at{share}")
        given = results(folder)
        hit = run(command.words, folder, DISKS[disk](alone.moment(share)))
        # `tune` adds to files of an earlier command
        kept = "" if name == "tune" else lost(results(folder), given)
        # what is refused after the last result, such as the removal of a lock, changes nothing
        done = results(folder) == alone.results
        ended = run(command.words, folder)
        # `export` does not write over its own result
        again = (0, 2) if done and name == "export" else (0,)
        ends = hit.expect(0, 1, 3) if done else hit.expect(1, 3), ended.expect(*again)
        other = differences(results(folder), alone.results)
        campaign.note(f"{name}, {disk} at {share}", *ends, kept, other)


OUTPUTS = {"prepare": "prepared", "train": "runs", "predict": "out", "crossval": "crossval"}
"""Folder that a command writes to."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("which", ["output", "input"])
def test_a_vanished_folder_gives_no_traceback(name: str, which: str, campaign: Campaign) -> None:
    command = COMMANDS[name]
    alone = campaign.undisturbed(command)
    vanishing = OUTPUTS[name] if which == "output" else "scans"
    for share in (0.5, 0.9) if name == "crossval" else (0.1, 0.5, 0.9):
        folder = campaign.start(command.stage, f"at{share}")
        fault = partial(at, alone.moment(share), partial(unplug, vanishing))
        hit = run(command.words, folder, fault)
        away = away_from(folder / vanishing)
        if which == "input" and away.exists():
            away.rename(folder / vanishing)
        shutil.rmtree(away, ignore_errors=True)
        problems = ending(run(command.words, folder), folder, alone.results)
        campaign.note(f"{name} at {share}", hit.expect(0, 1, 2, 3), *problems)
