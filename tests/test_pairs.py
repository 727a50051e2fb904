"""Test which label maps of references and predictions belong together."""

from pathlib import Path

import pytest

from brats_seg.cases.layouts import OUTPUT_MARKER
from brats_seg.errors import LayoutError, UsageError
from brats_seg.evaluation.evaluate import find_pairs, label_maps_in
from tests.builders import touch, write_case


def test_pairs_case_folders_with_a_flat_folder(tmp_path: Path) -> None:
    for case_id in ("BraTS2021_00001", "BraTS2021_00000"):
        write_case(tmp_path / "data", case_id)
    predictions = touch(tmp_path / "out", "BraTS2021_00000.nii.gz", "BraTS2021_00007.nii")

    pairing = find_pairs(tmp_path / "data", predictions)

    first, second = pairing.pairs
    assert first.case_id == "BraTS2021_00000"
    assert first.reference == tmp_path / "data/BraTS2021_00000/BraTS2021_00000_seg.nii.gz"
    assert first.prediction == predictions / "BraTS2021_00000.nii.gz"
    assert (second.case_id, second.prediction) == ("BraTS2021_00001", None)
    assert pairing.without_reference == ("BraTS2021_00007",)


@pytest.mark.parametrize(
    ("name", "case_id"),
    [
        ("BraTS-GLI-00001-000.nii.gz", "BraTS-GLI-00001-000"),
        ("BraTS-GLI-00001-000-seg.nii.gz", "BraTS-GLI-00001-000"),
        ("HGG/Brats18_TCIA01_201_1/Brats18_TCIA01_201_1_seg.nii.gz", "Brats18_TCIA01_201_1"),
        ("patient 7/seg.nii", "patient 7"),
        ("labelsTr/BRATS_001.nii.gz", "BRATS_001"),
        ("anything.nii", "anything"),
    ],
)
def test_a_label_map_belongs_to_the_case_of_its_name(
    tmp_path: Path, name: str, case_id: str
) -> None:
    touch(tmp_path, name, "notes.txt", "._BraTS-GLI-00001-000.nii.gz")

    assert label_maps_in(tmp_path) == {case_id: tmp_path / name}


def test_a_label_map_with_a_foreign_name_is_that_of_its_case_folder(tmp_path: Path) -> None:
    case = "BraTS20_Training_355"
    scans = [f"{case}/{case}_{word}.nii" for word in ("t1", "t1ce", "t2", "flair")]
    touch(tmp_path, *scans, f"{case}/W39_1998.09.19_Segm.nii", "a/a_seg.nii", "a/brain_mask.nii")

    # what was made from a case is no label map of it
    assert label_maps_in(tmp_path) == {
        case: tmp_path / case / "W39_1998.09.19_Segm.nii",
        "a": tmp_path / "a/a_seg.nii",
    }


def test_the_references_of_scans_are_their_label_maps(tmp_path: Path) -> None:
    """Other images beside labelled scans are none, and neither is a second label map of a case."""
    case = "UPENN-GBM-00001_11"
    scans = [
        f"images_structural/{case}/{case}_{word}.nii" for word in ("T1", "T1GD", "T2", "FLAIR")
    ]
    touch(
        tmp_path,
        *scans,
        f"unstripped/{case}/{case}_T1_unstripped.nii",
        f"images_segm/{case}_segm.nii",
        f"automated_segm/{case}_automated_approx_segm.nii",
        "images_segm/other.nii",
    )

    assert label_maps_in(tmp_path) == {
        case: tmp_path / f"images_segm/{case}_segm.nii",
        "other": tmp_path / "images_segm/other.nii",
    }


def test_two_files_are_a_pair_whatever_they_are_called(tmp_path: Path) -> None:
    touch(tmp_path, "BraTS2021_00006_seg.nii.gz", "final.nii.gz")

    pairing = find_pairs(tmp_path / "BraTS2021_00006_seg.nii.gz", tmp_path / "final.nii.gz")

    assert [pair.case_id for pair in pairing.pairs] == ["BraTS2021_00006"]
    assert pairing.pairs[0].prediction == tmp_path / "final.nii.gz"


def test_results_of_predict_in_the_place_of_the_references_are_remarked_on(tmp_path: Path) -> None:
    results = touch(tmp_path / "results", "a.nii.gz", OUTPUT_MARKER)
    references = touch(tmp_path / "references", "a.nii.gz", "b.nii.gz")

    (remark,) = find_pairs(results, references).remarks

    assert "was written by `predict`, and is scored as the reference" in remark
    assert find_pairs(references, results).remarks == ()
    assert find_pairs(references, results, only_predicted=True).left_out == ("b",)


@pytest.mark.parametrize(
    ("one", "other", "error", "words"),
    [
        ("two", "nowhere", UsageError, "nowhere does not exist"),
        ("two", "a.nii.gz", UsageError, "expected two label maps, or two folders; found"),
        ("notes.txt", "a.nii.gz", UsageError, "notes.txt is not a NIfTI file by its name"),
        ("none", "six", LayoutError, r"holds no label map; expected <case>\.nii\.gz"),
        ("two", "six", UsageError, r"a has two.*fold0/a\.nii\.gz and .*fold1/a\.nii\.gz"),
        ("six", "far", LayoutError, r"six has x1, x2, x3, x4, x5 and 1 more, .*far has x1_final"),
    ],
)
def test_what_cannot_be_paired_is_refused(
    tmp_path: Path, one: str, other: str, error: type[Exception], words: str
) -> None:
    touch(tmp_path, "a.nii.gz", "notes.txt", "none/a_t1.nii.gz", "far/x1_final.nii.gz")
    touch(tmp_path, "two/fold0/a.nii.gz", "two/fold1/a.nii.gz")
    touch(tmp_path / "six", *(f"x{number}.nii.gz" for number in range(1, 7)))

    with pytest.raises(error, match=words):
        find_pairs(tmp_path / one, tmp_path / other)
