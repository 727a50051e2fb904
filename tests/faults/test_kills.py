"""A command that is killed at any moment, and started again, ends with the results of an undisturbed one.

Moments are spread over the whole command: before, between and after its changes to files, in the
middle of a write, and by the clock.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.programs import At, Fault, KilledAfter, KilledWriting, kill_all, run
from tests.faults.stages import COMMANDS, Stages, Undisturbed, ending, lost, results

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


def faults(n_kills: int, alone: Undisturbed) -> Iterator[Fault]:
    """Return kills that are spread over a command."""
    for number in range(n_kills):
        share = (number + 0.5) / n_kills
        # six of ten at a change, three in the middle of the next write, one by the clock
        if number % 10 == 9:
            yield KilledAfter(share * alone.seconds)
        elif number % 3 == 2:
            yield KilledWriting(alone.moment(share))
        else:
            yield At(alone.moment(share), kill_all)


def kill_and_finish(
    name: str, n_kills: int, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    command = COMMANDS[name]
    alone = stages.undisturbed(command.words, command.stage, place / "undisturbed")
    with campaign(PROMISE.format(name)) as tries:
        for number, fault in enumerate(faults(n_kills, alone)):
            folder = stages.start(command.stage, place / f"killed{number}")
            given = results(folder)
            killed = run(command.words, folder, fault)
            kept = "" if name == "tune" else lost(results(folder), given)
            ended = run(command.words, folder)
            tries.note(f"{fault}", killed.problem, kept, *ending(ended, folder, alone.results))


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
