"""Which label maps belong together, and the scores, failures and remarks of folders of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from brats_seg.cases.layouts import OUTPUT_MARKER
from brats_seg.cases.nifti import read_label_map
from brats_seg.errors import CaseError, LayoutError, UsageError
from brats_seg.evaluation import evaluate, scores
from brats_seg.evaluation.protocols import ScoringProtocol, protocol_named
from brats_seg.evaluation.scores import MATCHED_COLUMNS, read_scores, write_scores
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024_PED, MSD
from tests import builders
from tests.builders import BRATS_AFFINE, make_label_map, touch, write_case, write_nifti
from tests.check_builders import PHANTOM_AFFINE, renumbered, write_clear_phantoms

LEGACY, LESIONWISE = protocol_named("legacy"), protocol_named("lesionwise2024", "GLI")
MATCHED = protocol_named("brats2025", "MET")
CASES = tuple(f"BraTS2021_{number:05d}" for number in range(6))


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    """Label maps of the cases in `tiny_scans` with 3 for ET, of which two are a voxel off."""
    folder = tmp_path / "predictions"
    for number, case_id in enumerate(CASES):
        label_map = make_label_map(convention=BRATS2023, seed=number, with_et=number < 5)
        write_nifti(folder / f"{case_id}.nii.gz", np.roll(label_map, int(number % 3 == 1), axis=0))
    return folder


def evaluated(reference: Path, prediction: Path, **options: Any) -> evaluate.Evaluation:
    return evaluate.evaluate_pairs(evaluate.find_pairs(reference, prediction), LEGACY, **options)


def dices(evaluation: evaluate.Evaluation, region: str = "wt") -> dict[str, float]:
    rows = evaluation.scores[evaluation.scores["region"] == region]
    return dict(zip(rows["case_id"], rows["dice"], strict=True))


def test_scores_every_case_and_names_the_conventions(tiny_scans: Path, predictions: Path) -> None:
    found = evaluated(tiny_scans, predictions)
    assert list(found.scores[["case_id", "region"]].itertuples(index=False, name=None)) == [
        (case_id, region) for case_id in CASES for region in ("wt", "tc", "et")
    ]
    assert found.case_ids == CASES
    assert found.reference_labels == ("brats2017",)
    # a label map without ET is read in the convention of its release
    assert found.prediction_labels == ("brats2017", "brats2023")
    assert (found.missing, found.failures, found.remarks) == ((), (), ())
    assert [dice == 1 for dice in dices(found, "et").values()] == [True, False, True] * 2
    assert found.scores["reference_ml"].iloc[-1] == 0
    assert {*found.scores["protocol"]} == {LEGACY.title}


def test_the_number_of_processes_changes_nothing(tiny_scans: Path, predictions: Path) -> None:
    write_nifti(predictions / f"{CASES[1]}.nii.gz", make_label_map((24, 24, 15)))
    pairing = evaluate.find_pairs(tiny_scans, predictions)
    one, two = (evaluate.evaluate_pairs(pairing, LESIONWISE, n_workers=n) for n in (0, 2))
    assert (len(one.failures), one.failures) == (1, two.failures)
    assert one.scores.equals(two.scores)


def test_missing_predictions_score_0(brats_root: Path, predictions: Path, tmp_path: Path) -> None:
    for case_id in CASES[:3]:
        (predictions / f"{case_id}.nii.gz").unlink()
    shutil.move(predictions / f"{CASES[3]}.nii.gz", predictions / "BraTS2021_00099.nii.gz")
    folders = (brats_root, predictions, tmp_path / "s.csv")
    whole = evaluate.score_folders(*folders, LEGACY)
    # a reference that is left out is not read
    (brats_root / CASES[0] / f"{CASES[0]}_seg.nii.gz").write_bytes(b"")
    partial = evaluate.score_folders(*folders, LEGACY, only_predicted=True)
    assert (whole.missing, whole.without_reference) == (CASES[:4], ("BraTS2021_00099",))
    assert (partial.missing, partial.left_out, partial.failures) == ((), CASES[:4], ())
    damaged = evaluated(*folders[:2])
    assert (damaged.missing, damaged.failures[0].case_id) == (CASES[1:4], CASES[0])
    for path in predictions.glob("*.nii.gz"):
        path.write_bytes(b"")
    # the table before remains
    assert not evaluate.score_folders(*folders, LEGACY, only_predicted=True).case_ids
    assert [dices(whole)[case_id] for case_id in CASES[:4]] == [0] * 4
    mean = partial.summaries[0].spread("dice").mean
    assert [one.n_cases for one in whole.summaries] == [6, 6, 6]
    assert whole.summaries[0].spread("dice").mean == pytest.approx(mean * 2 / 6)
    pd.testing.assert_frame_equal(read_scores(folders[2]), partial.scores, atol=1e-6)
    summary = json.loads((tmp_path / "s.json").read_text())
    assert [summary[name]["dice"]["mean"] for name in ("wt", "tc", "et")] == [
        one.spread("dice").mean for one in partial.summaries
    ]
    for name in ("s.json", "s.nii.gz", "volumes.csv", "failures.csv", "cases.csv"):
        with pytest.raises(UsageError, match=f"{name} is no table of scores .*expected a .csv"):
            evaluate.score_folders(tmp_path / "cases.csv", predictions, tmp_path / name, LEGACY)


def test_a_bad_case_does_not_stop_the_others(tiny_scans: Path, predictions: Path) -> None:
    paths = [predictions / f"{case_id}.nii.gz" for case_id in CASES]
    paths[0].write_bytes(paths[0].read_bytes()[: paths[0].stat().st_size // 2])
    write_nifti(paths[1], make_label_map((24, 24, 15)))
    write_nifti(paths[2], 7 * (make_label_map() > 0).astype(np.uint8))
    write_nifti(paths[3], make_label_map() / np.float32(8))
    paths[4].write_bytes(b"<html>not found</html>")
    found = evaluated(tiny_scans, predictions)
    assert list(dices(found)) == [CASES[5]]
    assert [failure.case_id for failure in found.failures] == list(CASES[:5])
    reasons = [failure.message for failure in found.failures]
    assert all(case_id in reason for case_id, reason in zip(CASES, reasons, strict=False))
    # both files have this name
    assert f"file prediction {CASES[0]}.nii.gz: " in reasons[0]
    assert "24x24x15" in reasons[1]
    assert f"file prediction {CASES[2]}.nii.gz: found label values [7]" in reasons[2]
    assert "expected whole numbers" in reasons[3]
    assert found.missing == ()


def test_a_case_of_the_2024_shape_is_read_in_the_convention_of_2024(tmp_path: Path) -> None:
    """Its name is one of 2023, and without the shape 4 would be enhancing tumour."""
    reference = np.zeros((182, 218, 182), np.uint8)
    reference[20:30, 20:30, 20:30] = 2
    reference[25:28, 25:28, 25:28] = 4
    name = "BraTS-GLI-00001-000.nii.gz"
    write_nifti(tmp_path / "reference" / name, reference)
    write_nifti(tmp_path / "prediction" / name, np.where(reference == 4, 0, reference))
    found = evaluated(tmp_path / "reference", tmp_path / "prediction")
    assert (found.reference_labels, found.failures) == (("brats2024",), ())
    volumes = dict(zip(found.scores["region"], found.scores["reference_ml"], strict=True))
    assert (volumes["et"], volumes["wt"]) == (0, pytest.approx(1.0 - 0.027))
    assert set(dices(found, "et").values()) == {1.0}


SHAPE = (10, 9, 8)
LabelMap = npt.NDArray[np.uint8]
Change = Callable[[LabelMap], LabelMap]


def oedema(x: slice) -> LabelMap:
    label_map = np.zeros(SHAPE, dtype=np.uint8)
    label_map[x, 1:3, 1:3] = 2
    return label_map


def scored(
    folder: Path,
    reference: LabelMap,
    prediction: LabelMap | None,
    protocol: ScoringProtocol = LEGACY,
    *,
    spacing_mm: float = 1.0,
    affine: npt.NDArray[np.float64] | None = None,
) -> list[dict[str, Any]]:
    scan_affine = BRATS_AFFINE @ np.diag([spacing_mm, 1, 1, 1])
    write_nifti(folder / "reference.nii.gz", reference, scan_affine)
    predicted = None
    if prediction is not None:
        predicted = evaluate.LabelFile(path=folder / "prediction.nii.gz")
        write_nifti(predicted.path, prediction, scan_affine if affine is None else affine)
    true = evaluate.LabelFile(path=folder / "reference.nii.gz")
    pair = evaluate.read_pair(evaluate.Pair(case_id="a", reference=true, prediction=predicted))
    pair = replace(pair, conventions=(BRATS2017, BRATS2023))
    return evaluate.score_pair(pair, protocol).to_dict("records")


def values(row: dict[str, Any]) -> list[float]:
    return [value for column, value in row.items() if column not in {"case_id", "region"}]


# 3 x 2 x 2 = 12 voxels; of the 16 predicted ones 8 are among them
REFERENCE, PREDICTION = oedema(slice(1, 4)), oedema(slice(2, 6))


def test_a_row_worked_out_by_hand(tmp_path: Path) -> None:
    wt, tc, et = scored(tmp_path, REFERENCE, PREDICTION)
    assert (wt["case_id"], wt["region"], tc["region"], et["region"]) == ("a", "wt", "tc", "et")
    expected = [16 / 28, 8 / 20, 2.0, 8 / 12, 1 - 8 / (10 * 9 * 8 - 12), 0.012, 0.016]
    assert values(wt) == pytest.approx(expected)
    assert values(tc) == values(et) == [1, 1, 0, 1, 1, 0, 0]


def test_spacing_and_conventions_are_those_of_the_files(tmp_path: Path) -> None:
    enhancing = np.where(REFERENCE > 0, 4, 0).astype(np.uint8)
    wt = scored(tmp_path, REFERENCE, PREDICTION, spacing_mm=3.0)[0]
    rows = scored(tmp_path, enhancing, np.where(enhancing, 3, 0).astype(np.uint8))
    found = [wt[column] for column in ("hd95", "reference_ml", "prediction_ml")]
    assert found == pytest.approx([6.0, 0.036, 0.048])
    assert [(row["dice"], row["reference_ml"]) for row in rows] == [(1, pytest.approx(0.012))] * 3


def test_one_empty_side_has_the_worst_scores_and_two_have_the_best(tmp_path: Path) -> None:
    nothing, everything = np.zeros(SHAPE, np.uint8), np.full(SHAPE, 2, np.uint8)
    for sides in ((REFERENCE, nothing), (nothing, PREDICTION)):
        assert values(scored(tmp_path, *sides)[0])[:4] == [0, 0, 373.12866, 0]
    rows = scored(tmp_path, nothing, nothing, LESIONWISE)
    assert [row["region"] for row in rows] == ["wt", "tc", "netc", "snfh", "et", "rc"]
    for row in rows:
        assert values(row) == [1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0]
    full = scored(tmp_path, everything, everything)[0]
    assert (full["dice"], full["sensitivity"], full["specificity"]) == (1, 1, 1)


def test_without_a_prediction_everything_is_the_worst_there_is(tmp_path: Path) -> None:
    """A region that the reference lacks too scores worst: a missing prediction earns nothing."""
    for row in scored(tmp_path, make_label_map((24, 24, 16)), None, LESIONWISE):
        n = int(row["region"] != "rc")
        assert row.pop("reference_ml") > 0 or not n
        assert values(row) == [0, 0, 337, 0, 0, 0, 0, 337, 0, 0, n, 0, n]
    for row in scored(tmp_path, make_label_map((24, 24, 16)), None, MATCHED):
        n, _ = int(row["region"] != "rc"), row.pop("reference_ml")
        assert values(row) == [0, 0, 373, 0, 0, 0, 0, 0, 373, 0, n, *(0,) * 9]


def test_matched_lesions_have_scores_of_their_own_for_the_whole_region(tmp_path: Path) -> None:
    wt, tc, *_ = scored(tmp_path, REFERENCE, PREDICTION, MATCHED, spacing_mm=3.0)
    columns = [*scores.REGION_COLUMNS, *(c for c in MATCHED_COLUMNS if c not in {"dice", "hd95"})]
    assert [*wt][2:] == columns
    # in voxels for the whole region, in mm for the lesion: X has 3 mm, which the program takes for Z
    assert [wt[c] for c in ("dice", "hd95", "nsd")] == pytest.approx([16 / 28, 2, 7 / 12])
    assert [wt[c] for c in ("lesionwise_dice", "lesionwise_hd95", "f1")] == [16 / 28, 2, 1]
    assert np.isnan([tc[c] for c in ("dice", "hd95", "nsd", "lesionwise_dice", "f1")]).all()
    assert tc["jaccard"] == 1


def test_cutting_to_the_tumour_changes_no_score(tmp_path: Path) -> None:
    maps = [make_label_map((24, 24, 16), BRATS2017, seed) for seed in (0, 1)]
    maps[1][maps[1] == 4] = 3
    roomy = [np.pad(label_map, ((9, 3), (0, 12), (7, 7))) for label_map in maps]
    tables = [scored(tmp_path, *sides, LESIONWISE) for sides in (maps, roomy)]
    # all but the specificity, for which the volume counts
    one, other = ([np.delete(values(row), 4) for row in table] for table in tables)
    np.testing.assert_allclose(one, other)


def test_another_grid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"found 10x9x7 .*the grid of reference reference\.nii\.gz"):
        scored(tmp_path, REFERENCE, PREDICTION[:, :, :7])
    with pytest.raises(CaseError, match=r"axes RAS.*axes LPS"):
        scored(tmp_path, REFERENCE, PREDICTION, affine=np.diag([1.0, 1.0, 1.0001, 1.0]))


def test_a_prediction_without_affine_has_a_remark(tiny_scans: Path, predictions: Path) -> None:
    path = predictions / f"{CASES[0]}.nii.gz"
    write_nifti(path, make_label_map(convention=BRATS2023), np.eye(4))
    rounded = BRATS_AFFINE + 5e-4 * np.eye(4, k=1)
    write_nifti(predictions / f"{CASES[3]}.nii.gz", make_label_map(seed=3), rounded)
    found = evaluated(tiny_scans, predictions)
    assert dices(found)[CASES[0]] == dices(found)[CASES[3]] == 1
    assert found.remarks == (
        f"case {CASES[0]}: prediction {CASES[0]}.nii.gz has no affine, so that voxels were paired "
        "by index",
    )


@pytest.fixture
def phantoms(tmp_path: Path) -> Path:
    return write_clear_phantoms(tmp_path / "data", 3)


def copy_label_maps(root: Path, folder: Path, change: Change = lambda label_map: label_map) -> Path:
    for path in root.glob("*/*_seg.nii.gz"):
        label_map = read_label_map(path, case_id="").array
        changed = np.ascontiguousarray(change(label_map))
        write_nifti(folder / f"{path.parent.name}.nii.gz", changed, PHANTOM_AFFINE)
    return folder


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("reference", "msd fits"),  # of an outline alone
        ("reference on scans", "msd fits"),
        ("prediction", "agree with the reference far better numbered as msd"),
    ],
)
def test_other_numbering_refused(phantoms: Path, tmp_path: Path, side: str, message: str) -> None:
    """Where prediction and reference agree, both regions would be wrong."""
    renamed = copy_label_maps(phantoms, tmp_path / "msd", lambda seg: renumbered(seg, MSD))
    if side == "reference on scans":
        for path in phantoms.glob("*/*_seg.nii.gz"):
            shutil.copy(renamed / f"{path.parent.name}.nii.gz", path)
    found = evaluated(renamed if side == "reference" else phantoms, renamed)
    assert found.scores.empty
    assert len(found.failures) == 3
    for failure in found.failures:
        assert f"file {side.split()[0]} {failure.case_id}" in failure.message
        assert message in failure.message
    if side == "prediction":
        # what `predict` recorded of them
        rows = (f"{failure.case_id},msd\n" for failure in found.failures)
        (renamed / "volumes.csv").write_text("".join(["case_id,convention\n", *rows]))
        assert set(dices(evaluated(phantoms, renamed), "et").values()) == {1}
        copy_label_maps(phantoms, tmp_path / "ped", lambda seg: renumbered(seg, BRATS2024_PED))
        children = protocol_named("lesionwise2024", "PED")
        pairing = evaluate.find_pairs(tmp_path / "ped", renamed)
        assert set(dices(evaluate.evaluate_pairs(pairing, children), "et").values()) == {1}
        # the table counts for references too
        assert set(dices(evaluated(renamed, renamed), "et").values()) == {1}
        (renamed / "volumes.csv").write_text(f"case_id,convention\n{CASES[0]},mds\n")
        unknown = rf"volumes.csv of {renamed}, case {CASES[0]}: .*'mds'"
        with pytest.raises(UsageError, match=unknown):
            evaluated(phantoms, renamed)


def test_a_mirrored_reference(phantoms: Path, tmp_path: Path) -> None:
    copy_label_maps(phantoms, tmp_path / "poor", lambda seg: np.roll(seg, len(seg) // 3, axis=0))
    found = evaluated(phantoms, tmp_path / "poor")
    path = phantoms / CASES[1] / f"{CASES[1]}_seg.nii.gz"
    mirrored = np.ascontiguousarray(read_label_map(path, case_id="").array[::-1])
    write_nifti(path, mirrored, PHANTOM_AFFINE)
    [failure] = evaluated(phantoms, tmp_path / "poor").failures
    assert found.failures == ()
    assert all(dice < 0.3 for dice in dices(found).values())
    assert failure.case_id == CASES[1]
    assert "expected labels on the tumour of this scan" in failure.message


def test_a_label_map_belongs_to_the_case_of_its_name(tmp_path: Path) -> None:
    names = {
        "BraTS-GLI-00001-000.nii.gz": "BraTS-GLI-00001-000",
        "BraTS-GLI-00001-000-seg.nii.gz": "BraTS-GLI-00001-000",
        "HGG/Brats18_TCIA01_201_1/Brats18_TCIA01_201_1_seg.nii.gz": "Brats18_TCIA01_201_1",
        "patient 7/seg.nii": "patient 7",
        "labelsTr/BRATS_001.nii.gz": "BRATS_001",
        "BraTS-MEN-RT-0002-1/BraTS-MEN-RT-0002-1_gtv.nii.gz": "BraTS-MEN-RT-0002-1",
        "anything.nii": "anything",
    }
    for number, (name, case_id) in enumerate(names.items()):
        root = touch(tmp_path / str(number), name, "notes.txt", "._BraTS-GLI-00001-000.nii.gz")
        assert evaluate.label_maps_in(root) == {case_id: evaluate.LabelFile(path=root / name)}
    builders.write_decathlon_case(tmp_path / "described")
    assert evaluate.label_maps_in(tmp_path / "described")["BRATS_001"].convention == "msd"


def test_label_maps_of_bids_belong_to_the_cases_of_the_table_of_volumes(tmp_path: Path) -> None:
    name = "sub-BraTS202100000/anat/sub-BraTS202100000_desc-brats2017_dseg.nii.gz"
    of_bids = "sub-01_ses-1/anat/sub-01_ses-1_dseg.nii.gz"
    others = (
        name.replace("desc-brats2017_dseg", f"{end}_probseg")
        for end in ("label-WT", "desc-entropy")
    )
    root = touch(tmp_path, name, of_bids, *others)
    (root / "volumes.csv").write_text("case_id,convention\nBraTS2021_00000,msd\nsub-01_ses-1,\n")
    files = {"BraTS2021_00000": (root / name, "msd"), "sub-01_ses-1": (root / of_bids, "")}
    found = evaluate.label_maps_in(root)
    assert {case_id: (file.path, file.convention) for case_id, file in found.items()} == files
    with pytest.raises(UsageError, match="BraTS2021_00000 has two label maps"):
        # the layout has changed
        evaluate.label_maps_in(touch(tmp_path, "BraTS2021_00000.nii.gz"))


def test_folders_and_files_of_any_name_are_paired(tmp_path: Path) -> None:
    case = write_case(tmp_path / "data", "BraTS2021_00000")
    write_case(tmp_path / "data", "BraTS2021_00001")
    predictions = touch(tmp_path / "out", "BraTS2021_00000.nii.gz", "BraTS2021_00007.nii")
    pairing = evaluate.find_pairs(tmp_path / "data", predictions)
    first, second = pairing.pairs
    reference, prediction = case / f"{case.name}_seg.nii.gz", predictions / f"{case.name}.nii.gz"
    assert (first.reference.path, first.prediction.path) == (reference, prediction)
    assert (first.case_id, second.case_id, second.prediction) == (*CASES[:2], None)
    assert pairing.without_reference == ("BraTS2021_00007",)
    other = predictions / "BraTS2021_00007.nii"
    for one, file, expected in (
        (reference, other, other),
        (case, other, other),
        (reference, predictions, prediction),
    ):
        (pair,) = evaluate.find_pairs(one, file).pairs
        assert (pair.reference.path, pair.prediction.path) == (reference, expected)
        assert pair.case_id == case.name


def test_results_of_predict_in_the_place_of_the_references_are_remarked_on(tmp_path: Path) -> None:
    results = touch(tmp_path / "results", "a.nii.gz", OUTPUT_MARKER)
    references = touch(tmp_path / "references", "a.nii.gz", "b.nii.gz")
    (remark,) = evaluate.find_pairs(results, references).remarks
    assert "was written by `predict`, and is scored as the reference" in remark
    assert evaluate.find_pairs(references, results).remarks == ()
    assert evaluate.find_pairs(references, results, only_predicted=True).left_out == ("b",)


@pytest.mark.parametrize(
    ("one", "other", "error", "words"),
    [
        ("six", "nowhere", UsageError, "nowhere does not exist"),
        ("six", "a.nii.gz", UsageError, "a.nii.gz is one label map, for 6 cases; give a folder"),
        ("notes.txt", "a.nii.gz", UsageError, "notes.txt is not a NIfTI file by its name"),
        ("none", "six", LayoutError, r"holds no label map; expected <case>\.nii\.gz"),
        ("two", "six", UsageError, r"a has two.*fold0/a\.nii\.gz and .*fold1/a.*, or name each"),
        ("six", "far", LayoutError, r"six has x1, x2, x3, x4, x5 and 1 more, .*far has x1_final"),
    ],
)
def test_what_cannot_be_paired_is_refused(tmp_path, one, other, error, words):
    touch(tmp_path, "a.nii.gz", "notes.txt", "none/a_t1.nii.gz", "far/x1_final.nii.gz")
    touch(tmp_path, "two/fold0/a.nii.gz", "two/fold1/a.nii.gz")
    touch(tmp_path / "six", *(f"x{number}.nii.gz" for number in range(1, 7)))
    with pytest.raises(error, match=words):
        evaluate.find_pairs(tmp_path / one, tmp_path / other)


REAL_DICE = {
    "Brats18_TCIA01_201_1": (0.977008, 0.949677, 0.895188),
    "Brats18_TCIA01_378_1": (0.892821, 0.960771, 0.937013),
    "Brats18_TCIA01_499_1": (0.950898, 0.963540, 0.946385),
    "Brats18_TCIA02_135_1": (0.949080, 0.936475, 0.892750),
    "Brats18_TCIA02_606_1": (0.933685, 0.923957, 0.858478),
    "Brats18_TCIA03_265_1": (0.955043, 0.934683, 0.835697),
    "Brats18_TCIA10_637_1": (0.952151, 0.892023, 0.869339),
    "Brats18_TCIA13_623_1": (0.952634, 0.950614, 0.782012),
}


@pytest.mark.slow
@pytest.mark.real
def test_plain_dice_of_real_predictions(real_data: Path, tmp_path: Path) -> None:
    predictions = real_data / "metric_fixtures" / "network_predictions"
    found = evaluated(real_data / "BraTS2018", predictions, n_workers=2)
    scores = found.scores.pivot(index="case_id", columns="region", values="dice").round(6)
    for case_id, expected in REAL_DICE.items():
        assert tuple(scores.loc[case_id, ["wt", "tc", "et"]]) == expected
    assert (found.reference_labels, found.prediction_labels) == (("brats2017",), ("brats2023",))
    # one patient has no prediction
    assert found.missing == ("Brats18_TCIA05_396_1",)
    write_scores(found.scores, tmp_path / "scores.csv")
    row = f"Brats18_TCIA01_201_1,wt,{LEGACY.title},0.977008,"
    assert row in (tmp_path / "scores.csv").read_text()


@pytest.mark.real
def test_a_reference_in_two_conventions_agrees_with_itself(real_data: Path) -> None:
    fixtures, case = real_data / "metric_fixtures", "BraTS2021_00006"
    folder = fixtures / "BraTS-GLI-00001-000_segmentations"
    reference = real_data / "BraTS2021" / case / f"{case}_seg.nii.gz"
    pairs = [
        (reference, fixtures / f"{case}_seg_labels_1_2_3.nii.gz"),
        (folder / "seg-BraTS23_1.nii.gz", folder / "seg-BraTS23_1_mapped.nii.gz"),
    ]
    for reference, prediction in pairs:
        found = evaluated(reference, prediction)
        assert found.scores[["dice", "hd95"]].to_numpy().tolist() == [[1, 0]] * 3
        assert found.reference_labels != found.prediction_labels
        assert (found.scores["reference_ml"] > 1).all()
