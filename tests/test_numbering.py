"""Reading each side's labels as they were meant."""

import pytest

from brats_seg.cases.conventions import find_conventions
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD, LabelConvention

LEGACY = protocol_named("legacy")


@pytest.mark.parametrize(
    ("case_id", "values", "convention"),
    [
        ("BraTS2021_00000", {0, 1, 2, 4}, BRATS2017),
        ("BraTS2021_00000", {0, 1, 2, 3}, BRATS2023),
        ("BraTS2021_00000", {0, 1, 2}, BRATS2017),
        ("BraTS-GLI-00001-000", {0, 1, 2, 3}, BRATS2023),
        ("BraTS-GLI-00001-000", {0, 1, 2, 4}, BRATS2017),
        ("BraTS-GLI-00005-100", {0, 1, 2, 3, 4}, BRATS2024),
        ("BraTS-PED-00002-000", {0, 1, 2, 4}, BRATS2024_PED),
        ("BRATS_001", {0, 1, 2, 3}, MSD),
        ("patient7", {0, 1, 2, 4}, BRATS2017),
        ("patient7", {0}, BRATS2023),
    ],
)
def test_names_and_values_tell_the_convention(
    case_id: str, values: set[int], convention: LabelConvention
) -> None:
    assert find_conventions({case_id: values}, LEGACY.labels) == {case_id: convention}


def test_after_treatment_4_is_the_cavity_though_nothing_enhances() -> None:
    values = {"BraTS-GLI-00005-100": {0, 1, 2, 4}}

    assert find_conventions(values, LEGACY.labels) == {"BraTS-GLI-00005-100": BRATS2024}


def test_one_map_with_3_and_4_tells_what_4_is_in_the_others() -> None:
    values = {"a": {0, 1, 2, 4}, "b": {0, 3, 4}, "c": {0, 3}}

    assert find_conventions(values, LEGACY.labels) == dict.fromkeys("abc", BRATS2024)


def test_maps_of_two_conventions_in_one_folder_are_each_read_in_their_own() -> None:
    values = {"a": {0, 1, 2, 4}, "b": {0, 1, 2, 3}}

    assert find_conventions(values, LEGACY.labels) == {"a": BRATS2017, "b": BRATS2023}


def test_a_task_with_its_own_numbering_is_read_in_it() -> None:
    """Without the fourth label paediatric maps look like those of 2023."""
    protocol = protocol_named("lesionwise2024", "PED")

    assert find_conventions({"a": {0, 1, 2}}, protocol.labels) == {"a": BRATS2024_PED}
