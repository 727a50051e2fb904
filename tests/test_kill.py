"""A run that is killed at any moment ends with the weights of one that was not."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.builders import write_case

SETTINGS = [
    "--epochs",
    "3",
    "--patch",
    "16,16,8",
    "--effective-batch",
    "3",
    "--precision",
    "fp32",
    "--set",
    "folds.n_folds=3",
    "--set",
    "patch.per_case=6",
    "--set",
    "model.widths=[8, 16]",
    "--set",
    "training.augment=full",
    "--set",
    "optimizer.ema=0.9",
    # a checkpoint after every window, so that most kills fall beside a write
    "--set",
    "training.checkpoint_minutes=0.0001",
]


def command(run: str) -> list[str]:
    return [sys.executable, "-m", "brats_seg", "train", "--data", "scans", "--run", run, *SETTINGS]


def wait_for_writes(process: subprocess.Popen[bytes], path: Path, n_writes: int) -> None:
    """Wait until a file has changed that often, or the process has ended."""
    last = changed_ns(path)
    while n_writes and process.poll() is None:
        time.sleep(0.002)
        if (now := changed_ns(path)) != last:
            n_writes, last = n_writes - 1, now


def changed_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_killed_ten_times_at_random_moments(tmp_path: Path, seed: int) -> None:
    for number in range(6):
        write_case(tmp_path / "scans", f"BraTS2021_{number:05d}", seed=number)
    subprocess.run(command("undisturbed"), cwd=tmp_path, check=True, capture_output=True)

    moments = random.Random(seed)
    n_killed = 0
    for _ in range(10):
        process = subprocess.Popen(
            command("killed"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # of 24 windows; the clock would say nothing on a machine that is busy now and then
        wait_for_writes(process, tmp_path / "killed" / "last.pt", moments.randint(0, 2))
        time.sleep(moments.uniform(0, 0.2))
        n_killed += process.poll() is None
        process.kill()
        process.wait()
    subprocess.run(command("killed"), cwd=tmp_path, check=True, capture_output=True)

    assert n_killed >= 8
    for name in ("last.pt", "best.pt"):
        expected = torch.load(tmp_path / "undisturbed" / name, weights_only=True)
        found = torch.load(tmp_path / "killed" / name, weights_only=True)
        assert all(
            torch.equal(expected["model"][key], found["model"][key]) for key in expected["model"]
        )
        assert expected["position"] == found["position"]
    # no half-written file is left over: temporary names begin with a dot
    assert not [path for path in (tmp_path / "killed").iterdir() if path.name.startswith(".")]
