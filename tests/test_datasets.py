import json
from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.discovery import find_cases
from brats_seg.errors import LayoutError

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


def cases_in(root: Path) -> dict[str, Case]:
    return {case.case_id: case for case in find_cases(root).cases}


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
    assert [str(case.t1n), str(case.t1c), str(case.t2w), str(case.t2f)] == [
        f"{image}#1",
        f"{image}#2",
        f"{image}#3",
        f"{image}#0",
    ]
    assert str(case.label) == "Task01_BrainTumour/labelsTr/BRATS_001.nii.gz"
    assert (case.release, case.label_convention, case.patient_id) == ("msd", "msd", "BRATS_001")
    assert case.usable
    assert sorted(found) == ["BRATS_001", "BRATS_485"]
    assert found["BRATS_485"].label is None
    assert found["BRATS_485"].label_convention == ""


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
    assert case.label_convention == "msd"
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

    assert cases_in(tmp_path)["BRATS_001"].label_convention == convention


def test_a_modality_that_is_not_described_is_missing(tmp_path: Path) -> None:
    write_dataset(tmp_path, {**MSD, "modality": {"0": "FLAIR", "1": "T1w"}}, "imagesTr/a.nii.gz")

    [problem] = cases_in(tmp_path)["a"].problems

    assert "file imagesTr/: found no t1c, t2w; expected t1n, t1c, t2w, t2f" in problem


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
