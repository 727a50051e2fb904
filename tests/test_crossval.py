"""Test the steps of a cross-validation: prediction, scores and export."""

from itertools import chain
from pathlib import Path
from shutil import copytree

import pytest

from brats_seg import PredictionSettings, crossval, export_model, load_model, read_scores
from brats_seg.cases.case import Case
from brats_seg.cases.index import index_cases
from brats_seg.cli.train import tune
from brats_seg.config import load_config
from brats_seg.errors import ResumeError, UsageError
from brats_seg.evaluation.evaluate import evaluate_pairs, find_pairs
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.inference.batch import BatchOutcome, finish_batch
from brats_seg.inference.held_out import HeldOut, open_held_out
from brats_seg.inference.results import OutputFolder
from tests.inference_builders import CASES, CPU, write_fold

LEGACY = protocol_named("legacy")
SETTINGS = PredictionSettings(preview=False, precision="fp32", device="cpu")
HeldOutCases = dict[Path, list[Case]]
"""The held-out cases of each run."""


@pytest.fixture
def held_out(tmp_path: Path, tiny_prepared: Path) -> list[HeldOut]:
    """Two runs with random weights; each held out half of the cases."""
    runs = [write_fold(tmp_path / f"fold{n}", tiny_prepared, CASES[n::2], seed=n) for n in range(2)]
    return [open_held_out(run, tiny_prepared) for run in runs]


@pytest.fixture
def cases(held_out: list[HeldOut], tiny_scans: Path) -> HeldOutCases:
    return crossval.held_out_cases(held_out, index_cases(tiny_scans))


def predict(cases: HeldOutCases, path: Path) -> BatchOutcome:
    output = OutputFolder(path)
    with output.opened():
        return finish_batch(crossval.held_out_outcomes(cases, SETTINGS, output), output, len(CASES))


def test_each_case_is_predicted_by_the_run_without_it(cases: HeldOutCases, tmp_path: Path) -> None:
    outcome = predict(cases, tmp_path / "out")
    records = OutputFolder(tmp_path / "out").records()
    fingerprints = [load_model([run], CPU).fingerprint for run in cases]
    assert (len(outcome.predicted), outcome.failures) == (6, ())
    assert fingerprints[0] != fingerprints[1]
    for held_out, fingerprint in zip(cases.values(), fingerprints, strict=True):
        assert {records[one.case_id].model for one in held_out} == {fingerprint}


def test_scores_are_those_of_evaluate(cases, tiny_scans, tmp_path):
    predict(cases, tmp_path / "out")
    volumes = tmp_path / "out" / "volumes.csv"
    # a patient that the first weights of the run had learnt from
    volumes.write_text(volumes.read_text().replace(",no,", ",yes,", 1))
    pairing = crossval.reference_pairs(chain(*cases.values()), tmp_path / "out")
    assert {pair.reference.convention for pair in pairing.pairs} == {"brats2017"}
    found = crossval.score_predictions(pairing, LEGACY, tmp_path)
    expected = evaluate_pairs(find_pairs(tiny_scans, tmp_path / "out"), LEGACY)
    assert found.scores.equals(expected.scores)
    assert [one.n_cases for one in found.held_out_summaries] == [5, 5, 5]
    assert read_scores(tmp_path / "scores.csv")["case_id"].equals(expected.scores["case_id"])


def test_damaged_predictions_are_made_again(cases: HeldOutCases, tmp_path: Path) -> None:
    predict(cases, tmp_path / "out")
    (tmp_path / "out" / "BraTS2021_00001.nii.gz").unlink()
    (tmp_path / "out" / "BraTS2021_00003.nii.gz").write_bytes(b"broken")
    pairing = crossval.reference_pairs(chain(*cases.values()), tmp_path / "out")
    found = crossval.score_predictions(pairing, LEGACY, tmp_path)
    assert found.missing == ("BraTS2021_00001",)
    assert found.scores.set_index("case_id")["dice"]["BraTS2021_00001"].tolist() == [0.0] * 3
    assert [failure.case_id for failure in found.failures] == ["BraTS2021_00003"]
    assert [one.n_cases for one in found.summaries] == [5, 5, 5]
    assert predict(cases, tmp_path / "out").n_skipped == 5


@pytest.mark.parametrize("name", ["model.json", "member0.safetensors"])
def test_a_damaged_model_is_replaced(held_out: list[HeldOut], tmp_path: Path, name: str) -> None:
    runs, folder = [one.run for one in held_out], tmp_path / "model"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    fingerprint = export_model(runs[:1], folder, replace=True).fingerprint
    assert export_model(runs, folder, replace=True).fingerprint != fingerprint
    (folder / name).write_bytes(b"damaged")
    fingerprint = export_model(runs, folder, replace=True).fingerprint
    assert len(load_model([folder], CPU).members) == 2
    assert load_model([folder], CPU).fingerprint == fingerprint == load_model(runs, CPU).fingerprint
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
    with pytest.raises(UsageError, match="other exists and holds no exported model"):
        export_model(runs, tmp_path / "other", replace=True)
    assert (tmp_path / "other" / "mine.txt").exists()


def test_no_fold_is_trained_where_one_is_refused(tiny_scans, tiny_run, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no fold is chosen"):
        crossval.cross_validate(tmp_path, folds=(), output=tmp_path / "out")
    copytree(tiny_run, tmp_path / "fold1")
    values = {"folds.n_folds": 2, "start.path": str(tmp_path / "fold1")}
    options = {"runs": tmp_path, "output": tmp_path / "out"}
    with pytest.raises(UsageError, match="cannot start from itself"):
        crossval.cross_validate(tiny_scans, config=load_config(values=values), **options)
    with pytest.raises(ResumeError, match="fold1 was begun with other settings"):
        crossval.cross_validate(tiny_scans, config=load_config(preset="demo"), **options)
    assert not (tmp_path / "fold0").exists(), "no fold is trained before that is noticed"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="crossval is one process: `train` each fold"):
        crossval.cross_validate(tmp_path, output=tmp_path / "out")
    with pytest.raises(UsageError, match="tune is one process: `train` each fold"):
        tune([tmp_path])
