import json
import os
from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.discovery import find_cases
from brats_seg.errors import LayoutError

LEGACY = ("_t1", "_t1ce", "_t2", "_flair")
MODERN = ("-t1n", "-t1c", "-t2w", "-t2f")
IMAGES = ("t1n", "t1c", "t2w", "t2f")


def touch(root: Path, *names: str) -> Path:
    """Make empty files: finding cases opens none."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def scans(stem: str, suffixes: tuple[str, ...] = LEGACY, end: str = ".nii.gz") -> list[str]:
    return [f"{stem}{suffix}{end}" for suffix in suffixes]


def cases_in(root: Path) -> dict[str, Case]:
    found = find_cases(root).cases
    assert len({case.case_id for case in found}) == len(found)
    return {case.case_id: case for case in found}


def only_case_in(root: Path) -> Case:
    [case] = find_cases(root).cases
    return case


def names_of(case: Case) -> list[str]:
    return [str(scan) for scan in (*case.images, case.label) if scan]


@pytest.mark.parametrize(
    ("stem", "suffixes", "case_id", "release", "grade"),
    [
        (
            "Brats17TrainingData/HGG/Brats17_2013_2_1/Brats17_2013_2_1",
            (*LEGACY, "_seg"),
            "Brats17_2013_2_1",
            "brats2017",
            "HGG",
        ),
        (
            "LGG/Brats18_TCIA10_637_1/Brats18_TCIA10_637_1",
            (*LEGACY, "_seg"),
            "Brats18_TCIA10_637_1",
            "brats2018",
            "LGG",
        ),
        (
            "BraTS19_CBICA_AAB_1/BraTS19_CBICA_AAB_1",
            LEGACY,
            "BraTS19_CBICA_AAB_1",
            "brats2019",
            "",
        ),
        (
            "MICCAI_BraTS2020_TrainingData/BraTS20_Training_001/BraTS20_Training_001",
            (*LEGACY, "_seg"),
            "BraTS20_Training_001",
            "brats2020",
            "",
        ),
        ("BraTS2021_00000/BraTS2021_00000", (*LEGACY, "_seg"), "BraTS2021_00000", "brats2021", ""),
        (
            "ASNR-MICCAI-BraTS2023-GLI-Challenge-TrainingData/BraTS-GLI-00000-000/BraTS-GLI-00000-000",
            (*MODERN, "-seg"),
            "BraTS-GLI-00000-000",
            "brats2023-gli",
            "",
        ),
        (
            "training_data1_v2/BraTS-GLI-00005-100/BraTS-GLI-00005-100",
            (*MODERN, "-seg"),
            "BraTS-GLI-00005-100",
            "brats2024-gli",
            "",
        ),
        ("BraTS-MEN-00004-000", MODERN, "BraTS-MEN-00004-000", "brats-men", ""),
        ("a/BraTS-MET-00086-000", MODERN, "BraTS-MET-00086-000", "brats-met", ""),
        (
            "a/BraTS-SSA-00002-000",
            ("-t1n", "-t1c", "-t2W", "-t2f", "-seg"),
            "BraTS-SSA-00002-000",
            "brats-ssa",
            "",
        ),
    ],
)
@pytest.mark.parametrize("end", [".nii", ".nii.gz", ".NII.GZ"])
def test_every_release_is_recognised(
    tmp_path: Path,
    stem: str,
    suffixes: tuple[str, ...],
    case_id: str,
    release: str,
    grade: str,
    end: str,
) -> None:
    touch(tmp_path, *scans(stem, suffixes, end))

    case = only_case_in(tmp_path)

    assert (case.case_id, case.release, case.grade) == (case_id, release, grade)
    assert names_of(case) == scans(stem, suffixes, end)
    assert case.usable
    assert case.remarks == ()


def test_a_flat_folder_holds_many_cases(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *scans("BraTS2021_00000", (*LEGACY, "_seg")),
        *scans("BraTS2021_00001"),
        *scans("BraTS-GLI-00000-000", MODERN, ".nii"),
        *scans("smith", (*LEGACY, "_seg")),
        *scans("jones"),
    )

    found = cases_in(tmp_path)

    assert sorted(found) == [
        "BraTS-GLI-00000-000",
        "BraTS2021_00000",
        "BraTS2021_00001",
        "jones",
        "smith",
    ]
    assert names_of(found["smith"]) == scans("smith", (*LEGACY, "_seg"))
    assert names_of(found["jones"]) == scans("jones")
    assert found["jones"].release == "unknown"


def test_a_flat_folder_of_unknown_scans_goes_by_their_names(tmp_path: Path) -> None:
    touch(tmp_path, *scans("scans/smith"), *scans("scans/jones", ("_fla_bet", "_t1c_bet")))

    found = cases_in(tmp_path)

    assert sorted(found) == ["jones", "smith"]
    assert names_of(found["jones"]) == ["scans/jones_t1c_bet.nii.gz", "scans/jones_fla_bet.nii.gz"]


def test_scanner_names_without_anything_in_common_are_the_case_of_their_folder(
    tmp_path: Path,
) -> None:
    files = ["AX_10_t1.nii.gz", "AX_POST_13_t1c.nii.gz", "TSE_2_t2.nii.gz", "IR_5_fla.nii.gz"]
    touch(tmp_path, *(f"new/TCGA-FG-6692_native/{name}" for name in files))

    case = only_case_in(tmp_path)

    assert case.case_id == case.patient_id == "TCGA-FG-6692_native"
    assert [scan.path.name for scan in case.images] == files


@pytest.mark.parametrize("stem", ["OtherExample", ""])
def test_one_unknown_case_in_a_folder_is_called_by_the_folder(tmp_path: Path, stem: str) -> None:
    suffixes = ("_t1_bet", "_t1c_bet", "_t2_bet", "_fla_bet")
    touch(tmp_path, *scans(f"patient_7/{stem}", suffixes), *scans("patient_8/scan"))

    assert sorted(cases_in(tmp_path)) == ["patient_7", "patient_8"]


def test_plain_names_in_a_folder_with_an_id_belong_to_that_case(tmp_path: Path) -> None:
    names = [f"BraTS2021_00007/{name}.nii" for name in ("t1", "t1ce", "t2", "flair", "seg")]
    touch(tmp_path, *names)

    case = only_case_in(tmp_path)

    assert (case.case_id, case.release) == ("BraTS2021_00007", "brats2021")
    assert names_of(case) == names


def test_mounts_several_levels_deep_are_searched(tmp_path: Path) -> None:
    deep = "input/datasets/owner/brats20/BraTS2020_TrainingData/MICCAI/BraTS20_Training_001"
    touch(tmp_path, *scans(f"{deep}/BraTS20_Training_001", end=".nii"))

    assert only_case_in(tmp_path).case_id == "BraTS20_Training_001"


def test_the_case_folder_itself_can_be_given(tmp_path: Path) -> None:
    root = touch(tmp_path / "HGG" / "Brats18_1_1_1", *scans("Brats18_1_1_1"))

    case = only_case_in(root)

    assert (case.case_id, case.grade) == ("Brats18_1_1_1", "HGG")
    assert only_case_in(touch(tmp_path / "smith", *scans("scan"))).case_id == "smith"


@pytest.mark.parametrize("inner", ["{}", "00000057_brain_flair.nii", "anything"])
def test_a_folder_called_like_a_file_stands_for_the_file_in_it(tmp_path: Path, inner: str) -> None:
    outer = scans("BraTS20_Training_001/BraTS20_Training_001", (*LEGACY, "_seg"), ".nii")
    names = [f"{name}/{inner.format(Path(name).name)}" for name in outer]
    touch(tmp_path, *names)

    case = only_case_in(tmp_path)

    assert names_of(case) == names
    assert case.usable


def test_validation_cases_of_two_years_may_lie_together(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *scans("val/BraTS20_Validation_001/BraTS20_Validation_001"),
        *scans("val/BraTS2021_00001/BraTS2021_00001"),
    )

    found = cases_in(tmp_path)

    assert {case.release for case in found.values()} == {"brats2020", "brats2021"}


def test_the_segmentation_of_case_355_is_found(tmp_path: Path) -> None:
    folder = "BraTS20_Training_355"
    touch(tmp_path, *scans(f"{folder}/{folder}"), f"{folder}/W39_1998.09.19_Segm.nii")

    case = only_case_in(tmp_path)

    assert str(case.label) == f"{folder}/W39_1998.09.19_Segm.nii"
    assert case.usable
    assert case.remarks == (
        "W39_1998.09.19_Segm.nii was taken as the label map, although its name does not say so",
    )


@pytest.mark.parametrize(
    ("case_id", "foreign"),
    [
        ("BraTS20_Validation_001", ["W39_Segm.nii"]),
        ("smith", ["W39_Segm.nii"]),
        ("BraTS20_Training_001", ["a.nii", "b.nii"]),
        ("BraTS20_Training_001", ["BraTS20_Training_001_brainmask.nii"]),
    ],
)
def test_a_file_of_unknown_kind_is_not_always_a_label_map(
    tmp_path: Path, case_id: str, foreign: list[str]
) -> None:
    touch(tmp_path, *scans(f"{case_id}/{case_id}"), *(f"{case_id}/{name}" for name in foreign))

    discovery = find_cases(tmp_path)

    assert discovery.cases[0].label is None
    assert f"({len(foreign)} in all)" in discovery.notices[0]


def test_label_maps_without_scans_are_no_cases(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *scans("BraTS2021_00000/BraTS2021_00000"),
        "predictions/BraTS2021_00000.nii.gz",
        "other_predictions/BraTS2021_00000_seg.nii.gz",
        "labels_1_2_3/BraTS2021_00000_seg_labels_1_2_3.nii.gz",
    )

    discovery = find_cases(tmp_path)

    assert [case.case_id for case in discovery.cases] == ["BraTS2021_00000"]
    assert discovery.cases[0].label is None
    assert discovery.notices == (
        "NIfTI files were ignored, such as "
        "labels_1_2_3/BraTS2021_00000_seg_labels_1_2_3.nii.gz (3 in all): their names tell no "
        "modality, or others of their case were taken instead",
    )


def test_what_was_made_from_a_case_in_its_folder_is_no_case(tmp_path: Path) -> None:
    folder = "BraTS2021_00000"
    touch(tmp_path, *scans(f"{folder}/{folder}"), *scans(f"{folder}/{folder}_n4"))

    case = only_case_in(tmp_path)

    assert names_of(case) == scans(f"{folder}/{folder}")


def test_results_of_the_package_are_passed_over(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *scans("BraTS2021_00000/BraTS2021_00000"),
        "results/brats_seg.json",
        *scans("results/more/BraTS2021_00001"),
    )

    assert sorted(cases_in(tmp_path)) == ["BraTS2021_00000"]
    # unless that is the folder asked for
    assert sorted(cases_in(tmp_path / "results")) == ["BraTS2021_00001"]


def test_hidden_files_are_passed_over(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *scans("BraTS2021_00000/BraTS2021_00000"),
        *scans("BraTS2021_00000/._BraTS2021_00000"),
        *scans("__MACOSX/BraTS2021_00000/BraTS2021_00000"),
        *scans(".trash/BraTS2021_00001"),
    )

    discovery = find_cases(tmp_path)

    assert [case.case_id for case in discovery.cases] == ["BraTS2021_00000"]
    assert discovery.notices == ()


def test_links_are_followed_once(tmp_path: Path) -> None:
    root = tmp_path / "data"
    touch(tmp_path, *scans("elsewhere/BraTS2021_00000/BraTS2021_00000"))
    root.mkdir()
    (root / "first").symlink_to(tmp_path / "elsewhere")
    (root / "second").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(root)

    case = only_case_in(root)

    assert case.images[0].path.parts[0] == "first"


def test_a_missing_modality_is_a_problem_of_a_listed_case(tmp_path: Path) -> None:
    touch(tmp_path, *scans("a/BraTS2021_00000/BraTS2021_00000", ("_t1", "_flair", "_seg")))

    case = only_case_in(tmp_path)

    assert case.problems == (
        "case BraTS2021_00000, file a/BraTS2021_00000/: found no t1c, t2w; expected t1n, t1c, t2w, "
        "t2f. Add what is missing, or leave the case out.",
    )
    assert case.t1c is None


def test_a_radiotherapy_case_is_not_supported(tmp_path: Path) -> None:
    touch(tmp_path, *scans("BraTS-MEN-RT-0002-1/BraTS-MEN-RT-0002-1", ("_t1c", "_gtv")))

    case = only_case_in(tmp_path)

    assert case.release == "brats2024-men-rt"
    assert case.label is None
    [problem] = case.problems
    assert "one modality" in problem
    assert "not supported" in problem


def test_two_files_for_one_modality_are_a_problem(tmp_path: Path) -> None:
    # both words mean t1c
    touch(tmp_path, *scans("BraTS2021_00000", (*LEGACY, "_t1gd")))

    case = only_case_in(tmp_path)

    assert case.problems == (
        "case BraTS2021_00000, file BraTS2021_00000_t1ce.nii.gz and BraTS2021_00000_t1gd.nii.gz: "
        "found 2 files for t1c; expected one. Remove or rename the other.",
    )


def test_a_plain_name_goes_before_a_processed_one(tmp_path: Path) -> None:
    touch(tmp_path, *scans("patient/scan", (*LEGACY, "_t1_bet", "_t2_brain")))

    case = only_case_in(tmp_path)

    assert case.case_id == "patient"
    assert names_of(case) == scans("patient/scan")
    assert case.usable


def test_an_unpacked_file_goes_before_its_archive_and_this_is_told(tmp_path: Path) -> None:
    touch(tmp_path, *scans("BraTS2021_00000"), "BraTS2021_00000_t1.nii")

    case = only_case_in(tmp_path)

    assert str(case.t1n) == "BraTS2021_00000_t1.nii"
    assert case.usable
    assert case.remarks == (
        "BraTS2021_00000_t1.nii.gz was ignored in favour of BraTS2021_00000_t1.nii",
    )


def test_one_id_in_two_places_is_two_cases_for_now(tmp_path: Path) -> None:
    touch(tmp_path, *scans("b/BraTS2021_00000"), *scans("a/BraTS2021_00000"))

    found = find_cases(tmp_path).cases

    assert [case.images[0].path.parts[0] for case in found] == ["a", "b"]


def test_listing_order_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(
        tmp_path,
        *scans("b/BraTS2021_00002"),
        *scans("a/BraTS2021_00001", (*LEGACY, "_seg")),
        *scans("c/scan"),
        *scans("smith"),
    )
    expected = find_cases(tmp_path)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: reversed(list(scandir(path))))

    assert find_cases(tmp_path) == expected


def test_the_key_changes_when_a_file_does(tmp_path: Path) -> None:
    touch(tmp_path, *scans("BraTS2021_00000", (*LEGACY, "_seg")))
    key = only_case_in(tmp_path).files_key
    assert only_case_in(tmp_path).files_key == key

    flair = tmp_path / "BraTS2021_00000_flair.nii.gz"
    os.utime(flair, ns=(1, 1))
    later = only_case_in(tmp_path).files_key
    flair.write_bytes(b"x")
    os.utime(flair, ns=(1, 1))
    longer = only_case_in(tmp_path).files_key
    (tmp_path / "BraTS2021_00000_seg.nii.gz").unlink()
    unlabelled = only_case_in(tmp_path).files_key

    assert len({key, later, longer, unlabelled}) == 4


def test_a_link_to_nowhere_is_left_for_the_inspection(tmp_path: Path) -> None:
    touch(tmp_path, *scans("BraTS2021_00000", LEGACY[1:]))
    (tmp_path / "BraTS2021_00000_t1.nii.gz").symlink_to(tmp_path / "gone")

    assert only_case_in(tmp_path).t1n is not None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "holds no cases: it holds no scans. Expected a release of BraTS"),
        (["readme.txt"], "holds no cases: it holds no scans"),
        (
            ["volume_1_slice_0.h5", "volume_1_slice_1.h5"],
            r"HDF5 files are not read, such as volume_1_slice_0\.h5 \(2 in all\): .*2-D slices",
        ),
        (
            ["BraTS2021_00495.tar"],
            r"archives are not read, such as BraTS2021_00495\.tar \(1 in all\): unpack.*tar -xf",
        ),
        (["a/b/data.zip", "x.tar.gz", "t1.gz"], r"archives.*such as t1\.gz \(3 in all\)"),
        (["p/IM1.dcm", "p/IM2.DCM"], r"DICOM files.*\(2 in all\): convert.*dcm2niix"),
        (["BRATS_001.nii.gz"], r"NIfTI files were ignored, such as BRATS.*CASE_t1, CASE_t1ce"),
        (["x_seg.nii.gz"], r"NIfTI files were ignored, such as x_seg\.nii\.gz \(1 in all\)"),
    ],
)
def test_a_folder_without_cases_gets_advice(tmp_path: Path, names: list[str], message: str) -> None:
    touch(tmp_path, *names)

    with pytest.raises(LayoutError, match=message):
        find_cases(tmp_path)


def test_what_is_not_read_beside_cases_is_told(tmp_path: Path) -> None:
    touch(tmp_path, *scans("BraTS2021_00000"), "more/BraTS2021_00495.tar", "slice_1.h5")

    notices = find_cases(tmp_path).notices

    assert [notice.split(" (")[0] for notice in notices] == [
        "archives are not read, such as more/BraTS2021_00495.tar",
        "HDF5 files are not read, such as slice_1.h5",
    ]


def test_no_folder_is_told_apart_from_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="nowhere does not exist; expected the folder of scans"):
        find_cases(tmp_path / "nowhere")
    (tmp_path / "data.tar").touch()
    with pytest.raises(
        LayoutError, match=r"data\.tar is a file; .*An archive must be unpacked first"
    ):
        find_cases(tmp_path / "data.tar")


def test_a_described_folder_is_read_by_its_description(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "Task01/imagesTr/BRATS_001.nii.gz",
        "Task01/labelsTr/BRATS_001.nii.gz",
        *scans("BraTS2021_00000"),
    )
    modality = {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}
    (tmp_path / "Task01" / "dataset.json").write_text(
        json.dumps({"modality": modality, "labels": {"0": "background"}})
    )

    found = cases_in(tmp_path)

    assert sorted(found) == ["BRATS_001", "BraTS2021_00000"]
    assert [str(found["BRATS_001"].images[i])[-2:] for i in range(4)] == ["#1", "#2", "#3", "#0"]
    assert find_cases(tmp_path).notices == ()
