"""Test what the doctor says of scans, disks and runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import brats_seg.runtime.machine as machine_module
from brats_seg.config import Config
from brats_seg.doctor import Diagnosis, diagnose
from brats_seg.errors import Finding
from brats_seg.files import locked
from brats_seg.runtime.torch_files import write_checkpoint
from tests.builders import Run

TRAINED = ("--preset", "demo", "--epochs", "2", "--patch", "16,16,16", "--set", "model.widths=4,8")


def found(diagnosis: Diagnosis, check: str) -> Finding:
    (finding,) = [one for one in diagnosis.findings if one.check == check]
    return finding


def begun(folder: Path, name: str, last: Any = None) -> Path:
    """Write the folder of a run that was begun, with or without a checkpoint."""
    path = folder / "runs" / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(Config().to_yaml())
    if last is not None:
        write_checkpoint(last, path / "last.pt")
    return path


def test_all_is_well_with_scans_that_can_be_prepared(brats_root: Path, tmp_path: Path) -> None:
    diagnosis = diagnose(brats_root, runs=tmp_path / "runs")

    assert diagnosis.can_work
    assert found(diagnosis, "scans").found == f"6 cases in {brats_root}, 6 with a label map"
    assert "0 of 6 labelled cases prepared" in found(diagnosis, "prepared cases").found
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_is_too_small_for_the_prepared_cases_is_a_problem(
    brats_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "free_bytes", lambda folder: 1000)

    diagnosis = diagnose(brats_root)

    assert not diagnosis.can_work
    assert found(diagnosis, "prepared cases").status == "problem"


def test_a_case_without_a_modality_is_a_warning(brats_root: Path) -> None:
    next(brats_root.glob("*_00003/*flair*")).unlink()

    finding = found(diagnose(brats_root), "scans")

    assert (finding.status, finding.remedy) == ("warning", f"brats-seg index {brats_root}")
    assert "1 with problems, such as BraTS2021_00003" in finding.found


def test_scans_that_are_not_there_are_a_problem(tmp_path: Path) -> None:
    finding = found(diagnose(tmp_path / "nowhere"), "scans")

    assert finding.status == "problem"
    assert "nowhere does not exist" in finding.found


def test_an_unfinished_run_is_a_warning_with_the_command_that_continues_it(
    brats_root: Path, tmp_path: Path, run: Run
) -> None:
    code, _, _ = run("train", "--data", brats_root, *TRAINED, "--session-hours", "0")
    assert code == 0

    finding = found(diagnose(brats_root, runs=tmp_path / "runs"), "run fold0")

    assert (finding.status, finding.found) == ("warning", "0 of 2 epochs done, unfinished")
    again = f"brats-seg train --data {brats_root} --fold 0 --run {tmp_path / 'runs/fold0'}"
    assert finding.remedy == again
    assert run(*again.split()[1:])[0] == 0
    assert found(diagnose(runs=tmp_path / "runs"), "run fold0").found.endswith("finished")


def test_a_run_of_another_format_or_damaged_is_a_problem(tmp_path: Path) -> None:
    begun(tmp_path, "newer", {"schema_version": 99})
    (begun(tmp_path, "cut") / "last.pt").write_bytes(b"PK")

    diagnosis = diagnose(runs=tmp_path / "runs")

    assert "found schema version 99" in found(diagnosis, "run newer").found
    assert found(diagnosis, "run cut").status == "problem"
    assert found(diagnosis, "run cut").remedy.endswith(f"--run {tmp_path}/runs/cut --fresh")


def test_a_run_that_is_being_trained_is_said_to_be(tmp_path: Path) -> None:
    path = begun(tmp_path, "fold1")
    with locked(path / ".training.lock"):
        diagnosis = diagnose(runs=tmp_path / "runs")

    assert found(diagnosis, "run fold1").found == "another process trains or tunes it now"
    assert "no checkpoint yet" in found(diagnose(runs=tmp_path / "runs"), "run fold1").found


def test_missing_packages_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Finding(check="packages", status="problem", found="torch", remedy="pip install torch")
    monkeypatch.setattr("brats_seg.doctor.package_finding", lambda: missing)

    diagnosis = diagnose()

    assert [one.check for one in diagnosis.findings] == ["Python", "packages"]
    assert not diagnosis.can_work


def test_the_command_prints_a_table_and_the_commands_that_mend(
    brats_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = machine_module.free_bytes
    monkeypatch.setattr(
        machine_module,
        "free_bytes",
        lambda path: 2**26 if path == machine_module.SHARED_MEMORY else free_bytes(path),
    )

    code, shown, _ = run("doctor", brats_root, "--set", "training.n_workers=8")

    assert code == 0
    assert re.search("shared memory +warning", shown)
    assert "shared memory, warning:\n    docker run --shm-size=8g ...\n" in shown
    assert shown.endswith("0 problems, 1 warning\n")


def test_the_command_exits_with_3_where_nothing_can_work(run: Run) -> None:
    code, shown, _ = run("doctor", "nowhere", "--json")

    assert code == 3
    assert not json.loads(shown)["can_work"]
