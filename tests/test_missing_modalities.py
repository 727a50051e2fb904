"""Test cases without some modalities: taken by models that were trained for it, refused by others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import nibabel as nib
import numpy as np
import pandas as pd
import pytest

from brats_seg import PageOptions, PredictionSettings, Predictor, load_case, write_report
from brats_seg.cases.find import find_inputs
from brats_seg.cases.many import Failure
from brats_seg.errors import CaseError
from brats_seg.evaluation.scores import SubsetScores
from brats_seg.figures.cases import montage_figure, open_view, with_prediction
from brats_seg.inference.batch import CaseOutcome
from brats_seg.inference.model import Model
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS
from tests.builders import make_volumes, write_case
from tests.inference_builders import IDENTITY, NAMES, PLAIN_SETTINGS, make_model, predict_into

CASE_ID = "BraTS2021_00000"
SCORES = SubsetScores.of_cases(("t1c", "t2f"), np.full((4, 3), 0.7), np.full((4, 3), 0.8))
FOR_ALL = replace(IDENTITY, subsets=MODALITY_SUBSETS)
PLAIN = make_model()
DROPOUT = make_model(identity=FOR_ALL, subset_scores=(SCORES,))
FOR_TWO = make_model(identity=replace(IDENTITY, subsets=(("t1c", "t2f"), ("t2f",))))


def write_subset(root: Path, modalities: Sequence[str]) -> Path:
    folder = write_case(root, CASE_ID, labelled=False)
    for modality in MODALITIES:
        if modality not in modalities:
            (folder / f"{CASE_ID}_{NAMES[modality]}.nii.gz").unlink()
    return folder


def predict(inputs: Path, output: Path, model: Model = DROPOUT) -> CaseOutcome:
    return predict_into(inputs, output, model, PLAIN_SETTINGS)[1][0]


@pytest.mark.parametrize(
    ("model", "kept", "missing", "expected"),
    [
        (PLAIN, ("t1n", "t2w", "t2f"), "t1c", "t1n, t1c, t2w, t2f, as the model was trained"),
        (FOR_TWO, ("t1c",), "t1n, t2w, t2f", "one of the sets that .*: t1c, t2f; t2f"),
    ],
)
def test_a_model_refuses_what_it_was_not_trained_for(tmp_path, model, kept, missing, expected):
    folder = write_subset(tmp_path / "scans", kept)
    record = predict(tmp_path / "scans", tmp_path / "out", model).record
    assert isinstance(record, Failure)
    assert record.message.startswith(f"case {CASE_ID}, file {CASE_ID}/: found no {missing}; expect")
    assert record.message.endswith("use a model trained with training.modality_dropout.")
    assert not list((tmp_path / "out").glob("*.nii.gz"))
    # nor does a prepared scan reach its networks
    scan = Predictor(model=DROPOUT).prepare(Predictor(model=DROPOUT).read(find_inputs([folder])[0]))
    with pytest.raises(CaseError, match=f"found no {missing}; expected .*{expected}"):
        Predictor(model=model).predict_scan(scan)


@pytest.mark.parametrize("kept", MODALITY_SUBSETS)
def test_a_model_with_dropout_takes_every_subset(tmp_path: Path, kept: tuple[str, ...]) -> None:
    write_subset(tmp_path / "scans", kept)
    record = predict(tmp_path / "scans", tmp_path / "out").record
    assert record.modalities == kept
    assert len(record.inputs) == len(record.files) == len(kept)
    missing = ", ".join(name for name in MODALITIES if name not in kept)
    warning = f"no {missing}: predicted from {' and '.join(kept)} alone; "
    assert record.warnings[0].startswith(warning)
    is_measured = kept == SCORES.modalities
    assert record.expected_loss == (SCORES if is_measured else None)
    assert record.warnings[0].endswith(f": it was {SCORES}") == is_measured
    assert ("not known: `brats-seg tune` measures it" in record.warnings[0]) != is_measured
    (row,) = pd.read_csv(tmp_path / "out" / "volumes.csv").to_dict("records")
    assert row["modalities"] == " ".join(kept)
    assert row["warnings"].startswith(warning)


def test_the_channels_of_missing_modalities_are_zero(tmp_path: Path) -> None:
    outcomes = {}
    for kept in (MODALITIES, ("t1c", "t2f"), ("t1n", "t2w")):
        name = " ".join(kept)
        write_subset(tmp_path / name, kept)
        outcomes[kept] = predict(tmp_path / name, tmp_path / "out" / name)
    plain = predict(tmp_path / " ".join(MODALITIES), tmp_path / "plain", PLAIN)
    whole, both, neither = (
        np.asarray(nib.load(tmp_path / "out" / " ".join(kept) / f"{CASE_ID}.nii.gz").dataobj)
        for kept in outcomes
    )
    assert {*np.unique(whole)} == {0, 1, 2, 4}
    np.testing.assert_array_equal(both, whole)
    assert not neither.any()
    # the figures show what there is
    view = with_prediction(open_view(tmp_path / name), tmp_path / "out" / name)
    assert montage_figure(view).get_suptitle() == f"{CASE_ID}, T1"
    # a whole case is predicted as by any model
    record = outcomes[MODALITIES].record
    assert (record.modalities, record.expected_loss) == (MODALITIES, None)
    assert record.key == plain.record.key
    assert not any("predicted from" in warning for warning in record.warnings)


def test_only_predict_takes_a_subset_of_files_or_arrays(tmp_path: Path) -> None:
    folder = write_subset(tmp_path / "scans", ("t1c", "t2f"))
    predictor = Predictor(model=DROPOUT)
    files = {name: folder / f"{CASE_ID}_{name}.nii.gz" for name in ("t1ce", "flair")}
    images, affine = make_volumes(seed=0)[[1, 3]], nib.load(files["flair"]).affine
    of_files = predictor.predict_files(files)
    of_arrays = predictor.predict_arrays(images, affine, modalities=("t1c", "t2f"))
    assert of_files.summary.modalities == of_arrays.summary.modalities == ("t1c", "t2f")
    np.testing.assert_array_equal(of_files.label_map, of_arrays.label_map)
    with pytest.raises(CaseError, match=r"found an array of shape \(2, .* for t1n"):
        predictor.predict_arrays(images, np.eye(4))
    with pytest.raises(CaseError, match=r"for t2f, t1c; .*, in the order t1n, t1c, t2w, t2f"):
        predictor.predict_arrays(images, np.eye(4), modalities=("t2f", "t1c"))
    with pytest.raises(CaseError, match="as the model was trained with all four"):
        Predictor(model=PLAIN).predict_files(files)
    with pytest.raises(CaseError, match="found no t1n, t2w; expected t1n, t1c, t2w, t2f"):
        load_case(find_inputs([folder])[0])


def test_picture_and_page_show_the_modalities_that_are_there(tmp_path: Path) -> None:
    kept = ("t1n", "t2w")
    write_subset(tmp_path / "scans", kept)
    out = tmp_path / "out"
    predict_into(tmp_path / "scans", out, DROPOUT, PredictionSettings(uncertainty=True))
    (page,) = write_report([out], PageOptions(case_ids=(CASE_ID,))).results
    html = page.read_text()
    by_scans = PageOptions(prediction=out, output=tmp_path / "pages")
    (page,) = write_report([tmp_path / "scans"], by_scans).results
    height, width = plt.imread(out / "previews" / f"{CASE_ID}.png").shape[:2]
    # one row of three planes: a missing modality would be a black row
    assert width > 2 * height
    assert page.read_text() == html
    for modality in MODALITIES:
        assert (f'data-scan="{modality}"' in html) == (modality in kept)
        assert (f"File of {modality}" in html) == (modality in kept)
    assert "predicted from t1n and t2w alone" in html
