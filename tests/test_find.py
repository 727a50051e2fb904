"""Finding the cases of every layout: files, ids, label maps, inputs, and advice on what is not read."""

import gzip
import json
import logging
import os
from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.find import (
    Folder,
    _notes_on_unread,
    find_cases,
    find_data,
    find_inputs,
    single_input,
    walk_folders,
)
from brats_seg.errors import LayoutError, UsageError
from brats_seg.labels import MODALITIES
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


def only_case_in(root: Path, label_files: str | None = None) -> Case:
    [case] = find_cases(root, label_files=label_files).cases
    return case


def named_scans(stem: str, names: tuple[str, ...] = ("t1", "t1ce", "t2", "flair")) -> list[str]:
    return scans(f"{stem}_", names)


def names_of(case: Case) -> list[str]:
    return [str(scan) for scan in (*case.images, case.label) if scan]


SCANNER = ("AX_9_t1_bet", "AXPOST_t1c_bet", "TSE_t2_bet", "IR_fla_bet")
PROCESSED = ("_t1_bet", "_t1ce_bet", "_t2_bet", "_flair_bet")
CASE = "BraTS2021_00007"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], {"smith": scans("x/smith"), "jones": scans("x/jones", PROCESSED)}),
        # names without anything in common are the case of their folder
        ([], {"TCGA-FG-6692_native": scans("x/TCGA-FG-6692_native/", SCANNER)}),
        ([], {CASE: scans(f"{CASE}/", ("t1", "t1ce", "t2", "flair", "seg"), ".nii")}),
        # what was made from a case in its folder is no case
        (scans(f"{CASE}/{CASE}_n4"), {CASE: scans(f"{CASE}/{CASE}")}),
        (scans("patient/scan", ("_t1_bet", "_t2_brain")), {"patient": scans("patient/scan")}),
        (scans("smith/smith", ("_t1", "_t2")), {"smith": scans("smith/smith", PROCESSED)}),
        # beside a segmentation, a mask is mostly that of the brain
        (["smith/smith_mask.nii.gz"], {"smith": scans("smith/smith", (*LEGACY, "_seg"))}),
    ],
)
def test_names_tell_the_files_of_a_case(
    tmp_path: Path, others: list[str], expected: dict[str, list[str]]
) -> None:
    touch(tmp_path, *others, *(name for names in expected.values() for name in names))

    found = cases_in(tmp_path)

    assert {case_id: names_of(case) for case_id, case in found.items()} == expected
    assert all(case.usable and not case.remarks for case in found.values())
    assert all(case.patient_id == case_id for case_id, case in found.items())


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
    touch(tmp_path, *scans("BraTS2021_00000"))

    found = cases_in(tmp_path)

    assert find_cases(tmp_path).notices == ()
    case = found["BRATS_001"]
    image = "Task01_BrainTumour/imagesTr/BRATS_001.nii.gz"
    assert [str(scan) for scan in case.images] == [f"{image}#{volume}" for volume in (1, 2, 3, 0)]
    assert str(case.label) == "Task01_BrainTumour/labelsTr/BRATS_001.nii.gz"
    assert (case.release, case.convention, case.patient_id) == ("msd", "msd", "BRATS_001")
    assert case.usable
    assert sorted(found) == ["BRATS_001", "BRATS_485", "BraTS2021_00000"]
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
    "text",
    [
        "{}",
        "[]",
        '{"modality": "FLAIR", "labels": {}}',
        '{"modality": {"0": "FLAIR"}}',
        "{ half",
    ],
)
def test_a_description_that_cannot_be_understood_is_refused(tmp_path: Path, text: str) -> None:
    write_dataset(tmp_path, MSD, "imagesTr/BRATS_001.nii.gz")
    (tmp_path / "dataset.json").write_text(text)

    with pytest.raises(LayoutError, match=r"dataset\.json is not valid .*'channel_names'"):
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere does not exist; expected the folder of scans"),
        ("n" * 300, "does not exist"),
        ("loop", "does not exist"),
        ("data.tar", r"data\.tar is a file; .*An archive must be unpacked first"),
    ],
)
def test_a_data_folder_that_cannot_be_there_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "data.tar").touch()

    with pytest.raises(LayoutError, match=message):
        find_cases(tmp_path / name)


