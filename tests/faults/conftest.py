"""Fixtures of the fault campaigns."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.stages import Stages


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Stages:
    """Folders that the commands start from, shared by the processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return Stages(base if worker_id == "master" else base.parent)


@pytest.fixture
def campaign(stages: Stages, tmp_path: Path) -> Iterator[Campaign]:
    """Tries below the folder of the test, which fails at its end if one of them has failed."""
    tries = Campaign(stages, tmp_path)
    yield tries
    tries.finish()
