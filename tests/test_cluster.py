"""Test batches on dask: the same results as in one process, also when workers die."""

import builtins
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.find import find_inputs
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.inference import batch
from brats_seg.inference.batch import (
    CaseOutcome,
    CaseWork,
    Job,
    cluster_outcomes,
    finish_batch,
    local_outcomes,
    run_case,
)
from brats_seg.inference.model import load_model
from brats_seg.inference.predict import Predictor
from brats_seg.inference.results import OutputFolder, Record
from brats_seg.inference.settings import PredictionSettings
from tests.builders import write_case
from tests.inference_builders import CPU, write_run

SETTINGS = PredictionSettings(preview=False, precision="fp32", device="cpu")


@pytest.fixture
def job(brats_root: Path, tmp_path: Path) -> Job:
    run = write_run(tmp_path / "run")
    return Job(
        model_paths=(run,),
        fingerprint=load_model([run], CPU).fingerprint,
        settings=SETTINGS,
        output_path=tmp_path / "out",
    )


def run_locally(root: Path, job: Job, path: Path) -> None:
    folder = OutputFolder(path)
    predictor = Predictor.load(job.model_paths, job.settings)
    inputs = find_inputs([root])
    with folder.opened():
        work = CaseWork(predictor=predictor, output=folder, earlier={})
        finish_batch(local_outcomes(inputs, work), folder, len(inputs))


def killed_once(case: Case, job: Job) -> CaseOutcome:
    """End the worker at the third case, the first time."""
    sign = job.output_path / "died"
    if case.case_id.endswith("2") and not sign.exists():
        sign.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run_case(case, job)


def killed_always(case: Case, job: Job) -> CaseOutcome:
    """End the worker at the third case every time, and count."""
    if case.case_id.endswith("2"):
        with (job.output_path / "deaths").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return run_case(case, job)


def test_a_worker_does_a_case_as_the_batch_does(brats_root: Path, job: Job, tmp_path: Path) -> None:
    run_locally(brats_root, job, tmp_path / "local")
    (tmp_path / "out").mkdir()

    endings = [run_case(one, job) for one in find_inputs([brats_root])]

    assert all(isinstance(ending.record, Record) for ending in endings)
    for path in (tmp_path / "local").glob("*.nii.gz"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_a_model_that_changed_meanwhile_is_refused(brats_root: Path, job: Job) -> None:
    write_run(job.model_paths[0], seed=5)
    batch._work.cache_clear()

    with pytest.raises(UsageError, match="the model changed while the batch was running"):
        run_case(find_inputs([brats_root])[0], job)


def test_without_dask_the_way_to_get_it_is_said(
    job: Job, brats_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def lacking(name: str, *args: object, **kwargs: object) -> object:
        if name == "distributed":
            raise ImportError(name)
        return imported(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(EnvironmentalError, match=r"pip install brats_seg\[cluster\]"):
        list(cluster_outcomes(find_inputs([brats_root]), job, 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_costs_a_retry_and_changes_nothing(
    brats_root: Path, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_locally(brats_root, job, tmp_path / "local")
    monkeypatch.setattr(batch, "run_case", killed_once)
    folder, inputs = OutputFolder(job.output_path), find_inputs([brats_root])

    with folder.opened():
        endings = cluster_outcomes(inputs, job, 2)
        outcome = finish_batch(endings, folder, len(inputs))

    assert (job.output_path / "died").exists()
    assert (outcome.n_predicted, outcome.failures) == (6, ())
    for path in (tmp_path / "local").glob("*.nii.gz"):
        assert path.read_bytes() == (job.output_path / path.name).read_bytes()
    local, shared = (folder / "volumes.csv" for folder in (tmp_path / "local", job.output_path))
    assert local.read_text() == shared.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_case_that_kills_three_workers_is_a_row_in_the_failures(
    brats_root: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "run_case", killed_always)
    write_case(brats_root, "BraTS2021_00099")
    (brats_root / "BraTS2021_00099" / "BraTS2021_00099_t1.nii.gz").unlink()
    folder, inputs = OutputFolder(job.output_path), find_inputs([brats_root])

    with folder.opened():
        endings = cluster_outcomes(inputs, job, 2)
        outcome = finish_batch(endings, folder, len(inputs))

    killed, broken = sorted(outcome.failures, key=lambda record: record.case_id)
    assert (job.output_path / "deaths").read_text() == "xxx"
    assert killed.error == "KilledWorker"
    assert "case BraTS2021_00002: its worker died 3 times" in killed.message
    assert broken.case_id == "BraTS2021_00099"
    assert outcome.n_predicted == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_that_does_not_answer_is_an_error_of_the_machine(
    job: Job, brats_root: Path
) -> None:
    import dask

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(EnvironmentalError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1"),
    ):
        next(cluster_outcomes(find_inputs([brats_root]), job, "tcp://127.0.0.1:1"))


def test_an_address_that_accepts_and_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "ANSWER_S", 0.5)
    started_s = time.monotonic()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(EnvironmentalError, match=rf"answers at tcp://127\.0\.0\.1:{port} \(no"):
            batch.check_scheduler(f"tcp://127.0.0.1:{port}")

    assert time.monotonic() - started_s < 20


@pytest.mark.parametrize("address", ["scheduler", "ftp://localhost:1", "tcp://127.0.0.1:1"])
def test_an_address_of_nothing_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "ANSWER_S", 0.5)

    with pytest.raises(EnvironmentalError, match=f"no dask scheduler answers at {address}"):
        batch.check_scheduler(address)


def test_workers_without_a_loop_back_are_an_error_of_the_machine(
    job: Job, brats_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without any network."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(101, os.strerror(101))

    monkeypatch.setattr(socket, "create_connection", unreachable)
    outcomes = cluster_outcomes(find_inputs([brats_root]), job, 2)

    with pytest.raises(EnvironmentalError, match=r"127\.0\.0\.1 .*Network is unreachable"):
        next(outcomes)