def test_a_description_that_is_no_file_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "imagesTr/a.nii.gz")
    os.mkfifo(tmp_path / "dataset.json")

    with pytest.raises(LayoutError, match=r"dataset\.json cannot be read: it is a named pipe"):
        find_cases(tmp_path)


UPENN = "UPENN-GBM-00001_11"
BIDS = ("T1w", "ce-gadolinium_T1w", "T2w", "FLAIR")


def upenn(root: Path) -> Path:
    words = ("T1", "T1GD", "T2", "FLAIR")
    return touch(
        root,
        *named_scans(f"images_structural/{UPENN}/{UPENN}", words),
        *named_scans(f"images_structural_unstripped/{UPENN}/{UPENN}_unstripped", ("DTI",)),
        f"automated_segm/{UPENN}_automated_approx_segm.nii.gz",
    )


def test_a_label_map_by_a_program_is_taken_where_no_person_drew_one(tmp_path: Path) -> None:
    case = only_case_in(upenn(tmp_path))

    assert str(case.label) == f"automated_segm/{UPENN}_automated_approx_segm.nii.gz"
    assert case.remarks == ("the label map was made by a program, as its name says",)


def test_ucsf_has_many_files_beside_the_scans(tmp_path: Path) -> None:
    stem = "UCSF-PDGM-0004_nifti/UCSF-PDGM-0004"
    touch(
        tmp_path,
        *named_scans(
            stem, ("T1", "T1c", "T2", "FLAIR", "T1_bias", "T1c_bias", "T2_bias", "FLAIR_bias")
        ),
        *named_scans(
            stem, ("ADC", "SWI_bias", "brain_segmentation", "brain_parenchyma_segmentation")
        ),
        *named_scans(stem, ("tumor_segmentation",)),
    )

    case = only_case_in(tmp_path)

    assert (case.case_id, case.release) == ("UCSF-PDGM-0004", "ucsf-pdgm")
    assert [str(scan) for scan in case.images] == named_scans(stem, ("T1", "T1c", "T2", "FLAIR"))
    assert str(case.label) == f"{stem}_tumor_segmentation.nii.gz"
    assert case.usable


@pytest.mark.parametrize(
    "name",
    [
        "derivatives/manual/sub-01/ses-1/anat/sub-01_ses-1_desc-tumor_dseg.nii.gz",
        "derivatives/manual/sub-01/ses-1/anat/sub-01_ses-1_space-T1w_label-tumor_mask.nii.gz",
        # a patient with one session may be named without it
        "derivatives/manual/sub-01/anat/sub-01_label-lesion_mask.nii.gz",
        "sub-01/ses-1/anat/sub-01_ses-1_dseg.nii.gz",
    ],
)
def test_bids_has_label_maps_in_derivatives(tmp_path: Path, name: str) -> None:
    words = ("acq-ax_T1w", "acq-ax_ce-gadolinium_T1w", "T2w", "acq-space_FLAIR")
    touch(
        tmp_path,
        *named_scans("sub-01/ses-1/anat/sub-01_ses-1", words),
        *named_scans(
            "derivatives/manual/sub-01/anat/sub-01", ("desc-brain_mask", "label-GM_probseg")
        ),
        name,
    )

    case = only_case_in(tmp_path)

    assert (case.case_id, case.patient_id, case.timepoint) == ("sub-01_ses-1", "sub-01", "1")
    assert case.files.get("t1c") is not None
    assert "ce-gadolinium" in str(case.files.get("t1c"))
    assert str(case.label) == name
    assert case.usable


def test_a_label_map_without_session_of_a_patient_with_two_is_nobodys(tmp_path: Path) -> None:
    for session in ("1", "2"):
        touch(tmp_path, *named_scans(f"sub-01/ses-{session}/anat/sub-01_ses-{session}", BIDS))
    touch(tmp_path, "derivatives/manual/sub-01/anat/sub-01_dseg.nii.gz")

    assert [case.label for case in find_cases(tmp_path).cases] == [None, None]


