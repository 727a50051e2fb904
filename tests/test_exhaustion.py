"""Memory that truly runs out: a run under half of what its first rung takes ends with its weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from brats_seg.training.checkpoints import load_checkpoint
from tests.builders import write_case

ROOT = Path(__file__).parent.parent
SETTINGS = [
    "folds.n_folds=3",
    "patch.size=[48, 48, 48]",
    "patch.per_case=2",
    "model.widths=[16, 32]",
    "training.n_epochs=2",
    "training.effective_batch=8",
    "training.micro_batch=8",
    "training.precision=fp32",
    "training.n_workers=0",
    "training.device=cpu",
]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scans")
    for number in range(6):
        write_case(root, f"BraTS2021_{number:05d}", seed=number, shape=(64, 64, 56))
    return root


def run(scans: Path, run_path: Path, limit_mb: float) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "tests.exhaustion_program"]
    return subprocess.run(
        [*program, str(scans), str(run_path), str(limit_mb), *SETTINGS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def weights(run_path: Path) -> torch.Tensor:
    model = load_checkpoint(run_path / "last.pt", torch.device("cpu")).model
    return torch.cat([tensor.flatten() for tensor in model.values()])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read on Linux")
def test_a_run_under_half_of_what_it_takes_learns_the_same(scans: Path, tmp_path: Path) -> None:
    free = run(scans, tmp_path / "free", 0)
    assert free.returncode == 0, free.stderr
    outcome = json.loads(free.stdout)
    assert outcome["rung"] == "micro-batch 8"

    half = run(scans, tmp_path / "half", outcome["taken_mb"] / 2)

    assert half.returncode == 0, half.stderr
    limited = json.loads(half.stdout)
    assert limited["finished"]
    assert limited["taken_mb"] <= outcome["taken_mb"] / 2
    assert limited["rung"] in {"micro-batch 2", "micro-batch 1"}
    assert "memory ran out with micro-batch 8" in half.stderr
    expected = weights(tmp_path / "free")
    difference = weights(tmp_path / "half") - expected
    assert float(difference.norm() / expected.norm()) <= 1e-5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read on Linux")
def test_where_no_rung_fits_the_run_says_what_to_lower(scans: Path, tmp_path: Path) -> None:
    ended = run(scans, tmp_path / "run", 60)

    assert ended.returncode == 1
    assert "memory ran out in every mode (micro-batch 8; micro-batch 4" in ended.stderr
    assert "Lower patch.size or model.widths" in ended.stderr
