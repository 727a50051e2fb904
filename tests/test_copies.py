from pathlib import Path

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.index import without_duplicates


def lying(
    folder: str,
    case_id: str = "BraTS2021_00000",
    *,
    voxels: str = "aaaa",
    tumour_ml: float | None = None,
    problems: tuple[str, ...] = (),
) -> Case:
    labelled = tumour_ml is not None
    return Case(
        case_id=case_id,
        patient_id=case_id,
        release="brats2021",
        t1n=ScanFile(path=Path(folder, "t1.nii.gz")),
        label=ScanFile(path=Path(folder, "seg.nii.gz")) if labelled else None,
        tumour_ml=tumour_ml,
        voxel_hash=voxels,
        problems=problems,
    )


def test_cases_of_other_ids_stay_as_they_are() -> None:
    cases = [lying("b", "two"), lying("a", "one")]

    # the same scan under two ids is a matter of folds
    assert without_duplicates(cases) == (cases[1], cases[0])


def test_of_equal_copies_the_first_is_kept_with_a_remark() -> None:
    [kept] = without_duplicates([lying("c"), lying("a"), lying("b")])

    assert str(kept.t1n) == "a/t1.nii.gz"
    assert kept.usable
    assert kept.remarks == ("the same scan is in b/ and c/, which was ignored",)


def test_of_equal_copies_a_labelled_one_is_kept() -> None:
    [kept] = without_duplicates([lying("a"), lying("b", tumour_ml=1.5)])

    assert str(kept.label) == "b/seg.nii.gz"


def test_another_scan_under_one_id_makes_both_unusable() -> None:
    first, second = without_duplicates([lying("b", voxels="bbbb"), lying("a")])

    assert first.problems == (
        "case BraTS2021_00000, file a/: found another scan of the same id in b/; expected one "
        "folder per id. Remove or rename the one that is not wanted.",
    )
    assert "file b/: found another scan of the same id in a/" in second.problems[0]


def test_another_label_map_under_one_id_makes_both_unusable() -> None:
    found = without_duplicates([lying("b", tumour_ml=1.5), lying("a", tumour_ml=1.6)])

    assert [case.usable for case in found] == [False, False]
    assert "the scan with another label map of the same id in b/" in found[0].problems[0]


def test_a_broken_copy_stays_listed_beside_a_sound_one() -> None:
    found = without_duplicates([lying("b"), lying("a", voxels="", problems=("cut off",))])

    assert [case.problems for case in found] == [("cut off",), ()]


def test_the_order_of_cases_does_not_matter() -> None:
    cases = [lying("a"), lying("b"), lying("c", "x"), lying("d", "y"), lying("e", "y", voxels="b")]

    assert without_duplicates(cases) == without_duplicates(cases[::-1])
