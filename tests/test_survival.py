"""Test the commands `features` and `survival`: output, files and exit codes."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.survival import results
from tests.builders import Run, check_json
from tests.survival_builders import RIDGE, make_feature_table

SURVIVAL = ("survival", "features.csv", "--clinical", "survival_info.csv", "--repeats", "1")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "Plan", partial(results.Plan, families=(RIDGE,)))
    monkeypatch.setattr(results, "_N_CONCORDANCE_RESAMPLES", 20)


def write_cohort(folder: Path) -> pd.DataFrame:
    """Write features of 30 cases, of which one drives survival; return the table of survival, to be written."""
    rng = np.random.default_rng([0, 3])
    signal, noise = rng.normal(size=(2, 30))
    values = np.column_stack([signal, rng.normal(size=(30, 6))])
    table = make_feature_table(values, ["wt_ml", *"abcdef"])
    table.to_csv(folder / "features.csv", index=False)
    ages = np.random.default_rng(0).normal(60, 9, len(signal)).round(1)
    days = np.exp(6 + 0.63 * signal + 0.3 * noise).round().astype(int).astype(str)
    return pd.DataFrame({"case_id": table["case_id"], "Age": ages, "Survival_days": days})


@pytest.mark.usefixtures("quick")
def test_an_effect_is_found(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survival = write_cohort(tmp_path)
    survival.loc[[3, 4], "Survival_days"] = ["ALIVE (9999 days later)", "NA"]
    survival.to_csv(tmp_path / "survival_info.csv", index=False)
    ids = survival["case_id"]
    folds = pd.DataFrame({"case_id": ids, "patient_id": ids, "fold": np.arange(30) % 3})
    folds.to_csv(tmp_path / "folds.csv", index=False)
    command = (*SURVIVAL, "--fold-table", "folds.csv")
    code, printed, shown = run(*command, "--json")
    assert code == 0, shown
    assert check_json("survival", printed)[0]["verdict"]["n_died"] == 28
    for text in (
        "30 cases: 28 deaths to learn from; 1 censored",
        "Accuracy is over short (under 300 days), mid and long (over 450 days)",
        "more than chance, better than age alone",
    ):
        assert text in shown
    folder = tmp_path / "survival"
    written = {path.name for path in folder.iterdir()}
    assert written == {"predictions.csv", "summary.json", "survival.png"}
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
    figures = json.loads((folder / "summary.json").read_text())["figures"]
    assert set(figures) == {"selected", "age", "ridge"}
    assert "concordance" not in figures["age"]
