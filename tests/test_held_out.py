"""Test which cases were held out of a run, and the loss without some modalities on them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg import PredictionSettings, Predictor, export_model, find_cases, predict_folder
from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.data.store import open_case
from brats_seg.errors import FoldError, UsageError
from brats_seg.evaluation.evaluate import evaluate_pairs, find_pairs
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.inference import held_out as module
from brats_seg.inference.held_out import measure_subsets, open_held_out
from brats_seg.inference.model import Model, load_model
from brats_seg.inference.tuning import tune_runs, tuned_card
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS, regions_of
from brats_seg.progress import untracked
from brats_seg.runtime.weights import (
    FittedPrediction,
    TrainedModel,
    fingerprint_of,
    load_trained,
    store_card,
)
from brats_seg.voxels.box import Box
from brats_seg.voxels.regions import Decoding
from tests.builders import BRATS_AFFINE
from tests.inference_builders import CASES, CPU, IDENTITY, make_model, write_fold

FEW = (("t1n", "t1c", "t2w"), ("t2f",))
"""Subsets that are quick to measure; training gives all fourteen."""
FITTED = FittedPrediction(decoding=Decoding(thresholds=(0.4, 0.5, 0.6), smallest_et_mm3=5.0))


@pytest.fixture
def pointwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(networks: Sequence[TrainedModel], *_: object) -> Model:
        return make_model(identity=networks[0].card.identity)

    monkeypatch.setattr(module, "assemble", build)


def test_other_splits_and_cases_are_refused(tmp_path: Path, tiny_prepared: Path) -> None:
    """A case that was trained on must not pass for one that was held out."""
    run = write_fold(tmp_path / "run", tiny_prepared, (CASES[1], CASES[3]))
    path = run / SPLIT_NAME
    split = open_held_out(run, tiny_prepared).data.split
    assert split.validation == (CASES[1], CASES[3])
    assert split.train == (CASES[0], CASES[2], *CASES[4:])
    with pytest.raises(UsageError, match=r"prepared in .*: give --data or --prepared"):
        open_held_out(run, tmp_path / "nowhere")
    path.write_text(path.read_text().replace(f"{CASES[0]},train", f"{CASES[0]},validation"))
    with pytest.raises(UsageError, match="was not trained on the cases prepared in"):
        open_held_out(run, tiny_prepared)
    path.unlink()
    with pytest.raises(FoldError, match=r"split\.csv does not exist"):
        open_held_out(run, tiny_prepared)


@pytest.mark.usefixtures("pointwise")
def test_losses_by_hand(tmp_path, tiny_prepared, monkeypatch):
    """The scans of a subset, predicted as any others, give the same Dice; few of many suffice."""
    monkeypatch.setattr(module, "MOST_CASES", 2)
    run = write_fold(tmp_path / "run", tiny_prepared, CASES[:3], subsets=MODALITY_SUBSETS)
    scores = measure_subsets(open_held_out(run, tiny_prepared), CPU, untracked)
    measured = {score.modalities: score for score in scores}
    assert tuple(measured) == MODALITY_SUBSETS
    assert {score.n_cases for score in scores} == {2}
    # stored with the weights
    monkeypatch.delattr(module, "assemble")
    assert measure_subsets(open_held_out(run, tiny_prepared), CPU, untracked) == scores
    predictor = Predictor(model=make_model(identity=replace(IDENTITY, subsets=MODALITY_SUBSETS)))
    rows = {
        subset: np.stack([dice_of(predictor, tiny_prepared, case, subset) for case in CASES[:3:2]])
        for subset in (MODALITIES, *FEW)
    }
    for subset in FEW:
        assert measured[subset].mean_dice == pytest.approx(rows[subset].mean(axis=0), abs=1e-3)
        loss = (rows[MODALITIES] - rows[subset]).mean(axis=0)
        assert measured[subset].mean_loss == pytest.approx(loss, abs=1e-3)
    # the network looks at t1c and t2f alone
    assert measured["t1c", "t2f"].mean_loss == (0, 0, 0)
    assert measured["t1n", "t2w"].mean_loss[0] > 0.5


def dice_of(
    predictor: Predictor, prepared: Path, case_id: str, subset: Sequence[str]
) -> np.ndarray:
    case = open_case(prepared, case_id)
    box = Box.at((0, 0, 0), case.shape)
    images = np.pad(box.read(case.image), ((0, 0), (1, 1), (1, 1), (1, 1))).astype(np.float32)
    indices = [MODALITIES.index(modality) for modality in subset]
    result = predictor.predict_arrays(images[indices], BRATS_AFFINE, modalities=subset)
    assert case.convention is not None
    reference = regions_of(np.pad(box.read(case.labels), 1), case.convention)
    return dice(count_regions(regions_of(result.label_map, result.convention), reference, case_id))


def test_measuring_changes_nothing_else(tmp_path: Path, tiny_prepared: Path) -> None:
    run = write_fold(tmp_path / "run", tiny_prepared, CASES[:1], subsets=FEW)
    before = open_held_out(run, tiny_prepared)
    first = measure_subsets(before, CPU, untracked)
    stored = open_held_out(run, tiny_prepared)
    assert stored.trained.card.subset_scores == first
    # what was predicted for `tune` stays valid
    assert fingerprint_of([stored.unfitted]) == fingerprint_of([before.unfitted])
    for name, value in before.trained.weights.items():
        assert value.equal(stored.trained.weights[name])
    store_card(run / "best.pt", tuned_card(load_trained(run / "best.pt").card, FITTED, {}))
    assert load_trained(run / "best.pt").card.subset_scores == ()


@pytest.mark.usefixtures("one_process")
def test_tuning_measures_runs_and_exports_say_so(tmp_path: Path, tiny_prepared: Path) -> None:
    runs = [write_fold(tmp_path / one, tiny_prepared, [one], subsets=FEW) for one in CASES[:2]]
    plain = write_fold(tmp_path / "plain", tiny_prepared, CASES[:1])
    content = (plain / "best.pt").read_bytes()
    for index, run in enumerate((runs[0], plain)):
        export_model([run], tmp_path / f"untuned{index}")
    tuning = tune_runs(runs, prepared_path=tiny_prepared, device="cpu", precision="fp32")
    again = tune_runs(runs, prepared_path=tiny_prepared, device="cpu", precision="fp32")
    export_model(runs, tmp_path / "model")
    assert [score.modalities for score in tuning.subset_scores] == list(FEW)
    assert {score.n_cases for score in tuning.subset_scores} == {2}
    assert again == tuning
    names = ("model", "untuned0", "untuned1")
    tuned, untuned, without = ((tmp_path / name / "README.md").read_text() for name in names)
    assert f"| t1n, t1c, t2w | {' | '.join(tuning.subset_scores[0].texts())} | 2 |" in tuned
    assert "besides all four modalities, 2 subsets of them are accepted" in tuned
    assert "`brats-seg tune` measures it" in untuned
    assert "Missing modalities" not in without
    model = load_model([tmp_path / "model"], CPU)
    assert (model.subsets, len(model.subset_scores)) == (FEW, 2)
    assert measure_subsets(open_held_out(plain, tiny_prepared), CPU, untracked) == ()
    assert (plain / "best.pt").read_bytes() == content


def test_validation_scores_the_label_maps(tiny_run: Path, tiny_scans: Path, tmp_path: Path) -> None:
    settings = PredictionSettings(device="cpu", precision="fp32", overlap=0)
    held_out = read_split(tiny_run / SPLIT_NAME).validation
    cases = [case for case in find_cases(tiny_scans).cases if case.case_id in held_out]
    predict_folder(cases, [tiny_run], tmp_path, settings)
    pairs = find_pairs(tiny_scans, tmp_path, only_predicted=True)
    scores = evaluate_pairs(pairs, protocol_named("legacy")).scores
    history = pd.read_csv(tiny_run / "history.csv").iloc[-1]
    for region, of_region in scores.groupby("region"):
        assert of_region["dice"].mean() == pytest.approx(history[f"val_dice_{region}"], abs=1e-6)
    # the network says tumour almost everywhere, also outside the brain
    assert 0 < history["val_dice_wt"] < 1
