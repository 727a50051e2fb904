"""Finding the cases of every layout."""

import json
import logging
import os
from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.find import find_cases, find_data
from brats_seg.errors import LayoutError
from tests.builders import touch, write_case

LEGACY = ("_t1", "_t1ce", "_t2", "_flair")
MODERN = ("-t1n", "-t1c", "-t2w", "-t2f")
IMAGES = ("t1n", "t1c", "t2w", "t2f")


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

    assert (case.case_id, case.release, case.facts.grade) == (case_id, release, grade)
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

    assert (case.case_id, case.facts.grade) == ("Brats18_1_1_1", "HGG")
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
        ("smith", ["W39_1998.nii"]),
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
        "labels_1_2_3/BraTS2021_00000_seg_labels_1_2_3.nii.gz (3 in all): their names show no "
        "modality and no label map, or their case has other files for it",
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


def test_two_files_for_one_modality_are_a_problem(tmp_path: Path) -> None:
    # both words mean t1c
    touch(tmp_path, *scans("BraTS2021_00000", (*LEGACY, "_t1gd")))

    case = only_case_in(tmp_path)

    assert case.problems == (
        "case BraTS2021_00000, file BraTS2021_00000_t1ce.nii.gz and BraTS2021_00000_t1gd.nii.gz: "
        "found 2 files for t1c; expected one. Remove or rename the other, or list the files of the "
        "cases in a table of paths.",
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

    assert str(case.files.get("t1n")) == "BraTS2021_00000_t1.nii"
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
    key = only_case_in(tmp_path).facts.files_key
    assert only_case_in(tmp_path).facts.files_key == key

    flair = tmp_path / "BraTS2021_00000_flair.nii.gz"
    os.utime(flair, ns=(1, 1))
    later = only_case_in(tmp_path).facts.files_key
    flair.write_bytes(b"x")
    os.utime(flair, ns=(1, 1))
    longer = only_case_in(tmp_path).facts.files_key
    (tmp_path / "BraTS2021_00000_seg.nii.gz").unlink()
    unlabelled = only_case_in(tmp_path).facts.files_key

    assert len({key, later, longer, unlabelled}) == 4


def test_a_link_to_nowhere_is_left_for_the_inspection(tmp_path: Path) -> None:
    touch(tmp_path, *scans("BraTS2021_00000", LEGACY[1:]))
    (tmp_path / "BraTS2021_00000_t1.nii.gz").symlink_to(tmp_path / "gone")

    assert "t1n" in only_case_in(tmp_path).files


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
        (["p/IM1.dcm", "p/IM2.DCM"], r"DICOM files.*\(2 in all\): convert.*brats-seg convert"),
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


MSD = {
    "name": "BRATS",
    "tensorImageSize": "4D",
    "modality": {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"},
    "labels": {
        "0": "background",
        "1": "edema",
        "2": "non-enhancing tumor",
        "3": "enhancing tumour",
    },
}
NNUNET = {
    "channel_names": {"0": "T1", "1": "T1ce", "2": "T2", "3": "Flair"},
    "labels": {
        "background": 0,
        "whole tumor": [1, 2, 3],
        "tumor core": [2, 3],
        "enhancing tumor": [3],
    },
    "file_ending": ".nii.gz",
}


def write_dataset(root: Path, description: object, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "dataset.json").write_text(json.dumps(description))
    return root


def nnunet_images(case_id: str, folder: str = "imagesTr") -> list[str]:
    return [f"{folder}/{case_id}_000{channel}.nii.gz" for channel in range(4)]


def test_the_decathlon_keeps_all_modalities_in_one_file(tmp_path: Path) -> None:
    write_dataset(
        tmp_path / "Task01_BrainTumour",
        MSD,
        "imagesTr/BRATS_001.nii.gz",
        "imagesTr/._BRATS_001.nii.gz",
        "labelsTr/BRATS_001.nii.gz",
        "imagesTs/BRATS_485.nii.gz",
    )

    found = cases_in(tmp_path)

    case = found["BRATS_001"]
    image = "Task01_BrainTumour/imagesTr/BRATS_001.nii.gz"
    assert [
        str(case.files.get("t1n")),
        str(case.files.get("t1c")),
        str(case.files.get("t2w")),
        str(case.files.get("t2f")),
    ] == [
        f"{image}#1",
        f"{image}#2",
        f"{image}#3",
        f"{image}#0",
    ]
    assert str(case.label) == "Task01_BrainTumour/labelsTr/BRATS_001.nii.gz"
    assert (case.release, case.convention, case.patient_id) == ("msd", "msd", "BRATS_001")
    assert case.usable
    assert sorted(found) == ["BRATS_001", "BRATS_485"]
    assert found["BRATS_485"].label is None
    assert found["BRATS_485"].convention == ""


def test_the_order_of_the_description_counts(tmp_path: Path) -> None:
    swapped = {**MSD, "modality": {"0": "T2w", "1": "t1gd", "2": "FLAIR", "3": "T1w"}}
    write_dataset(tmp_path, swapped, "imagesTr/BRATS_001.nii.gz")

    case = cases_in(tmp_path)["BRATS_001"]

    assert [scan.volume for scan in case.images] == [3, 1, 0, 2]


def test_nnunet_keeps_a_file_per_modality(tmp_path: Path) -> None:
    write_dataset(
        tmp_path / "Dataset137_BraTS2021",
        NNUNET,
        *nnunet_images("BraTS2021_00000"),
        "labelsTr/BraTS2021_00000.nii.gz",
        *nnunet_images("BraTS-GLI-00001-000", "imagesTs"),
        "labelsTs/BraTS-GLI-00001-000.nii.gz",
    )

    found = cases_in(tmp_path)

    case = found["BraTS2021_00000"]
    assert [scan.path.as_posix() for scan in case.images] == [
        f"Dataset137_BraTS2021/{name}" for name in nnunet_images("BraTS2021_00000")
    ]
    assert case.release == "nnunet"
    # nnU-Net renumbers the labels of BraTS into the decathlon's order
    assert case.convention == "msd"
    assert found["BraTS-GLI-00001-000"].patient_id == "BraTS-GLI-00001"
    assert found["BraTS-GLI-00001-000"].label is not None


@pytest.mark.parametrize(
    ("labels", "convention"),
    [
        (MSD["labels"], "msd"),
        (NNUNET["labels"], "msd"),
        ({"background": 0, "edema": 1, "non-enhancing": 2, "enhancing": 3}, "msd"),
        ({"background": 0, "NCR": 1, "ED": 2, "ET": 3}, "brats2023"),
        ({"background": 0, "NETC": 1, "SNFH": 2, "ET": 3, "RC": 4}, "brats2024"),
        ({"background": 0, "ET": 1, "NETC": 2, "CC": 3, "ED": 4}, "brats2024-ped"),
        ({"background": 0, "necrosis": 1, "oedema": 2, "enhancing": 4}, "brats2017"),
        ({"background": 0, "wt": [1, 2, 3], "tc": [1, 3], "et": [3]}, "brats2023"),
        ({"background": 0, "wt": [1, 2, 3], "tc": [1, 3], "et": 3, "rc": 4}, "brats2024"),
        ({"background": 0, "tumour": 1}, ""),
        ({"background": 0, "ET": 2, "ED": 1}, ""),
        ({"0": "background", "edema": "1"}, ""),
        ({}, ""),
    ],
)
def test_the_named_labels_tell_the_convention(
    tmp_path: Path, labels: dict[str, object], convention: str
) -> None:
    description = {**MSD, "labels": labels}
    names = ("imagesTr/BRATS_001.nii.gz", "labelsTr/BRATS_001.nii.gz")
    write_dataset(tmp_path, description, *names)

    assert cases_in(tmp_path)["BRATS_001"].convention == convention


def test_a_modality_that_is_not_described_is_missing(tmp_path: Path) -> None:
    write_dataset(tmp_path, {**MSD, "modality": {"0": "FLAIR", "1": "T1w"}}, "imagesTr/a.nii.gz")

    case = cases_in(tmp_path)["a"]

    assert case.modalities == ("t1n", "t2f")
    assert not case.usable


def test_another_organ_holds_no_cases(tmp_path: Path) -> None:
    write_dataset(tmp_path, {**MSD, "modality": {"0": "MRI"}}, "imagesTr/hippocampus_001.nii.gz")

    with pytest.raises(LayoutError, match="holds no cases: NIfTI files were ignored, such as im"):
        find_cases(tmp_path)


@pytest.mark.parametrize(
    "description", [{}, [], {"modality": "FLAIR", "labels": {}}, {"modality": {"0": "FLAIR"}}]
)
def test_a_description_that_cannot_be_understood_is_refused(
    tmp_path: Path, description: object
) -> None:
    write_dataset(tmp_path, description, "imagesTr/BRATS_001.nii.gz")

    with pytest.raises(LayoutError, match=r"dataset\.json is not valid .*'channel_names'"):
        find_cases(tmp_path)


def test_a_description_that_is_no_json_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, MSD, "imagesTr/BRATS_001.nii.gz")
    (tmp_path / "dataset.json").write_text("{ half")

    with pytest.raises(LayoutError, match=r"dataset\.json is not valid \(file: Invalid JSON"):
        find_cases(tmp_path)


def test_a_description_without_images_describes_nothing(tmp_path: Path) -> None:
    write_dataset(
        tmp_path, {"anything": 1}, *(f"a/t{i}_{s}.nii" for i in (1, 2) for s in ("t1", "t2"))
    )

    assert sorted(cases_in(tmp_path)) == ["t1", "t2"]


def test_the_folder_above_the_case_folders_is_found_at_any_depth(tmp_path: Path) -> None:
    """The layout of BraTS 2020 on Kaggle, where newer mounts have a folder for the owner."""
    scans = (
        tmp_path / "input" / "datasets" / "owner" / "brats20" / "BraTS2020_TrainingData" / "MICCAI"
    )
    for number in (1, 2):
        write_case(scans, f"BraTS20_Training_{number:03d}")

    assert find_data([tmp_path / "input"]) == scans


def test_the_release_with_most_labelled_cases_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_case(tmp_path / "a", "BraTS2021_00000")
    for number in (1, 2):
        write_case(tmp_path / "b", f"BraTS-GLI-{number:05d}-000")
    for number in range(3):
        write_case(tmp_path / "c", f"BraTS20_Validation_{number:03d}", labelled=False)

    assert find_data([tmp_path]) == tmp_path / "b"
    assert "2 cases of brats2023-gli; ignored: 1 of brats2021" in caplog.text


def test_a_release_in_two_parts_has_the_folder_of_both(tmp_path: Path) -> None:
    write_case(tmp_path / "input" / "part-1" / "x", "BraTS-GLI-00001-000")
    write_case(tmp_path / "input" / "part-2" / "x", "BraTS-GLI-00002-000")

    assert find_data([tmp_path / "input"]) == tmp_path / "input"


def test_one_case_is_data_too(tmp_path: Path) -> None:
    write_case(tmp_path / "scans")

    assert find_data([tmp_path]) == tmp_path / "scans"


def test_files_side_by_side_in_one_folder_are_found(tmp_path: Path) -> None:
    for number in range(2):
        folder = write_case(tmp_path / "made", f"BraTS2021_{number:05d}")
        for file in folder.iterdir():
            (tmp_path / "flat").mkdir(exist_ok=True)
            file.rename(tmp_path / "flat" / file.name)
        folder.rmdir()

    assert find_data([tmp_path]) == tmp_path / "flat"


def test_the_first_place_with_labelled_cases_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "empty").mkdir()
    write_case(tmp_path / "unlabelled" / "x", labelled=False)
    write_case(tmp_path / "labelled" / "x")
    places = [tmp_path / name for name in ("absent", "empty", "unlabelled", "labelled")]

    assert find_data(places) == tmp_path / "labelled" / "x"
    assert "empty holds no cases" in caplog.text
    assert "unlabelled holds 1 case, and no label map" in caplog.text


