"""Finding the cases of every layout: files, ids, label maps, inputs, and advice on what is not read."""

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.find import find_cases, find_inputs, single_input
from brats_seg.cases.layouts import walk_folders
from brats_seg.errors import LayoutError, UsageError
from brats_seg.labels import MODALITIES
from tests.builders import touch

LEGACY = ("_t1", "_t1ce", "_t2", "_flair")
PLAIN = ("t1", "t1ce", "t2", "flair")
BIDS = ("_T1w", "_ce-gadolinium_T1w", "_T2w", "_FLAIR")
SESSION = ("_acq-ax_T1w", "_acq-ax_ce-gd_T1w", "_T2w", "_acq-space_FLAIR")
PROCESSED = ("_t1_bet", "_t1ce_bet", "_t2_bet", "_flair_bet")
SCANNER = ("AX_9_t1_bet", "AXPOST_t1c_bet", "TSE_t2_bet", "IR_fla_bet")
CASE = "BraTS2021_00007"
CASE_355 = "BraTS20_Training_355"
UPENN, UCSF = "UPENN-GBM-00001_11", "UCSF-PDGM-0004"
SES = "sub-01/ses-1"
AUTOMATED = f"automated_segm/{UPENN}_automated_approx_segm.nii.gz"


def scans(stem: str, suffixes: Sequence[str] = LEGACY, end: str = ".nii.gz") -> list[str]:
    return [f"{stem}{suffix}{end}" for suffix in suffixes]


def cases_in(root: Path, **options: str) -> dict[str, Case]:
    cases = find_cases(root, **options).cases
    assert len({case.case_id for case in cases}) == len(cases)
    return {case.case_id: case for case in cases}


def only_case_in(root: Path, **options: str) -> Case:
    [case] = find_cases(root, **options).cases
    return case


def names_of(case: Case) -> list[str]:
    """Return the files of the modalities in their order, and then the label map."""
    return [str(scan) for scan in (*case.images, case.label) if scan]


LABELLED = [*scans("a/smith/smith"), "labels/smith.nii.gz"]
KAGGLE = scans(f"{CASE}/{CASE}", (*LEGACY, "_seg"), ".nii")
UPENN_SCANS = scans(f"images/{UPENN}/{UPENN}", ("_T1", "_T1GD", "_T2", "_FLAIR"))


