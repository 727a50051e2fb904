"""A folder of thirty cases, ten of them bad: twenty label maps, ten rows, also if a worker is killed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.bad_cases import BAD_CASES, break_in_ten_ways
from tests.builders import start, write_case
from tests.inference_builders import write_run

GOOD_IDS = [f"BraTS2021_{number:05d}" for number in range(20)]


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scans, a model, and `undisturbed`: the results of one process."""
    root = tmp_path_factory.mktemp("thirty")
    for number, case_id in enumerate(GOOD_IDS):
        write_case(root / "scans", case_id, seed=number, shape=(40, 40, 32), labelled=False)
    break_in_ten_ways(root / "scans")
    write_run(root / "run")
    done = start(command(root, "undisturbed"), root)
    assert done.returncode == 1, done.stderr
    return root


def command(root: Path, output: str, *options: str) -> list[str]:
    words = ["predict", root / "scans", "-o", root / output, "--model", root / "run"]
    return [sys.executable, "-m", "brats_seg", *map(str, words), "--precision", "fp32", *options]


def results(output: Path) -> dict[str, bytes]:
    """Return every file but the manifest, which has times in it, and the lock."""
    files = {path for path in output.rglob("*") if path.is_file()}
    files -= {output / "manifest.jsonl", output / ".predicting.lock"}
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


def done_ids(output: Path) -> list[str]:
    """Return the cases that the manifest calls done, as often as it does."""
    lines = (output / "manifest.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return sorted(record["case_id"] for record in records if "error" not in record)


@pytest.mark.slow
def test_twenty_label_maps_and_ten_rows(thirty: Path) -> None:
    output = thirty / "undisturbed"
    failures = pd.read_csv(output / "failures.csv").set_index("case_id")["message"]
    names = {path.name for path in output.glob("*.nii.gz")}
    assert names == {f"{case_id}.nii.gz" for case_id in GOOD_IDS}
    assert len(list((output / "previews").glob("*.png"))) == 20
    assert list(failures.index) == list(BAD_CASES)
    assert all(f"found {found}" in failures[case_id] for case_id, found in BAD_CASES.items())
    assert done_ids(output) == GOOD_IDS


@pytest.mark.slow
def test_a_killed_worker_changes_no_bit(thirty: Path) -> None:
    output = thirty / "shared"
    process = psutil.Popen(
        command(thirty, "shared", "--workers", "2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(list(output.glob("*.nii.gz"))) < 3 and process.poll() is None:
        time.sleep(0.002)
    # a worker is known by its command line; its other processes only watch it
    workers = [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]
    workers[0].kill()
    assert process.wait() == 1
    assert len(workers) == 2
    assert results(output) == results(thirty / "undisturbed")
    assert done_ids(output) == GOOD_IDS
