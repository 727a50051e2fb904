"""Which series is which modality, and why."""

from pathlib import Path
from typing import Any

import pytest

from brats_seg.dicom.modalities import missing_words, parse_overrides, sort_series
from brats_seg.dicom.series import Series
from brats_seg.errors import UsageError

T1 = {"echo_ms": 12.0, "repetition_ms": 600.0, "techniques": ("SE",)}
GR_IR = ("GR", "IR")
MPRAGE = {"echo_ms": 3.0, "repetition_ms": 2000.0, "inversion_ms": 900.0, "techniques": GR_IR}
T2 = {"echo_ms": 95.0, "repetition_ms": 4500.0, "techniques": ("SE",)}
FLAIR = {"echo_ms": 110.0, "repetition_ms": 9000.0, "inversion_ms": 2500.0, "techniques": ("SE",)}
THIN = (0.5, 0.5, 0.5)


def series(description: str = "", number: int = 1, **fields: Any) -> Series:
    usual = {"kind": "MR", "n_slices": 24, "files": (Path("1"),), "spacing_mm": (1.0, 1.0, 5.0)}
    return Series(number=number, description=description, **usual | fields)


@pytest.mark.parametrize(
    ("description", "header", "modality"),
    [
        ("AX T1", T1, "t1n"),
        ("AX T1 POST", T1, "t1c"),
        ("t1_mpr_sag_pre", MPRAGE, "t1n"),
        ("T1 MPRAGE +C", MPRAGE, "t1c"),
        ("AX T1 PRE-OP POST GAD", T1, "t1c"),
        ("AX T1 POST-OP", T1, "t1n"),
        ("T1 without contrast", T1, "t1n"),
        ("t1_tse_tra_KM", T1, "t1c"),
        ("t1_tse_tra_ohne_KM", T1, "t1n"),
        ("SAG BRAVO", MPRAGE, "t1n"),
        ("AX T1 FLAIR", T1 | {"inversion_ms": 800.0, "repetition_ms": 2000.0}, "t1n"),
        ("AX T1", T1 | {"has_agent": True}, "t1c"),
        ("AX T1 PRE", T1 | {"has_agent": True}, "t1n"),
        ("AX T2", T2, "t2w"),
        ("t2_space_sag", {"echo_ms": 400.0, "repetition_ms": 3200.0}, "t2w"),
        ("AX T2 FLAIR", FLAIR, "t2f"),
        ("AX FLAIR", FLAIR | {"inversion_ms": None}, "t2f"),
        ("t2_tirm_tra_dark-fluid", FLAIR, "t2f"),
        # named after nothing: the times say it
        ("", T1, "t1n"),
        ("head", MPRAGE, "t1n"),
        ("brain", T1 | {"has_agent": True}, "t1c"),
        ("2", T2, "t2w"),
        ("3", FLAIR, "t2f"),
        # what is none of the four
        ("localizer", T1, ""),
        ("ep2d_diff_3scan_trace", T2, ""),
        ("ADC", T2, ""),
        ("AX T2* GRE", T2 | {"techniques": ("GR",), "echo_ms": 25.0}, ""),
        ("Ax SWI", T1, ""),
        ("DSC perfusion", T2, ""),
        ("TOF 3D", T1, ""),
        ("T1 post subtraction", T1, ""),
        ("AX STIR", T2, ""),
        ("PD tse", {"echo_ms": 15.0, "repetition_ms": 3000.0}, ""),
        ("AX T1", T2, ""),
        ("AX T2", {"echo_ms": 3.0, "repetition_ms": 8.0, "techniques": ("GR",)}, ""),
        ("unknown", {}, ""),
        ("AX T1", T1 | {"image_type": ("DERIVED", "SECONDARY", "MIP")}, ""),
        ("AX T2", T2 | {"techniques": ("EP",)}, ""),
        ("AX T1", T1 | {"n_slices": 3}, ""),
        ("AX T1", T1 | {"kind": "CT"}, ""),
    ],
)
def test_a_series_is_sorted(description: str, header: dict[str, Any], modality: str) -> None:
    (one,) = sort_series([series(description, **header)])

    assert (one.modality, bool(one.reason)) == (modality, True), one.reason


@pytest.mark.parametrize(
    ("description", "header", "reason"),
    [
        ("AX FLAIR", FLAIR, "by its description"),
        ("head", T2, "by its times (echo 95 ms, repetition 4500 ms)"),
        ("AX T1", T2, "description says T1, its times (echo 95 ms, repetition 4500 ms) say T2"),
        ("AX T1", T1 | {"has_agent": True}, "T1 by its description; its header names a contrast"),
    ],
)
def test_the_reason_names_what_it_was_judged_by(
    description: str, header: dict[str, Any], reason: str
) -> None:
    assert reason in sort_series([series(description, **header)])[0].reason


def test_the_best_of_several_series_is_taken() -> None:
    thick, thin = series("AX T2", 2, **T2), series("T2 thin", 1, **T2 | {"spacing_mm": (1, 1, 1)})
    broken = series("AX T2", 3, problem="gap", **T2 | {"spacing_mm": THIN})
    derived = series("T2", 4, image_type=("DERIVED",), **T2 | {"spacing_mm": THIN})

    found = sort_series([thick, thin, broken, derived])
    equal = sort_series([series("AX T2", number, **T2) for number in (3, 9, 5)])

    assert [one.modality for one in found] == ["", "t2w", "", ""]
    assert found[0].reason.startswith("t2w, but series 1 has thinner slices")
    assert found[2].reason == "t2w, but gap"
    # of equal ones the later
    assert [one.number for one in equal if one.modality] == [9]


def test_a_person_overrules_by_number_or_by_a_part_of_the_description() -> None:
    first, second = series("AX T1", 4, **T1), series("AX T1", 5, **T1)
    scans = [first, second, series("special sequence", 6), series("AX FLAIR", 7, **FLAIR)]

    found = sort_series(scans, parse_overrides(["t1ce=5", "T2=Special"]))

    assert [one.modality for one in found] == ["t1n", "t1c", "t2w", "t2f"]
    assert found[1].reason == "chosen by --series t1c=5"
    assert missing_words(found) == ""
    assert missing_words(found, {"t1n": "7"}) == "nothing that is --series t1n=7"


@pytest.mark.parametrize("texts", [["t4=1"], ["t1c"], ["t1c="], ["t1c=1", "t1ce=2"]])
def test_a_wrong_override_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="expected MODALITY=NUMBER"):
        parse_overrides(texts)


def test_two_t1_without_contrast_agent_are_not_guessed() -> None:
    t1, t2 = [series("T1", number, **T1) for number in (1, 2)], series("T2", 3, **T2)

    assert missing_words(sort_series([*t1, t2, series("FLAIR", 4)])) == "no series for t1c"