@pytest.mark.parametrize(
    ("ignored", "expected"),
    [
        ([], {"smith": scans("x/smith"), "jones": scans("x/jones", PROCESSED)}),
        ([], {CASE: scans(CASE), **{n: scans(n, (*LEGACY, "_seg")) for n in (CASE_355, "smith")}}),
        # names without anything in common are the case of their folder
        ([], {"TCGA-FG-6692_native": scans("x/TCGA-FG-6692_native/", SCANNER)}),
        ([], {CASE: scans(f"{CASE}/", (*PLAIN, "seg"), ".nii")}),
        # what was made from a case in its folder is no case
        (scans(f"{CASE}/{CASE}_n4"), {CASE: scans(f"{CASE}/{CASE}")}),
        (scans("patient/scan", ("_t1_bet", "_t2_brain")), {"patient": scans("patient/scan")}),
        (scans("smith/smith", ("_t1", "_t2")), {"smith": scans("smith/smith", PROCESSED)}),
        # beside a segmentation, a mask is mostly that of the brain
        (["smith/smith_mask.nii.gz"], {"smith": scans("smith/smith", (*LEGACY, "_seg"))}),
        # an unpacked file goes before its archive
        (scans("smith/smith"), {"smith": scans("smith/smith", end=".nii")}),
        # folders called like files, as on Kaggle
        *(
            ([], {CASE: [f"{name}/{inner or Path(name).name}" for name in KAGGLE]})
            for inner in ("", "00000057_brain_flair.nii", "anything")
        ),
        # label maps elsewhere
        *(
            (scans("jones/jones"), {"smith": [*scans("smith/smith"), name]})
            for name in (
                "labels/smith.nii.gz",
                "labels/smith_seg.nii.gz",
                "masks/smith/tumour.nii.gz",
                "smith/segmentation/anything.nii.gz",
                "smith/mask.nii.gz",
                "smith/smith_tumor_mask.nii.gz",
            )
        ),
        # one drawn by a person goes before one of a program, which is taken where there is no other
        ([AUTOMATED], {UPENN: [*UPENN_SCANS, f"images_segm/{UPENN}_segm.nii.gz"]}),
        ([], {UPENN: [*UPENN_SCANS, AUTOMATED]}),
        (
            scans(f"x/{UCSF}", ("_T1_bias", "_T1c_bias", "_ADC", "_brain_parenchyma_segmentation")),
            {UCSF: scans(f"x/{UCSF}", ("_T1", "_T1c", "_T2", "_FLAIR", "_tumor_segmentation"))},
        ),
        *(
            (
                [
                    *scans("derivatives/a/sub-01/anat/sub-01", ("_desc-brain_mask",)),
                    "derivatives/a/sub-01/anat/sub-01_label-GM_probseg.nii.gz",
                ],
                {"sub-01_ses-1": [*scans(f"{SES}/anat/sub-01_ses-1", SESSION), f"{name}.nii.gz"]},
            )
            for name in (
                f"derivatives/manual/{SES}/anat/sub-01_ses-1_desc-tumor_dseg",
                f"derivatives/manual/{SES}/anat/sub-01_ses-1_space-T1w_label-tumor_mask",
                f"{SES}/anat/sub-01_ses-1_dseg",
            )
        ),
        # complete derivatives are taken instead of raw scans
        (
            [
                *scans("sub-01/anat/sub-01", (*BIDS, "_run-2_T1w")),
                *scans("derivatives/pre/sub-02/anat/sub-02_space-SRI24", BIDS[:1]),
            ],
            {
                "sub-01": scans("Derivatives/pre/sub-01/anat/sub-01_space-SRI24", BIDS),
                "sub-02": scans("sub-02/anat/sub-02", BIDS),
            },
        ),
    ],
)
def test_names_tell_files(tmp_path, ignored, expected):
    """The case `jones` is ignored where it is only a neighbour."""
    touch(tmp_path, *ignored, *(name for names in expected.values() for name in names))
    cases = cases_in(tmp_path)
    found = {name: names_of(case) for name, case in cases.items()}
    assert found | expected == found
    assert found.keys() - expected.keys() <= {"jones"}
    assert all(case.usable and not case.remarks for case in cases.values())


def test_the_case_folder_itself_can_be_given(tmp_path: Path) -> None:
    root = touch(tmp_path / "hgg" / "Brats18_1_1_1", *scans("Brats18_1_1_1"))
    case = only_case_in(root)
    assert (case.case_id, case.facts.grade) == ("Brats18_1_1_1", "HGG")
    case = only_case_in(touch(tmp_path / "LGG-study" / "smith", *scans("scan")))
    assert (case.case_id, case.facts.grade) == ("smith", "")


@pytest.mark.parametrize("names", [("smith", "jones"), ("P-7", "P-8"), ("anna/x", "bert/x")])
def test_a_case_has_the_same_id_alone_and_beside_others(tmp_path: Path, names: tuple[str]) -> None:
    touch(tmp_path, *scans(names[0]))
    (alone,) = cases_in(tmp_path)
    touch(tmp_path, *scans(names[1]))
    assert alone in cases_in(tmp_path)


@pytest.mark.parametrize(
    ("case_id", "foreign", "n_taken"),
    [
        (CASE_355, ["W39_1998.09.19_Segm.nii"], 1),
        ("BraTS20_Training_001", ["W39_Segm.nii", "W40_Segm.nii"], 0),
        ("smith", ["W39_1998.nii"], 0),
        ("BraTS20_Training_001", ["BraTS20_Training_001_brainmask.nii"], 0),
    ],
)
def test_unknown_label_maps(tmp_path: Path, case_id: str, foreign: list[str], n_taken: int) -> None:
    touch(tmp_path, *scans(f"{case_id}/{case_id}"), *(f"{case_id}/{name}" for name in foreign))
    found = find_cases(tmp_path)
    [case] = found.cases
    assert [case.label is not None, len(found.notices)] == [n_taken == 1, 1 - n_taken]
    assert [remark.split(" was taken")[0] for remark in case.remarks] == foreign * n_taken


