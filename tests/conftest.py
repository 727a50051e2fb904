"""Fixtures that many tests share."""

import gc
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings

from tests.browser import CHROMIUM, Page, opened_browser
from tests.builders import Run, call, write_case

if TYPE_CHECKING:
    from brats_seg.data.fold import FoldData

# the same examples in every run, on machines of any speed
settings.register_profile(
    "project", deadline=None, derandomize=True, max_examples=50, database=None
)
settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def _disks_are_not_waited_for() -> Iterator[None]:
    """Leave out `fsync` in this process; the commands of `tests/faults` count it in theirs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on cases in this process: to fork it takes longer than what is done with tiny scans."""
    for module in ("cli.look", "data.fold", "inference.tuning", "pages.write"):
        monkeypatch.setattr(f"brats_seg.{module}.available_cpus", lambda: 0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def tiny_scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scans of six labelled patients named as in BraTS 2021, to be read only; the last has no ET."""
    root = tmp_path_factory.mktemp("tiny") / "data"
    for number in range(6):
        write_case(root, f"BraTS2021_{number:05d}", seed=number, with_et=number < 5)
    return root


@pytest.fixture
def brats_root(tmp_path: Path, tiny_scans: Path) -> Path:
    return Path(shutil.copytree(tiny_scans, tmp_path / "data"))


@pytest.fixture
def case(tmp_path: Path) -> Path:
    return write_case(tmp_path / "scans")


@pytest.fixture(scope="session")
def data(tiny_scans: Path) -> "FoldData":
    """The first of three folds of `tiny_scans`: four cases to train on, two held out."""
    from brats_seg.data.fold import open_fold
    from tests.training_builders import tiny_settings

    folder = tiny_scans.with_name("data-prepared")
    return open_fold(tiny_scans, fold=0, config=tiny_settings(), prepared_path=folder)


@pytest.fixture(scope="session")
def tiny_prepared(data: "FoldData") -> Path:
    """The prepared cases of `tiny_scans` in three folds, to be read only."""
    return data.folder


@pytest.fixture(scope="session")
def tiny_run(tiny_scans: Path, tiny_prepared: Path) -> Path:
    """A run of one epoch on the first of three folds of `tiny_scans`, to be read only."""
    from brats_seg.training.trainer import train_fold
    from tests.training_builders import tiny_settings

    path = tiny_scans.with_name("runs") / "fold0"
    config = tiny_settings("training.n_epochs=1")
    train_fold(tiny_scans, 0, config=config, run_path=path, prepared_path=tiny_prepared)
    return path


@pytest.fixture(scope="session")
def cubes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prepared cases of about 45 voxels an edge, to be read only."""
    from tests.prepared import write_prepared

    return write_prepared(tmp_path_factory.mktemp("cubes"), n_cases=2, shape=(48, 48, 48))


@pytest.fixture(scope="session")
def five_prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from brats_seg.cases.phantom import write_phantom_cases
    from tests.prepared import prepare

    folder = tmp_path_factory.mktemp("five")
    write_phantom_cases(folder / "scans", n_cases=5, seed=0)
    assert prepare(folder / "scans", folder / "prepared") == ()
    return folder / "prepared"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return partial(call, tmp_path)


@pytest.fixture(scope="session")
def browser() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with opened_browser() as page:
        yield page


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("BRATS_REAL_DATA")
    if not folder:
        pytest.skip("BRATS_REAL_DATA names no folder of real cases")
    return Path(folder)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs CUDA")


def pytest_collection_finish() -> None:
    # what was imported stays, and each collection of garbage would go through all of it
    gc.freeze()
