"""A command that is killed at any moment, and started again, ends with the results of an undisturbed one.

Moments are spread over the whole command: before, between and after its changes to files, in the
middle of a write, and by the clock.
"""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.faults.campaign import Campaign
from tests.faults.programs import Fault, at, kill_after, kill_all, kill_writing, run
from tests.faults.stages import COMMANDS, Undisturbed, ending, lost, results

N_KILLS = {"index": 12, "tune": 9, "crossval": 6, "features": 12}
N_KILLS |= {"prepare": 20, "train": 20, "predict": 16}


def kills(n_kills: int, alone: Undisturbed) -> Iterator[Fault]:
    for number in range(n_kills):
        share = (number + 0.5) / n_kills
        # six of ten at a change, three in the middle of the next write, one by the clock
        if number % 10 == 9:
            yield partial(kill_after, share * alone.seconds)
        elif number % 3 == 2:
            yield partial(kill_writing, alone.moment(share))
        else:
            yield partial(at, alone.moment(share), kill_all)


@pytest.mark.parametrize(
    ("name", "n_kills"),
    [
        *(pytest.param(*row, marks=pytest.mark.slow) for row in N_KILLS.items()),
        ("predict, label maps alone", 3),
    ],
)
def test_a_kill_loses_nothing(name: str, n_kills: int, campaign: Campaign) -> None:
    command = COMMANDS[name]
    alone = campaign.undisturbed(command)
    for number, fault in enumerate(kills(n_kills, alone)):
        folder = campaign.start(command.stage, f"killed{number}")
        given = results(folder)
        killed = run(command.words, folder, fault)
        # what `tune` adds to the runs may be there already
        kept = "" if name == "tune" else lost(results(folder), given)
        ended = run(command.words, folder)
        campaign.note(f"{fault}", killed.problem, kept, *ending(ended, folder, alone.results))
