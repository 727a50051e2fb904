"""The night: a folder of thirty cases, ten of them bad, and whatever dies meanwhile."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.bad_cases import BAD_IDS, FOUND, break_in_ten_ways
from tests.builders import write_case
from tests.inference_builders import write_run

GOOD_IDS = [f"BraTS2021_{number:05d}" for number in range(20)]
N_KILLS = 5


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scans, a model, and `undisturbed`: the results of a night without trouble."""
    root = tmp_path_factory.mktemp("night")
    for number, case_id in enumerate(GOOD_IDS):
        write_case(root / "scans", case_id, seed=number, shape=(40, 40, 32), labelled=False)
    break_in_ten_ways(root / "scans")
    write_run(root / "run")
    done = subprocess.run(command(root, "undisturbed"), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return root


def command(root: Path, output: str, *options: str) -> list[str]:
    words = ["predict", root / "scans", "-o", root / output, "--model", root / "run"]
    return [sys.executable, "-m", "brats_seg", *map(str, words), "--precision", "fp32", *options]


def start(root: Path, output: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(root, output, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for(process: subprocess.Popen[bytes], output: Path, n_label_maps: int) -> None:
    """Wait until so many label maps are there, or the process has ended."""
    while len(list(output.glob("*.nii.gz"))) < n_label_maps and process.poll() is None:
        time.sleep(0.002)


def results(output: Path) -> dict[str, bytes]:
    """Return every file but the manifest, which has times in it, and the lock."""
    others = {"manifest.jsonl", ".predicting.lock"}
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in output.rglob("*")
        if path.is_file() and path.name not in others
    }


def done_ids(output: Path) -> list[str]:
    """Return the cases that the manifest calls done, as often as it does."""
    lines = (output / "manifest.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return sorted(record["case_id"] for record in records if record["status"] == "done")


@pytest.mark.slow
def test_twenty_label_maps_and_ten_rows(night: Path) -> None:
    output = night / "undisturbed"

    failures = pd.read_csv(output / "failures.csv")

    assert sorted(path.name for path in output.glob("*.nii.gz")) == [
        f"{case_id}.nii.gz" for case_id in GOOD_IDS
    ]
    assert len(list((output / "previews").glob("*.png"))) == 20
    assert failures["case_id"].tolist() == BAD_IDS
    for message, found in zip(failures["message"], FOUND, strict=True):
        assert f"found {found}" in message
    assert done_ids(output) == GOOD_IDS


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_killed_five_times_it_ends_with_the_same(night: Path, seed: int) -> None:
    """Without warning, at random moments of the work itself, not of the start of Python."""
    moments, output = random.Random(seed), night / "killed"
    n_killed = 0
    for number in range(N_KILLS):
        process = start(night, "killed")
        n_before = len(list(output.glob("*.nii.gz")))
        wait_for(process, output, max(n_before + 1, 3 * number + 1))
        time.sleep(moments.uniform(0, 0.1))
        n_killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished = done_ids(output)
        assert all((output / f"{case_id}.nii.gz").exists() for case_id in finished)
    last = subprocess.run(command(night, "killed"), capture_output=True, check=False)

    assert last.returncode == 1
    assert n_killed == N_KILLS
    assert results(output) == results(night / "undisturbed")
    assert done_ids(output) == GOOD_IDS


@pytest.mark.slow
def test_a_killed_worker_changes_no_bit(night: Path) -> None:
    output = night / "shared"
    process = start(night, "shared", "--workers", "2")
    wait_for(process, output, 3)
    # one is told by what it was started with; the rest of its family only keeps watch
    workers = [
        child
        for child in psutil.Process(process.pid).children()
        if "spawn_main" in " ".join(child.cmdline())
    ]
    workers[0].kill()
    process.wait()

    assert len(workers) == 2
    assert process.returncode == 1
    assert results(output) == results(night / "undisturbed")
    assert done_ids(output) == GOOD_IDS