def test_nowhere_is_none(tmp_path: Path) -> None:
    assert find_data([tmp_path / "absent"]) is None
    assert find_data([]) is None


@pytest.mark.parametrize(
    ("name", "case_id"),
    [(b"caf\xe9", r"caf\xe9"), (b"two\nlines", r"two\nlines"), (b"\x1b[2J", r"\x1b[2J")],
)
def test_a_name_that_cannot_be_printed_becomes_an_id_that_can(
    tmp_path: Path, name: bytes, case_id: str
) -> None:
    stem = os.fsdecode(name)
    touch(tmp_path, *scans(f"{stem}/{stem}"))

    case = only_case_in(tmp_path)

    assert case.case_id == case.patient_id == case_id
    assert all(case.path_of(scan).is_file() for scan in case.images)
    assert case.usable


def test_an_id_too_long_for_the_name_of_a_result_is_a_problem_of_its_case(tmp_path: Path) -> None:
    touch(tmp_path, *scans("x" * 240), *scans("BraTS2021_00001"))

    good, bad = find_cases(tmp_path).cases

    assert good.usable
    assert "found an id of 240 bytes; expected at most 200. Rename" in bad.problems[0]


def test_links_to_themselves_do_not_end_the_search(tmp_path: Path) -> None:
    touch(tmp_path, *scans("BraTS2021_00001"), "other/notes.txt")
    for name in ("loop", "other/loop", "loop.nii.gz"):
        (tmp_path / name).symlink_to(Path(name).name)

    assert list(cases_in(tmp_path)) == ["BraTS2021_00001"]


@pytest.mark.parametrize("name", ["n" * 300, "loop"])
def test_a_data_folder_that_cannot_be_there_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(LayoutError, match="does not exist"):
        find_cases(tmp_path / name)


def test_a_description_that_is_no_file_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "imagesTr/a.nii.gz")
    os.mkfifo(tmp_path / "dataset.json")

    with pytest.raises(LayoutError, match=r"dataset\.json cannot be read: it is a named pipe"):
        find_cases(tmp_path)
