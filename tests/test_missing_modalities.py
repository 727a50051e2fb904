"""Test cases without some modalities: taken by models that were trained for it, refused by others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import nibabel as nib
import numpy as np
import pandas as pd
import pytest

from brats_seg.cases.case import load_case
from brats_seg.cases.find import find_inputs, single_input
from brats_seg.cases.many import Failure
from brats_seg.errors import CaseError, UsageError
from brats_seg.evaluation.subset_scores import SubsetScores
from brats_seg.inference.batch import (
    CaseOutcome,
    CaseWork,
    check_apart,
    finish_batch,
    local_outcomes,
)
from brats_seg.inference.model import Model, load_model
from brats_seg.inference.predict import Predictor, predict_scan
from brats_seg.inference.results import OutputFolder
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS
from brats_seg.pages.write import PageOptions, write_report
from tests.builders import make_volumes, write_case, write_nifti
from tests.inference_builders import CPU, IDENTITY, make_model, write_run

CASE_ID = "BraTS2021_00000"
NAMES = dict(zip(MODALITIES, ("t1", "t1ce", "t2", "flair"), strict=True))
SCORES = SubsetScores.of_cases(("t1c", "t2f"), np.full((4, 3), 0.7), np.full((4, 3), 0.8))
FOR_ALL = replace(IDENTITY, subsets=MODALITY_SUBSETS)
PLAIN = make_model()
DROPOUT = make_model(identity=FOR_ALL, subset_scores=(SCORES,))
SETTINGS = PredictionSettings(preview=False)


def write_subset(root: Path, modalities: Sequence[str], seed: int = 0) -> Path:
    """Write a case with the files of these modalities alone, and return its folder."""
    folder = write_case(root, CASE_ID, seed=seed, labelled=False)
    for modality in MODALITIES:
        if modality not in modalities:
            (folder / f"{CASE_ID}_{NAMES[modality]}.nii.gz").unlink()
    return folder


def run(
    inputs: Path, output: Path, model: Model, settings: PredictionSettings = SETTINGS
) -> CaseOutcome:
    """Predict the one case of a folder."""
    folder = OutputFolder(output)
    (case,) = find_inputs([inputs])
    endings: list[CaseOutcome] = []
    with folder.opened():
        work = CaseWork(
            predictor=Predictor(model=replace(model, settings=settings)),
            output=folder,
            earlier=folder.records(),
        )
        finish_batch(local_outcomes([case], work), folder, 1, on_case=endings.append)
    (ending,) = endings
    return ending


def label_map_in(output: Path) -> np.ndarray:
    return np.asarray(nib.load(output / f"{CASE_ID}.nii.gz").dataobj)


@pytest.mark.parametrize("missing", [("t1c",), ("t1n", "t2f"), MODALITIES[1:]])
def test_a_model_of_all_modalities_refuses_by_name(tmp_path: Path, missing: Sequence[str]) -> None:
    write_subset(tmp_path / "scans", [name for name in MODALITIES if name not in missing])

    record = run(tmp_path / "scans", tmp_path / "out", PLAIN).record

    assert isinstance(record, Failure)
    assert record.message == (
        f"case {CASE_ID}, file {CASE_ID}/: found no {', '.join(missing)}; expected t1n, t1c, t2w, "
        "t2f, as the model was trained with all four modalities. Add the missing files, or use a "
        "model trained with training.modality_dropout."
    )
    assert not list((tmp_path / "out").glob("*.nii.gz"))


@pytest.mark.parametrize("kept", MODALITY_SUBSETS)
def test_a_model_with_dropout_takes_every_subset(tmp_path: Path, kept: tuple[str, ...]) -> None:
    write_subset(tmp_path / "scans", kept)

    record = run(tmp_path / "scans", tmp_path / "out", DROPOUT).record

    assert record.modalities == kept
    assert len(record.inputs) == len(record.files) == len(kept)
    (row,) = pd.read_csv(tmp_path / "out" / "volumes.csv").to_dict("records")
    assert row["modalities"] == " ".join(kept)
    missing = [name for name in MODALITIES if name not in kept]
    said = f"no {', '.join(missing)}: predicted from {' and '.join(kept)} alone; "
    assert record.warnings[0].startswith(said)
    assert row["warnings"].startswith(said)


def test_the_channels_of_missing_modalities_are_zero_and_the_others_in_their_place(
    tmp_path: Path,
) -> None:
    """The network looks at t1c and t2f alone, so that their absence shows."""
    write_case(tmp_path / "all", CASE_ID, labelled=False)
    for kept in (("t1c", "t2f"), ("t1n", "t2w")):
        write_subset(tmp_path / kept[0], kept)
        run(tmp_path / kept[0], tmp_path / f"out-{kept[0]}", DROPOUT)
    run(tmp_path / "all", tmp_path / "out", DROPOUT)

    expected = label_map_in(tmp_path / "out")
    assert {*np.unique(expected)} == {0, 1, 2, 4}
    np.testing.assert_array_equal(label_map_in(tmp_path / "out-t1c"), expected)
    assert not label_map_in(tmp_path / "out-t1n").any()


def test_the_loss_to_expect_is_told_where_it_was_measured(tmp_path: Path) -> None:
    write_subset(tmp_path / "known", ("t1c", "t2f"))
    write_subset(tmp_path / "unknown", ("t1c",))

    known = run(tmp_path / "known", tmp_path / "a", DROPOUT).record
    unknown = run(tmp_path / "unknown", tmp_path / "b", DROPOUT).record

    assert known.expected_loss == SCORES
    assert known.warnings[0].endswith(
        "expect a lower Dice than with all four modalities: it was WT 0.10 lower (standard deviation "
        "0.00), TC 0.10 lower (standard deviation 0.00), ET 0.10 lower (standard deviation 0.00) on 4 "
        "held-out cases"
    )
    assert unknown.expected_loss is None
    assert "not known: `brats-seg tune` measures it on the held-out cases" in unknown.warnings[0]


def test_nothing_is_said_of_a_whole_case(tmp_path: Path) -> None:
    write_case(tmp_path / "scans", CASE_ID, labelled=False)

    record = run(tmp_path / "scans", tmp_path / "out", DROPOUT).record

    assert (record.modalities, record.expected_loss) == (MODALITIES, None)
    assert record.key == run(tmp_path / "scans", tmp_path / "plain", PLAIN).record.key
    assert not any("predicted from" in warning for warning in record.warnings)


def test_a_subset_that_a_model_was_not_trained_for_is_refused_with_those_it_was(
    tmp_path: Path,
) -> None:
    model = make_model(identity=replace(IDENTITY, subsets=(("t1c", "t2f"), ("t2f",))))
    write_subset(tmp_path / "scans", ("t1c",))

    record = run(tmp_path / "scans", tmp_path / "out", model).record

    assert (
        "found no t1n, t2w, t2f; expected all four modalities, or one of the sets" in record.message
    )
    assert "trained for: t1c, t2f; t2f. Add the missing files" in record.message


def test_an_ensemble_takes_what_all_its_networks_were_trained_for(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain")
    dropout = write_run(tmp_path / "dropout", identity=FOR_ALL)

    assert load_model([dropout], CPU).subsets == MODALITY_SUBSETS
    assert load_model([dropout, plain], CPU).subsets == ()


def test_a_file_that_cannot_be_read_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "scans", CASE_ID, labelled=False)
    (folder / f"{CASE_ID}_t1ce.nii.gz").write_bytes(b"no scan")

    record = run(tmp_path / "scans", tmp_path / "out", DROPOUT).record

    assert isinstance(record, Failure)
    assert f"{CASE_ID}_t1ce.nii.gz" in record.message


def test_other_problems_of_a_case_stay(tmp_path: Path) -> None:
    folder = write_subset(tmp_path / "scans", ("t1n", "t1c"))
    (folder / f"{CASE_ID}_t1.nii.gz").rename(folder / f"{CASE_ID}_T1.nii.gz")
    (folder / f"{CASE_ID}_t1n.nii.gz").write_bytes(b"another file of t1n")

    record = run(tmp_path / "scans", tmp_path / "out", DROPOUT).record

    assert "found 2 files for t1n" in record.message
    assert "found no t2w" not in record.message


def test_a_case_of_no_modality_is_refused() -> None:
    case = single_input("nothing", {})

    with pytest.raises(CaseError, match=r"file \(none\): .* expected at least one of t1n"):
        Predictor(model=DROPOUT).read(case)


def test_one_file_given_as_another_modality_is_another_case(tmp_path: Path) -> None:
    folder = write_subset(tmp_path / "scans", ("t2w",))

    first = run(tmp_path / "scans", tmp_path / "out", DROPOUT)
    again = run(tmp_path / "scans", tmp_path / "out", DROPOUT)
    (folder / f"{CASE_ID}_t2.nii.gz").rename(folder / f"{CASE_ID}_flair.nii.gz")
    other = run(tmp_path / "scans", tmp_path / "out", DROPOUT)

    assert (first.is_new, again.is_new, other.is_new) == (True, False, True)
    assert other.record.modalities == ("t2f",)


def test_one_image_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = write_subset(tmp_path / "scans", ("t1c", "t2f"))
    same = (folder / f"{CASE_ID}_flair.nii.gz").read_bytes()
    (folder / f"{CASE_ID}_t1ce.nii.gz").write_bytes(same)

    record = run(tmp_path / "scans", tmp_path / "out", DROPOUT).record

    assert "the same voxels for t1c and t2f" in record.message


def test_results_are_not_written_among_the_scans_of_a_subset(tmp_path: Path) -> None:
    folder = write_subset(tmp_path / "scans", ("t1c",))

    with pytest.raises(UsageError, match="holds scans"):
        check_apart(find_inputs([tmp_path / "scans"]), OutputFolder(folder))


def test_files_and_arrays_of_a_subset_are_predicted(tmp_path: Path) -> None:
    folder = write_subset(tmp_path / "scans", ("t1c", "t2f"))
    predictor = Predictor(model=DROPOUT)
    files = {name: folder / f"{CASE_ID}_{name}.nii.gz" for name in ("t1ce", "flair")}

    of_files = predictor.predict_files(files)
    images = make_volumes(seed=0)[[1, 3]]
    of_arrays = predictor.predict_arrays(
        images, nib.load(files["flair"]).affine, modalities=("t1c", "t2f")
    )

    assert of_files.summary.modalities == of_arrays.summary.modalities == ("t1c", "t2f")
    np.testing.assert_array_equal(of_files.label_map, of_arrays.label_map)
    with pytest.raises(CaseError, match="found 2 images for t1n"):
        predictor.predict_arrays(images, np.eye(4))
    with pytest.raises(
        CaseError, match="expected at least one of t1n, t1c, t2w, t2f, in this order"
    ):
        predictor.predict_arrays(images, np.eye(4), modalities=("t2f", "t1c"))
    with pytest.raises(CaseError, match="as the model was trained with all four"):
        Predictor(model=PLAIN).predict_files(files)


def test_a_prepared_scan_reaches_no_network_that_was_not_trained_for_it(tmp_path: Path) -> None:
    folder = write_subset(tmp_path / "scans", ("t1c", "t2f"))
    scan = Predictor(model=DROPOUT).prepare(Predictor(model=DROPOUT).read(find_inputs([folder])[0]))

    with pytest.raises(CaseError, match="found no t1n, t2w; expected t1n, t1c, t2w, t2f, as the"):
        predict_scan(PLAIN, scan)


def test_every_other_command_needs_four_modalities(tmp_path: Path) -> None:
    (case,) = find_inputs([write_subset(tmp_path / "scans", ("t1c", "t2f"))])

    with pytest.raises(CaseError, match="found no t1n, t2w; expected t1n, t1c, t2w, t2f"):
        load_case(case)


def test_the_picture_shows_a_modality_that_is_there(tmp_path: Path) -> None:
    """A missing modality would be a black row."""
    write_subset(tmp_path / "scans", ("t1n", "t2w"))

    run(tmp_path / "scans", tmp_path / "out", DROPOUT, PredictionSettings())

    picture = tmp_path / "out" / "previews" / f"{CASE_ID}.png"
    height, width = plt.imread(picture).shape[:2]
    # one row of three planes
    assert width > 2 * height


@pytest.mark.parametrize("kept", [("t1n", "t1c"), ("t2w", "t2f")])
def test_the_page_shows_the_modalities_that_are_there(
    tmp_path: Path, kept: tuple[str, ...]
) -> None:
    write_subset(tmp_path / "scans", kept)
    out = tmp_path / "out"

    run(tmp_path / "scans", out, DROPOUT, SETTINGS.model_copy(update={"uncertainty": True}))
    (page,) = write_report([out], PageOptions(case_ids=(CASE_ID,))).results
    at_once = page.read_text()
    by_scans = PageOptions(prediction=out, output=tmp_path / "pages")
    (page,) = write_report([tmp_path / "scans"], by_scans).results

    assert page.read_text() == at_once
    for modality in MODALITIES:
        assert (f'data-scan="{modality}"' in at_once) == (modality in kept)
        assert (f"File of {modality}" in at_once) == (modality in kept)
    assert f"predicted from {kept[0]} and {kept[1]} alone" in at_once


def test_a_case_of_another_task_is_refused_as_before(tmp_path: Path) -> None:
    """The radiotherapy task has t1c alone, and another target than the regions."""
    volume = make_volumes()[1]
    write_nifti(tmp_path / "BraTS-MEN-RT-0001-1" / "BraTS-MEN-RT-0001-1_t1c.nii.gz", volume)

    record = run(tmp_path, tmp_path / "out", DROPOUT).record

    assert "found a case of the radiotherapy task" in record.message
