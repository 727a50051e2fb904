"""Folders in, a table of scores and a list of what went wrong out."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.nifti import Volume, read_label_map
from brats_seg.evaluation import evaluate
from brats_seg.evaluation.evaluate import Evaluation, evaluate_folders
from brats_seg.evaluation.protocols import Protocol, protocol_named
from brats_seg.evaluation.scores import write_scores
from brats_seg.labels import BRATS2017, BRATS2023, LabelConvention
from tests.builders import make_label_map, write_nifti
from tests.test_overlap import REAL_DICE

LEGACY = protocol_named("legacy")
CASES = tuple(f"BraTS2021_{number:05d}" for number in range(6))


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    """Label maps of the cases in `brats_root` with 3 for ET, of which two are a voxel off."""
    folder = tmp_path / "predictions"
    for number, case_id in enumerate(CASES):
        write_prediction(folder, case_id, seed=number, with_et=number < 5, shift=number % 3 == 1)
    return folder


def write_prediction(
    folder: Path,
    case_id: str,
    convention: LabelConvention = BRATS2023,
    *,
    seed: int = 0,
    with_et: bool = True,
    shift: int = 0,
) -> None:
    label_map = make_label_map(convention=convention, seed=seed, with_et=with_et)
    write_nifti(folder / f"{case_id}.nii.gz", np.roll(label_map, shift, axis=0))


def dices(evaluation: Evaluation, region: str = "wt") -> dict[str, float]:
    return {s.case_id: s.dice for s in evaluation.scores if s.region == region}


def test_scores_every_case_and_tells_the_conventions(brats_root: Path, predictions: Path) -> None:
    found = evaluate_folders(brats_root, predictions, LEGACY)

    assert [(s.case_id, s.region) for s in found.scores] == [
        (case_id, region) for case_id in CASES for region in ("wt", "tc", "et")
    ]
    assert found.reference_labels == ("brats2017",)
    # the map of a case without ET speaks for no other numbering than that of its release
    assert found.prediction_labels == ("brats2017", "brats2023")
    assert (found.missing, found.failures, found.remarks) == ((), (), ())
    for number, (case_id, dice) in enumerate(dices(found, "et").items()):
        assert (dice == 1) is (number % 3 != 1), case_id
    assert found.scores[-1].reference_ml == 0


@pytest.mark.parametrize("protocol", [LEGACY, protocol_named("lesionwise2024", "GLI")])
def test_the_number_of_processes_changes_nothing(
    brats_root: Path, predictions: Path, protocol: Protocol
) -> None:
    write_nifti(predictions / f"{CASES[1]}.nii.gz", make_label_map((24, 24, 15)))

    one, two = (
        evaluate_folders(brats_root, predictions, protocol, n_workers=n_workers)
        for n_workers in (0, 2)
    )

    assert len(one.failures) == 1

    assert one == two


def test_a_case_without_prediction_is_listed_and_scores_nothing(
    brats_root: Path, predictions: Path
) -> None:
    (predictions / f"{CASES[2]}.nii.gz").unlink()
    shutil.move(predictions / f"{CASES[3]}.nii.gz", predictions / "BraTS2021_00099.nii.gz")

    found = evaluate_folders(brats_root, predictions, LEGACY)

    assert found.missing == (CASES[2], CASES[3])
    assert found.without_reference == ("BraTS2021_00099",)
    assert dices(found)[CASES[2]] == 0
    assert len(found.scores) == 18


def test_a_case_that_cannot_be_scored_does_not_stop_the_others(
    brats_root: Path, predictions: Path
) -> None:
    """Cut short, on another grid, with a foreign value, with probabilities, not NIfTI."""
    whole = (predictions / f"{CASES[0]}.nii.gz").read_bytes()
    (predictions / f"{CASES[0]}.nii.gz").write_bytes(whole[: len(whole) // 2])
    write_nifti(predictions / f"{CASES[1]}.nii.gz", make_label_map((24, 24, 15)))
    write_nifti(predictions / f"{CASES[2]}.nii.gz", 7 * (make_label_map() > 0).astype(np.uint8))
    write_nifti(predictions / f"{CASES[3]}.nii.gz", make_label_map() / np.float32(8))
    (predictions / f"{CASES[4]}.nii.gz").write_bytes(b"<html>not found</html>")

    found = evaluate_folders(brats_root, predictions, LEGACY)

    assert list(dices(found)) == [CASES[5]]
    assert [failure.case_id for failure in found.failures] == list(CASES[:5])
    reasons = [failure.message for failure in found.failures]
    assert all(case_id in reason for case_id, reason in zip(CASES, reasons, strict=False))
    assert "24x24x15" in reasons[1]
    assert f"file prediction {CASES[2]}.nii.gz: " in reasons[2]
    assert "found label values [7]" in reasons[2]
    assert "expected whole numbers" in reasons[3]
    assert found.missing == ()


def test_conventions_may_be_mixed_in_one_folder(brats_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    for number, case_id in enumerate(CASES):
        convention = (BRATS2017, BRATS2023)[number % 2]
        write_prediction(folder, case_id, convention, seed=number, with_et=number < 5)

    found = evaluate_folders(brats_root, folder, LEGACY)

    assert set(dices(found, "et").values()) == {1.0}
    assert set(dices(found, "tc").values()) == {1.0}


def test_two_files_are_scored_under_the_name_of_the_reference(brats_root: Path) -> None:
    reference = brats_root / CASES[0] / f"{CASES[0]}_seg.nii.gz"
    prediction = brats_root / CASES[1] / f"{CASES[1]}_seg.nii.gz"

    found = evaluate_folders(reference, prediction, LEGACY)

    assert [score.case_id for score in found.scores] == [CASES[0]] * 3
    assert 0 < found.scores[0].dice < 1


def test_progress_is_shown_for_reading_and_scoring(brats_root: Path, predictions: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def track(items: Iterable[object], *, what: str, total: int) -> Iterable[object]:
        passed = list(items)
        seen.append((what, total, len(passed)))
        return passed

    evaluate_folders(brats_root, predictions, LEGACY, track=track)

    assert seen == [("reading label maps", 6, 6), ("scoring", 6, 6)]


def test_every_label_map_is_read_once(
    brats_root: Path, predictions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path, *, case_id: str) -> Volume:
        read.append(path)
        return read_label_map(path, case_id=case_id)

    monkeypatch.setattr(evaluate, "read_label_map", counted)
    evaluate_folders(brats_root, predictions, LEGACY)

    assert len(read) == len(set(read)) == 12


@pytest.mark.parametrize("cavity_and_enhancing", [False, True])
def test_a_case_of_the_2024_shape_is_read_in_the_convention_of_2024(
    tmp_path: Path, cavity_and_enhancing: bool
) -> None:
    """Its name is one of 2023, and without the shape 4 would be enhancing tumour."""
    case_id, shape = "BraTS-GLI-00001-000", (182, 218, 182)
    reference = np.zeros(shape, np.uint8)
    reference[20:30, 20:30, 20:30] = 2
    reference[22:25, 22:25, 22:25] = 1
    reference[25:28, 25:28, 25:28] = 4
    if cavity_and_enhancing:
        reference[22:25, 25:28, 25:28] = 3
    write_nifti(tmp_path / "reference" / f"{case_id}.nii.gz", reference)
    write_nifti(
        tmp_path / "prediction" / f"{case_id}.nii.gz", np.where(reference == 4, 0, reference)
    )

    found = evaluate_folders(tmp_path / "reference", tmp_path / "prediction", LEGACY)

    assert (found.reference_labels, found.failures) == (("brats2024",), ())
    volumes = {score.region: score.reference_ml for score in found.scores}
    assert volumes["et"] == (0.027 if cavity_and_enhancing else 0)
    assert volumes["wt"] == pytest.approx(1.0 - 0.027)
    assert set(dices(found, "et").values()) == {1.0}


@pytest.mark.real
def test_plain_dice_of_real_predictions(real_data: Path, tmp_path: Path) -> None:
    found = evaluate_folders(
        real_data / "BraTS2018",
        real_data / "metric_fixtures" / "network_predictions",
        LEGACY,
        n_workers=2,
    )

    scores = {(score.case_id, score.region): score for score in found.scores}
    for case_id, expected in REAL_DICE.items():
        dice = tuple(round(scores[case_id, region].dice, 6) for region in ("wt", "tc", "et"))
        assert dice == expected, case_id
    assert (found.reference_labels, found.prediction_labels) == (("brats2017",), ("brats2023",))
    # one patient has no prediction
    assert found.missing == ("Brats18_TCIA05_396_1",)
    write_scores(found.scores, tmp_path / "scores.csv")
    assert "Brats18_TCIA01_201_1,wt,0.977008," in (tmp_path / "scores.csv").read_text()


@pytest.mark.real
def test_a_reference_in_two_conventions_agrees_with_itself(real_data: Path) -> None:
    fixtures = real_data / "metric_fixtures"
    pairs = [
        (
            real_data / "BraTS2021/BraTS2021_00006/BraTS2021_00006_seg.nii.gz",
            fixtures / "BraTS2021_00006_seg_labels_1_2_3.nii.gz",
        ),
        (
            fixtures / "BraTS-GLI-00001-000_segmentations/seg-BraTS23_1.nii.gz",
            fixtures / "BraTS-GLI-00001-000_segmentations/seg-BraTS23_1_mapped.nii.gz",
        ),
    ]

    for reference, prediction in pairs:
        found = evaluate_folders(reference, prediction, LEGACY)

        assert [(score.dice, score.hd95) for score in found.scores] == [(1, 0)] * 3
        assert found.reference_labels != found.prediction_labels
        assert all(score.reference_ml > 1 for score in found.scores)
