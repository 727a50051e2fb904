"""Test what the doctor says of packages, scans and disks."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from brats_seg.doctor import Diagnosis, diagnose, package_finding
from brats_seg.errors import Finding
from brats_seg.runtime import machine
from tests.builders import ROOT, Run, start, touch

NUMPY = version("numpy")


def found(diagnosis: Diagnosis, check: str) -> Finding:
    (finding,) = [one for one in diagnosis.findings if one.check == check]
    return finding


def test_scans_are_counted_and_a_missing_modality_is_a_warning(brats_root, tiny_prepared, tmp_path):
    diagnosis = diagnose(brats_root, runs=tmp_path / "runs")
    ready = found(diagnose(brats_root, prepared_path=tiny_prepared), "prepared cases").found
    next(brats_root.glob("*_00003/*flair*")).unlink()
    warning = found(diagnose(brats_root), "scans")
    assert diagnosis.can_work
    assert found(diagnosis, "scans").found == f"6 cases in {brats_root}, 6 with a label map"
    assert "0 of 6 labelled cases prepared" in found(diagnosis, "prepared cases").found
    assert "6 of 6 labelled cases prepared: 0 MiB needed" in ready
    assert found(diagnosis, "packages").status != "problem"
    assert not (tmp_path / "runs").exists()
    assert (warning.status, warning.remedy) == ("warning", f"brats-seg index {brats_root}")
    assert "1 with problems, such as BraTS2021_00003" in warning.found


def test_no_mode_is_advised_where_a_file_is_in_place_of_the_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem = found(diagnose(runs=tmp_path / "file"), "runs")
    assert (problem.status, problem.remedy) == ("problem", "")


def test_remedies_are_printed(brats_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = machine.free_bytes
    small = {machine.SHARED_MEMORY: 2**26}
    monkeypatch.setattr(machine, "free_bytes", lambda path: small.get(path) or free_bytes(path))
    code, shown, _ = run("doctor", brats_root, "--set=training.n_workers=1", "--effective-batch=4")
    assert code == 0
    assert re.search("shared memory +warning", shown)
    assert "shared memory, warning:\n    docker run --shm-size=8g ...\n" in shown
    assert shown.endswith("0 problems, 1 warning\n")


def test_the_command_exits_with_3_where_nothing_can_work(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("doctor", tmp_path, "--json")
    diagnosis = json.loads(shown)
    assert (code, diagnosis["can_work"]) == (3, False)
    (problem,) = [one["found"] for one in diagnosis["findings"] if one["status"] == "problem"]
    assert "holds no cases" in problem


def test_packages_are_compared_with_the_required_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {"numpy": "2", "torch": "2.0"}
    monkeypatch.setattr("brats_seg.doctor.versions_required", lambda: required)
    assert package_finding().found == "2 are new enough"
    required |= {"numpy": "99", "no-such-package": ""}
    finding = package_finding()
    text = f"numpy>=99 ({NUMPY} installed), no-such-package (not installed)"
    assert (finding.status, finding.found) == ("problem", f"missing or too old: {text}")
    assert finding.remedy == 'pip install "numpy>=99" "no-such-package"'
    monkeypatch.setattr("brats_seg.doctor.installed_version", lambda name: "")
    monkeypatch.setattr("brats_seg.doctor.files", lambda name: Path("a b/brats_seg"))
    assert package_finding().remedy == "pip install 'a b/brats_seg/..'"


@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["train"]])
def test_missing_packages_are_named(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "brats_seg").symlink_to(ROOT / "brats_seg")
    described = touch(tmp_path, "brats_seg-0.1.0.dist-info/METADATA")
    (described / "brats_seg-0.1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: brats_seg\nVersion: 0.1.0\n"
        "Requires-Dist: torch>=2.6\nRequires-Dist: typer>=0.15\n"
    )
    # without site-packages
    command = [sys.executable, "-S", "-m", "brats_seg", *arguments]
    done = start(command, tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3, done.stderr
    shown = done.stderr
    if arguments[0] == "doctor":
        diagnosis = json.loads(done.stdout)
        assert not diagnosis["can_work"]
        shown = diagnosis["findings"][0]["found"] + diagnosis["findings"][0]["remedy"]
    else:
        assert shown.startswith("error: No module named 'typer'; missing or too old: ")
    assert "torch>=2.6 (not installed), typer>=0.15 (not installed)" in shown
    assert 'pip install "torch>=2.6" "typer>=0.15"' in shown
