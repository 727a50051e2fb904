"""Test the commands `features` and `survival`: output, files and exit codes."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.survival import results
from brats_seg.survival.table import read_features, write_features
from tests.builders import Run, check_json
from tests.inference_builders import write_run
from tests.survival_builders import RIDGE

SURVIVAL = ("survival", "features.csv", "--clinical", "survival_info.csv", "--repeats", "1")
HEADER = "case_id,Age,Survival_days,Extent_of_Resection"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one quick family instead of all."""
    monkeypatch.setattr(results, "FAMILIES", (RIDGE,))


def write_cohort(folder: Path, *, n_cases: int = 30, effect: float = 0.9, seed: int = 0) -> None:
    """Write features of which one drives survival, and the table of survival."""
    rng = np.random.default_rng([seed, 3])
    signal, noise = rng.normal(size=(2, n_cases))
    days = np.exp(6 + 0.7 * (effect * signal + (1 - effect**2) ** 0.5 * noise))
    ids = [f"case{number:02d}" for number in range(n_cases)]
    texts = {"labels_from": "reference", "labels_seen": "", "resection": ""}
    rows = [
        {"case_id": case_id, "patient_id": case_id, **texts, "wt_ml": float(value)}
        | {f"noise{k}": float(rng.normal()) for k in range(6)}
        for case_id, value in zip(ids, signal, strict=True)
    ]
    write_features(rows, folder / "features.csv")
    lines = [
        f"{i},{age:.1f},{day:.0f},GTR"
        for i, age, day in zip(ids, rng.normal(60, 9, n_cases), days, strict=True)
    ]
    (folder / "survival_info.csv").write_text("\n".join([HEADER, *lines]) + "\n")


def replace_cell(path: Path, row: int, column: str, text: str) -> None:
    """Change one cell of a table."""
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    rows[row][column] = text
    lines = [",".join(rows[0]), *(",".join(cells.values()) for cells in rows)]
    path.write_text("\n".join(lines) + "\n")


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "survival" / "summary.json").read_text())


def test_features_of_a_folder(run: Run, brats_root: Path, tmp_path: Path) -> None:
    code, shown, errors = run("features", brats_root, "-o", "out/features.csv")

    assert code == 0, errors
    assert "6 cases with 320 features; label maps: 6 reference, 0 predicted" in shown
    assert "Research use only." in shown
    table = read_features(tmp_path / "out" / "features.csv")
    assert len(table) == 6
    assert "t2f_wt_mean" in table
    assert (tmp_path / "out" / "failures.csv").read_text() == "case_id,error,message\n"
    assert json.loads((tmp_path / "out" / "features.json").read_text())["autoencoders"] == []