def test_the_label_map_is_in_the_space_of_the_scans(tmp_path: Path) -> None:
    folder = "derivatives/pre/sub-01/anat/sub-01_space-SRI24"
    words = ("desc-preproc_T1w", "ce-gd_T1w", "T2w", "FLAIR")
    other = "derivatives/pre/sub-01/anat/sub-01_space-T1w_desc-tumor_dseg.nii.gz"
    touch(tmp_path, *named_scans(folder, (*words, "desc-tumor_dseg")), other)

    case = only_case_in(tmp_path)

    assert str(case.label) == f"{folder}_desc-tumor_dseg.nii.gz"
    assert case.usable


@pytest.mark.parametrize(
    "name",
    [
        "labels/smith.nii.gz",
        "labels/smith_seg.nii.gz",
        "masks/smith/tumour.nii.gz",
        "smith/segmentation/anything.nii.gz",
        "smith/mask.nii.gz",
        "smith/smith_tumor_mask.nii.gz",
    ],
)
def test_folders_and_files_called_after_label_maps_are_searched(tmp_path: Path, name: str) -> None:
    touch(tmp_path, *named_scans("smith/smith"), *named_scans("jones/jones"), name)

    jones, smith = find_cases(tmp_path).cases

    assert str(smith.label) == name
    assert smith.usable
    assert jones.label is None


def test_label_maps_that_fit_equally_well_are_a_problem_and_packed_copies_are_not(
    tmp_path: Path,
) -> None:
    names = ("masks/smith.nii.gz", "labels/smith.nii.gz", "labels/smith.nii")
    touch(tmp_path, *named_scans("a/smith/smith"), *names)

    case = only_case_in(tmp_path)

    assert case.remarks == ("smith.nii.gz was ignored in favour of smith.nii",)
    assert case.problems == (
        "case smith, file labels/smith.nii and masks/smith.nii.gz: found 2 files for label map; "
        "expected one. Remove or rename the others, or name the right ones with --label-files.",
    )


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("smith/smith_tumour_final2.nii.gz", "*_tumour_*"),
        ("smith/W39.nii.gz", "w39*"),
        ("drawn/smith.nii.gz", "drawn/*"),
        ("drawn/smith_by_me.nii.gz", "*_by_me.nii.gz"),
        ("drawn/smith/anything.nii.gz", "drawn/*"),
    ],
)
def test_a_pattern_names_other_label_maps(tmp_path: Path, name: str, pattern: str) -> None:
    touch(
        tmp_path,
        *named_scans("smith/smith"),
        *named_scans("jones/jones"),
        name,
        "labels/smith.nii.gz",
    )

    found = {case.case_id: case.label for case in find_cases(tmp_path, label_files=pattern).cases}

    assert str(found["smith"]) == name
    assert found["jones"] is None


def test_a_pattern_without_a_label_map_says_what_there_is(tmp_path: Path) -> None:
    touch(tmp_path, *named_scans("smith/smith"), "smith/smith_final.nii.gz")

    with pytest.raises(
        LayoutError,
        match=r"label map called '\*_tumour\.nii\.gz'; the files .* are smith/smith_final\.nii\.gz",
    ):
        find_cases(tmp_path, label_files="*_tumour.nii.gz")


def files(folder: str) -> list[str]:
    return [f"{folder}/{name}.nii.gz" for name in SCANNER]


def ids_in(root: Path) -> list[tuple[str, str, str]]:
    return [(case.case_id, case.patient_id, case.timepoint) for case in find_cases(root).cases]


def test_cases_in_folders_of_one_name_are_named_after_the_folders_above(tmp_path: Path) -> None:
    touch(tmp_path, *files("A/raw_bet"), *files("B/raw_bet"), *files("C"))

    assert ids_in(tmp_path) == [("A", "A", ""), ("B", "B", ""), ("C", "C", "")]
    assert find_cases(tmp_path).notices == (
        "several folders are called raw_bet: 2 cases are named after the folders above, such as A in "
        "A/raw_bet/",
    )


