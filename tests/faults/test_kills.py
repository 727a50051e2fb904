"""A command that is killed at any moment, and started again, ends with the results of an undisturbed one.

Moments are spread over the whole command: before, between and after its changes to files, in the
middle of a write, and by the clock.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.programs import (
    At,
    Fault,
    KilledAfter,
    KilledWriting,
    kill_all,
    run,
)
from tests.faults.stages import COMMANDS, Stages, ending, lost, results

KILLS = {
    "index": 12,
    "prepare": 20,
    "train": 20,
    "tune": 12,
    "crossval": 12,
    "predict": 16,
    "features": 12,
}
"""Number of kills of each command, 104 in all."""
PROMISE = "killed at any moment, `{}` ends with equal results"


def faults(n_kills: int, n_changes: int, seconds: float) -> Iterator[Fault]:
    """Return kills that are spread over a command of so many changes and seconds."""
    for number in range(n_kills):
        share = (number + 0.5) / n_kills
        moment = 1 + int(share * n_changes)
        # six of ten at a change, three in the middle of the next write, one by the clock
        if number % 10 == 9:
            yield KilledAfter(share * seconds)
        elif number % 3 == 2:
            yield KilledWriting(moment)
        else:
            yield At(moment, kill_all)


def kill_and_finish(
    name: str, n_kills: int, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    command = COMMANDS[name]
    n_changes, expected = stages.undisturbed(command, place / "undisturbed")
    timed = stages.start(command.stage, place / "timed")
    started_s = time.monotonic()
    assert run(command.words, timed).code == 0
    seconds = time.monotonic() - started_s
    with campaign(PROMISE.format(name)) as tries:
        for number, fault in enumerate(faults(n_kills, n_changes, seconds)):
            folder = stages.start(command.stage, place / f"killed{number}")
            given = results(folder)
            killed = run(command.words, folder, fault)
            kept = "" if name == "tune" else lost(results(folder), given)
            ended = run(command.words, folder)
            tries.note(f"{fault}", killed.problem, kept, *ending(ended, folder, expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_killed_at_any_moment_it_ends_with_the_same(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    kill_and_finish(name, KILLS[name], stages, place, campaign)


@pytest.mark.parametrize("name", ["prepare", "predict"])
def test_killed_three_times_it_ends_with_the_same(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    kill_and_finish(name, 3, stages, place, campaign)