def test_results_and_hidden_files_are_passed_over_unless_asked_for(tmp_path: Path) -> None:
    hidden = ("BraTS2021_00000/._BraTS2021_00000", "__MACOSX/BraTS2021_00000/x", ".trash/x")
    stems = ("BraTS2021_00000/BraTS2021_00000", "results/more/BraTS2021_00001", *hidden)
    touch(tmp_path, "results/brats_seg.json", *(name for stem in stems for name in scans(stem)))
    found = find_cases(tmp_path)
    assert [case.case_id for case in found.cases] == ["BraTS2021_00000"]
    assert found.notices == ()
    assert only_case_in(tmp_path / "results").case_id == "BraTS2021_00001"
    # label maps without scans, in folders that are not called after label maps, are no cases
    ignored = ("x/BraTS2021_00000.nii", "y/BraTS2021_00000_seg.nii", "labels_1_2/smith_seg_1_2.nii")
    found = find_cases(touch(tmp_path, *ignored))
    assert [case.label for case in found.cases] == [None]
    assert ["(3 in all)" in notice for notice in found.notices] == [True]


def test_links_are_followed_once(tmp_path: Path) -> None:
    root = tmp_path / "data"
    touch(tmp_path, *scans("elsewhere/BraTS2021_00000/BraTS2021_00000"))
    root.mkdir()
    (root / "first").symlink_to(tmp_path / "elsewhere")
    (root / "second").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(root)
    assert only_case_in(root).images[0].path.parts[0] == "first"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        # both words mean t1c
        (
            scans(CASE, (*LEGACY, "_t1gd")),
            f"_t1ce.nii.gz and {CASE}_t1gd.nii.gz: found 2 files for",
        ),
        (
            scans("x/sub-01", (*BIDS[1:], "_run-1_T1w", "_run-2_T1w")),
            "found 2 files for t1n; expec",
        ),
        # label maps that fit equally well; the packed copy of one is none
        ([*LABELLED, "masks/smith.nii.gz", "labels/smith.nii"], "found 2 files for label map;"),
        (scans("x" * 240), "found an id of 240 bytes; expected at most 200. Rename"),
        (["BraTS-MEN-RT-0002-1_t1c.nii"], "one modality and another target; expected t1n"),
    ],
)
def test_wrong_files_are_a_problem(tmp_path: Path, names: list[str], problem: str) -> None:
    touch(tmp_path, *names, *scans("BraTS2021_00001"))
    bad, good = sorted(find_cases(tmp_path).cases, key=lambda case: case.usable)
    assert [problem in text for text in bad.problems] == [True]
    assert good.usable


def test_listing_order_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stems = ("b/BraTS2021_00002", "a/BraTS2021_00001", "c/scan", "smith")
    touch(tmp_path, "a/BraTS2021_00001_seg.nii", *(name for stem in stems for name in scans(stem)))
    expected, folders = find_cases(tmp_path), [*walk_folders(tmp_path)]
    walk = os.walk

    def backwards(root, **options):
        for path, below, files in walk(root, **options):
            below.reverse()
            yield path, below, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert find_cases(tmp_path) == expected
    assert [*walk_folders(tmp_path)] == folders


