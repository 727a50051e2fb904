from collections.abc import Sequence
from pathlib import Path

import pytest

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.index import Inspection, OpenedCase, with_conventions
from brats_seg.cases.layouts import parse_case_id


def opened(
    case_id: str,
    values: Sequence[int] = (),
    *,
    folder: str = "data",
    shape: tuple[int, int, int] = (240, 240, 155),
    declared: str = "",
) -> OpenedCase:
    """A case of whose label values there are as many voxels, in litres, as the value says."""
    name = parse_case_id(case_id)
    case = Case(
        case_id=case_id,
        patient_id=name.patient_id,
        release=name.release,
        label_convention=declared,
        t1n=ScanFile(path=Path(folder, case_id, "t1.nii.gz")),
        label=ScanFile(path=Path(folder, case_id, "seg.nii.gz")) if values else None,
    )
    return OpenedCase.inspected(
        case,
        Inspection(
            shape=shape,
            voxel_hash=case_id,
            label_counts=tuple((value, value) for value in values),
            label_voxel_mm3=1e6,
            problems=(),
        ),
    )


def explained(*cases: OpenedCase) -> dict[str, Case]:
    return {case.case_id: case for case in with_conventions(cases, "")}


@pytest.mark.parametrize(
    ("case_id", "values", "convention", "litres"),
    [
        ("BraTS2021_00000", (0, 1, 2, 4), "brats2017", 7),
        ("BraTS2021_00000", (0, 2), "brats2017", 2),
        ("BraTS2021_00000", (0, 1, 2, 3), "brats2023", 6),
        ("BraTS-GLI-00000-000", (0, 1, 2, 3), "brats2023", 6),
        ("BraTS-GLI-00000-100", (0, 1, 2, 3, 4), "brats2024", 6),
        ("BraTS-MET-00000-000", (0, 1, 2, 3, 4), "brats2024", 6),
        ("BraTS-PED-00000-000", (0, 1, 2, 3, 4), "brats2024-ped", 10),
    ],
)
def test_values_and_release_tell_the_convention(
    case_id: str, values: tuple[int, ...], convention: str, litres: float
) -> None:
    case = explained(opened(case_id, values))[case_id]

    assert case.label_convention == convention
    assert case.tumour_ml == litres * 1000
    assert case.label_values == values
    assert case.usable


def test_cases_of_a_release_share_their_convention() -> None:
    found = explained(
        opened("BraTS-GLI-00000-100", (0, 1, 2)),
        opened("BraTS-GLI-00001-100", (0, 2, 4)),
        opened("BraTS-GLI-00002-101", (0, 1, 2, 3)),
    )

    # the second alone would be read as of 2017, with the cavity for enhancing tumour
    assert {case.label_convention for case in found.values()} == {"brats2024"}
    assert found["BraTS-GLI-00001-100"].tumour_ml == 2000


def test_releases_do_not_mix() -> None:
    found = explained(
        opened("BraTS2021_00000", (0, 1, 2, 4)), opened("BraTS-GLI-00000-000", (0, 1, 2, 3))
    )

    assert [case.label_convention for case in found.values()] == ["brats2017", "brats2023"]


def test_the_shape_tells_the_cases_of_2024() -> None:
    found = explained(
        opened("BraTS-GLI-00000-000", (0, 1, 2, 3), shape=(182, 218, 182)),
        opened("BraTS-GLI-00001-000", (0, 1, 2, 3)),
        opened("BraTS-SSA-00001-000", (0, 1, 2, 3), shape=(182, 218, 182)),
    )

    assert [case.release for case in found.values()] == [
        "brats2024-gli",
        "brats2023-gli",
        "brats-ssa",
    ]


def test_a_value_outside_the_convention_is_a_problem_of_its_case() -> None:
    found = explained(
        opened("BraTS2021_00000", (0, 1, 2, 4)), opened("BraTS2021_00001", (0, 1, 2, 4, 7))
    )

    assert found["BraTS2021_00000"].usable
    [problem] = found["BraTS2021_00001"].problems
    assert problem.startswith("case BraTS2021_00001")
    assert "label values [7]" in problem
    assert "name another convention with --labels" in problem


def test_a_named_convention_goes_before_all_others() -> None:
    cases = [
        opened("BraTS2021_00000", (0, 1, 2, 3)),
        opened("BraTS2021_00001", (0, 1, 2, 4)),
        opened("BRATS_001", (0, 1, 2, 3), declared="brats2023"),
    ]

    first, second, third = with_conventions(cases, "msd")

    assert first.label_convention == second.label_convention == third.label_convention == "msd"
    assert first.usable
    assert third.usable
    assert not second.usable


def test_a_declared_convention_goes_before_the_values() -> None:
    found = explained(opened("BRATS_485"), opened("BRATS_001", (0, 1, 2, 3), declared="msd"))

    assert found["BRATS_001"].label_convention == "msd"
    assert found["BRATS_001"].remarks == ()
    assert found["BRATS_485"].label_convention == ""


def test_a_guess_is_told() -> None:
    found = explained(
        opened("smith", (0, 1, 2, 3)),
        opened("jones"),
        opened("BraTS-PED-00000-000", (0, 1, 2, 3)),
        opened("BraTS-MEN-00000-000", (0, 1, 2, 3)),
    )

    told = (
        "the label values 0 1 2 3 were read as brats2023, but the names leave it open: if that is "
        "wrong, name the convention with --labels",
    )
    assert [case.remarks for case in found.values()] == [told, (), told, ()]


def test_unknown_scans_of_two_folders_are_told_apart() -> None:
    found = explained(
        opened("smith", (0, 1, 2, 3), folder="one"), opened("jones", (0, 1, 2, 4), folder="two")
    )

    assert [case.label_convention for case in found.values()] == ["brats2023", "brats2017"]


def test_an_empty_label_map_is_told() -> None:
    case = explained(opened("BraTS2021_00000", (0,)))["BraTS2021_00000"]

    assert case.remarks == ("the label map holds no tumour",)
    assert case.tumour_ml == 0
    assert case.usable


def test_a_recalled_case_needs_no_file_while_its_convention_holds() -> None:
    known = explained(opened("BraTS2021_00000", (0, 1, 2, 4)))["BraTS2021_00000"]
    case = opened("BraTS2021_00000", (0, 1, 2, 4)).case

    [again] = with_conventions([OpenedCase.recalled(case, known)], "brats2017")

    assert again == known


def test_a_recalled_case_is_opened_when_its_convention_changes(brats_root: Path) -> None:
    names = [f"BraTS2021_00000/BraTS2021_00000_{suffix}.nii.gz" for suffix in ("t1", "seg")]
    image, label = (ScanFile(path=Path(name)) for name in names)
    case = Case(
        case_id="BraTS2021_00000",
        patient_id="",
        root=brats_root,
        release="brats2021",
        t1n=image,
        label=label,
    )
    known = Case(
        case_id="BraTS2021_00000",
        patient_id="",
        release="brats2021",
        label_convention="brats2017",
        label_values=(0, 1, 2),
        tumour_ml=1000.0,
    )

    [again] = with_conventions([OpenedCase.recalled(case, known)], "brats2023")

    assert again.label_convention == "brats2023"
    assert again.tumour_ml is not None
    assert 0 < again.tumour_ml < 10
