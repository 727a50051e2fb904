"""Which scans are one case, and what a case is called by its folders."""

from pathlib import Path

from brats_seg.cases.find import find_cases
from tests.test_label_files import BIDS, scans, touch

SCANNER = ("AX_9_t1_bet", "AXPOST_t1c_bet", "TSE_t2_bet", "IR_fla_bet")


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
        *scans("sub-01/anat/sub-01", (*BIDS, "run-2_T1w")),
        *scans("derivatives/pre/sub-01/anat/sub-01_space-SRI24", BIDS),
        *scans("sub-02/anat/sub-02", BIDS),
        *scans("derivatives/pre/sub-02/anat/sub-02_space-SRI24", BIDS[:1]),
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
    touch(tmp_path, *scans("sub-01/anat/sub-01", (*BIDS[1:], "run-1_T1w", "run-2_T1w")))

    [case] = find_cases(tmp_path).cases

    assert "found 2 files for t1n; expected one. Remove or rename the other" in case.problems[0]


def test_the_variant_that_has_all_modalities_is_taken(tmp_path: Path) -> None:
    words = ("t1", "t2", *(f"{word}_bet" for word in ("t1", "t1ce", "t2", "flair")))
    touch(tmp_path, *scans("smith/smith", words))

    [case] = find_cases(tmp_path).cases

    assert [str(scan) for scan in case.images] == scans("smith/smith", words[2:])
