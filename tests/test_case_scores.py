"""Two label maps to a row per region."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from brats_seg.errors import CaseError
from brats_seg.evaluation.evaluate import (
    CaseScores,
    Pair,
    PairConventions,
    read_pair,
    score_pair,
)
from brats_seg.evaluation.protocols import Protocol, protocol_named
from brats_seg.evaluation.scores import LESION_COLUMNS, REGION_COLUMNS
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024
from brats_seg.voxels.box import Box
from tests.builders import BRATS_AFFINE, make_label_map, write_nifti

LEGACY = protocol_named("legacy")
LESIONWISE = protocol_named("lesionwise2024", "GLI")
SHAPE = (10, 9, 8)
LabelMap = npt.NDArray[np.uint8]


def boxed(*boxes: tuple[int, tuple[slice, slice, slice]]) -> LabelMap:
    label_map = np.zeros(SHAPE, dtype=np.uint8)
    for value, box in boxes:
        label_map[box] = value
    return label_map


def scored(
    folder: Path,
    reference: LabelMap,
    prediction: LabelMap | None,
    protocol: Protocol = LEGACY,
    *,
    spacing_mm: float = 1.0,
    affine: npt.NDArray[np.float64] | None = None,
) -> CaseScores:
    scan_affine = BRATS_AFFINE @ np.diag([spacing_mm, 1, 1, 1])
    write_nifti(folder / "reference.nii.gz", reference, scan_affine)
    predicted = None
    if prediction is not None:
        predicted = folder / "prediction.nii.gz"
        write_nifti(predicted, prediction, scan_affine if affine is None else affine)
    pair = Pair(case_id="a", reference=folder / "reference.nii.gz", prediction=predicted)
    conventions = PairConventions(reference=BRATS2017, prediction=BRATS2023)
    return score_pair(read_pair(pair), conventions, protocol)


# 3 x 2 x 2 = 12 voxels; of the 16 predicted ones 8 are among them
REFERENCE = boxed((2, (slice(1, 4), slice(1, 3), slice(1, 3))))
PREDICTION = boxed((2, (slice(2, 6), slice(1, 3), slice(1, 3))))


def test_a_row_worked_out_by_hand(tmp_path: Path) -> None:
    wt, tc, et = scored(tmp_path, REFERENCE, PREDICTION).scores

    assert (wt.case_id, wt.region, tc.region, et.region) == ("a", "wt", "tc", "et")
    expected = [16 / 28, 8 / 20, 2.0, 8 / 12, 1 - 8 / (10 * 9 * 8 - 12), 0.012, 0.016]
    assert wt.values == pytest.approx(expected)
    assert tc.values == et.values == (1, 1, 0, 1, 1, 0, 0)


def test_volumes_and_distances_follow_the_spacing(tmp_path: Path) -> None:
    wt = scored(tmp_path, REFERENCE, PREDICTION, spacing_mm=3.0).scores[0]

    assert wt.hd95 == pytest.approx(6.0)
    assert (wt.reference_ml, wt.prediction_ml) == pytest.approx((0.036, 0.048))


def test_each_side_is_read_in_its_own_convention(tmp_path: Path) -> None:
    enhancing = np.where(REFERENCE > 0, 4, 0).astype(np.uint8)

    found = scored(tmp_path, enhancing, np.where(enhancing, 3, 0).astype(np.uint8))

    assert [score.dice for score in found.scores] == [1, 1, 1]
    assert found.scores[2].reference_ml == pytest.approx(0.012)


@pytest.mark.parametrize(
    ("reference", "prediction"),
    [(REFERENCE, np.zeros_like(REFERENCE)), (np.zeros_like(REFERENCE), PREDICTION)],
)
def test_a_region_on_one_side_only_pays_the_penalty(
    tmp_path: Path, reference: LabelMap, prediction: LabelMap
) -> None:
    wt = scored(tmp_path, reference, prediction).scores[0]

    assert (wt.dice, wt.jaccard, wt.hd95, wt.sensitivity) == (0, 0, 373.12866, 0)


def test_two_empty_maps_score_full_marks(tmp_path: Path) -> None:
    nothing = np.zeros(SHAPE, dtype=np.uint8)

    scores = scored(tmp_path, nothing, nothing, LESIONWISE).scores

    assert [score.region for score in scores] == ["wt", "tc", "netc", "snfh", "et", "rc"]
    for score in scores:
        assert score.values == (1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0)


def test_a_tumour_that_fills_the_volume_can_be_scored(tmp_path: Path) -> None:
    everything = np.full(SHAPE, 2, dtype=np.uint8)

    wt = scored(tmp_path, everything, everything).scores[0]

    assert (wt.dice, wt.sensitivity, wt.specificity) == (1, 1, 1)


def test_without_a_prediction_everything_is_the_worst_there_is(tmp_path: Path) -> None:
    """A region that the reference lacks too: nothing handed in earns no full marks."""
    label_map = make_label_map((24, 24, 16))

    scores = scored(tmp_path, label_map, None, LESIONWISE).scores

    for score in scores:
        found = dict(zip(REGION_COLUMNS + LESION_COLUMNS, score.values, strict=True))
        present = int(score.region != "rc")
        assert found.pop("reference_ml") > 0 or not present
        assert found == {
            "dice": 0,
            "jaccard": 0,
            "hd95": 337,
            "sensitivity": 0,
            "specificity": 0,
            "prediction_ml": 0,
            "lesionwise_dice": 0,
            "lesionwise_hd95": 337,
            "lesionwise_nsd_0.5": 0,
            "lesionwise_nsd_1.0": 0,
            "n_lesions": present,
            "n_false_positive": 0,
            "n_false_negative": present,
        }


def test_cutting_to_the_tumour_changes_no_score(tmp_path: Path) -> None:
    """Dilations that reach the edge of the volume, and others that have room."""
    maps = [make_label_map((24, 24, 16), BRATS2023, seed) for seed in (0, 1)]
    roomy = [np.pad(label_map, ((9, 3), (0, 12), (7, 7))) for label_map in maps]
    conventions = PairConventions(reference=BRATS2024, prediction=BRATS2024)

    tables = []
    for name, sides in (("tight", maps), ("roomy", roomy)):
        paths = [write_nifti(tmp_path / f"{name}{k}.nii", side) for k, side in enumerate(sides)]
        pair = Pair(case_id="a", reference=paths[0], prediction=paths[1])
        scores = score_pair(read_pair(pair), conventions, LESIONWISE).scores
        tables.append([np.delete(score.values, 4) for score in scores])

    # all but the specificity, for which the volume counts
    np.testing.assert_allclose(tables[0], tables[1])


def test_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(
        CaseError,
        match=r"case a, file prediction prediction\.nii\.gz: found 10x9x7 .*"
        r"the grid of reference reference\.nii\.gz: 10x9x8",
    ):
        scored(tmp_path, REFERENCE, PREDICTION[:, :, :7])


def test_another_orientation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"axes RAS.*axes LPS"):
        scored(tmp_path, REFERENCE, PREDICTION, affine=np.diag([1.0, 1.0, 1.0001, 1.0]))


def test_a_prediction_without_affine_is_paired_by_index_and_remarked_upon(tmp_path: Path) -> None:
    found = scored(tmp_path, REFERENCE, PREDICTION, affine=np.eye(4))

    assert found.scores[0].dice == pytest.approx(16 / 28)
    assert found.remark == (
        "case a: prediction prediction.nii.gz has no affine, so that voxels were paired by index"
    )


def test_rounding_of_an_affine_is_no_other_grid(tmp_path: Path) -> None:
    found = scored(tmp_path, REFERENCE, PREDICTION, affine=BRATS_AFFINE + 5e-4 * np.eye(4, k=1))

    assert found.remark == ""


def test_a_label_map_is_kept_packed(tmp_path: Path) -> None:
    label_map = boxed((4, np.s_[2:5, 1:4, 3:4]), (1, np.s_[6:7, 2:3, 5:6]))
    path = write_nifti(tmp_path / "a.nii", label_map.astype(np.float32))

    kept = read_pair(Pair(case_id="a", reference=path, prediction=None)).reference

    assert kept.values == {0, 1, 4}
    assert kept.box == Box(start=(2, 1, 3), stop=(7, 4, 6))
    np.testing.assert_array_equal(kept.within(kept.box), label_map[2:7, 1:4, 3:6])
    np.testing.assert_array_equal(kept.within(Box.at((0, 0, 0), SHAPE)), label_map)
