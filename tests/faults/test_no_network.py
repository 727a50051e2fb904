"""No command uses the network, but `predict --workers` that is given an address."""

from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.programs import NETWORK_USED, run, without_network
from tests.faults.stages import COMMANDS, Stages

PROMISE = "no command uses the network"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, "predict --workers 2"])
def test_no_command_opens_a_socket(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    command, _, workers = name.partition(" --workers ")
    words = COMMANDS[command].words + f" --workers {workers}" * bool(workers)
    folder = stages.start(COMMANDS[command].stage, place / "here")
    with campaign(PROMISE) as tries:
        ended = run(words, folder, without_network)
        tries.note(name, ended.expect(0), NETWORK_USED if NETWORK_USED in ended.shown else "")


@pytest.mark.slow
def test_a_scheduler_cannot_be_reached_without_it(stages: Stages, place: Path) -> None:
    """The guard guards: the one command that needs the network is stopped, and shown."""
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    folder = stages.start("trained", place / "here")

    words = f"{COMMANDS['predict'].words} --workers tcp://127.0.0.1:9"
    with dask.config.set({"distributed.comm.require-encryption": False}):
        ended = run(words, folder, without_network)

    assert NETWORK_USED in ended.shown
