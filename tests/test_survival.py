"""Test the commands `features` and `survival`: output, files and exit codes."""

import csv
import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.survival import results
from brats_seg.survival.table import read_features, write_features
from tests.builders import Run, check_json
from tests.inference_builders import write_run
from tests.survival_builders import RIDGE

TABLES = ("survival", "features.csv", "--clinical", "survival_info.csv")
SURVIVAL = (*TABLES, "--repeats", "1")
HEADER = "case_id,Age,Survival_days,Extent_of_Resection"


def test_features_of_a_folder_and_of_a_bad_case(run: Run, brats_root: Path, tmp_path: Path) -> None:
    (brats_root / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz").write_bytes(b"")

    code, shown, _ = run("features", brats_root, "-o", "out/features.csv")

    assert code == 1
    assert "5 cases with 320 features; label maps: 5 reference, 0 predicted" in shown
    assert "Research use only." in shown
    assert "FAILED  case BraTS2021_00003" in shown
    table = read_features(tmp_path / "out" / "features.csv")
    assert len(table) == 5
    assert "t2f_wt_mean" in table
    with (tmp_path / "out" / "failures.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["case_id"], row["error"]) == ("BraTS2021_00003", "CaseError")
    assert "found an empty file" in row["message"]
    assert json.loads((tmp_path / "out" / "features.json").read_text())["autoencoders"] == []


def test_networks_without_a_split_are_noted(run: Run, brats_root: Path, tmp_path: Path) -> None:
    model = write_run(tmp_path / "run")

    code, shown, _ = run("features", brats_root, "--model", model, "--predict-all")

    assert code == 0
    assert "has no split.csv: whether it was trained on a case is unknown" in shown
    assert "note: 6 label maps by networks without a record of the patients" in shown


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one quick family instead of all."""
    monkeypatch.setattr(results, "Plan", partial(results.Plan, families=(RIDGE,)))


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
    write_survival(folder, ids, rng.normal(60, 9, n_cases), days)


def write_survival(folder: Path, ids, ages, days) -> None:
    rows = [f"{i},{age:.1f},{day:.0f},GTR" for i, age, day in zip(ids, ages, days, strict=True)]
    (folder / "survival_info.csv").write_text("\n".join([HEADER, *rows]) + "\n")


def replace_cell(path: Path, row: int, column: str, text: str) -> None:
    """Change one cell of a table."""
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    rows[row][column] = text
    lines = [",".join(rows[0]), *(",".join(cells.values()) for cells in rows)]
    path.write_text("\n".join(lines) + "\n")


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "survival" / "summary.json").read_text())


@pytest.mark.usefixtures("quick")
def test_an_effect_is_found_and_written_down_with_and_without_lifelines(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the folds of the project, of a case that was alive and one of unknown outcome."""
    write_cohort(tmp_path)
    replace_cell(tmp_path / "survival_info.csv", 3, "Survival_days", "ALIVE (9999 days later)")
    replace_cell(tmp_path / "survival_info.csv", 4, "Survival_days", "NA")
    folds = [f"case{number:02d},case{number:02d},{number % 3}" for number in range(30)]
    (tmp_path / "folds.csv").write_text("\n".join(["case_id,patient_id,fold", *folds]) + "\n")
    command = (*SURVIVAL, "--fold-table", "folds.csv")

    code, printed, shown = run(*command, "--json")

    assert code == 0, shown
    assert check_json("survival", printed)[0]["verdict"]["n_died"] == 28
    for text in (
        "30 cases: 28 deaths to learn from; 1 censored",
        "1 of unknown outcome, predicted only",
        "censored too early",
        "1 of 1",
        "Accuracy is over short (under 300 days), mid and long (over 450 days)",
        "More than chance",
        "Better than age alone",
        "Research use only.",
    ):
        assert text in shown
    summary = summary_of(tmp_path)
    assert summary["verdict"]["beats_age"] is True
    assert (summary["n_censored"], summary["n_folds"]) == (1, 3)
    folder = tmp_path / "survival"
    written = {path.name for path in folder.iterdir()}
    assert written == {"predictions.csv", "summary.json", "submission.csv", "survival.png"}
    submission = (folder / "submission.csv").read_text().splitlines()
    assert len(submission) == 30
    assert submission[0].startswith("case00,")
    lines = (folder / "predictions.csv").read_text().splitlines()
    in_folds = [line.split(",")[2] for line in lines[1:]]
    assert in_folds == ["" if number == 4 else str(number % 3) for number in range(30)]

    monkeypatch.setitem(sys.modules, "lifelines", None)
    code, shown, _ = run(*command)

    assert code == 0
    assert 'pip install "brats_seg[survival]"' in shown
    with_cox = [line.rsplit(",", 1) for line in lines]
    assert with_cox[0][1] == "cox_risk"
    assert (folder / "predictions.csv").read_text().splitlines() == [days for days, _ in with_cox]
    assert set(summary_of(tmp_path)["figures"]) == {"selected", "age", "ridge"}
    assert "concordance" not in summary_of(tmp_path)["figures"]["age"]


@pytest.mark.usefixtures("quick")
def test_without_an_effect_the_verdict_is_not_significant(run: Run, tmp_path: Path) -> None:
    """The negative control: of 150 cohorts without an effect, 3 were significant."""
    write_cohort(tmp_path, effect=0.0, seed=1)

    code, shown, _ = run(*SURVIVAL)

    assert code == 0
    assert "NOT SIGNIFICANT" in shown
    assert summary_of(tmp_path)["verdict"]["is_significant"] is False


@pytest.mark.usefixtures("quick")
def test_five_patients_with_constant_columns_end_with_a_verdict(run: Run, tmp_path: Path) -> None:
    """The cases to submit are named, and one of them has no features."""
    write_cohort(tmp_path, n_cases=5)
    for row in range(5):
        replace_cell(tmp_path / "features.csv", row, "noise1", "7")
        replace_cell(tmp_path / "survival_info.csv", row, "Age", "50")
    (tmp_path / "evaluation.csv").write_text("case_id,Age\ncase03,50\nelsewhere,50\n")

    code, shown, _ = run(*SURVIVAL, "--submit", "evaluation.csv")

    assert code == 1
    assert "Fewer than 20 deaths prove nothing" in shown
    assert "concordance" in shown
    assert "not in the submission, because they have no features: elsewhere" in shown
    (line,) = (tmp_path / "survival" / "submission.csv").read_text().splitlines()
    assert line.startswith("case03,")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (f"{HEADER}\nother,60,300,GTR\n", "has none of the 30 cases of the features"),
        (f"{HEADER}\ncase01,60,300,GTR\n", "1 patient .* too few for 5 folds; expected 5"),
    ],
)
def test_tables_that_cannot_be_used_are_wrong_use(
    run: Run, tmp_path: Path, table: str, message: str
) -> None:
    write_cohort(tmp_path)
    (tmp_path / "survival_info.csv").write_text(table)

    code, _, errors = run(*TABLES)

    assert code == 2
    assert re.search(message, errors)
    assert not (tmp_path / "survival").exists()


@pytest.mark.slow
def test_phantoms_whose_volume_drives_survival_or_does_not(run: Run, tmp_path: Path) -> None:
    """Run with every family: an effect is found where there is one, and none otherwise."""
    write_phantom_cases(tmp_path / "scans", n_cases=40, seed=0, shape=(40, 40, 32))
    assert run("features", "scans")[0] == 0
    table = read_features(tmp_path / "features.csv")
    for volume_matters in (True, False):
        rng = np.random.default_rng(0)
        volumes = table["wt_ml"].to_numpy()
        if not volume_matters:
            volumes = rng.permutation(volumes)
        days = 800 * np.exp(-volumes / volumes.mean() + rng.normal(0, 0.15, 40))
        write_survival(tmp_path, table["case_id"], rng.normal(60, 9, 40), days)

        code, shown, _ = run(*SURVIVAL)

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