def test_folders_above_of_one_name_are_told_apart_by_theirs(tmp_path: Path) -> None:
    touch(tmp_path, *files("one/A/raw"), *files("two/A/raw"))

    assert [case_id for case_id, *_ in ids_in(tmp_path)] == ["one_A", "two_A"]


def test_weeks_of_a_patient_are_of_one_patient(tmp_path: Path) -> None:
    for folder in ("P1/week-0", "P1/week-9", "P2/week-0", "P3/week-4"):
        touch(tmp_path, *files(folder))

    assert ids_in(tmp_path) == [
        ("P1_week-0", "P1", "week-0"),
        ("P1_week-9", "P1", "week-9"),
        ("P2", "P2", "week-0"),
        ("P3", "P3", "week-4"),
    ]


def test_numbers_of_two_sites_are_different_patients(tmp_path: Path) -> None:
    for folder in ("berlin/001", "berlin/002", "paris/001", "paris/003"):
        touch(tmp_path, *files(folder))

    ids = ("berlin_001", "berlin_002", "paris_001", "paris_003")
    assert ids_in(tmp_path) == [(name, name, "") for name in ids]


def test_cases_directly_below_the_data_folder_keep_their_names(tmp_path: Path) -> None:
    touch(tmp_path, *files("001"), *files("002"), *files("more/001"))

    assert [case_id for case_id, *_ in ids_in(tmp_path)] == ["001", "002", "more"]


def test_complete_derivatives_are_taken_instead_of_raw_scans(tmp_path: Path) -> None:
    touch(
        tmp_path,
        *named_scans("sub-01/anat/sub-01", (*BIDS, "run-2_T1w")),
        *named_scans("derivatives/pre/sub-01/anat/sub-01_space-SRI24", BIDS),
        *named_scans("sub-02/anat/sub-02", BIDS),
        *named_scans("derivatives/pre/sub-02/anat/sub-02_space-SRI24", BIDS[:1]),
    )

    found = find_cases(tmp_path)

    assert [case.folder.parts[0] for case in found.cases] == ["derivatives", "sub-02"]
    assert all(case.usable for case in found.cases)
    assert found.notices == (
        "scans of BIDS cases were ignored, such as "
        "derivatives/pre/sub-02/anat/sub-02_space-SRI24_T1w.nii.gz (6 in all): another folder of the "
        "data set has more of their modalities, or a derivative of them",
    )


def test_two_runs_of_a_modality_are_a_problem(tmp_path: Path) -> None:
    touch(tmp_path, *named_scans("sub-01/anat/sub-01", (*BIDS[1:], "run-1_T1w", "run-2_T1w")))

    [case] = find_cases(tmp_path).cases

    assert "found 2 files for t1n; expected one. Remove or rename the other" in case.problems[0]


def _noted(root: Path, folders: list[Folder]) -> tuple[str, ...]:
    return tuple(_notes_on_unread(root, folders))


