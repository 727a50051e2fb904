"""Which file is the label map of a case: UPENN-GBM, UCSF-PDGM, BIDS, and files of any name."""

from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.find import find_cases
from brats_seg.config_text import load_config
from brats_seg.data.fold import prepare_data
from brats_seg.errors import LayoutError
from tests.builders import touch, write_case

UPENN = "UPENN-GBM-00001_11"
BIDS = ("T1w", "ce-gadolinium_T1w", "T2w", "FLAIR")


def scans(stem: str, words: tuple[str, ...] = ("t1", "t1ce", "t2", "flair")) -> list[str]:
    return [f"{stem}_{word}.nii.gz" for word in words]


def only_case_in(root: Path, label_files: str | None = None) -> Case:
    [case] = find_cases(root, label_files=label_files).cases
    return case


def upenn(root: Path) -> Path:
    words = ("T1", "T1GD", "T2", "FLAIR")
    return touch(
        root,
        *scans(f"images_structural/{UPENN}/{UPENN}", words),
        *scans(f"images_structural_unstripped/{UPENN}/{UPENN}_unstripped", ("DTI",)),
        f"automated_segm/{UPENN}_automated_approx_segm.nii.gz",
    )


def test_upenn_keeps_label_maps_in_folders_of_their_own(tmp_path: Path) -> None:
    touch(upenn(tmp_path), f"images_segm/{UPENN}_segm.nii.gz")

    case = only_case_in(tmp_path)

    assert (case.case_id, case.patient_id, case.timepoint) == (UPENN, UPENN[:-3], "11")
    assert case.release == "upenn-gbm"
    assert str(case.label) == f"images_segm/{UPENN}_segm.nii.gz"
    assert case.usable
    assert case.remarks == ()


def test_a_label_map_by_a_program_is_taken_where_no_person_drew_one(tmp_path: Path) -> None:
    case = only_case_in(upenn(tmp_path))

    assert str(case.label) == f"automated_segm/{UPENN}_automated_approx_segm.nii.gz"
    assert case.remarks == ("the label map was made by a program, as its name says",)


def test_ucsf_has_many_files_beside_the_scans(tmp_path: Path) -> None:
    stem = "UCSF-PDGM-0004_nifti/UCSF-PDGM-0004"
    touch(
        tmp_path,
        *scans(stem, ("T1", "T1c", "T2", "FLAIR", "T1_bias", "T1c_bias", "T2_bias", "FLAIR_bias")),
        *scans(stem, ("ADC", "SWI_bias", "brain_segmentation", "brain_parenchyma_segmentation")),
        *scans(stem, ("tumor_segmentation",)),
    )

    case = only_case_in(tmp_path)

    assert (case.case_id, case.release) == ("UCSF-PDGM-0004", "ucsf-pdgm")
    assert [str(scan) for scan in case.images] == scans(stem, ("T1", "T1c", "T2", "FLAIR"))
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
        *scans("sub-01/ses-1/anat/sub-01_ses-1", words),
        *scans("derivatives/manual/sub-01/anat/sub-01", ("desc-brain_mask", "label-GM_probseg")),
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
        touch(tmp_path, *scans(f"sub-01/ses-{session}/anat/sub-01_ses-{session}", BIDS))
    touch(tmp_path, "derivatives/manual/sub-01/anat/sub-01_dseg.nii.gz")

    assert [case.label for case in find_cases(tmp_path).cases] == [None, None]


def test_the_label_map_is_in_the_space_of_the_scans(tmp_path: Path) -> None:
    folder = "derivatives/pre/sub-01/anat/sub-01_space-SRI24"
    words = ("desc-preproc_T1w", "ce-gd_T1w", "T2w", "FLAIR")
    other = "derivatives/pre/sub-01/anat/sub-01_space-T1w_desc-tumor_dseg.nii.gz"
    touch(tmp_path, *scans(folder, (*words, "desc-tumor_dseg")), other)

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
    touch(tmp_path, *scans("smith/smith"), *scans("jones/jones"), name)

    jones, smith = find_cases(tmp_path).cases

    assert str(smith.label) == name
    assert smith.usable
    assert jones.label is None


