"""Profile and predicted Dice travel from training and tuning into the results of `predict`."""

import json
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.cases.folds import Split
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.data.fold import open_split
from brats_seg.inference.export import export_model
from brats_seg.inference.model import load_model
from brats_seg.inference.predict import Predictor
from brats_seg.quality.expected_dice import DiceLine, dice_lines
from brats_seg.quality.profile import TrainingProfile, profile_in
from brats_seg.runtime.weights import (
    fingerprint_of,
    load_trained,
    read_exported,
    read_trained,
)
from brats_seg.training.state import read_state
from tests.builders import Run, write_nifti
from tests.check_builders import phantom
from tests.inference_builders import CPU, write_run
from tests.prepared import prepare
from tests.test_profile import phantom_profile
from tests.training_builders import tiny_settings, train

LINES = tuple(
    DiceLine(
        region=region,
        n_cases=12,
        intercept=0.2,
        slope=0.5,
        width=0.4,
        worst_fifth=0.1,
        mean_error=0.05,
    )
    for region in ("wt", "tc", "et")
)
NOTES = {
    "predicted_dice": [line.model_dump() for line in LINES],
    "profile": phantom_profile().model_dump(mode="json"),
}
SUFFIXES = ("t1", "t1ce", "t2", "flair")


def write_scan(folder: Path, images: np.ndarray, name: str = "BraTS2021_00001") -> None:
    for image, suffix in zip(images, SUFFIXES, strict=True):
        write_nifti(folder / name / f"{name}_{suffix}.nii.gz", image)


def test_a_run_keeps_the_profile_of_the_cases_that_it_learns_from(tmp_path: Path) -> None:
    """Four of five phantoms; the checkpoint is read as by prediction and as by the resumed run."""
    write_phantom_cases(tmp_path / "scans", n_cases=5, seed=0)
    assert prepare(tmp_path / "scans", tmp_path / "prepared") == ()
    *learnt, held_out = (f"BraTS2021_{number:05d}" for number in range(5))
    split = Split(train=tuple(learnt), validation=(held_out,))
    data = open_split(tmp_path / "prepared", split)

    settings = ("training.n_epochs=1", "patch.per_case=1", "patch.size=32,32,32")
    train(data, tmp_path / "run", tiny_settings(*settings))

    notes = load_trained(tmp_path / "run" / "best.pt").card.notes
    profile = profile_in([notes])
    assert profile is not None
    assert (profile.n_cases, profile.grids) == (4, ((64, 64, 56),))
    last = read_state(tmp_path / "run" / "last.pt")
    assert last.card.notes == notes


def test_an_exported_model_keeps_profile_and_predicted_dice(tmp_path: Path) -> None:
    """They describe a model, but do not change it: its fingerprint is that without them."""
    plain, described = write_run(tmp_path / "plain"), tmp_path / "described"
    write_run(described, notes=NOTES)

    export_model([described], tmp_path / "model")
    export_model([plain], tmp_path / "plain-model")

    (network,) = read_exported(tmp_path / "model").networks
    assert network.card.notes == NOTES
    assert fingerprint_of([network]) == fingerprint_of(read_trained(plain))
    description = json.loads((tmp_path / "plain-model" / "model.json").read_bytes())
    assert description["members"][0]["card"]["notes"] == {}


def test_an_ensemble_has_what_all_of_its_networks_have(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", notes=NOTES)
    two = write_run(tmp_path / "two", seed=1, notes=NOTES)
    plain = write_run(tmp_path / "plain", seed=2)

    both, mixed = load_model([one, two], CPU), load_model([one, plain], CPU)

    assert isinstance(profile_in(both.notes), TrainingProfile)
    assert dice_lines(both.notes) == LINES
    assert (profile_in(mixed.notes), dice_lines(mixed.notes)) == (None, ())


def test_a_model_without_a_profile_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = write_run(tmp_path / "old")
    new = write_run(tmp_path / "new", notes={"profile": phantom_profile().model_dump(mode="json")})

    with caplog.at_level(logging.WARNING):
        Predictor.load([new])
        assert caplog.messages == []
        Predictor.load([old])

    (said,) = caplog.messages
    assert said.startswith("the model has no profile of its training scans")


def test_predict_writes_what_is_unusual_and_the_dice_that_it_expects(
    run: Run, tmp_path: Path
) -> None:
    images, _ = phantom(20)
    write_scan(tmp_path / "usual", images)
    write_scan(tmp_path / "swapped", images[[2, 1, 0, 3]])
    model = write_run(tmp_path / "run", notes=NOTES)
    records, tables, shown = {}, {}, {}

    for name in ("usual", "swapped"):
        code, shown[name], errors = run(
            "predict", name, "-o", f"{name}-out", "--model", model, "--set", "preview=false"
        )
        assert code == 0, errors
        folder = tmp_path / f"{name}-out"
        records[name] = json.loads((folder / "manifest.jsonl").read_text())
        (tables[name],) = pd.read_csv(folder / "volumes.csv").to_dict("records")

    told = {one["region"]: one for one in records["usual"]["predicted_dice"]}
    assert told
    for region, one in told.items():
        assert one["low"] < one["dice"] < one["high"]
        assert tables["usual"][f"{region}_predicted_dice"] == one["dice"]
        assert f"{region.upper()} {one['dice']:.2f} (" in shown["usual"]
    unusual = [
        w for w in records["swapped"]["warnings"] if w.startswith("unlike the training scans")
    ]
    assert unusual
    assert unusual[0] in shown["swapped"]
    assert not any("unlike the training scans" in w for w in records["usual"]["warnings"])
    doubts = [
        any("predicted Dice was fitted" in w for w in r["warnings"]) for r in records.values()
    ]
    assert doubts == [False, True]


def test_predictions_without_a_fit_have_no_columns_of_it(run: Run, tmp_path: Path) -> None:
    write_scan(tmp_path / "scans", phantom(20)[0])
    model = write_run(
        tmp_path / "run", notes={"profile": phantom_profile().model_dump(mode="json")}
    )

    code, shown, errors = run(
        "predict", "scans", "-o", "out", "--model", model, "--set", "preview=false"
    )

    assert code == 0, errors
    assert "predicted Dice" not in shown
    assert not any("predicted" in name for name in pd.read_csv(tmp_path / "out" / "volumes.csv"))