def test_the_key_changes_when_a_file_or_the_id_does(tmp_path: Path) -> None:
    touch(tmp_path, *scans(CASE, (*LEGACY, "_seg")))
    flair, label = tmp_path / f"{CASE}_flair.nii.gz", tmp_path / f"{CASE}_seg.nii.gz"
    changes = (
        lambda: os.utime(flair, ns=(1, 1)),
        lambda: (flair.write_bytes(b"x"), os.utime(flair, ns=(1, 1))),
        label.unlink,
    )
    keys = [only_case_in(tmp_path).facts.files_key for _ in range(2)]
    for change in changes:
        change()
        keys.append(only_case_in(tmp_path).facts.files_key)
    assert (keys[0], len(set(keys))) == (keys[1], 4)
    table = tmp_path / "table.csv"
    for case_id in ("smith", CASE):
        table.write_text(f"case_id,t1n\n{case_id},{CASE}_t1.nii.gz\n")
        keys.append(only_case_in(table).facts.files_key)
    assert len(set(keys)) == 6


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "holds no cases: it holds no scans. Expected a release of BraTS"),
        (["readme.txt", "survival.csv", "LICENSE"], "holds no cases: it holds no scans"),
        (["v_0.h5", "v_1.h5"], r"HDF5 files are not read, such as v_0\.h5 \(2 in all\): .*slices"),
        (["a.mha", "b.img"], r"other formats than NIfTI are not read, such as a\.mha \(2 in all\)"),
        (["a.tar"], r"archives are not read, such as a\.tar \(1 in all\): unpack.*tar -xf"),
        (["a/b/data.zip", "x.tar.gz", "t1.gz"], r"archives.*such as t1\.gz \(3 in all\)"),
        (["p/1.dcm", "p/2.DCM", "q/3.dicom"], r"DICOM.* p \(2 in all\): .*brats-seg convert"),
        (["BRATS_001.nii.gz"], r"NIfTI files were ignored, such as BRATS.*CASE_t1, CASE_t1ce"),
        (["x_seg.nii.gz"], r"NIfTI files were ignored, such as x_seg\.nii\.gz \(1 in all\)"),
        (["caf\udce9\n.zip"], r"such as caf\\xe9\\n\.zip \(1 in all\)"),
    ],
)
def test_a_folder_without_cases_gets_advice(tmp_path: Path, names: list[str], message: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(LayoutError, match=message) as refused:
        find_cases(tmp_path)
    # beside cases the same is a notice
    notices = find_cases(touch(tmp_path, *scans("more/BraTS2021_00000"))).notices
    assert [notice in str(refused.value) for notice in notices] == [True] * len(notices)
    assert len(notices) == str(refused.value).count(" in all)")


MSD = {
    "modality": {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"},
    "labels": dict(zip("0123", ("background", "edema", "non-enhancing tumor", "ET"), strict=True)),
}
REGIONS = {"background": 0, "whole tumor": [1, 2, 3], "tumor core": [2, 3], "enhancing tumor": [3]}
NNUNET = {"channel_names": {"0": "T1", "1": "T1ce", "2": "T2", "3": "Flair"}, "labels": REGIONS}


def write_dataset(root: Path, description: object, *names: str) -> Path:
    touch(root, *names)
    (root / "dataset.json").write_text(json.dumps(description))
    return root


def test_the_decathlon_keeps_all_modalities_in_one_file(tmp_path: Path) -> None:
    image, label = "x/imagesTr/BRATS_0001.nii.gz", "x/labelsTr/BRATS_0001.nii.gz"
    touch(tmp_path, image, "x/imagesTr/._BRATS_001.nii.gz", label, *scans("BraTS2021_00000"))
    write_dataset(tmp_path / "x", MSD, "imagesTs/BRATS_485.nii.gz")
    found = cases_in(tmp_path)
    assert find_cases(tmp_path).notices == ()
    assert sorted(found) == ["BRATS_0001", "BRATS_485", "BraTS2021_00000"]
    case = found["BRATS_0001"]
    assert names_of(case) == [*(f"{image}#{volume}" for volume in (1, 2, 3, 0)), label]
    assert (case.release, case.convention, case.patient_id) == ("msd", "msd", "BRATS_0001")
    assert (found["BRATS_485"].label, found["BRATS_485"].convention) == (None, "")
    with pytest.raises(LayoutError, match=r"'drawn/.'; the files .* dataset\.json are in its"):
        find_cases(touch(tmp_path, "drawn/BRATS_0001.nii.gz"), label_files="drawn/*")
    # a modality that is not described is missing, and the order of the description counts
    write_dataset(tmp_path / "x", {**MSD, "modality": {"0": "T2w", "1": "T1w"}})
    assert [scan.volume for scan in cases_in(tmp_path)["BRATS_485"].images] == [1, 0]


def test_nnunet_keeps_a_file_per_modality(tmp_path: Path) -> None:
    stems = ("imagesTr/BraTS2021_00000", "imagesTs/BraTS-GLI-00001-000")
    images, others = (scans(stem, [f"_000{channel}" for channel in range(4)]) for stem in stems)
    labels = [f"{stem.replace('images', 'labels')}.nii.gz" for stem in stems]
    write_dataset(tmp_path, NNUNET, *images, *others, *labels)
    other, case = find_cases(tmp_path).cases
    assert [names_of(case), names_of(other)] == [[*images, labels[0]], [*others, labels[1]]]
    # nnU-Net renumbers the labels of BraTS into the decathlon's order
    assert (case.release, case.convention) == ("nnunet", "msd")
    assert other.patient_id == "BraTS-GLI-00001"
    # cases to predict are there without any to train on, and an editor has put a mark before the text
    test = write_dataset(tmp_path / "test", {}, *others)
    (test / "dataset.json").write_text(json.dumps(NNUNET), encoding="utf-8-sig")
    assert names_of(only_case_in(test)) == others


@pytest.mark.parametrize(
    ("labels", "convention"),
    [
        (MSD["labels"], "msd"),
        (REGIONS, "msd"),
        ({"background": 0, "edema": 1, "non-enhancing": 2, "enhancing": 3}, "msd"),
        ({"background": 0, "NCR": 1, "ED": 2, "ET": 3}, "brats2023"),
        ({"background": 0, "NETC": 1, "SNFH": 2, "ET": 3, "RC": 4}, "brats2024"),
        ({"background": 0, "ET": 1, "NETC": 2, "CC": 3, "ED": 4}, "brats2024-ped"),
        ({"background": 0, "necrosis": 1, "oedema": 2, "enhancing": 4}, "brats2017"),
        ({"background": 0, "wt": [1, 2, 3], "tc": [1, 3], "et": [3]}, "brats2023"),
        ({"background": 0, "wt": [1, 2, 3], "tc": [1, 3], "et": 3, "rc": 4}, "brats2024"),
        *((labels, "") for labels in ({"tumour": 1}, {"edema": "1"}, {})),
    ],
)
def test_labels_say_convention(tmp_path: Path, labels: dict[str, object], convention: str) -> None:
    names = ("imagesTr/BRATS_001.nii.gz", "labelsTr/BRATS_001.nii.gz")
    write_dataset(tmp_path, {**MSD, "labels": labels}, *names)
    case = only_case_in(tmp_path)
    assert case.convention == convention
    assert case.label is not None


@pytest.mark.parametrize(
    "labels",
    [
        {"background": 0, "ET": 1, "ED": 2, "NCR": 3},
        {"ET": 2, "ED": 1},
        {"wt": [1, 2, 3], "tc": [1, 2], "et": 2},
    ],
)
def test_a_label_map_with_the_numbers_of_no_release_is_left_out(tmp_path, labels, caplog):
    """Its values would be read as those of a release: ET as necrosis."""
    write_dataset(tmp_path, {**MSD, "labels": labels}, "imagesTr/A.nii.gz", "labelsTr/A.nii.gz")
    case = only_case_in(tmp_path)
    assert (case.label, case.convention) == (None, "")
    assert "dataset.json numbers tissues as no release of BraTS does" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, r"dataset\.json is not valid .*'channel_names'") for text in ("{}", "[]", "{ x")),
        ('{"modality": "FLAIR", "labels": {}}', r"dataset\.json is not valid"),
        ('{"modality": {"0": "FLAIR"}}', r"dataset\.json is not valid"),
        # another organ
        ('{"modality": {"0": "MRI"}, "labels": {}}', "holds no cases: NIfTI files were ignored"),
    ],
)
def test_an_unusable_description_is_refused(tmp_path, text, message, caplog):
    touch(tmp_path, "imagesTr/BRATS_001.nii.gz")
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(LayoutError, match=message):
        find_cases(tmp_path)
    assert ("MRI" in text) == ("dataset.json names the channels MRI; expected" in caplog.text)
    # it describes images: without any, it is one file of many
    (tmp_path / "imagesTr" / "BRATS_001.nii.gz").rename(tmp_path / "imagesTr" / "t1_t1.nii.gz")
    (tmp_path / "imagesTr").rename(tmp_path / "a")
    assert only_case_in(tmp_path).case_id == "a"


