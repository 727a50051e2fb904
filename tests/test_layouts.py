"""Folders and names of files, ids, releases and label conventions."""

import csv
import os
import re
from pathlib import Path

import pytest

from brats_seg.cases import layouts, releases
from brats_seg.cases.find import find_cases
from brats_seg.errors import LayoutError
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD, LabelConvention
from brats_seg.voxels.box import Triple
from tests.builders import touch


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("t1n", "BraTS2021_00000|_t1.nii.gz, BraTS-GLI-00000-000|-t1n.nii.gz, |_t1.nii"),
        ("t1n", "sub-01_ses-02|_T1w.nii.gz"),
        ("t1c", "BraTS20_Training_001|_t1ce.nii, BraTS-GLI-00000-000|-t1c.nii.gz, |CT1.nii.gz"),
        (
            "t1c",
            "BraTS-MEN-RT-0002-1|_t1c.nii.gz, AX_T1_POST_GAD_se2d1r|_t1c.nii.gz, patient 7| t1gd.nii",
        ),
        ("t1c", "UPENN-GBM-00001_11|_T1GD.nii.gz, smith|_T1_post.nii.gz"),
        ("t1c", "sub-01_ses-02|_ce-gadolinium_T1w.nii.gz, sub-01|_acq-postcontrast_T1w.nii.gz"),
        ("t2w", "BraTS-SSA-00002-000|-t2W.nii.gz, BraTS2021_00000|_T2.NII.GZ"),
        ("t2w", "MRHR_T2_AX_tse2d1_11|_t2.nii.gz"),
        ("t2f", "Brats17_2013_2_1|_flair.nii.gz, BraTS-GLI-00000-000|-t2f.nii, |flair.nii"),
        ("t2f", "AX_SE_IR_5_tir2d1_21|_fla.nii.gz, smith|_T2_FLAIR.nii.gz, sub-01|_FLAIR.nii.gz"),
        ("label", "BraTS2021_00000|_seg.nii.gz, UPENN-GBM-00001_11|_segm.nii.gz"),
        ("label", "UPENN-GBM-00001_11|_automated_approx_segm.nii.gz, |segmentation.nii.gz"),
        ("label", "UCSF-PDGM-0004|_tumor_segmentation.nii.gz, smith|_tumour-mask.nii.gz"),
        ("label", "smith|_ground_truth.nii.gz"),
    ],
)
def test_the_modality_is_the_last_word_of_a_name(kind: str, names: str) -> None:
    for case, rest in (name.split("|") for name in names.split(", ")):
        found = layouts.parse_file_name(case + rest)
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
        ("sub-01_t1c_BET", "t1c", "BET"),
    ],
)
def test_the_entities_of_a_bids_name_are_its_variant(name: str, kind: str, variant: str) -> None:
    expected = layouts.NamedFile(stem=name, case="sub-01", kind=kind, variant=variant)
    assert layouts.parse_file_name(f"{name}.nii.gz") == expected


@pytest.mark.parametrize(
    "stems",
    [
        "Brats18_TCIA01_201_1 seg-BraTS23_1 BraTS2021_00006_seg_labels_1_2_3 BRATS_001 case_0000",
        "xt1 t1_mapping BraTS-MEN-RT-0002-1_gtv bet brain_mask t1_bet_mask smith_T1w_mask x_t1ce-t1",
        "UCSF-PDGM-0004_brain_segmentation UCSF-PDGM-0004_brain_parenchyma_segmentation",
        "UPENN-GBM-00001_11_T1_unstripped sub-01_desc-brain_mask sub-01_label-WM_mask sub-01_dwi",
    ],
)
def test_a_name_without_a_modality_at_its_end_has_none(stems: str) -> None:
    for stem in stems.split():
        assert layouts.parse_file_name(f"{stem}.nii.gz") == layouts.NamedFile(stem=stem)


def test_other_files_are_no_scans() -> None:
    names = ("name_mapping.csv", "scan.nii.txt", "scan.gz", ".nii", "nii", "scan.nii.bz2")
    assert list(map(layouts.parse_file_name, names)) == [None] * len(names)