def test_a_bad_case_is_a_row_of_failures_and_ends_it_with_one(
    run: Run, brats_root: Path, tmp_path: Path
) -> None:
    (brats_root / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz").write_bytes(b"")

    code, shown, _ = run("features", brats_root)

    assert code == 1
    assert "FAILED  case BraTS2021_00003" in shown
    with (tmp_path / "failures.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert row["case_id"] == "BraTS2021_00003"
    assert row["error"] == "CaseError"
    assert "found an empty file" in row["message"]
    assert len(read_features(tmp_path / "features.csv")) == 5


def test_networks_without_a_split_are_noted(run: Run, brats_root: Path, tmp_path: Path) -> None:
    model = write_run(tmp_path / "run")

    code, shown, _ = run("features", brats_root, "--model", model, "--predict-all")

    assert code == 0
    assert "has no split.csv: whether it was trained on a case is unknown" in shown
    assert "note: 6 label maps by networks without a record of the patients" in shown


def test_a_segmentation_run_for_an_autoencoder_is_wrong_use(
    run: Run, brats_root: Path, tmp_path: Path
) -> None:
    model = write_run(tmp_path / "run")

    code, _, errors = run("features", brats_root, "--autoencoder", model)

    assert code == 2
    assert "found a segmentation run, model.name 'unet'; expected a reconstruction run" in errors


@pytest.mark.usefixtures("quick")
def test_an_effect_is_found_and_written_down(run: Run, tmp_path: Path) -> None:
    write_cohort(tmp_path)

    code, found, shown = run(*SURVIVAL, "--json")

    assert code == 0, shown
    assert check_json("survival", found)[0]["verdict"]["n_died"] == 30
    assert "30 cases: 30 deaths to learn from; 0 censored" in shown
    assert "Accuracy is over short (under 300 days), mid and long (over 450 days)" in shown
    assert "More than chance" in shown
    assert "Better than age alone" in shown
    assert "Research use only." in shown
    assert summary_of(tmp_path)["verdict"]["beats_age"] is True
    written = {path.name for path in (tmp_path / "survival").iterdir()}
    assert written == {"predictions.csv", "summary.json", "submission.csv", "survival.png"}
    submission = (tmp_path / "survival" / "submission.csv").read_text().splitlines()
    assert len(submission) == 30
    assert submission[0].startswith("case00,")


@pytest.mark.usefixtures("quick")
def test_without_an_effect_the_verdict_is_not_significant(run: Run, tmp_path: Path) -> None:
    """The negative control: of 150 cohorts without an effect, 3 were significant."""
    write_cohort(tmp_path, effect=0.0, seed=1)

    code, shown, _ = run(*SURVIVAL)

    assert code == 0
    assert "NOT SIGNIFICANT" in shown
    assert summary_of(tmp_path)["verdict"]["is_significant"] is False


@pytest.mark.usefixtures("quick")
def test_censored_cases_are_counted_and_named(run: Run, tmp_path: Path) -> None:
    write_cohort(tmp_path)
    replace_cell(tmp_path / "survival_info.csv", 3, "Survival_days", "ALIVE (9999 days later)")
    replace_cell(tmp_path / "survival_info.csv", 4, "Survival_days", "NA")

    code, shown, _ = run(*SURVIVAL)

    assert code == 0
    assert "30 cases: 28 deaths to learn from; 1 censored" in shown
    assert "1 of unknown outcome, predicted only" in shown
    assert "censored too early" in shown
    assert "1 of 1" in shown
    assert summary_of(tmp_path)["n_censored"] == 1


@pytest.mark.usefixtures("quick")
def test_without_lifelines_the_days_are_the_same_and_a_remark_says_how_to_install_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cohort(tmp_path)
    run(*SURVIVAL)
    path = tmp_path / "survival" / "predictions.csv"
    beside = [line.rsplit(",", 1) for line in path.read_text().splitlines()]
    monkeypatch.setitem(sys.modules, "lifelines", None)

    code, shown, _ = run(*SURVIVAL)

    assert code == 0
    assert 'pip install "brats_seg[survival]"' in shown
    assert path.read_text().splitlines() == [days for days, _ in beside]
    assert beside[0][1] == "cox_risk"
    assert set(summary_of(tmp_path)["figures"]) == {"selected", "age", "ridge"}
    assert "concordance" not in summary_of(tmp_path)["figures"]["age"]


@pytest.mark.usefixtures("quick")
def test_five_patients_with_constant_columns_end_with_a_verdict(run: Run, tmp_path: Path) -> None:
    write_cohort(tmp_path, n_cases=5)
    for row in range(5):
        replace_cell(tmp_path / "features.csv", row, "noise1", "7")
        replace_cell(tmp_path / "survival_info.csv", row, "Age", "50")

    code, shown, _ = run(*SURVIVAL)

    assert code == 0
    assert "Fewer than 20 deaths prove nothing" in shown
    assert "concordance" in shown


@pytest.mark.usefixtures("quick")
def test_the_folds_of_the_project_are_taken(run: Run, tmp_path: Path) -> None:
    write_cohort(tmp_path)
    lines = [f"case{number:02d},case{number:02d},{number % 3}" for number in range(30)]
    (tmp_path / "folds.csv").write_text("\n".join(["case_id,patient_id,fold", *lines]) + "\n")

    run(*SURVIVAL, "--fold-table", "folds.csv")

    with (tmp_path / "survival" / "predictions.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["fold"]) for row in rows] == [number % 3 for number in range(30)]
    assert summary_of(tmp_path)["n_folds"] == 3


@pytest.mark.usefixtures("quick")
def test_the_cases_to_submit_can_be_named(run: Run, tmp_path: Path) -> None:
    write_cohort(tmp_path)
    (tmp_path / "evaluation.csv").write_text("case_id,Age\ncase07,50\nelsewhere,50\n")

    code, shown, _ = run(*SURVIVAL, "--submit", "evaluation.csv")

    assert code == 1
    assert "not in the submission, because they have no features: elsewhere" in shown
    (line,) = (tmp_path / "survival" / "submission.csv").read_text().splitlines()
    assert line.startswith("case07,")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (f"{HEADER}\nother,60,300,GTR\n", "has none of the 30 cases of the features"),
        (f"{HEADER}\ncase01,60,ALIVE (9 days later),GTR\n", "has no death among the 1 case that"),
        ("case_id,Age\ncase01,60\n", "has no column of survival; found case_id, Age. Expected"),
        (f"{HEADER}\ncase01,60,300,GTR\n", "1 patient .* too few for 5 folds; expected 5"),
    ],
)
def test_tables_that_cannot_be_used_are_wrong_use(
    run: Run, tmp_path: Path, table: str, message: str
) -> None:
    write_cohort(tmp_path)
    (tmp_path / "survival_info.csv").write_text(table)

    code, _, errors = run("survival", "features.csv", "--clinical", "survival_info.csv")

    assert code == 2
    assert re.search(message, errors)
    assert not (tmp_path / "survival").exists()


@pytest.mark.slow
@pytest.mark.parametrize("volume_matters", [True, False])
def test_phantoms_whose_volume_drives_survival_or_does_not(
    run: Run, tmp_path: Path, volume_matters: bool
) -> None:
    """Run with every family: an effect is found where there is one, and none otherwise."""
    write_phantom_cases(tmp_path / "scans", n_cases=40, seed=0, shape=(40, 40, 32))
    assert run("features", "scans")[0] == 0
    table = read_features(tmp_path / "features.csv")
    rng = np.random.default_rng(0)
    volumes = table["wt_ml"].to_numpy()
    if not volume_matters:
        volumes = rng.permutation(volumes)
    days = 800 * np.exp(-volumes / volumes.mean() + rng.normal(0, 0.15, 40))
    lines = [
        f"{c},{rng.normal(60, 9):.1f},{d:.0f},GTR"
        for c, d in zip(table["case_id"], days, strict=True)
    ]
    (tmp_path / "survival_info.csv").write_text("\n".join([HEADER, *lines]) + "\n")

    code, shown, _ = run(
        "survival", "features.csv", "--clinical", "survival_info.csv", "--repeats", 1
    )

    assert code == 0
    assert ("Better than age alone" in shown) == volume_matters
    assert ("NOT SIGNIFICANT" in shown) == (not volume_matters)


@pytest.mark.slow
@pytest.mark.real
def test_real_cases_get_features_and_an_honest_verdict(
    run: Run, real_data: Path, tmp_path: Path
) -> None:
    """Nine patients of 2018 are found in the tables of 2019; five deaths are not significant."""
    tables = real_data / "tables"
    survival, mapping = tables / "survival_data.csv", tables / "name_mapping.csv"
    scans = real_data / "BraTS2018"

    measured = run("features", scans, "--clinical", survival, "--clinical", mapping)
    code, shown, errors = run("survival", "features.csv", "--clinical", survival, "--repeats", 1)

    assert measured[0] == 0, measured[2]
    assert "9 cases with 320 features; label maps: 9 reference" in measured[1]
    assert code == 0, errors
    assert "9 cases: 5 deaths" in shown
    assert "Fewer than 20 deaths prove nothing" in shown