def test_an_id_can_be_printed_as_any_name_is(tmp_path: Path) -> None:
    stem = os.fsdecode(b"caf\xe9\n\x1b[2J")
    touch(tmp_path, *scans(f"{stem}/{stem}"))
    case = only_case_in(tmp_path)
    assert case.case_id == case.patient_id == r"caf\xe9\n\x1b[2J"
    assert all(case.path_of(scan).is_file() for scan in case.images)
    assert case.usable


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere does not exist; expected the folder of scans"),
        *((name, "does not exist") for name in ("n" * 300, "loop")),
        ("data.tar", r"data\.tar is a file; .*archive must be unpacked first.*give --t1n, --t1c"),
    ],
)
def test_an_impossible_data_folder_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "data.tar").touch()
    for find in (find_cases, lambda path: find_inputs([path])):
        with pytest.raises(LayoutError, match=message):
            find(tmp_path / name)


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
    found = cases_in(tmp_path, label_files=pattern)
    assert str(found["smith"].label) == name
    assert found["jones"].label is None
    with pytest.raises(LayoutError, match=r"label map called '\*_no'; the files .*smith\.nii\.gz"):
        find_cases(tmp_path, label_files="*_no")


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (("A/raw_bet", "B/raw_bet", "C"), {"A": "A", "B": "B", "C": "C"}),
        # folders above of one name are told apart by theirs
        (("one/A/raw", "two/A/raw"), {"one_A": "one_A", "two_A": "two_A"}),
        # weeks of a patient are of one patient, or folds would leak
        (
            ("P1/week-0", "P1/week-9-2", "P2/week-0"),
            {"P1_week-0": "P1", "P1_week-9-2": "P1", "P2_week-0": "P2"},
        ),
        # also if each name occurs once, and where a patient has but one
        (
            ("P1/pre", "P1/post-op", "P2/baseline", "P3"),
            {"P1_pre": "P1", "P1_post-op": "P1", "P2_baseline": "P2", "P3": "P3"},
        ),
        (("P1/pre", "P1/post"), {"P1_pre": "P1", "P1_post": "P1"}),
        (("bonn/scan1", "rome/scan2"), {"scan1": "scan1", "scan2": "scan2"}),
        # grades are no patients
        (
            [f"{grade}/scan{n}" for grade in ("HGG", "LGG") for n in "12"],
            {name: name for name in ("HGG_scan1", "HGG_scan2", "LGG_scan1", "LGG_scan2")},
        ),
        (
            ("P1/2019_03_04", "P1/02.01.2020", "P2/2018-05-06"),
            {"P1_2019_03_04": "P1", "P1_02.01.2020": "P1", "P2_2018-05-06": "P2"},
        ),
        (("P1/20190304/raw", "P1/20200102/raw"), {"P1_20190304": "P1", "P1_20200102": "P1"}),
        # one folder may hold the dates of many patients
        (("old/20190304", "old/20200102"), {n: n for n in ("old_20190304", "old_20200102")}),
        # eight digits may be the number of a patient
        (("bonn/10234567", "rome/20384756"), {n: n for n in ("10234567", "20384756")}),
        # numbers of two sites are different patients
        (("bonn/001", "rome/001", "rome/002"), {n: n for n in ("bonn", "rome_001", "rome_002")}),
        (("001", "002", "more/001"), {"001": "001", "002": "002", "more": "more"}),
    ],
)
def test_folder_names(tmp_path: Path, folders: tuple[str, ...], expected: dict[str, str]) -> None:
    for folder in folders:
        touch(tmp_path, *scans(f"{folder}/", SCANNER), f"labels/{folder}.nii.gz")
    found = cases_in(tmp_path)
    assert {name: case.patient_id for name, case in found.items()} == expected
    assert all(case.label.path == Path(f"labels/{case.folder}.nii.gz") for case in found.values())


