import csv
from pathlib import Path

import pytest

from brats_seg.cases.layouts import (
    NamedFile,
    grade_of,
    is_label_folder,
    modality_named,
    parse_case_id,
    parse_file_name,
)


@pytest.mark.parametrize(
    ("name", "case", "kind"),
    [
        ("Brats17_2013_2_1_flair.nii.gz", "Brats17_2013_2_1", "t2f"),
        ("BraTS20_Training_001_t1ce.nii", "BraTS20_Training_001", "t1c"),
        ("BraTS2021_00000_t1.nii.gz", "BraTS2021_00000", "t1n"),
        ("BraTS2021_00000_seg.nii.gz", "BraTS2021_00000", "label"),
        ("BraTS-GLI-00000-000-t1n.nii.gz", "BraTS-GLI-00000-000", "t1n"),
        ("BraTS-GLI-00000-000-t1c.nii.gz", "BraTS-GLI-00000-000", "t1c"),
        ("BraTS-GLI-00000-000-t2f.nii", "BraTS-GLI-00000-000", "t2f"),
        ("BraTS-SSA-00002-000-t2W.nii.gz", "BraTS-SSA-00002-000", "t2w"),
        ("BraTS2021_00000_T2.NII.GZ", "BraTS2021_00000", "t2w"),
        ("BraTS-MEN-RT-0002-1_t1c.nii.gz", "BraTS-MEN-RT-0002-1", "t1c"),
        ("AX_SE_IR_5_tir2d1_21_fla.nii.gz", "AX_SE_IR_5_tir2d1_21", "t2f"),
        ("AX_T1_POST_GAD_se2d1r_t1c.nii.gz", "AX_T1_POST_GAD_se2d1r", "t1c"),
        ("MRHR_T2_AX_tse2d1_11_t2.nii.gz", "MRHR_T2_AX_tse2d1_11", "t2w"),
        ("flair.nii", "", "t2f"),
        ("_t1.nii", "", "t1n"),
        ("patient 7 t1gd.nii", "patient 7", "t1c"),
        ("UPENN-GBM-00001_11_T1GD.nii.gz", "UPENN-GBM-00001_11", "t1c"),
        ("UPENN-GBM-00001_11_segm.nii.gz", "UPENN-GBM-00001_11", "label"),
        ("UPENN-GBM-00001_11_automated_approx_segm.nii.gz", "UPENN-GBM-00001_11", "label"),
        ("UCSF-PDGM-0004_tumor_segmentation.nii.gz", "UCSF-PDGM-0004", "label"),
        ("segmentation.nii.gz", "", "label"),
        ("smith_tumour-mask.nii.gz", "smith", "label"),
        ("smith_ground_truth.nii.gz", "smith", "label"),
        ("CT1.nii.gz", "", "t1c"),
        ("smith_T1_post.nii.gz", "smith", "t1c"),
        ("smith_T2_FLAIR.nii.gz", "smith", "t2f"),
        ("sub-01_ses-02_T1w.nii.gz", "sub-01_ses-02", "t1n"),
        ("sub-01_ses-02_ce-gadolinium_T1w.nii.gz", "sub-01_ses-02", "t1c"),
        ("sub-01_acq-postcontrast_T1w.nii.gz", "sub-01", "t1c"),
        ("sub-01_FLAIR.nii.gz", "sub-01", "t2f"),
    ],
)
def test_the_modality_is_the_last_word_of_a_name(name: str, case: str, kind: str) -> None:
    found = parse_file_name(name)

    assert found is not None
    assert (found.case, found.kind, found.variant) == (case, kind, "")


@pytest.mark.parametrize(
    ("name", "kind", "variant"),
    [
        ("sub-01_acq-axial_run-2_T2w", "t2w", "acq-axial_run-2"),
        ("sub-01_ce-gd_space-SRI24_T1w", "t1c", "space-SRI24"),
        ("sub-01_acq-precontrast_T1w", "t1n", "acq-precontrast"),
        ("sub-01_ce-none_T1w", "t1n", "ce-none"),
        ("sub-01_acq-space_T1w", "t1n", "acq-space"),
        ("sub-01_space-T1w_label-tumor_mask", "label", "space-T1w_label-tumor"),
        ("sub-01_desc-tumor_dseg", "label", "desc-tumor"),
        ("sub-01_T1w_seg", "label", ""),
        ("sub-01_T1_bias", "t1n", "bias"),
    ],
)
def test_the_entities_of_a_bids_name_are_its_variant(name: str, kind: str, variant: str) -> None:
    assert parse_file_name(f"{name}.nii.gz") == NamedFile(
        stem=name, case="sub-01", kind=kind, variant=variant
    )


@pytest.mark.parametrize(
    ("name", "is_for_labels"),
    [
        ("images_segm", True),
        ("automated_segm", True),
        ("labels", True),
        ("Masks", True),
        ("tumor segmentations", True),
        ("labels_1_2_3", False),
        ("predictions", False),
        ("images_structural", False),
    ],
)
def test_folders_of_label_maps_are_known_by_their_names(name: str, is_for_labels: bool) -> None:
    assert is_label_folder(name) == is_for_labels


@pytest.mark.parametrize("word", ["bet", "BET", "brain", "bias"])
def test_what_a_program_appends_is_told_apart(word: str) -> None:
    assert parse_file_name(f"scan_t1c_{word}.nii.gz") == NamedFile(
        stem=f"scan_t1c_{word}", case="scan", kind="t1c", variant=word
    )


