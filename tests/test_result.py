"""Test the warnings about predicted label maps that cannot be right, and the Dice that is expected of one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from scipy.ndimage import binary_erosion

from brats_seg import export_model, load_model
from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import RegionCounts, dice, region_counts
from brats_seg.labels import BRATS2017, regions_of
from brats_seg.quality import result
from brats_seg.runtime.weights import fingerprint_of, read_exported, read_trained
from brats_seg.voxels.box import brain_mask
from brats_seg.voxels.regions import measure_parts
from brats_seg.wings import Notes, PredictedDice
from tests.builders import Run, write_arrays
from tests.check_builders import images_of, phantom, real_cases
from tests.inference_builders import CPU, write_run

Mask = npt.NDArray[np.bool_]

SHAPE = (64, 64, 64)


def ball(radius: float, centre: tuple[float, float, float] = (32, 32, 32)) -> Mask:
    distance = np.sqrt(((np.indices(SHAPE).T - centre) ** 2).sum(axis=-1)).T
    return distance < radius


BRAIN = ball(30)
TUMOUR = np.select([ball(radius, (40, 32, 32)) for radius in (4, 7, 11)], [1, 4, 2])


def prediction_of(
    labels: npt.NDArray[np.generic], *, brain: Mask = BRAIN, sure: float = 0.99, mm: float = 1.0
) -> result.JudgedPrediction:
    regions = regions_of(labels.astype(np.uint8), BRATS2017)
    return result.JudgedPrediction(
        regions=regions,
        probabilities=np.where(regions, sure, 1 - sure).astype(np.float32),
        brain=brain,
        volumes=measure_parts(regions, mm**3),
        spacing_mm=(mm, mm, mm),
    )


def speckle(share: float) -> Mask:
    return BRAIN & (np.random.default_rng(0).random(SHAPE) < share)


def with_island(radius: float) -> npt.NDArray[np.generic]:
    return np.where(ball(radius, (16, 32, 32)), 2, TUMOUR)


def said_of(labels: npt.NDArray[np.generic], **values: float) -> str:
    return "\n".join(result.implausibilities(prediction_of(labels, **values)))


def test_a_plausible_tumour_has_no_remarks() -> None:
    assert said_of(TUMOUR) == said_of(TUMOUR, mm=2.0) == said_of(with_island(3)) == ""
    # 14 ml of foreground are no brain
    for labels in (2 * BRAIN, TUMOUR * 0, 2 * speckle(0.2)):
        assert said_of(labels, sure=0.6, mm=0.5) == ""


SHELL = BRAIN & ~binary_erosion(BRAIN, iterations=3)


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (2 * BRAIN, r"very large: .* \[share of the brain: 1; usual at most 0\.33\]"),
        (TUMOUR * 0, "no tumour was found"),
        (4 * ball(8), "nearly all of the tumour enhances"),
        (2 * speckle(0.02), r"very many parts: .*: [\d.e+]+; usual at most 200"),
        (2 * speckle(0.2), "is scattered: .* a ball of the same volume"),
        (2 * SHELL, r"lies at the border of the brain: .*: 0\.[67]"),
        (2 * ball(9, (3, 3, 3)), "lies at the border of the brain: .*: 1;"),
        (with_island(8), r"lies in several places: .* usual at most 0\.15"),
    ],
    ids=["all brain", "nothing", "one label", "grains", "noise", "shell", "outside", "islands"],
)
def test_what_cannot_be_a_tumour_is_flagged(labels: npt.NDArray[np.generic], found: str) -> None:
    assert re.search(found, said_of(labels))


def test_a_network_that_cannot_decide_is_flagged() -> None:
    """The label map is that of a tumour, but other voxels are nearly as likely."""
    prediction = prediction_of(TUMOUR)
    doubtful = np.where(prediction.regions, 0.9, np.where(BRAIN, 0.4, 0)).astype(np.float32)
    (said,) = result.implausibilities(replace(prediction, probabilities=doubtful))
    assert said.startswith("the network is undecided in very many voxels")


@pytest.mark.parametrize(("enhancement", "is_flagged"), [(0.2, True), (0.5, False)])
def test_tumour_that_does_not_enhance_is_flagged(enhancement: float, *, is_flagged: bool) -> None:
    prediction = prediction_of(TUMOUR)
    noise = np.random.default_rng(0).normal(1, 0.3, SHAPE).astype(np.float32)
    uptake = noise + np.float32(enhancement) * prediction.regions[2]
    said = list(result.implausibilities(replace(prediction, uptake=uptake)))
    assert len(said) == is_flagged
    assert all("is hardly brighter in t1c than its surroundings" in one for one in said)


def test_a_low_predicted_dice_is_flagged_and_that_of_an_unusual_scan_is_doubted() -> None:
    wt = PredictedDice(region="wt", dice=0.82, low=0.7, high=0.9)
    et = PredictedDice(region="et", dice=0.41, low=0.2, high=0.6, is_low=True)

    def said(*dice: PredictedDice, is_unusual: bool = False) -> str:
        prediction = replace(prediction_of(TUMOUR), predicted_dice=dice, is_unusual=is_unusual)
        return " | ".join(result.implausibilities(prediction))

    assert said(wt) == said(is_unusual=True) == ""
    assert said(wt, et).endswith("held-out cases of the model: ET 0.41 (0.20 to 0.60)]")
    assert said(wt, is_unusual=True).startswith("the predicted Dice may be too high")


@pytest.mark.real
@pytest.mark.slow
def test_real_label_maps_and_good_predictions_have_no_remarks(real_data: Path) -> None:
    predictions = real_data / "metric_fixtures" / "network_predictions"
    n_believed = 0
    weak: list[str] = []
    for loaded in real_cases(real_data, "BraTS2018", "BraTS2021"):
        assert loaded.label is not None
        case_id = loaded.case.case_id
        brain = brain_mask([volume.array for volume in loaded.volumes])
        native, enhanced = (_normalised(image, brain) for image in images_of(loaded)[:2])
        maps = [loaded.label.array]
        for path in predictions.glob(f"{case_id}.nii.gz"):
            stored = np.asarray(nib.load(path).dataobj).astype(np.uint8)
            maps.append(np.where(stored == 3, 4, stored))
        for labels in maps:
            prediction = replace(prediction_of(labels, brain=brain), uptake=enhanced - native)
            said = list(result.implausibilities(prediction))
            n_believed += not said
            weak += [case_id] * any("hardly brighter" in one for one in said)
    # the reference and the prediction of a scan whose contrast agent is weak
    assert (n_believed, weak) == (18, ["Brats18_TCIA13_623_1"] * 2)


def _normalised(image: npt.NDArray[np.generic], brain: Mask) -> npt.NDArray[np.float32]:
    values = image.astype(np.float32)
    return (values - values[brain].mean()) / values[brain].std()


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
    assert [result.dice_lines(one.notes) for one in (both, mixed)] == [LINES, ()]


@pytest.mark.parametrize("change", [{"region": "brain"}, {"n_cases": 3}, {"new": 1}])
def test_a_damaged_fit_of_a_model_is_refused_with_what_is_wrong(change: dict[str, object]) -> None:
    notes = [{"predicted_dice": [{**LINE.model_dump(), **change}]}]
    (key,) = change
    with pytest.raises(UsageError, match=f"damaged note predicted_dice: 0.{key}: .* tune"):
        result.dice_lines(notes)


def test_predict_writes_what_is_unusual_and_the_expected_dice(run: Run, tmp_path: Path) -> None:
    # less than 100 ml in voxels of 1 mm: its size and shape are not judged
    images, _ = phantom(20, (59, 70, 58))
    for name, scan in (("usual", images), ("swapped", images[[2, 1, 0, 3]])):
        write_arrays(tmp_path / "scans" / name, scan)
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
