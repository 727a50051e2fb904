"""No command uses the network, but `predict --workers` that is given an address."""

import os
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.programs import NETWORK_USED, run, without_network
from tests.faults.stages import COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, "predict --workers 2"])
def test_no_command_opens_a_socket(name: str, campaign: Campaign) -> None:
    command = COMMANDS[name.partition(" --workers")[0]]
    words = command.words + name.removeprefix("predict") * name.startswith("predict ")
    ended = run(words, campaign.start(command.stage), without_network)
    assert ended.expect(0) == ""
    assert NETWORK_USED not in ended.shown


def without_network_and_tls(folder: Path) -> None:
    os.environ["DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION"] = "False"
    without_network(folder)


@pytest.mark.slow
def test_a_scheduler_cannot_be_reached_without_it(campaign: Campaign) -> None:
    words = f"{COMMANDS['predict'].words} --workers tcp://127.0.0.1:9"
    assert NETWORK_USED in run(words, campaign.start("trained"), without_network_and_tls).shown
