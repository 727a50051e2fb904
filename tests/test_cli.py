"""Test commands as a user types them: their output, their files and their exit codes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import pandas as pd
import pytest

from brats_seg.cli import main
from brats_seg.labels import BRATS2023
from tests.builders import make_label_map, write_case, write_nifti

QUICK = [
    "--patch",
    "8,8,8",
    "--epochs",
    "1",
    "--effective-batch",
    "2",
    "--precision",
    "fp32",
    "--set",
    "folds.n_folds=3",
    "--set",
    "model.widths=[4, 8]",
    "--set",
]


@dataclass(frozen=True, kw_only=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The program in this process, because importing torch and MONAI takes seconds."""

    def run_here(*arguments: str | Path) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["brats-seg", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return Done(returncode=ended.value.code or 0, stdout=shown.out, stderr=shown.err)

    return run_here


@pytest.fixture
def scans(brats_root: Path) -> Path:
    return brats_root


def test_index_says_what_it_found(run: Callable[..., Done], scans: Path, tmp_path: Path) -> None:
    done = run("index", scans, "-o", "table.csv")

    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "table.csv")
    assert list(table.columns[:11]) == [
        "case_id",
        "patient_id",
        "timepoint",
        "release",
        "convention",
        "problems",
        "remarks",
        "t1n",
        "t1c",
        "t2w",
        "t2f",
    ]
    assert len(table) == 6
    assert set(table["convention"]) == {"brats2017"}
    assert "brats2021" in done.stdout
    assert "6 cases" in done.stdout


