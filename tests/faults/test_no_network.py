"""No command uses the network, but `predict --workers`, which is given an address."""

from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.programs import NETWORK_USED, run, without_network
from tests.faults.stages import COMMANDS, Stages

PROMISE = "no command uses the network"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_opens_a_socket(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    command = COMMANDS[name]
    folder = stages.start(command.stage, place / "here")
    with campaign(PROMISE) as tries:
        ended = run(command.words, folder, without_network)
        tries.note(name, ended.expect(0), NETWORK_USED if NETWORK_USED in ended.shown else "")


@pytest.mark.slow
def test_a_scheduler_cannot_be_reached_without_it(stages: Stages, place: Path) -> None:
    """The guard guards: the one command that needs the network is stopped, and shown."""
    folder = stages.start("trained", place / "here")

    words = f"{COMMANDS['predict'].words} --workers tcp://127.0.0.1:9"
    ended = run(words, folder, without_network)

    assert NETWORK_USED in ended.shown
