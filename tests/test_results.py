"""Test the files of a survival study."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from brats_seg.survival import results
from brats_seg.survival.cross_validation import Predictions, Study
from brats_seg.survival.radiomics import Feature
from brats_seg.survival.results import (
    Summary,
    study_survival,
    write_predictions,
    write_submission,
    write_summary,
)
from brats_seg.survival.table import FeatureRow, write_features
from brats_seg.survival.verdict import figures_of, judge, remarks_on
from tests.survival_builders import RIDGE, make_feature_table, make_outcomes, make_plan


@pytest.fixture
def study():
    outcomes = make_outcomes([100, 361, np.nan, 500], censored=[False, True, False, False])
    return Study.of(make_feature_table([[1.0], [2], [3], [4]], case_ids=list("ABCD")), outcomes)


@pytest.fixture
def predictions():
    days = np.array([[110.4, 222, 333, 444], [200.0, 201, 202, 203]])
    chosen = (("ridge", 4),)
    return Predictions(names=("selected", "age"), days=days, folds=(0, 1, None, 1), chosen=chosen)


def test_every_case_has_a_row_with_its_fold_and_predictions(study, predictions, tmp_path):
    write_predictions(study, predictions, tmp_path / "p.csv")

    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["case_id"] for row in rows] == list("ABCD")
    assert [row["reported_days"] for row in rows] == ["100", "361", "", "500"]
    assert [row["censored"] for row in rows] == ["no", "yes", "", "no"]
    assert [row["fold"] for row in rows] == ["0", "1", "", "1"]
    assert [row["selected_days"] for row in rows] == ["110.4", "222.0", "333.0", "444.0"]
    assert rows[0]["age_days"] == "200.0"


def test_a_submission_is_ids_and_days_without_a_header(study, predictions, tmp_path):
    missing = write_submission(study.table, predictions, tmp_path / "s.csv")

    assert (tmp_path / "s.csv").read_text() == "A,110\nB,222\nC,333\nD,444\n"
    assert missing == ()


def test_a_submission_has_the_wanted_cases_only_and_names_those_it_lacks(
    study, predictions, tmp_path
):
    missing = write_submission(study.table, predictions, tmp_path / "s.csv", ["c", "x"])

    assert (tmp_path / "s.csv").read_text() == "C,333\n"
    assert missing == ("x",)


def test_the_summary_holds_figures_verdict_and_remarks(study, predictions, tmp_path):
    rng = np.random.default_rng(0)
    figures = figures_of(study, predictions, rng)
    verdict = judge(study, predictions, figures, rng)
    summary = Summary(figures=figures, verdict=verdict, remarks=remarks_on(study, with_cox=False))

    write_summary(summary, study, predictions, make_plan(), tmp_path / "summary.json")

    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["class_days"] == [300, 450]
    assert (content["n_cases"], content["n_died"], content["n_censored"]) == (4, 2, 1)
    assert content["verdict"]["is_significant"] is False
    assert content["verdict"]["words"].startswith("NOT SIGNIFICANT")
    assert content["figures"]["selected"]["mae_days"]["value"] == pytest.approx((10.4 + 56) / 2)
    assert content["figures"]["selected"]["n_censored_contradicted"] == 1
    assert content["research_use_only"] is True
    assert content["n_folds"] == 2


def test_with_a_cox_model_every_family_has_a_concordance_index(study, predictions, tmp_path):
    hazards = np.log([2.0, 1.0, 0.5, 0.25])
    predictions = replace(predictions, log_hazards=hazards)
    rng = np.random.default_rng(0)
    figures = figures_of(study, predictions, rng)
    verdict = judge(study, predictions, figures, rng)
    summary = Summary(figures=figures, verdict=verdict, remarks=remarks_on(study, with_cox=True))

    write_summary(summary, study, predictions, make_plan(), tmp_path / "summary.json")
    write_predictions(study, predictions, tmp_path / "p.csv")

    found = json.loads((tmp_path / "summary.json").read_text())["figures"]
    # 100 days before 361 (alive) and 500
    assert {name: one["concordance"]["value"] for name, one in found.items()} == {
        "selected": 1,
        "age": 1,
        "cox": 1,
    }
    assert set(found["cox"]) == {"concordance"}
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["cox_risk"] for row in rows] == ["2", "1", "0.5", "0.25"]


def test_with_a_cox_model_the_other_figures_are_the_same(study, predictions):
    beside = replace(predictions, log_hazards=np.zeros(4))

    one, other = (
        figures_of(study, each, np.random.default_rng(0)) for each in (predictions, beside)
    )

    assert [family.estimates for family in one] == [family.estimates[:-1] for family in other[:-1]]


def test_a_study_is_one_function_that_prints_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FAMILIES", (RIDGE,))
    rng = np.random.default_rng(0)
    names = [f"case{number}" for number in range(12)]
    rows = [
        FeatureRow(
            case_id=name,
            patient_id=name,
            labels_from="reference",
            labels_leakage=None,
            latent_leakage=(),
            resection="",
            features=(Feature(name="wt_ml", value=rng.normal()),),
        )
        for name in names
    ]
    write_features(rows, tmp_path / "features.csv")
    lines = [f"{name},60,{number * 50 + 100},GTR" for number, name in enumerate(names)]
    header = "case_id,Age,Survival_days,Extent_of_Resection"
    (tmp_path / "table.csv").write_text("\n".join([header, *lines]) + "\n")

    found = study_survival(
        tmp_path / "features.csv", tmp_path / "table.csv", tmp_path / "out", n_folds=3, n_repeats=1
    )

    assert found.study.table.case_ids == tuple(names)
    assert found.predictions.held_out.all()
    assert found.missing == ()
    assert [one.name for one in found.summary.figures] == ["selected", "age", "ridge", "cox"]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"predictions.csv", "summary.json", "submission.csv", "survival.png"}
    assert capsys.readouterr().out == ""