def test_a_folder_lists_scans_and_other_files_apart(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b_t1.nii.gz", "a_t1.nii", "notes.txt", "b/x.nii"):
        (tmp_path / name).touch()

    top, below = walk_folders(tmp_path)

    assert [str(scan.path) for scan in top.scans] == ["a_t1.nii", "b_t1.nii.gz"]
    assert top.others == ("notes.txt",)
    assert (below.path, [str(scan.path) for scan in below.scans]) == (Path("b"), ["b/x.nii"])


@pytest.mark.parametrize("inside", [[], ["a.nii", "b.nii"], ["folder/a.nii"]])
def test_a_folder_called_like_a_file_that_holds_no_single_file_is_a_folder(
    tmp_path: Path, inside: list[str]
) -> None:
    (tmp_path / "x_t1.nii").mkdir()
    for name in inside:
        (tmp_path / "x_t1.nii" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "x_t1.nii" / name).touch()

    top, *below = walk_folders(tmp_path)

    assert top.scans == ()
    assert Path("x_t1.nii") in {folder.path for folder in below}


def test_a_folder_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

    assert list(walk_folders(tmp_path)) == [
        Folder(path=Path()),
        Folder(path=Path("locked"), refused="Permission denied"),
    ]
    assert _noted(tmp_path, list(walk_folders(tmp_path))) == (
        "the folder locked cannot be read (Permission denied)",
    )


DICOM = bytes(128) + b"DICM" + bytes(100)


@pytest.mark.parametrize(
    "names", [["IM000001", "IM000002"], ["1.2.840.10008.1", "1.2.840.10008.2"]]
)
def test_dicom_files_are_known_by_what_they_hold(tmp_path: Path, names: list[str]) -> None:
    folder = Folder(path=Path(), others=(*names, "README.txt"))
    for name in names:
        (tmp_path / name).write_bytes(DICOM)

    [advice] = _noted(tmp_path, [folder])
    assert advice.startswith(f"DICOM files are not read, such as {names[0]} (2 in all): convert")

    (tmp_path / names[0]).write_bytes(b"plain text")
    assert _noted(tmp_path, [folder]) == ()


def test_a_dicomdir_and_its_files_are_counted_once(tmp_path: Path) -> None:
    names = ("DICOMDIR", "a.dcm", "b.IMA")
    for name in names:
        (tmp_path / name).write_bytes(DICOM)

    [advice] = _noted(tmp_path, [Folder(path=Path(), others=names)])

    assert "(3 in all)" in advice


def test_a_file_that_is_gone_is_no_dicom_file(tmp_path: Path) -> None:
    assert _noted(tmp_path, [Folder(path=Path(), others=("LICENSE",))]) == ()


def test_ordinary_files_are_not_mentioned(tmp_path: Path) -> None:
    names = ("survival_info.csv", "dataset.json", "notes.txt", "figure.png", "LICENSE")
    (tmp_path / "LICENSE").write_text("Apache")

    assert _noted(tmp_path, [Folder(path=Path(), others=names)]) == ()


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a_t1.nii", "loop", "folder/loop"):
        (tmp_path / name).symlink_to(Path(name).name)

    top, below = walk_folders(tmp_path)

    assert [str(scan.path) for scan in top.scans] == ["a_t1.nii"]
    assert (top.others, below.others) == (("loop",), ("loop",))


def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    for name in ("0001", "scan.dcm"):
        os.mkfifo(tmp_path / name)

    (folder,) = walk_folders(tmp_path)

    assert "scan.dcm (1 in all)" in _noted(tmp_path, [folder])[0]


def test_names_in_a_notice_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9\n.zip")).touch()

    assert r"such as caf\xe9\n.zip (1 in all)" in _noted(tmp_path, list(walk_folders(tmp_path)))[0]


def ids(inputs: tuple[Case, ...]) -> list[str]:
    return [one.case_id for one in inputs]


def paths_of(folder: Path) -> dict[str, Path]:
    case_id = folder.name
    names = ("t1", "t1ce", "t2", "flair")
    return {
        modality: folder / f"{case_id}_{name}.nii.gz"
        for modality, name in zip(MODALITIES, names, strict=True)
    }


def test_folders_are_searched_as_for_training(brats_root: Path, tmp_path: Path) -> None:
    write_case(tmp_path / "more", "BraTS-GLI-00003-000")

    inputs = find_inputs([brats_root, tmp_path / "more"])

    assert ids(inputs) == ["BraTS-GLI-00003-000", *(f"BraTS2021_{n:05d}" for n in range(6))]
    assert inputs[0].release == "brats2023-gli"
    assert all((one.root / scan.path).is_file() for one in inputs for scan in one.images)


def test_label_maps_of_scans_to_predict_do_not_matter(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "scans", "smith")
    for name in ("labels", "masks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "smith.nii.gz").touch()
    (folder / "smith_seg.nii.gz").unlink()

    (found,) = find_inputs([tmp_path])

    assert found.usable
    assert found.label is None


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_csv_table_names_files_relative_to_itself(tmp_path: Path, separator: str) -> None:
    folder = write_case(tmp_path / "scans")
    files = {modality: path.relative_to(tmp_path) for modality, path in paths_of(folder).items()}
    header = separator.join(["case_id", "t1", "t1ce", "t2", "FLAIR", "comment"])
    row = separator.join(["me", *map(str, files.values()), "new"])
    # spreadsheets put a mark before the first letter
    (tmp_path / "cases.csv").write_text(f"{header}\n{row}\n", encoding="utf-8-sig")

    (found,) = find_inputs([tmp_path / "cases.csv"])

    assert found.case_id == "me"
    assert [found.root / scan.path for scan in found.images] == [*paths_of(folder).values()]
    assert found.problems == ()


def test_a_json_table_may_name_volumes_of_a_4d_file(tmp_path: Path) -> None:
    row = {modality: f"all.nii.gz#{place}" for place, modality in enumerate(MODALITIES)}
    (tmp_path / "cases.json").write_text(json.dumps([{"case_id": "me", **row}]))

    (found,) = find_inputs([tmp_path / "cases.json"])

    assert [scan.volume for scan in found.images] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/b", "..", "a\\b", ".hidden", "c:a"])
def test_a_name_that_leaves_the_output_folder_is_a_problem(tmp_path: Path, name: str) -> None:
    row = {modality: f"{modality}.nii.gz" for modality in MODALITIES}
    (tmp_path / "cases.json").write_text(json.dumps([{"case_id": name, **row}]))

    (found,) = find_inputs([tmp_path / "cases.json"])

    assert (
        "cannot be the name of a file; expected a file name without special characters"
        in found.problems[0]
    )


def test_two_cases_of_one_id_are_both_refused(tmp_path: Path) -> None:
    """One of the results would overwrite the other."""
    for place in ("a", "b"):
        write_case(tmp_path / place)

    inputs = find_inputs([tmp_path / "a", tmp_path / "b"])

    assert ["found 2 cases of this id; expected one" in one.problems[0] for one in inputs] == [
        True,
        True,
    ]


def test_a_single_scan_file_is_refused_with_the_way_to_give_it(tmp_path: Path) -> None:
    path = tmp_path / "t1.nii.gz"
    path.touch()

    with pytest.raises(LayoutError, match="For one case give --t1n, --t1c"):
        find_inputs([path])


def test_four_files_are_called_by_what_their_names_share(tmp_path: Path) -> None:
    found = single_input(None, paths_of(tmp_path / "BraTS2021_00007"))

    assert found.case_id == "BraTS2021_00007"
    assert found.release == "brats2021"


def test_four_files_without_a_name_in_common_are_called_by_their_folder(tmp_path: Path) -> None:
    files = {modality: tmp_path / "Smith" / f"{modality}.nii" for modality in MODALITIES}

    assert single_input(None, files).case_id == "Smith"
    assert single_input("me", files).case_id == "me"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cases.csv", "case_id,t1n,t1c,t2w,t2f\n"),
        ("cases.csv", ""),
        ("cases.json", "[]"),
        ("cases.json", "[" * 100_000),
        ("cases.json", '[{"case_id": ' + "9" * 5000 + "}]"),
        ("cases.csv", bytes(range(256)) * 9),
        ("cases.csv", gzip.compress(b"case_id,t1n", mtime=0)),
        ("cases.json", bytes(range(256))),
        ("cases.csv", "id,t1n\na,b\n"),
        ("cases.csv", b"\xff\xfe\x00"),
        ("cases.json", "{"),
        ("cases.json", '{"case_id": "a"}'),
        ("cases.json", "[1]"),
    ],
)
def test_a_table_without_cases_is_refused(tmp_path: Path, name: str, content: str | bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(
        UsageError, match=rf"{name} (cannot be read .*Expected case_id, t1n, t1c|lists no cases)"
    ):
        find_inputs([path])


def test_a_long_id_in_a_table_is_a_problem_of_its_case(tmp_path: Path) -> None:
    row = {modality: f"{modality}.nii.gz" for modality in MODALITIES}
    rows = [
        {"case_id": "x" * 300, **row},
        {"case_id": "a\nb\0\ud800", **row},
        {"case_id": "c", **row},
    ]
    (tmp_path / "cases.json").write_text(json.dumps(rows))

    escaped, good, long = find_inputs([tmp_path / "cases.json"])

    assert good.problems == ()
    assert "found an id of 300 bytes" in long.problems[0]
    assert escaped.case_id == r"a\nb\x00\ud800"
    assert "cannot be the name of a file" in escaped.problems[0]
