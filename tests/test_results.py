"""Test the figures, verdict, remarks and files of a survival study."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from brats_seg.errors import EnvironmentalError
from brats_seg.survival import results
from brats_seg.survival.study import Predictions, Study, cross_validate
from tests.survival_builders import make_feature_table, make_outcomes, make_plan, make_study

REPORTED = np.array([100.0, 200.0, 400.0, 1000.0])
PREDICTED = np.array([110.0, 170.0, 500.0, 900.0])
SPEARMAN = results.Estimate(value=0.4, low=0.2, high=0.6)


def test_figures_by_hand():
    # errors 10, 30, 100, 100; squared 100, 900, 10000, 10000; short, short, mid for long, long
    assert results.days_figures(REPORTED, PREDICTED) == {
        "accuracy": 0.75,
        "mse_days2": 5250,
        "median_se_days2": 5450,
        "std_se_days2": pytest.approx(np.std([100, 900, 1e4, 1e4])),
        "spearman": pytest.approx(1),
        "mae_days": 60,
    }


@pytest.mark.parametrize(
    ("days", "kin"), [(299.0, 1.0), (300.0, 400.0), (450.0, 400.0), (451.0, 5000.0)]
)
def test_mid_survivors_have_both_borders(days, kin):
    for other in (1.0, 400.0, 5000.0):
        assert results.accuracy(np.array([days]), np.array([other])) == (other == kin)


def test_the_rank_correlation_is_that_of_scipy(rng):
    one, other = rng.integers(0, 10, (2, 30)).astype(float)
    assert results.spearman(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)
    assert results.spearman(one, np.full(30, 300.0)) == 0


@pytest.mark.parametrize("figures", [results.days_figures, results.concordance_figure])
def test_patients_are_drawn_not_cases(rng, figures):
    """Ten scans of one patient are not ten patients."""
    names = np.array(list("abcdefgh"))
    days, predicted, died = rng.gamma(2, 200, 8), rng.gamma(2, 200, 8), rng.random(8) < 0.7
    values = (days, predicted) if figures is results.days_figures else (days, died, predicted)
    once, often = [], []
    for n, found in ((1, once), (10, often)):
        repeated, rng = [np.repeat(one, n) for one in values], np.random.default_rng(1)
        drawn = results.estimates(figures, repeated, np.repeat(names, n), rng, n_resamples=200)
        found += drawn.values()
    for one, same in zip(once, often, strict=True):
        assert one.low <= one.value <= one.high
        assert (one.low, one.high) == pytest.approx((same.low, same.high))


def test_a_clear_order_and_a_clear_gain_are_no_chance(rng):
    def p_values(selected: np.ndarray, baseline: np.ndarray) -> tuple[float, float]:
        verdict = results.judge(reported, selected, baseline, SPEARMAN, np.random.default_rng(0))
        return verdict.p_ranks, verdict.p_gain

    reported = rng.gamma(2, 200, 40)
    near, far = reported + rng.normal(0, 20, 40), reported + rng.normal(0, 200, 40)
    assert max(p_values(near, far)) < 0.001
    assert p_values(-reported, far)[0] > 0.999
    assert p_values(far, near)[1] > 0.999
    assert p_values(far, far)[1] == 1


def test_scans_of_one_patient_are_one_death():
    verdicts = []
    for n in (1, 5):
        days = np.repeat([100.0, 200, 300, 400], n)
        patients = np.repeat(list("abcd"), n).tolist()
        ids = [f"{patient}{index}" for index, patient in enumerate(patients)]
        table = make_feature_table(days[:, None], case_ids=ids, patient_ids=patients)
        predictions = predicted_days(
            [0] * len(days), selected=(days + 10).tolist(), age=[250.0] * len(days)
        )
        study = Study.of(table, make_outcomes(days))
        verdicts.append(results.summarise(study, predictions, 0).verdict)
    assert verdicts[0].n_died == verdicts[1].n_died == 4
    assert verdicts[0].p_ranks == verdicts[1].p_ranks == 1 / 24
    assert verdicts[0].p_gain == verdicts[1].p_gain


@pytest.mark.parametrize("seed", range(3))
def test_no_effect_is_not_believed(seed):
    """The negative control."""
    study = make_study(seed, effect=0.0)
    verdict = results.summarise(study, cross_validate(study, make_plan()), 0).verdict
    assert not verdict.is_significant


@pytest.mark.parametrize(
    ("changes", "heading", "text"),
    [
        ({}, "more than chance, better than age alone", "mean error 12 days smaller than by age"),
        ({"p_gain": 0.2}, "more than chance, NOT better than age alone", "NOT better than age"),
        ({"p_ranks": 0.06}, "NOT SIGNIFICANT", "These predictions may be due to chance"),
        ({"spearman": replace(SPEARMAN, low=-0.01)}, "NOT SIGNIFICANT", "0.40 [-0.01, 0.60] on 50"),
        ({"n_died": 19}, "NOT SIGNIFICANT", "Fewer than 20 deaths prove nothing"),
    ],
)
def test_each_verdict_has_its_text(changes, heading, text):
    given = {"n_died": 50, "spearman": SPEARMAN, "p_ranks": 0.01, "gain_days": 12.0, "p_gain": 0.01}
    verdict = results.Verdict(**given | changes)
    assert verdict.heading == heading
    assert text in str(verdict)


def test_a_censored_case_counts_in_no_figure_in_days():
    outcomes = make_outcomes([100, 200, 300, 500, 500], [False, False, False, True, True])
    study = Study.of(make_feature_table(np.arange(5)[:, None]), outcomes)
    early, late = (
        predicted_days([0] * 5, selected=[100.0, 200, 300, days, days], age=[1.0] * 5)
        for days in (499, 9e9)
    )
    assert results.summarise(study, early, 0).figures == results.summarise(study, late, 0).figures


def predicted_days(folds: list[int], **days: list[float]) -> Predictions:
    return Predictions(days=pd.DataFrame(days), folds=np.array(folds), n_chosen={"ridge": 4})


def test_the_remarks_describe_the_data():
    seen = {"latent0_seen": ["yes", "yes", "unknown", "no"], "labels_seen": ["", "yes", "", "no"]}
    nan, days = np.nan, [100, 200, 300, np.nan]
    outcomes = make_outcomes(days, [False, True, False, False], [50, nan, 60, nan])
    values, patients = [[1.0, 7], [2, 7], [3, 7], [4, 7]], [*"ABAC"]
    study = Study.of(make_feature_table(values, patient_ids=patients, **seen), outcomes)
    predictions = predicted_days([0, 1, 0, -1], selected=[1.0] * 4, age=[1.0] * 4)
    remarks = "\n".join(results.summarise(study, predictions, 0).remarks)
    for remark in (
        # two scans of a patient are one death, as in the verdict
        "4 cases: 1 death to learn from; 1 censored (alive at last contact); 1 of unknown outcome",
        "the age of 1 of 3 cases with an outcome is unknown",
        'pip install "brats_seg[survival]"',
        "NOT HELD OUT: the latent vector of 2 of 4 cases is of networks that were trained",
        "the latent vector of 1 of 4 cases is of networks without a record",
        "the label map of 1 of 4 cases is of networks that were trained",
    ):
        assert remark in remarks


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_study(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentalError, match="file cannot be written: Not a directory"):
        results.study_survival(tmp_path / "absent.csv", [], tmp_path / "file")


STUDY = Study.of(
    make_feature_table([[1.0], [2], [3], [4]], case_ids=list("ABCD")),
    make_outcomes([100, 361, np.nan, 500], censored=[False, True, False, False]),
)
DAYS = {"selected": [110.4, 222, 333, 444], "age": [200.0, 201, 202, 203]}
HAZARDS = np.log([2.0, 1.0, 0.5, 0.25])
PREDICTIONS = replace(predicted_days([0, 1, -1, 1], **DAYS), log_hazards=HAZARDS)


def test_every_case_has_a_row_with_its_fold_and_predictions(tmp_path):
    results.write_predictions(STUDY, PREDICTIONS, tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text().splitlines() == [
        "case_id,patient_id,fold,reported_days,censored,selected_days,age_days,cox_risk",
        "A,A,0,100,no,110.4,200.0,2",
        "B,B,1,361,yes,222.0,201.0,1",
        "C,C,,,,333.0,202.0,0.5",
        "D,D,1,500,no,444.0,203.0,0.25",
    ]


def test_the_summary_holds_figures_verdict_and_remarks(tmp_path):
    without = replace(PREDICTIONS, log_hazards=None)
    plain, summary = (results.summarise(STUDY, each, 0) for each in (without, PREDICTIONS))
    results.write_summary(summary, make_plan(), tmp_path / "summary.json")
    content = json.loads((tmp_path / "summary.json").read_text())
    figures = content["figures"]
    counts = ("n_cases", "n_died", "n_censored", "research_use_only")
    assert [content[name] for name in counts] == [4, 2, 1, True]
    assert content["verdict"]["words"].startswith("NOT SIGNIFICANT")
    assert figures["selected"]["mae_days"]["value"] == pytest.approx((10.4 + 56) / 2)
    # 100 days before 361 (alive) and 500
    assert [figures[name]["concordance"]["value"] for name in ("selected", "age", "cox")] == [1] * 3
    assert set(figures["cox"]) == {"concordance"}
    # the other figures are the same with and without the Cox model
    for family, known in plain.figures.items():
        assert known.items() < summary.figures[family].items()
