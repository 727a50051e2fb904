"""Test the commands `tune` and `crossval`: their files, and what they refuse."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brats_seg.cli import main
from tests.builders import write_case

SETTINGS = [
    *("--set", "folds.n_folds=2"),
    *("--set", "training.n_epochs=2"),
    *("--set", "patch.size=8,8,8"),
    *("--set", "model.widths=[4, 8]"),
    *("--set", "training.n_workers=0"),
    *("--precision", "fp32"),
]
CROSSVAL = ["crossval", "--data", "scans", *SETTINGS]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "brats_seg", *arguments]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with six labelled cases under `scans`."""
    for number in range(6):
        write_case(tmp_path / "scans", f"BraTS2021_{number:05d}", seed=number)
    return tmp_path


@pytest.mark.slow
def test_from_a_folder_of_scans_to_scores_and_a_model(root: Path) -> None:
    done = run(root, *CROSSVAL)

    assert done.returncode == 0, done.stderr
    assert "tuned on 6 held-out cases of 2 runs" in done.stdout
    assert "6 held-out cases, 0 failed" in done.stdout
    assert "Research use only." in done.stdout
    summary = json.loads((root / "crossval" / "summary.json").read_text())
    assert {region: row["n_cases"] for region, row in summary.items()} == {
        "wt": 6,
        "tc": 6,
        "et": 6,
    }
    assert len((root / "crossval" / "scores.csv").read_text().splitlines()) == 1 + 3 * 6
    assert (root / "crossval" / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert (root / "runs" / "fold1" / "tuning.json").exists()
    card = (root / "crossval" / "model" / "README.md").read_text()
    assert "Cross-validation, scored by the protocol legacy" in card
    assert "Held out of network 0; trained on by network 1 (3 cases):" in card
    predicted = run(root, "predict", "scans", "-o", "out", "--model", "crossval/model")
    assert predicted.returncode == 0, predicted.stderr


@pytest.mark.slow
def test_a_second_start_repeats_nothing_and_a_fold_can_be_added(root: Path) -> None:
    """Runs that `train` has finished are kept."""
    first = run(root, "train", "--fold", "1", "--data", "scans", *SETTINGS)
    times = {path: path.stat().st_mtime_ns for path in (root / "runs/fold1").glob("last.pt")}

    done = [run(root, *CROSSVAL) for _ in range(2)]

    assert first.returncode == done[0].returncode == done[1].returncode == 0, done[0].stderr
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert done[1].stdout.count("(finished before)") == 6
    assert len((root / "crossval/predictions/manifest.jsonl").read_text().splitlines()) == 6
    assert "epoch 1/2" in done[0].stdout
    assert "epoch 1/2" not in done[1].stdout


@pytest.mark.slow
def test_a_case_that_cannot_be_predicted_is_named_and_ends_it_with_one(root: Path) -> None:
    run(root, *CROSSVAL)
    # the scan is damaged, and the prepared case is not
    shutil.rmtree(root / "crossval")
    path = root / "scans" / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    os.utime(path, ns=times)

    done = run(root, *CROSSVAL)

    assert done.returncode == 1, done.stderr
    assert "FAILED  case BraTS2021_00003" in done.stdout
    assert "BraTS2021_00003: no prediction, given the worst scores" in done.stdout
    assert "BraTS2021_00003" in (root / "crossval/predictions/failures.csv").read_text()


@pytest.mark.slow
def test_ctrl_c_prints_how_to_resume(root: Path) -> None:
    process = subprocess.Popen(
        command(*CROSSVAL[:-2], "--set", "training.n_epochs=9999"),
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (root / "runs" / "fold0" / "last.pt").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate()

    assert process.returncode == 128 + signal.SIGINT
    assert "stopped: SIGINT was received. The same command continues" in shown


@pytest.mark.slow
def test_tune_stores_what_it_fits(root: Path) -> None:
    run(root, *CROSSVAL)

    done = run(
        root, "tune", "runs/fold0", "runs/fold1", "--data", "scans", "--protocol", "lesionwise2023"
    )
    refused = run(root, "tune", "crossval/model", "--data", "scans")

    assert done.returncode == 0, done.stderr
    assert "tuned on 6 held-out cases of 2 runs, for the mean lesion-wise Dice" in done.stdout
    assert refused.returncode == 2
    assert "is an exported model, which does not list its held-out cases" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--folds", "x"], "--folds is 'x'; expected numbers"),
        (["--folds", "0,7"], "there is no fold 7: the settings have 2 folds, 0 to 1"),
        (["--protocol", "legac"], "protocol 'legac' is unknown"),
        (["--protocol", "hd95"], "hd95"),
        (["--set", "model.name=autoencoder"], "gives no label maps"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_trained(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main_exits(root, monkeypatch, [*CROSSVAL, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (root / "runs").exists()


@pytest.mark.parametrize(
    ("taken", "code", "message"),
    [
        ("crossval/model/mine.txt", 2, "crossval/model exists and holds no exported model"),
        ("crossval", 3, "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_used_is_found_before_anything_is_trained(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    taken: str,
    code: int,
    message: str,
) -> None:
    (root / taken).parent.mkdir(parents=True, exist_ok=True)
    (root / taken).touch()

    assert main_exits(root, monkeypatch, CROSSVAL) == code
    assert message in capsys.readouterr().err
    assert not (root / "runs").exists()


def main_exits(root: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> object:
    """Run the program in this process, and return its exit code."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["brats-seg", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code
