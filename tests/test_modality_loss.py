"""Test the loss without some modalities: measured on held-out cases, stored with the weights, told."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.data.fold import open_split
from brats_seg.data.store import open_case
from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.evaluation.subset_scores import SubsetScores
from brats_seg.inference import held_out as module
from brats_seg.inference.export import export_model
from brats_seg.inference.held_out import HeldOut, measure_subsets, open_held_out
from brats_seg.inference.model import Model, load_model
from brats_seg.inference.predict import Predictor
from brats_seg.inference.tuning import tune_runs, tuned_card
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS, regions_of
from brats_seg.progress import untracked
from brats_seg.runtime.weights import (
    Decoding,
    FittedPrediction,
    TrainedModel,
    load_trained,
    store_card,
)
from brats_seg.voxels.box import Box
from tests.builders import BRATS_AFFINE
from tests.inference_builders import CPU, IDENTITY, make_model, write_run
from tests.prepared import write_prepared

FEW = (("t1n", "t1c", "t2w"), ("t2f",))
"""Subsets that are quick to measure; training gives all fourteen."""
CASES = [f"BraTS2021_{number:05d}" for number in range(4)]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return write_prepared(tmp_path, n_cases=4)


def write_fold(
    path: Path,
    prepared: Path,
    *held_out: str,
    subsets: tuple[tuple[str, ...], ...] = FEW,
) -> Path:
    train = tuple(case_id for case_id in CASES if case_id not in held_out)
    split = Split(train=train, validation=held_out)
    fingerprint = open_split(prepared, split).fingerprint
    write_run(path, identity=replace(IDENTITY, fingerprint=fingerprint, subsets=subsets))
    write_split(split, path / SPLIT_NAME)
    return path


def use_pointwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a network of known output stand for the weights of a run."""

    def build(networks: Sequence[TrainedModel], *_: object) -> Model:
        return make_model(identity=networks[0].identity)

    monkeypatch.setattr(module, "assemble", build)


def measured(held_out: HeldOut) -> dict[tuple[str, ...], SubsetScores]:
    scores = measure_subsets(held_out, CPU, untracked)
    return {one.modalities: one for one in scores}


