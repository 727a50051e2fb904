"""Test the Dice that is expected of a prediction, and its way from training to `predict`."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg import export_model, load_model
from brats_seg.evaluation.metrics import RegionCounts, dice, region_counts
from brats_seg.quality import result
from brats_seg.runtime.weights import fingerprint_of, read_exported, read_trained
from brats_seg.wings import Notes
from tests.builders import Run, write_nifti
from tests.check_builders import phantom
from tests.inference_builders import CPU, write_run

LINE = result.DiceLine(
    region="wt", n_cases=12, intercept=-0.5, slope=1.5, width=0.5, worst_fifth=0.6, mean_error=0.05
)


def counts_of(*dices: float) -> RegionCounts:
    """Return the voxels of a case with a given Dice of WT, TC and ET: of 1000 in either side."""
    both = [round(1000 * one) for one in dices]
    rest = [1000 - one for one in both]
    return region_counts("case", [both, rest, rest, [0, 0, 0]])


def test_the_mean_probability_is_that_inside_each_region() -> None:
    probabilities = np.zeros((3, 2, 2, 1), np.float32)
    probabilities[0] = np.array([[[0.9], [0.7]], [[0.2], [0.1]]])
    probabilities[1, 0, 0] = 0.6
    regions = probabilities > 0.5
    found = result.mean_probabilities(probabilities, regions)
    np.testing.assert_allclose(found, [0.8, 0.6, np.nan], rtol=1e-6)


def test_a_line_is_found_of_each_region_that_enough_cases_have() -> None:
    sure = np.linspace(0.5, 0.9, 12)
    cases = [np.array([x, x, x if x < 0.6 else np.nan]) for x in sure]
    counts = [counts_of(x, 1.2 * x - 0.2, x) for x in sure]
    wt, tc = result.fit_predicted_dice(cases, counts)
    (falling, *_) = result.fit_predicted_dice(cases, [counts_of(1 - x, x, x) for x in sure])
    assert (wt.region, tc.region) == ("wt", "tc")
    assert (wt.slope, tc.slope) == (pytest.approx(1, abs=0.01), pytest.approx(1.2, abs=0.01))
    assert wt.width < 0.01
    assert wt.worst_fifth == pytest.approx(sure[2], abs=0.03)
    (expected,) = result.predicted_dice([wt], np.array([0.75, 0.5, 0.5]))
    assert expected.dice == pytest.approx(0.75, abs=0.002)
    assert (falling.slope, falling.intercept) == (0.0, pytest.approx(0.3, abs=0.01))


def test_an_interval_stays_between_no_overlap_and_a_perfect_one() -> None:
    high, low = LINE.at(0.99), LINE.at(0.3)
    assert (high.dice, high.low, high.high) == (0.985, 0.9275, 1.0)
    assert (low.dice, low.low, low.high) == (0.0, 0.0, 0.55)
    assert str(high) == "WT 0.98 (0.93 to 1.00)"
    assert high.columns["wt_predicted_dice_low"] == 0.9275
    # of a region that was not found, nothing is expected
    assert result.predicted_dice([LINE], np.array([np.nan, 0.9, 0.9])) == ()


def test_a_dice_is_low_in_the_worst_fifth_of_cases_unless_it_is_good() -> None:
    good = LINE.model_copy(update={"worst_fifth": 0.9})
    assert [LINE.at(x).is_low for x in (0.72, 0.75)] == [True, False]
    assert [good.at(x).is_low for x in (0.75, 0.81)] == [True, False]


@pytest.mark.parametrize("n_cases", [result.FEWEST_CASES, 12, 40])
def test_the_interval_covers_new_cases_as_often_as_it_says(n_cases: int) -> None:
    rng = np.random.default_rng(0)
    n_covered = 0
    for _ in range(250):
        x = rng.uniform(0.5, 1, n_cases + 1)
        y = np.clip(1.4 * x - 0.45 + rng.normal(0, 0.08, n_cases + 1), 0, 1)
        counts = [counts_of(value, value, value) for value in y]
        sure = [np.full(3, value) for value in x[:-1]]
        (line, *_) = result.fit_predicted_dice(sure, counts[:-1])
        expected = line.at(x[-1])
        n_covered += expected.low - 1e-3 <= dice(counts[-1])[0] <= expected.high + 1e-3
    assert n_covered / 250 > result.COVERAGE - 0.05


LINES = tuple(
    LINE.model_copy(update={"region": region, "intercept": 0.2, "slope": 0.5, "worst_fifth": 0.1})
    for region in ("wt", "tc", "et")
)


NOTES: Notes = {"predicted_dice": [line.model_dump() for line in LINES]}


def test_an_exported_model_and_an_ensemble_have_the_lines(tmp_path: Path) -> None:
    plain, one = write_run(tmp_path / "plain"), write_run(tmp_path / "one", notes=NOTES)
    two = write_run(tmp_path / "two", seed=1, notes=NOTES)
    export_model([one], tmp_path / "model")
    (network,) = read_exported(tmp_path / "model").networks
    assert network.card.notes == NOTES
    assert fingerprint_of([network]) == fingerprint_of(read_trained(plain))
    both, mixed = load_model([one, two], CPU), load_model([one, plain], CPU)
    found = [result.dice_lines(one.notes) for one in (both, mixed)]
    assert found == [LINES, ()]


def test_predict_writes_what_is_unusual_and_the_expected_dice(run: Run, tmp_path: Path) -> None:
    # less than 100 ml in voxels of 1 mm: its size and shape are not judged
    images, _ = phantom(20, (59, 70, 58))
    for name, scan in (("usual", images), ("swapped", images[[2, 1, 0, 3]])):
        for image, suffix in zip(scan, ("t1", "t1ce", "t2", "flair"), strict=True):
            write_nifti(tmp_path / f"scans/{name}/{name}_{suffix}.nii.gz", image)
    write_run(tmp_path / "fitted", notes=NOTES)
    write_run(tmp_path / "plain")
    options = ("--set", "preview=false", "--window", "whole")
    code, shown, errors = run("predict", "scans", "-o", "out", "--model", "fitted", *options)
    plain = run("predict", "scans/usual", "-o", "plain-out", "--model", "plain", *options)
    assert (code, plain[0]) == (0, 0), errors
    lines = (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()
    records = {record["case_id"]: record for record in map(json.loads, lines)}
    table = pd.read_csv(tmp_path / "out" / "volumes.csv").set_index("case_id")
    assert records["usual"]["predicted_dice"]
    for one in records["usual"]["predicted_dice"]:
        assert one["low"] < one["dice"] < one["high"]
        assert table.loc["usual", f"{one['region']}_predicted_dice"] == one["dice"]
        assert f"{one['region'].upper()} {one['dice']:.2f} (" in shown
    assert "predicted Dice" not in plain[1]
    assert not any("predicted" in name for name in pd.read_csv(tmp_path / "plain-out/volumes.csv"))
    said = records["swapped"]["warnings"]
    assert all(f"note: {text}" in shown for text in said)
    assert table.loc["swapped", "warnings"] == " | ".join(said)
    for beginning in ("modalities may be mixed up", "the predicted Dice may be too high"):
        assert any(text.startswith(beginning) for text in said)
    usual = " ".join(records["usual"]["warnings"])
    assert not any(text in usual for text in ("mixed up", "may be too high"))
