"""Test the comparison of installed packages with those that are required and tested."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from brats_seg.doctor import package_finding, versions_required, versions_tested

NUMPY = version("numpy")


def test_what_is_installed_as_tested_is_all_right() -> None:
    finding = package_finding({"numpy": "2"}, {"numpy": NUMPY})

    assert (finding.status, finding.found) == ("ok", "1 as tested")


def test_missing_and_old_packages_are_named_with_the_command_that_installs_them() -> None:
    finding = package_finding({"numpy": "99", "no-such-package": "", "pandas": "2"}, {})

    assert finding.status == "problem"
    assert f"numpy>=99 ({NUMPY}), no-such-package (not installed)" in finding.found
    assert finding.remedy == 'pip install "numpy>=99" "no-such-package"'


def test_another_version_than_the_tested_one_is_a_warning() -> None:
    finding = package_finding({"numpy": "2"}, {"numpy": "2.0.7"})

    assert finding.status == "warning"
    assert f"numpy {NUMPY} (tested: 2.0.7)" in finding.found
    assert finding.remedy == "pip install numpy==2.0.7"


def test_torch_of_another_build_or_version_is_left_as_it_is() -> None:
    finding = package_finding({"torch": "2"}, {"torch": "2.0.1"})

    assert finding.status == "ok"


def test_the_versions_tested_are_those_of_the_constraints() -> None:
    assert versions_required().keys() >= {"torch", "numpy", "typer"}
    tested = versions_tested()
    assert {name.lower() for name in versions_required()} <= tested.keys()


@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["train"]])
def test_where_packages_are_missing_the_program_says_so(
    tmp_path: Path, arguments: list[str]
) -> None:
    """Nothing is installed but the package: a folder with its source and its metadata."""
    import brats_seg.errors

    (tmp_path / "brats_seg").symlink_to(Path(brats_seg.errors.__file__).parent)
    described = tmp_path / "brats_seg-0.1.0.dist-info"
    described.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: brats_seg", "Version: 0.1.0"]
    lines += ["Requires-Dist: torch>=2.6", "Requires-Dist: typer>=0.15"]
    (described / "METADATA").write_text("\n".join(lines) + "\n")

    done = subprocess.run(
        # without site-packages
        [sys.executable, "-S", "-m", "brats_seg", *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3, done.stderr
    shown = done.stderr
    if arguments[0] == "doctor":
        diagnosis = json.loads(done.stdout)
        assert not diagnosis["can_work"]
        shown = diagnosis["findings"][0]["found"] + diagnosis["findings"][0]["remedy"]
    assert "torch>=2.6 (not installed), typer>=0.15 (not installed)" in shown
    assert 'pip install "torch>=2.6" "typer>=0.15"' in shown