def test_index_of_a_folder_with_a_bad_case_lists_it_and_ends_with_1(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    (scans / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz").unlink()

    done = run("index", scans)

    assert done.returncode == 1
    assert "BraTS2021_00003" in done.stdout
    assert "t2w" in done.stdout
    assert len(pd.read_csv(tmp_path / "cases.csv")) == 6


def test_train_writes_a_run_and_resumes_it(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    command = ["train", "--data", scans, "--fold", "1", *QUICK]

    stopped = run(*command, "--session-hours", "0")
    finished = run(*command)
    again = run(*command)

    assert stopped.returncode == 0, stopped.stderr
    assert "the time limit of 0.0 hours was reached" in stopped.stdout
    table = scans.with_name("data-prepared") / "folds-3-seed55.csv"
    assert f"fold 1 of {table}: 4 cases to train on, 2 held out" in stopped.stdout
    assert finished.returncode == 0, finished.stderr
    assert "4 cases to train on, 2 held out" in finished.stdout
    assert "epoch 1/1 | training loss" in finished.stdout
    assert (tmp_path / "runs" / "fold1" / "best.pt").exists()
    assert again.returncode == 0
    assert "finished after 1 epoch:" in again.stdout


def test_a_run_goes_on_with_its_settings_when_none_are_given(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    begun = run("train", "--data", scans, *QUICK, "--session-hours", "0")
    run_path = tmp_path / "runs" / "fold0"
    settings = (run_path / "config.yaml").read_text()

    finished = run("train", "--data", scans)

    assert "preset cpu, because torch finds no GPU here" in begun.stdout
    assert "patch 8x8x8 as given" in begun.stdout
    assert finished.returncode == 0, finished.stderr
    assert "settings of runs/fold0/config.yaml, which the run began with" in finished.stdout
    assert "finished after 1 epoch" in finished.stdout
    assert (run_path / "config.yaml").read_text() == settings
    refused = run("train", "--data", scans, "--preset", "cpu", "--set", "folds.n_folds=3")
    assert refused.returncode == 2
    assert "Without --preset and --config the run keeps its own settings" in refused.stderr


def test_flags_win_over_set_and_are_written_down(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    run("train", "--data", scans, *QUICK, "--seed", "7", "--set", "training.seed=8")

    assert "seed: 7" in (tmp_path / "runs" / "fold0" / "config.yaml").read_text()


def test_a_written_configuration_can_be_given_again(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    run("train", "--data", scans, *QUICK)

    done = run(
        "train", "--data", scans, "--config", "runs/fold0/config.yaml", "--run", "runs/again"
    )

    assert done.returncode == 0, done.stderr


def test_prepare_makes_each_stage_a_file(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    done = run("prepare", scans, "--prepared", "ready", "--set", "folds.n_folds=3")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ready" / "cases.csv").exists()
    assert (tmp_path / "ready" / "folds-3-seed55.csv").exists()
    assert "6 cases prepared, with cases.csv, in ready\n" in done.stdout
    assert "the table of 3 folds is folds-3-seed55.csv there" in done.stdout
    assert (tmp_path / "ready" / "BraTS2021_00000").is_dir()


def test_prepared_cases_are_verified_and_repaired(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    prepare = ("prepare", scans, "--prepared", "ready", "--set", "folds.n_folds=3")
    n_cases = len(list(scans.iterdir()))
    run(*prepare)
    damaged = tmp_path / "ready" / "BraTS2021_00001" / "image.npy"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + b"\x55")

    done = run(*prepare, "--verify")

    assert done.returncode == 1
    assert done.stdout.count("\ncase ") + done.stdout.startswith("case BraTS2021_00001") == 1
    assert "Prepare it again with `brats-seg prepare --repair`" in done.stdout
    assert f"{n_cases} prepared cases in ready, 1 damaged" in done.stdout
    assert damaged.read_bytes() != content
    assert run(*prepare, "--repair").returncode == 0
    assert damaged.read_bytes() == content
    assert run(*prepare, "--verify").returncode == 0


def test_phantom_cases_are_found_again(run: Callable[..., Done], tmp_path: Path) -> None:
    run("phantom", "made", "--number", "2")

    done = run("index", "made")

    assert done.returncode == 0, done.stderr
    assert "2 cases" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--set", "training.epochs=3"],
            2,
            "setting training.epochs is unknown; there are n_epochs",
        ),
        (["--set", "optimizer.lr"], 2, "has no '='"),
        (["--preset", "kagle"], 2, "preset 'kagle' is unknown; there are demo, cpu, kaggle-t4"),
        (["--config", "nowhere.yaml"], 2, "nowhere.yaml cannot be read"),
        (["--network", "vnet"], 2, "setting model.name"),
        (["--fold", "7"], 2, "there is no fold 7: the settings have 3 folds, 0 to 2"),
        (["--device", "cuda:9"], 3, "torch sees"),
        (["--set", "folds.n_folds=9"], 2, "6 patients cannot fill 9 folds"),
        (["--patch", "8,8"], 2, "expected three positive whole numbers such as 64,64,64"),
        (["--run", "occupied/run"], 3, "occupied/run"),
    ],
)
def test_wrong_use_ends_with_a_message_and_the_code(
    run: Callable[..., Done],
    scans: Path,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    (tmp_path / "occupied").write_text("a file in the way")

    done = run("train", "--data", scans, *QUICK, *arguments)

    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def spoil_missing(folder: Path) -> None:
    next(folder.glob("*_t1ce.nii.gz")).unlink()


def spoil_grid(folder: Path) -> None:
    write_nifti(next(folder.glob("*_t2.nii.gz")), np.ones((24, 24, 15), np.int16))


def spoil_4d(folder: Path) -> None:
    write_nifti(next(folder.glob("*_t1.nii.gz")), np.ones((24, 24, 16, 2), np.int16))


def spoil_nan(folder: Path) -> None:
    path = next(folder.glob("*_flair.nii.gz"))
    array = nib.load(path).get_fdata().astype(np.float32)
    array[12, 12, 8] = np.nan
    write_nifti(path, array)


def spoil_constant(folder: Path) -> None:
    write_nifti(next(folder.glob("*_t2.nii.gz")), np.full((24, 24, 16), 7, np.int16))


def spoil_truncated(folder: Path) -> None:
    path = next(folder.glob("*_t1.nii.gz"))
    path.write_bytes(path.read_bytes()[:-200])


def spoil_empty(folder: Path) -> None:
    next(folder.glob("*_t1.nii.gz")).write_bytes(b"")


def spoil_text(folder: Path) -> None:
    next(folder.glob("*_t1.nii.gz")).write_text("this is no scan")


def spoil_label(folder: Path) -> None:
    label = make_label_map()
    label[12, 12, 8] = 9
    write_nifti(next(folder.glob("*_seg.nii.gz")), label)


@pytest.mark.parametrize(
    ("spoil", "file", "words"),
    [
        (spoil_missing, "BraTS2021_00002/", "t1c"),
        (spoil_grid, "_t2.nii.gz", "15"),
        (spoil_4d, "_t1.nii.gz", "24"),
        (spoil_nan, "_flair.nii.gz", "finite"),
        (spoil_constant, "_t2.nii.gz", "constant"),
        (spoil_truncated, "_t1.nii.gz", "t"),
        (spoil_empty, "_t1.nii.gz", "empty"),
        (spoil_text, "_t1.nii.gz", "NIfTI"),
        (spoil_label, "label map", "9"),
    ],
)
def test_every_bad_case_is_named_and_can_be_left_out(
    run: Callable[..., Done], scans: Path, tmp_path: Path, spoil: object, file: str, words: str
) -> None:
    """The message names case, file, what was found, what was expected, and what to try."""
    spoil(scans / "BraTS2021_00002")  # type: ignore[operator]

    refused = run("train", "--data", scans, *QUICK)
    left_out = run("train", "--data", scans, *QUICK, "--skip-bad")

    assert refused.returncode == 1, refused.stderr
    error = refused.stderr
    assert all(part in error for part in ("case BraTS2021_00002", file, "found", "expected", words))
    assert "--skip-bad" in error
    assert "Traceback" not in error
    assert left_out.returncode == 0, left_out.stderr
    assert "left out: case BraTS2021_00002, file" in left_out.stdout


def test_one_case_only_is_refused(run: Callable[..., Done], tmp_path: Path) -> None:
    write_case(tmp_path / "scans")

    done = run("train", "--data", "scans", *QUICK)

    assert done.returncode == 2
    assert "all cases are of one patient" in done.stderr


def test_scans_without_label_maps_are_refused(run: Callable[..., Done], tmp_path: Path) -> None:
    write_case(tmp_path / "scans", labelled=False)

    done = run("train", "--data", "scans", *QUICK)

    assert done.returncode == 2
    assert "and no usable label map" in done.stderr


def test_a_folder_without_scans_is_refused(run: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()

    done = run("train", "--data", "scans", *QUICK)

    assert done.returncode == 2
    assert "holds no cases" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_for_the_run_is_an_error_of_the_machine(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)

    done = run("train", "--data", scans, *QUICK, "--run", "closed/run")

    assert done.returncode == 3
    assert "cannot be written" in done.stderr


def test_two_label_conventions_are_trained_on_together(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    """Each case is read by the convention of its own release."""
    for number in range(2):
        write_case(scans, f"BraTS-GLI-{number:05d}-000", seed=10 + number, convention=BRATS2023)

    done = run("train", "--data", scans, *QUICK)

    assert done.returncode == 0, done.stderr
    table = pd.read_csv(scans.with_name("data-prepared") / "cases.csv")
    assert sorted(set(table["convention"])) == ["brats2017", "brats2023"]


def test_a_case_that_vanished_is_missed(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    run("prepare", scans, "--set", "folds.n_folds=3")
    shutil.rmtree(scans / "BraTS2021_00004")

    done = run("train", "--data", scans, *QUICK)

    assert done.returncode == 2
    assert "BraTS2021_00004" in done.stderr


def test_a_new_case_is_an_error_until_folds_are_made_again(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    run("prepare", scans, "--set", "folds.n_folds=3")
    write_case(scans, "BraTS2021_00099", seed=99)

    done = run("train", "--data", scans, *QUICK)

    assert done.returncode == 2
    assert "the fold table has no row for case BraTS2021_00099" in done.stderr


def write_prediction(folder: Path, case_id: str, seed: int) -> None:
    write_nifti(folder / f"{case_id}.nii.gz", make_label_map(seed=seed, convention=BRATS2023))


def test_evaluate_scores_a_folder_in_another_convention(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    for number in range(5):
        write_prediction(tmp_path / "made", f"BraTS2021_{number:05d}", seed=number)

    done = run("evaluate", scans, "made", "-o", "s.csv", "--protocol", "lesionwise2023")

    assert done.returncode == 1
    assert "BraTS2021_00005: no prediction, given the worst scores" in done.stdout
    assert "labels brats2023, against brats2017 of the references" in done.stdout
    assert "lesion-wise HD95 (mm)" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith(("region", "wt", "et"))]
    assert len(rows) == 2 * 2 * 3
    # a terminal of 80 columns would cut longer ones
    assert max(map(len, rows)) <= 80
    table = pd.read_csv(tmp_path / "s.csv")
    assert list(table.columns) == [
        "case_id",
        "region",
        "dice",
        "jaccard",
        "hd95",
        "sensitivity",
        "specificity",
        "reference_ml",
        "prediction_ml",
        "lesionwise_dice",
        "lesionwise_hd95",
        "lesionwise_nsd_0.5",
        "lesionwise_nsd_1.0",
        "n_lesions",
        "n_false_positive",
        "n_false_negative",
    ]
    assert table["dice"].tolist() == [1.0] * 15 + [0.0] * 3
    assert (tmp_path / "s.json").exists()


def test_evaluate_prints_both_means_where_predictions_are_missing(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    for number in range(2):
        write_prediction(tmp_path / "made", f"BraTS2021_{number:05d}", seed=number)

    done = run("evaluate", scans, "made")
    only = run("evaluate", scans, "made", "--only-predicted")

    assert done.returncode == 1
    assert "made: 2 of 6 references with a prediction" in done.stdout
    assert "BraTS2021_00004, BraTS2021_00005: no prediction, given the worst" in done.stdout
    assert "mean [95 % interval] over 6 references, with the worst scores for 4" in done.stdout
    assert re.search(r"region +Dice +HD95 \(mm\)", done.stdout)
    assert re.search(r"\nwt +0\.333 \[0\.000, 0\.667\] +248\.8 \[", done.stdout)
    assert re.search(r"the 2 that have a prediction\n.*\n.*\nwt +1\.000 \[", done.stdout)
    assert only.returncode == 0
    assert "2 of 6 references scored" in only.stdout
    assert "Mean Dice if those left out counted as 0: wt 0.333, tc 0.333" in only.stdout
    assert len(pd.read_csv(tmp_path / "scores.csv")) == 2 * 3


def test_evaluate_says_when_nothing_could_be_scored(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "BraTS2021_00001.nii.gz").write_bytes(b"broken")

    done = run("evaluate", scans, "made", "--only-predicted")

    assert done.returncode == 1
    assert "not scored: case BraTS2021_00001, file" in done.stdout
    assert "no case could be scored\nwrote" in done.stdout


def test_evaluate_compares_two_sets(run: Callable[..., Done], scans: Path, tmp_path: Path) -> None:
    for number in range(6):
        write_prediction(tmp_path / "good", f"BraTS2021_{number:05d}", seed=number)
        write_prediction(tmp_path / "poor", f"BraTS2021_{number:05d}", seed=number + 1)

    done = run("evaluate", scans, "--compare", "good", "poor")

    assert done.returncode == 0, done.stderr
    assert re.search(r"wt +Dice +1\.0000 +0\.", done.stdout)
    assert done.stdout.splitlines()[-3].startswith("good: mean rank 1.")
    table = pd.read_csv(tmp_path / "comparison.csv")
    assert table.mean_first[(table.region == "wt") & (table.column == "dice")].item() == 1.0


def test_the_table_of_a_comparison_is_written_where_it_is_asked_for(
    run: Callable[..., Done], scans: Path, tmp_path: Path
) -> None:
    for folder in ("one", "other"):
        write_prediction(tmp_path / folder, "BraTS2021_00000", seed=0)

    done = run("evaluate", scans, "--compare", "one", "other", "-o", "tests.csv")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tests.csv").is_file()
    assert not (tmp_path / "comparison.csv").exists()


def test_settings_lists_keys_values_and_what_is_allowed(run: Callable[..., Done]) -> None:
    done = run("settings", "training", "--preset", "demo", "--set", "training.seed=7")

    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[2:])
    assert rows["training.n_epochs"].startswith("20 ")
    assert rows["training.seed"].startswith("7 ")
    assert re.search(r"none, light, full +`light`: mirroring", rows["training.augment"])
    assert run("settings", "learning_rate").returncode == 2


def test_evaluate_needs_one_set_or_two(run: Callable[..., Done], scans: Path) -> None:
    done = run("evaluate", scans)

    assert done.returncode == 2
    assert "two with --compare A B" in done.stderr


def test_output_to_a_full_disk_is_an_error_of_the_machine(tmp_path: Path) -> None:
    code = (
        "import sys; from brats_seg.cli import main; "
        "sys.argv = ['brats-seg', 'phantom', 'scans', '--number', '1']; main()"
    )

    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr) == (
        3,
        "error: the output of the command is lost: No space left on device\n",
    )
    assert len(list((tmp_path / "scans").rglob("*.nii.gz"))) == 5


def test_a_name_that_is_too_long_is_an_error_without_a_traceback(run: Callable[..., Done]) -> None:
    done = run("phantom", "n" * 300)

    assert done.returncode == 3
    assert "File name too long" in done.stderr


@pytest.mark.parametrize("content", ["[]", "[" * 100_000])
def test_predicting_no_case_is_an_error(
    run: Callable[..., Done], tmp_path: Path, content: str
) -> None:
    (tmp_path / "cases.json").write_text(content)

    done = run("predict", "cases.json", "-o", "out", "--model", "nowhere")

    assert done.returncode == 2
    assert "error: cases.json" in done.stderr