@pytest.mark.parametrize(
    ("release", "case_ids"),
    [
        ("brats2017", "Brats17_<2013_2>_1 Brats17_<TCIA_201>_1"),
        ("brats2018", "Brats18_TCIA01_201_1=TCIA_201 Brats18_<CBICA_ABT>_1"),
        ("brats2019", "BraTS19_<CBICA_AAB>_1"),
        ("brats2020", "<BraTS20_Training_355> <BraTS20_Validation_001>"),
        ("brats2021", "<BraTS2021_00000>"),
        ("brats2023-gli", "<BraTS-GLI-00005>-000 <BraTS-GLI-00005>-099"),
        ("brats2024-gli", "<BraTS-GLI-00005>-100 <BraTS-GLI-02405>-101"),
        ("brats-men", "<BraTS-MEN-00004>-000"),
        ("brats-met", "<BraTS-MET-00086>-000"),
        ("brats-ped", "<BraTS-PED-00002>-000"),
        ("brats-ssa", "<BraTS-SSA-00002>-000"),
        ("brats-goat", "<BraTS-GoAT-00000>"),
        ("brats2024-men-rt", "<BraTS-MEN-RT-0002>-1"),
        ("upenn-gbm", "<UPENN-GBM-00001>_11"),
        ("ucsf-pdgm", "<UCSF-PDGM-0004> <UCSF-PDGM-0429>_FU003d"),
        ("ucsd-ptgbm", "<UCSD-PTGBM-0002>_01"),
        ("ucsf-alptdg", "<100001>_time2"),
        ("mu-glioma-post", "<PatientID_0003>_Timepoint_12"),
        ("rhuh-gbm", "<RHUH-0001>_2"),
        ("tcga-glioma", "<TCGA-02-0006>_1996.08.23"),
        ("bids", "<sub-01> <sub-01>_ses-pre"),
        ("unknown", "<TCGA-FG-6692_atlas> <BraTS2021_00000_old> <BraTS-GLI-0005-000>"),
        (
            "unknown",
            "<P-001>_week-000-2 <a_7>_FU <b>-post-op 2 <c_scan_3> <d4>_2020-01-31 <d4>_31.01.2020 <glioma_20200131>",
        ),
    ],
)
def test_an_id_tells_release_and_patient(release: str, case_ids: str) -> None:
    """The patient is the part in angle brackets, or what follows the sign of equality."""
    for marked in case_ids.split():
        case_id, _, patient_id = marked.partition("=")
        patient_id = patient_id or re.sub(".*<|>.*", "", marked)
        assert releases.parse_case_id(re.sub("[<>]", "", case_id)) == (release, patient_id)


SHAPE_2024 = (182, 218, 182)
SHAPE = (240, 240, 155)
ALL_OF_2024 = [(0, 1, 2, 4), (0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 2), ()]


@pytest.mark.parametrize(
    ("release", "shape", "values", "expected"),
    [
        # otherwise the resection cavity, 4, would be scored as enhancing tumour
        *(("brats2023-gli", SHAPE_2024, v, ("brats2024-gli", "brats2024")) for v in ALL_OF_2024),
        # without a shape the name decides
        ("brats2023-gli", None, (0, 1, 2, 4), ("brats2023-gli", "brats2017")),
        ("brats-ssa", SHAPE_2024, (0, 1, 2, 3), ("brats-ssa", "brats2023")),
        ("brats2017", SHAPE, (0, 1, 2, 4), ("brats2017", "brats2017")),
        ("brats2021", SHAPE, (0, 1, 2), ("brats2021", "brats2017")),
        ("brats2021", SHAPE, (0, 1, 2, 3), ("brats2021", "brats2023")),
        ("brats2024-gli", SHAPE, (0, 1, 2, 4), ("brats2024-gli", "brats2024")),
        ("brats-ped", SHAPE, (0, 1, 2, 4), ("brats-ped", "brats2024-ped")),
        ("brats-ped", SHAPE, (0, 1, 2, 3), ("brats-ped", "brats2023?")),
        *(("msd", SHAPE, v, ("msd", "msd")) for v in ((0, 1, 2, 3), (0, 1, 2, 4))),
        ("nnunet", SHAPE, (0, 1, 2, 4), ("nnunet", "brats2017?")),
        ("bids", SHAPE, (0, 1, 2, 4), ("bids", "brats2017?")),
        ("unknown", SHAPE, (0, 1, 2, 4), ("unknown", "brats2017?")),
        ("unknown", SHAPE, (0, 1, 2, 3), ("unknown", "brats2023?")),
        ("unknown", SHAPE, (0, 1, 2, 3, 4), ("unknown", "brats2024?")),
        ("unknown", SHAPE, (), ("unknown", "brats2023?")),
    ],
)
def test_release_shape_and_values_tell_the_convention(release, shape, values, expected):
    """A question mark: neither name nor values decide."""
    release = releases.release_at(release, shape)
    convention, is_ambiguous = releases.resolve_convention(release, values)
    assert (release, convention.name + "?" * is_ambiguous) == expected


def conventions(values: dict[str, set[int]], shape: Triple = SHAPE) -> list[LabelConvention]:
    maps = {name: (shape, frozenset(of)) for name, of in values.items()}
    return list(releases.resolve_conventions(maps, {}).values())


