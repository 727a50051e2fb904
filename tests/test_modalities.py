"""Which series is which modality, and why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brats_seg.dicom.modalities import missing_reasons, parse_overrides, sort_series
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


AGENT = T1 | {"has_agent": True}
INVERTED = T1 | {"inversion_ms": 800.0, "repetition_ms": 2000.0}


@pytest.mark.parametrize(
    ("modality", "header", "descriptions"),
    [
        ("t1n", T1, "AX T1|AX T1 POST-OP|T1 without contrast|t1_tse_tra_ohne_KM"),
        ("t1c", T1, "AX T1 POST|AX T1 PRE-OP POST GAD|t1_tse_tra_KM"),
        ("t1n", MPRAGE, "t1_mpr_sag_pre|SAG BRAVO"),
        ("t1c", MPRAGE, "T1 MPRAGE +C"),
        ("t1n", INVERTED, "AX T1 FLAIR"),
        ("t1c", AGENT, "AX T1|T1 w/o and w/ Gd|T1 pre and post Gd|T1 +/- GAD|T1 mit + ohne KM"),
        ("t1n", AGENT, "AX T1 PRE"),
        ("t2w", T2, "AX T2"),
        ("t2w", {"echo_ms": 400.0, "repetition_ms": 3200.0}, "t2_space_sag"),
        ("t2f", FLAIR, "AX T2 FLAIR|t2_tirm_tra_dark-fluid"),
        ("t2f", FLAIR | {"inversion_ms": None}, "AX FLAIR"),
        # named after nothing: the times say it
        ("t1n", T1, ""),
        ("t1n", MPRAGE, "head"),
        ("t1c", AGENT, "brain"),
        ("t2w", T2, "2"),
        ("t2f", FLAIR, "3"),
        # what is none of the four
        ("", T1, "localizer|Ax SWI|TOF 3D|T1 post subtraction|T1 map"),
        ("", T2, "ep2d_diff_3scan_trace|ADC|DSC perfusion|AX STIR|AX T1"),
        ("", T2 | {"techniques": ("GR",), "echo_ms": 25.0}, "AX T2* GRE"),
        ("", {"echo_ms": 15.0, "repetition_ms": 3000.0}, "PD tse"),
        ("", {"echo_ms": 3.0, "repetition_ms": 8.0, "techniques": ("GR",)}, "AX T2"),
        ("", {}, "unknown"),
        ("", T1 | {"image_type": ("DERIVED", "SECONDARY", "MIP")}, "AX T1"),
        ("", T1 | {"image_type": ("DERIVED", "PRIMARY", "DIXON", "FAT")}, "AX T1 POST"),
        # fat suppression, named as FLAIR is
        ("", T2 | {"inversion_ms": 150.0}, "t2_tirm_cor|COR TIRM dark fluid"),
        ("", T2 | {"techniques": ("EP",)}, "AX T2"),
        ("", T1 | {"n_slices": 3}, "AX T1"),
        ("", T1 | {"kind": "CT"}, "AX T1"),
        # contrast agent in other languages
        (
            "t1c",
            T1,
            "T1 INJ|AX T1 GADO|T1 3D injecté|T1 apres injection|T1 con contraste|T1 con CIV|T1 contrastado"
            "|T1 con contrasto|T1 dopo mdc|T1 com contraste|T1 pós-contraste|T1 PÓS|t1_tra_mit_KM|T1 nach KM"
            "|t1_mpr_nKM|T1 nach Kontrastmittel|T1 n. KM|T1 sans sat INJ|T1 sin fatsat con gado|T1INJ"
            "|T1 ohne FS nach KM|T1 mit i.v. KM|T1 iniezione|T1 inyectado|T1 without fatsat POST",
        ),
        (
            "t1n",
            T1,
            "T1 sans injection|T1 non injecté|T1 SANS GADO|T1 avant injection|T1 sans l'injection|T1 SANS"
            "|T1 pas d'injection|T1 sin contraste|T1 sin gado|T1 antes de la inyección|T1 senza mdc|T1 nativ"
            "|T1 senza mezzo di contrasto|T1 prima del contrasto|T1 sem contraste|T1 pré-contraste|T1 s/ contraste"
            "|t1_ohne_KM|T1 vor KM|T1 o. KM|t1_oKM|T1 vor i.v. KM|T1 kein Kontrastmittel|T1 head injury"
            "|T1 post-quirúrgico|T1 position 2|T1 non-enhanced|T1 not enhanced",
        ),
        ("", T1, "T1 GADO soustraction|T1 con contraste sustracción|T1 sottrazione"),
    ],
)
def test_a_series_is_sorted(modality: str, header: dict[str, Any], descriptions: str) -> None:
    for description in descriptions.split("|"):
        (one,) = sort_series([series(description, **header)])
        assert (one.modality, bool(one.reason)) == (modality, True), (description, one.reason)


@pytest.mark.parametrize(
    ("description", "header", "reason"),
    [
        ("AX FLAIR", FLAIR, "by its description"),
        ("head", T2, "by its times (echo 95 ms, repetition 4500 ms)"),
        ("AX T1", T2, "description says T1, its times (echo 95 ms, repetition 4500 ms) say T2"),
        ("AX T1", T1 | {"has_agent": True}, "T1 by its description; its header names a contrast"),
        ("T1 vor und nach KM", T1, "with and without contrast agent, by its description"),
    ],
)
def test_the_reason_is_named(description: str, header: dict[str, Any], reason: str) -> None:
    assert reason in sort_series([series(description, **header)])[0].reason


def test_the_best_of_several_series_is_taken() -> None:
    thick, thin = series("AX T2", 2, **T2), series("T2 thin", 1, **T2 | {"spacing_mm": (1, 1, 1)})
    broken = series("AX T2", 3, problem="gap", **T2 | {"spacing_mm": THIN})
    derived = series("T2", 4, image_type=("DERIVED",), **T2 | {"spacing_mm": THIN})
    found = sort_series([thick, thin, broken, derived])
    equal = sort_series([series("AX T2", number, **T2) for number in (3, 9, 5)])
    assert [one.modality for one in found] == ["", "t2w", "", ""]
    reasons = [item.reason for item in found if not item.modality]
    thinner, original = "series 1 has thinner slices", "series 1 is no reformatted image"
    assert reasons == [f"t2w, but {why}" for why in (thinner, "gap", original)]
    # of equal ones the later
    assert [one.number for one in equal if one.modality] == [9]
    assert equal[0].reason == "t2w, but series 9 is later"
    echoes = [series("dual", 5, **T2 | {"echo_ms": echo_ms}) for echo_ms in (20, 90)]
    for modality, echo_ms in (("t2w", 90), ("t1n", 20)):
        chosen = sort_series(echoes, {modality: "5"})
        assert [one.echo_ms for one in chosen if one.modality] == [echo_ms]
        assert "but series 5 has a better echo" in "".join(item.reason for item in chosen)


def test_a_person_overrules_by_number_or_by_a_part_of_the_description() -> None:
    first, second = series("AX T1", 4, **T1), series("AX T1", 5, **T1)
    scans = [first, second, series("special sequence", 6), series("AX FLAIR", 7, **FLAIR)]
    found = sort_series(scans, parse_overrides(["t1ce=5", "T2=Special"]))
    assert [one.modality for one in found] == ["t1n", "t1c", "t2w", "t2f"]
    assert found[1].reason == "chosen by --series t1c=5"
    assert [*missing_reasons(found)] == []
    assert [*missing_reasons(found, {"t1n": "7"})] == ["nothing that is --series t1n=7"]
    # the whole description, and the longer part, are closer
    scans = [
        series(text, 4 + n) for n, text in enumerate(("T1", "T1 POST", "AX T2", "AX T2 FLAIR"))
    ]
    for choices in ("t1n=t1|t1c=5|t2w=T2|t2f=T2 FLAIR", "t2f=7|t2w=AX|t1c=T1 POST|t1n=T1"):
        chosen = parse_overrides(choices.split("|"))
        found = sort_series(scans, chosen)
        assert [one.modality for one in found] == ["t1n", "t1c", "t2w", "t2f"]
        assert [*missing_reasons(found, chosen)] == []


@pytest.mark.parametrize("texts", [["t4=1"], ["t1c"], ["t1c="], ["t1c=1", "t1ce=2"]])
def test_a_wrong_override_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="expected MODALITY=NUMBER"):
        parse_overrides(texts)


def test_two_t1_without_contrast_agent_are_not_guessed() -> None:
    first, later = (series("T1", number, **T1) for number in (1, 5))
    others = [series("T1 POST", 2, **T1), series("T2", 3, **T2), series("FLAIR", 4, **FLAIR)]
    derived = replace(later, image_type=("DERIVED",))
    found = sort_series([first, later, *others])
    known = sort_series([first, later, series("T1 PRE", 6, **T1), *others])
    assert [*missing_reasons(found)] == ["no series for t1n"]
    assert "no contrast agent is named, and it is not the only T1 series" in found[0].reason
    assert [one.number for one in known if one.modality == "t1n"] == [6]
    assert not [*missing_reasons(sort_series([first, later, *others], {"t1n": "1"}))]
    assert not [*missing_reasons(sort_series([first, derived, *others]))]