def paths_of(folder: Path) -> dict[str, Path]:
    return dict(zip(MODALITIES, map(Path, scans(str(folder / folder.name))), strict=True))


def test_folders_are_searched_as_for_training_and_label_maps_do_not_matter(tmp_path: Path) -> None:
    names = ("BraTS2021_00000", "BraTS2021_00001", "BraTS-GLI-00003-000")
    folders = [touch(tmp_path / str(n), *scans(f"x/{name}")) for n, name in enumerate(names)]
    labelled = touch(tmp_path / "z", *scans("scan"), "labels/z.nii", "masks/z.nii")
    inputs = find_inputs([*folders, labelled])
    assert [case.case_id for case in inputs] == [*sorted(names), "z"]
    assert inputs[0].release == "brats2023-gli"
    assert all(case.path_of(scan).is_file() for case in inputs for scan in case.images)
    assert [(case.usable, case.label) for case in inputs] == [(True, None)] * 4


def test_a_csv_table_names_files_relative_to_itself(tmp_path: Path) -> None:
    files = paths_of(Path("scans/smith"))
    for separator in ",;":
        header = separator.join(["case_id", "t1", "t1ce", "t2", "FLAIR", "comment"])
        row = separator.join(["me", *map(str, files.values()), "new"])
        # spreadsheets put a mark before the first letter
        (tmp_path / "cases.csv").write_text(f"{header}\n{row}\n", encoding="utf-8-sig")
        [case] = find_inputs([tmp_path / "cases.csv"])
        assert (case.case_id, case.problems) == ("me", ())
        assert [case.path_of(s) for s in case.images] == [tmp_path / p for p in files.values()]
    with pytest.raises(UsageError, match="names the label maps in its column label"):
        find_cases(tmp_path / "cases.csv", label_files="*")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("../a", "/etc/a", "a/b", "..", "a\\b", ".hidden", "c:a"), "cannot be the name of a file"),
        (["a\nb?"], r"the id 'a\\nb?', which cannot be the name of a file"),
        (["x" * 300], "found an id of 300 bytes"),
    ],
)
def test_an_id_must_be_able_to_name_files(tmp_path: Path, names: list[str], problem: str) -> None:
    files = {modality: f"all.nii.gz#{index}" for index, modality in enumerate(MODALITIES)}
    rows = [{"case_id": case_id, **files} for case_id in (*names, "good")]
    pd.DataFrame(rows).to_csv(tmp_path / "cases.csv", index=False)
    *bad, good = sorted(find_inputs([tmp_path / "cases.csv"]), key=lambda case: case.usable)
    assert (good.usable, [scan.volume for scan in good.images]) == (True, [0, 1, 2, 3])
    assert [problem in case.problems[0] for case in bad] == [True] * len(names)