def test_a_mask_is_taken_only_without_a_segmentation(tmp_path: Path) -> None:
    """Beside a segmentation it is mostly that of the brain."""
    touch(tmp_path, *scans("smith/smith", ("t1", "t1ce", "t2", "flair", "seg", "mask")))

    assert str(only_case_in(tmp_path).label) == "smith/smith_seg.nii.gz"


def test_two_label_maps_that_fit_equally_well_are_a_problem(tmp_path: Path) -> None:
    touch(tmp_path, *scans("a/smith/smith"), "masks/smith.nii.gz", "labels/smith.nii.gz")

    [problem] = only_case_in(tmp_path).problems

    assert problem == (
        "case smith, file labels/smith.nii.gz and masks/smith.nii.gz: found 2 files for label map; "
        "expected one. Remove or rename the others, or name the right ones with --label-files."
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
    touch(tmp_path, *scans("smith/smith"), *scans("jones/jones"), name, "labels/smith.nii.gz")

    found = {case.case_id: case.label for case in find_cases(tmp_path, label_files=pattern).cases}

    assert str(found["smith"]) == name
    assert found["jones"] is None


def test_a_pattern_finds_the_cases_of_a_flat_folder(tmp_path: Path) -> None:
    names = ("case_1", "case_10")
    for name in names:
        touch(tmp_path, *scans(name), f"{name}_tumour_v2.nii.gz")

    found = find_cases(tmp_path, label_files="*_v2.nii.gz").cases

    assert [str(case.label) for case in found] == [f"{name}_tumour_v2.nii.gz" for name in names]


def test_a_pattern_without_a_label_map_says_what_there_is(tmp_path: Path) -> None:
    touch(tmp_path, *scans("smith/smith"), "smith/smith_final.nii.gz")

    with pytest.raises(
        LayoutError,
        match=r"label map called '\*_tumour\.nii\.gz'; the files .* are smith/smith_final\.nii\.gz",
    ):
        find_cases(tmp_path, label_files="*_tumour.nii.gz")


LAYOUTS = {
    "upenn-gbm": (
        "images_structural/UPENN-GBM-{n:05d}_11/UPENN-GBM-{n:05d}_11_{word}.nii.gz",
        ("T1", "T1GD", "T2", "FLAIR"),
        "images_segm/UPENN-GBM-{n:05d}_11_segm.nii.gz",
    ),
    "ucsf-pdgm": (
        "UCSF-PDGM-{n:04d}_nifti/UCSF-PDGM-{n:04d}_{word}.nii.gz",
        ("T1", "T1c", "T2", "FLAIR"),
        "UCSF-PDGM-{n:04d}_nifti/UCSF-PDGM-{n:04d}_tumor_segmentation.nii.gz",
    ),
    "bids": (
        "sub-{n:02d}/ses-1/anat/sub-{n:02d}_ses-1_{word}.nii.gz",
        BIDS,
        "derivatives/manual/sub-{n:02d}/ses-1/anat/sub-{n:02d}_ses-1_label-tumor_mask.nii.gz",
    ),
    "unknown": (
        "patient{n}/raw_bet/{word}.nii.gz",
        ("t1_bet", "ct1_bet", "t2_bet", "t2_flair_bet"),
        "patient{n}/raw_bet/segmentation.nii.gz",
    ),
}


@pytest.mark.parametrize("release", LAYOUTS)
def test_every_layout_is_prepared_for_training(tmp_path: Path, release: str) -> None:
    scan, words, label = LAYOUTS[release]
    root = tmp_path / "scans"
    for n in range(4):
        folder = write_case(tmp_path / "made", f"BraTS2021_{n:05d}", seed=n)
        names = (*(scan.format(n=n, word=word) for word in words), label.format(n=n))
        for word, name in zip(("t1", "t1ce", "t2", "flair", "seg"), names, strict=True):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{folder.name}_{word}.nii.gz").rename(root / name)
    config = load_config(preset="demo", values={"folds.n_folds": 2})

    prepared = prepare_data(root, config=config, prepared_path=tmp_path / "ready")

    assert len(prepared.case_ids) == 4
    assert {case.release for case in find_cases(root).cases} == {release}