PED, MET, GLI = "BraTS-PED-0000", "BraTS-MET-0000", "BraTS-GLI-0000"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({f"{GLI}1-000": {0, 1, 2, 4}}, [BRATS2017]),
        ({f"{GLI}5-100": {0, 1, 2, 3, 4}}, [BRATS2024]),
        ({"BRATS_001": {0, 1, 2, 3}, "BRATS_0001": {0, 1, 2, 3}}, [MSD, BRATS2023]),
        ({"patient7": {0}}, [BRATS2023]),
        # one map with 3 and 4 tells what 4 is in the others
        ({"a": {0, 1, 2, 4}, "b": {0, 3, 4}, "c": {0, 3}}, [BRATS2024] * 3),
        ({"a": {0, 1, 2, 4}, "b": {0, 3, 4}}, [BRATS2024] * 2),
        # unless most have 4 alone: then that one is wrong, and not the others
        ({"a": {1, 2, 4}, "b": {1, 2, 4}, "c": {0, 3, 4}}, [BRATS2017, BRATS2017, BRATS2024]),
        # maps of two conventions in one folder are each read in their own
        ({"a": {0, 1, 2, 4}, "b": {0, 1, 2, 3}}, [BRATS2017, BRATS2023]),
        # 4 in another release tells nothing about paediatric maps
        ({f"{PED}1-000": {0, 1, 2}, f"{GLI}5-100": {0, 1, 2, 3, 4}}, [BRATS2023, BRATS2024]),
        # after treatment 4 is the cavity, though nothing enhances
        ({f"{GLI}5-100": {0, 1, 2, 4}}, [BRATS2024]),
        # otherwise the tumour core of a child without enhancing tumour would lose a label
        *(
            (
                {
                    f"{task}1-000": {0, 1, 2, 4},
                    f"{task}2-000": {0, 1, 2},
                    f"{GLI}1-000": {0, 1, 2, 3},
                },
                [convention, convention, BRATS2023],
            )
            for task, convention in ((PED, BRATS2024_PED), (MET, BRATS2024))
        ),
    ],
)
def test_maps_resolve_others(values: dict[str, set[int]], expected: list[LabelConvention]) -> None:
    assert conventions(values) == expected
    # the shape counts too
    assert conventions({f"{GLI}1-000": {0, 1, 2, 4}}, SHAPE_2024) == [BRATS2024]


def test_a_folder_lists_scans_and_other_files_apart(tmp_path: Path) -> None:
    names = ("b_t1.nii.gz", "a_t1.nii", "notes.txt", "b/x.nii", "b/y_t1.nii/x", "b/y_t1.nii/z")
    top, below, *_ = layouts.walk_folders(touch(tmp_path, *names))
    assert [str(scan.path) for scan in top.scans] == ["a_t1.nii", "b_t1.nii.gz"]
    assert top.other_names == ("notes.txt",)
    # a folder called like a file that does not hold a single file is a folder
    assert (below.path, [str(scan.path) for scan in below.scans]) == (Path("b"), ["b/x.nii"])


def test_an_unreadable_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "smith_t1.nii", "locked/x")
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    locked = layouts.Folder(path=Path("locked"), refused="Permission denied")
    assert list(layouts.walk_folders(tmp_path))[1] == locked
    assert find_cases(tmp_path).notices == ("the folder locked cannot be read (Permission denied)",)


@pytest.mark.parametrize(
    ("names", "content", "is_dicom"),
    [
        (("CHECKSUM", "IM000001"), bytes(128) + b"DICM" + bytes(100), True),
        (("README.txt", "1.2.840.10008.1"), bytes(128) + b"DICM", True),
        (("DICOMDIR", "README.txt"), b"", True),
        (("LICENSE", "IM000001"), b"plain text", False),
    ],
)
def test_dicom_files_are_known_by_what_they_hold(tmp_path, names, content, is_dicom):
    touch(tmp_path, *(f"p/{name}" for name in names))
    (tmp_path / "p" / names[-1]).write_bytes(content)
    assert layouts.holds_dicom(tmp_path) is is_dicom
    with pytest.raises(LayoutError) as refused:
        find_cases(tmp_path)
    assert ("DICOM files are not read, such as p (1 in all)" in str(refused.value)) is is_dicom
    assert not layouts.holds_dicom(touch(tmp_path, "smith_t1.nii"))


def test_links_to_themselves_and_pipes_are_neither_followed_nor_opened(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a_t1.nii", "loop", "folder/loop"):
        (tmp_path / name).symlink_to(Path(name).name)
    os.mkfifo(tmp_path / "0001")
    top, below = layouts.walk_folders(tmp_path)
    assert [str(scan.path) for scan in top.scans] == ["a_t1.nii"]
    assert (top.other_names, below.other_names) == (("0001", "loop"), ("loop",))
    assert not layouts.holds_dicom(tmp_path / "folder")
    assert find_cases(tmp_path).cases[0].modalities == ("t1n",)


@pytest.mark.real
def test_ids_of_three_years_name_one_patient(real_data: Path) -> None:
    columns = [f"BraTS_{year}_subject_ID" for year in (2017, 2018, 2019)]
    with (real_data / "tables" / "name_mapping.csv").open() as stream:
        rows = [[row[n] for n in columns if row[n] != "NA"] for row in csv.DictReader(stream)]
    patients = [{releases.parse_case_id(case_id)[1] for case_id in row} for row in rows]
    assert all(len(patient) == 1 for patient in patients)
    assert len(set.union(*patients)) == len(rows) == 335