def test_two_cases_of_one_id_are_both_refused(tmp_path: Path) -> None:
    """One of the results would overwrite the other. In BIDS, each of two sites has a case of that id."""
    folders = [touch(tmp_path / folder, *scans(f"{CASE}/{CASE}")) for folder in ("a", "b")]
    found = [case.problems[0] for case in find_inputs([*folders, folders[0]])]
    assert ["found 2 cases of this id; expected one" in problem for problem in found] == [True] * 2
    labels = [f"{site}/derivatives/labels/sub-01/sub-01_dseg.nii" for site in "cd"]
    touch(tmp_path, *labels, *scans("c/sub-01", BIDS), *scans("d/sub-01", BIDS[1:]))
    assert [str(case.label) for case in find_cases(tmp_path).cases[-2:]] == labels


def test_four_files_are_called_by_what_their_names_share_or_by_their_folder() -> None:
    named = paths_of(Path(CASE))
    plain = {modality: Path("Smith", f"{modality}.nii") for modality in MODALITIES}
    found = [single_input(*one).case_id for one in ((None, named), ("me", named), (None, plain))]
    assert found == [CASE, "me", "Smith"]
    for words in ((), ("t2f", "FLAIR"), ("t1n", "pet"), ("seg",)):
        with pytest.raises(UsageError, match=f"names {', '.join(words) or '.none.'}; expected"):
            single_input("me", dict.fromkeys(words, Path("a.nii")))


def test_rows_without_an_id_and_empty_rows_spoil_no_others(tmp_path: Path) -> None:
    table = tmp_path / "cases.csv"
    table.write_text("case_id,t1n,t1c,t2w,t2f\nanna,a,b,c,d\n,,,,\n,e,f,g,h\n")
    nameless, anna = find_inputs([table])
    assert (anna.case_id, anna.problems) == ("anna", ())
    assert "found the id '', which cannot be the name of a file" in nameless.problems[0]


def test_a_table_without_cases_is_refused(tmp_path: Path) -> None:
    contents = [b"case_id,t1n\n", b"case_id,t1n\n,\n", b"", b"id,t1n\na,b\n", b"\xff\xfe\x00"]
    contents += [bytes(range(256)) * 9, gzip.compress(b"case_id,t1n", mtime=0), bytes(5000)]
    # a table of features
    contents += [b'case_id,t1n,t1c,t2w,t2f\n"a,b,c,d,e\n', b"case_id,t1n_wt_mean\na,0.5\n"]
    found = r"cases.csv cannot be read .*Expected the columns case_id, t1n, t1c"
    for content in contents:
        (tmp_path / "cases.csv").write_bytes(content)
        with pytest.raises(UsageError, match=found):
            find_inputs([tmp_path / "cases.csv"])