@pytest.mark.parametrize(
    "stem",
    [
        "Brats18_TCIA01_201_1",
        "seg-BraTS23_1",
        "BraTS2021_00006_seg_labels_1_2_3",
        "BRATS_001",
        "case_0000",
        "xt1",
        "t1_mapping",
        "BraTS-MEN-RT-0002-1_gtv",
        "bet",
        "brain_mask",
        "t1_bet_mask",
        "smith_T1w_mask",
        "UCSF-PDGM-0004_brain_segmentation",
        "UCSF-PDGM-0004_brain_parenchyma_segmentation",
        "UPENN-GBM-00001_11_T1_unstripped",
        "sub-01_desc-brain_mask",
        "sub-01_label-WM_mask",
        "sub-01_dwi",
    ],
)
def test_a_name_without_a_modality_at_its_end_has_none(stem: str) -> None:
    assert parse_file_name(f"{stem}.nii.gz") == NamedFile(stem=stem)


@pytest.mark.parametrize(
    "name", ["name_mapping.csv", "scan.nii.txt", "scan.gz", ".nii", "nii", "scan.nii.bz2"]
)
def test_other_files_are_no_scans(name: str) -> None:
    assert parse_file_name(name) is None


@pytest.mark.parametrize(
    ("case_id", "release", "patient_id"),
    [
        ("Brats17_2013_2_1", "brats2017", "2013_2"),
        ("Brats17_TCIA_201_1", "brats2017", "TCIA_201"),
        ("Brats18_TCIA01_201_1", "brats2018", "TCIA_201"),
        ("Brats18_CBICA_ABT_1", "brats2018", "CBICA_ABT"),
        ("BraTS19_CBICA_AAB_1", "brats2019", "CBICA_AAB"),
        ("BraTS20_Training_355", "brats2020", "BraTS20_Training_355"),
        ("BraTS20_Validation_001", "brats2020", "BraTS20_Validation_001"),
        ("BraTS2021_00000", "brats2021", "BraTS2021_00000"),
        ("BraTS-GLI-00005-000", "brats2023-gli", "BraTS-GLI-00005"),
        ("BraTS-GLI-00005-099", "brats2023-gli", "BraTS-GLI-00005"),
        ("BraTS-GLI-00005-100", "brats2024-gli", "BraTS-GLI-00005"),
        ("BraTS-GLI-02405-101", "brats2024-gli", "BraTS-GLI-02405"),
        ("BraTS-MEN-00004-000", "brats-men", "BraTS-MEN-00004"),
        ("BraTS-MET-00086-000", "brats-met", "BraTS-MET-00086"),
        ("BraTS-PED-00002-000", "brats-ped", "BraTS-PED-00002"),
        ("BraTS-SSA-00002-000", "brats-ssa", "BraTS-SSA-00002"),
        ("BraTS-GoAT-00000", "brats-goat", "BraTS-GoAT-00000"),
        ("BraTS-MEN-RT-0002-1", "brats2024-men-rt", "BraTS-MEN-RT-0002"),
        ("UPENN-GBM-00001_11", "upenn-gbm", "UPENN-GBM-00001"),
        ("UCSF-PDGM-0004", "ucsf-pdgm", "UCSF-PDGM-0004"),
        ("UCSF-PDGM-0429_FU003d", "ucsf-pdgm", "UCSF-PDGM-0429"),
        ("sub-01", "bids", "sub-01"),
        ("sub-01_ses-pre", "bids", "sub-01"),
        ("TCGA-FG-6692_atlas", "unknown", "TCGA-FG-6692_atlas"),
        ("BraTS2021_00000_old", "unknown", "BraTS2021_00000_old"),
        ("BraTS-GLI-0005-000", "unknown", "BraTS-GLI-0005-000"),
        ("", "unknown", ""),
    ],
)
def test_an_id_tells_release_and_patient(case_id: str, release: str, patient_id: str) -> None:
    assert parse_case_id(case_id) == (release, patient_id)


@pytest.mark.parametrize(
    ("word", "modality"),
    [
        ("FLAIR", "t2f"),
        ("T1w", "t1n"),
        ("t1gd", "t1c"),
        ("T2w", "t2w"),
        ("T1 post", "t1c"),
        ("T2-FLAIR", "t2f"),
        ("seg", None),
        ("CT", None),
    ],
)
def test_words_of_a_description_are_modalities(word: str, modality: str | None) -> None:
    assert modality_named(word) == modality


def test_the_grade_is_a_folder_above() -> None:
    assert grade_of(["Brats18_1", "HGG", "BraTS2018"]) == "HGG"
    assert grade_of(["a", "lgg"]) == "LGG"
    assert grade_of(["LGG-study", "case"]) == ""


@pytest.mark.real
def test_ids_of_three_years_name_one_patient(real_data: Path) -> None:
    columns = [f"BraTS_{year}_subject_ID" for year in (2017, 2018, 2019)]
    with (real_data / "tables" / "name_mapping.csv").open() as stream:
        rows = [
            [row[name] for name in columns if row[name] != "NA"] for row in csv.DictReader(stream)
        ]

    patients = [{parse_case_id(case_id)[1] for case_id in row} for row in rows]

    assert all(len(patient) == 1 for patient in patients)
    assert len(set.union(*patients)) == len(rows) == 335
