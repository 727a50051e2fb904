"""Reading each side's labels as they were meant."""

import pytest

from brats_seg.cases.conventions import LabelContent, resolve_all
from brats_seg.evaluation.protocols import ScoringProtocol, protocol_named
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD, LabelConvention

LEGACY = protocol_named("legacy")


def conventions(
    values: dict[str, set[int]], protocol: ScoringProtocol = LEGACY
) -> dict[str, LabelConvention]:
    label_maps = {
        case_id: LabelContent(shape=(240, 240, 155), values=frozenset(of_case))
        for case_id, of_case in values.items()
    }
    declared = protocol.labels.name if protocol.labels else ""
    found = resolve_all(label_maps, declared=declared)
    return {case_id: one.convention for case_id, one in found.items()}


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
    assert conventions({case_id: values}) == {case_id: convention}


def test_after_treatment_4_is_the_cavity_though_nothing_enhances() -> None:
    values = {"BraTS-GLI-00005-100": {0, 1, 2, 4}}

    assert conventions(values) == {"BraTS-GLI-00005-100": BRATS2024}


def test_one_map_with_3_and_4_tells_what_4_is_in_the_others() -> None:
    values = {"a": {0, 1, 2, 4}, "b": {0, 3, 4}, "c": {0, 3}}

    assert conventions(values) == dict.fromkeys("abc", BRATS2024)


def test_maps_of_two_conventions_in_one_folder_are_each_read_in_their_own() -> None:
    values = {"a": {0, 1, 2, 4}, "b": {0, 1, 2, 3}}

    assert conventions(values) == {"a": BRATS2017, "b": BRATS2023}


def test_a_task_with_its_own_numbering_is_read_in_it() -> None:
    """Without the fourth label paediatric maps look like those of 2023."""
    protocol = protocol_named("lesionwise2024", "PED")

    assert conventions({"a": {0, 1, 2}}, protocol) == {"a": BRATS2024_PED}
