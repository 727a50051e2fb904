"""Fixtures of the fault campaigns."""

from pathlib import Path

import pytest

from tests.faults.campaign import campaign
from tests.faults.stages import Stages

__all__ = ["campaign"]


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Stages:
    """Folders that the commands start from, shared by the processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return Stages(base if worker_id == "master" else base.parent)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder below which commands run, each in a folder of its own."""
    return tmp_path