def test_the_loss_is_that_of_predictions_of_the_held_out_cases(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scans of a subset, predicted as any others, give the same Dice."""
    use_pointwise(monkeypatch)
    run = write_fold(tmp_path / "run", prepared, *CASES[:2], subsets=MODALITY_SUBSETS)

    found = measured(open_held_out(run, prepared))

    assert tuple(found) == MODALITY_SUBSETS
    assert {one.n_cases for one in found.values()} == {2}
    predictor = Predictor(model=make_model(identity=replace(IDENTITY, subsets=MODALITY_SUBSETS)))
    rows = {
        subset: np.stack([dice_of(predictor, prepared, case, subset) for case in CASES[:2]])
        for subset in (MODALITIES, *FEW)
    }
    for subset in FEW:
        assert found[subset].mean_dice == pytest.approx(rows[subset].mean(axis=0), abs=1e-3)
        loss = (rows[MODALITIES] - rows[subset]).mean(axis=0)
        assert found[subset].mean_loss == pytest.approx(loss, abs=1e-3)
    # the network looks at t1c and t2f alone
    assert found["t1c", "t2f"].mean_loss == (0, 0, 0)
    assert found["t1n", "t2w"].mean_loss[0] > 0.5


def dice_of(
    predictor: Predictor, prepared: Path, case_id: str, subset: tuple[str, ...]
) -> np.ndarray:
    """Return the Dice of the prediction of the images themselves."""
    case = open_case(prepared, case_id)
    box = Box.at((0, 0, 0), case.shape)
    images = np.pad(case.read_image(box), ((0, 0), (1, 1), (1, 1), (1, 1)))
    places = [MODALITIES.index(modality) for modality in subset]
    result = predictor.predict_arrays(
        images[places].astype(np.float32), BRATS_AFFINE, modalities=subset
    )
    assert case.convention is not None
    reference = regions_of(np.pad(case.read_labels(box), 1), case.convention)
    return dice(count_regions(regions_of(result.label_map, result.convention), reference, case_id))


def test_it_is_measured_once_and_stored_with_the_weights(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_fold(tmp_path / "run", prepared, CASES[0])
    before = load_trained(run / "best.pt")
    held_out = open_held_out(run, prepared)
    first = measure_subsets(held_out, CPU, untracked)

    stored = open_held_out(run, prepared)
    monkeypatch.delattr(module, "assemble")

    assert stored.trained.card.subset_scores == first
    assert measure_subsets(stored, CPU, untracked) == first
    # what was predicted for `tune` stays valid
    assert stored.key == held_out.key
    for name, value in before.weights.items():
        assert value.equal(stored.trained.weights[name])


def test_settings_that_are_fitted_again_drop_the_scores_with_the_former_ones(
    tmp_path: Path, prepared: Path
) -> None:
    run = write_fold(tmp_path / "run", prepared, CASES[0])
    measure_subsets(open_held_out(run, prepared), CPU, untracked)

    fitted = FittedPrediction(decoding=Decoding(thresholds=(0.4, 0.5, 0.5)))
    store_card(run / "best.pt", tuned_card(load_trained(run / "best.pt").card, fitted, {}))

    assert load_trained(run / "best.pt").card.subset_scores == ()


def test_few_of_many_held_out_cases_are_predicted(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pointwise(monkeypatch)
    monkeypatch.setattr(module, "MOST_CASES", 2)
    run = write_fold(tmp_path / "run", prepared, *CASES[:3])

    assert {one.n_cases for one in measured(open_held_out(run, prepared)).values()} == {2}


def test_tuning_measures_all_runs_and_an_export_tells_it(tmp_path: Path, prepared: Path) -> None:
    runs = [write_fold(tmp_path / case_id, prepared, case_id) for case_id in CASES[:2]]

    tuning = tune_runs(runs, prepared_path=prepared, device="cpu", precision="fp32")
    again = tune_runs(runs, prepared_path=prepared, device="cpu", precision="fp32")
    export_model(runs, tmp_path / "model")

    assert [one.modalities for one in tuning.subset_scores] == list(FEW)
    assert {one.n_cases for one in tuning.subset_scores} == {2}
    assert again == tuning
    card = (tmp_path / "model" / "README.md").read_text()
    first = tuning.subset_scores[0]
    assert f"| t1n, t1c, t2w | {' | '.join(first.texts())} | 2 |" in card
    assert "besides all four modalities, 2 subsets of them are accepted" in card
    model = load_model([tmp_path / "model"], CPU)
    assert model.subsets == FEW
    assert len(model.subset_scores) == 2


def test_what_was_not_measured_is_said_where_there_was_dropout(
    tmp_path: Path, prepared: Path
) -> None:
    dropped = write_fold(tmp_path / "dropped", prepared, CASES[0])
    plain = write_fold(tmp_path / "plain", prepared, CASES[0], subsets=())
    content = (plain / "best.pt").read_bytes()

    for run in (dropped, plain):
        export_model([run], tmp_path / run.name / "model")

    cards = [(run / "model" / "README.md").read_text() for run in (dropped, plain)]
    assert "`brats-seg tune` measures it" in cards[0]
    assert "Missing modalities" not in cards[1]
    assert measure_subsets(open_held_out(plain, prepared), CPU, untracked) == ()
    assert (plain / "best.pt").read_bytes() == content


def test_a_subset_of_unknown_modalities_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", identity=replace(IDENTITY, subsets=(("t1c", "pet"),)))

    with pytest.raises(UsageError, match=r"subsets of the modalities .*pet"):
        load_model([run], CPU)
