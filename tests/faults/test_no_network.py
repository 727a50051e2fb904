"""No command uses the network, but `predict --workers`, which is given an address."""

import pytest

from tests.faults.campaign import Campaign
from tests.faults.programs import NETWORK_USED, run, without_network
from tests.faults.stages import COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_opens_a_socket(name: str, campaign: Campaign) -> None:
    ended = run(COMMANDS[name].words, campaign.start(COMMANDS[name].stage), without_network)
    assert ended.expect(0) == ""
    assert NETWORK_USED not in ended.shown


@pytest.mark.slow
def test_a_scheduler_cannot_be_reached_without_it(campaign: Campaign) -> None:
    """The guard guards: the one command that needs the network is stopped, and shown."""
    words = f"{COMMANDS['predict'].words} --workers tcp://127.0.0.1:9"
    assert NETWORK_USED in run(words, campaign.start("trained"), without_network).shown
