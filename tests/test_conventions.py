"""Find the release and the label convention of cases and of folders of label maps."""

import pytest

from brats_seg.cases.conventions import LabelContent, resolve, resolve_all
from brats_seg.errors import ConfigError
from brats_seg.evaluation.protocols import ScoringProtocol, protocol_named
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD, LabelConvention

SHAPE_2024 = (182, 218, 182)
SHAPE = (240, 240, 155)
CASE_2024 = "BraTS-GLI-00001-000"


@pytest.mark.parametrize("values", [(0, 1, 2, 4), (0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 2), ()])
def test_a_gli_case_of_the_2024_shape_is_of_2024_whatever_its_values(values: tuple[int]) -> None:
    """Otherwise the resection cavity, 4, would be scored as enhancing tumour."""
    found = resolve(release="brats2023-gli", shape=SHAPE_2024, values=values)

    assert (found.release, found.convention.name) == ("brats2024-gli", "brats2024")
    assert not found.is_ambiguous


def test_without_a_shape_the_name_decides() -> None:
    found = resolve(release="brats2023-gli", shape=None, values={0, 1, 2, 4})

    assert (found.release, found.convention.name) == ("brats2023-gli", "brats2017")


def test_the_2024_shape_says_nothing_about_other_releases() -> None:
    found = resolve(release="brats-ssa", shape=SHAPE_2024, values={0, 1, 2, 3})

    assert (found.release, found.convention.name) == ("brats-ssa", "brats2023")


def test_a_declared_convention_is_taken_as_it_is() -> None:
    found = resolve(release="brats2023-gli", shape=SHAPE_2024, values={1}, declared="msd")

    assert (found.release, found.convention.name) == ("brats2024-gli", "msd")
    assert not found.is_ambiguous


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(ConfigError, match="'brats1999' is unknown"):
        resolve(release="unknown", shape=None, values=(), declared="brats1999")


@pytest.mark.parametrize(
    ("release", "values", "is_ambiguous"),
    [
        ("unknown", (0, 1, 2, 3), True),
        ("nnunet", (0, 1, 2, 4), True),
        ("brats-ped", (0, 1, 2, 3), True),
        ("brats-ped", (0, 1, 2, 4), False),
        ("brats2021", (0, 1, 2), False),
        ("msd", (0, 1, 2, 3), False),
    ],
)
def test_it_is_ambiguous_where_neither_name_nor_values_decide(
    release: str, values: tuple[int, ...], is_ambiguous: bool
) -> None:
    assert resolve(release=release, shape=SHAPE, values=values).is_ambiguous is is_ambiguous


@pytest.mark.parametrize("values", [{0, 1, 2, 4}, {0, 1, 2, 3, 4}])
def test_the_shape_counts_in_folders_of_label_maps_too(values: set[int]) -> None:
    content = LabelContent(shape=SHAPE_2024, values=frozenset(values))

    found = resolve_all({CASE_2024: content})

    assert found[CASE_2024].convention.name == "brats2024"


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


@pytest.mark.parametrize(("release", "convention"), [("PED", BRATS2024_PED), ("MET", BRATS2024)])
def test_one_map_with_4_tells_the_convention_of_its_release(
    release: str, convention: LabelConvention
) -> None:
    """Otherwise the tumour core of a paediatric case without enhancing tumour would lose a label."""
    first, second = f"BraTS-{release}-00001-000", f"BraTS-{release}-00002-000"
    values = {first: {0, 1, 2, 4}, second: {0, 1, 2}, "BraTS-GLI-00001-000": {0, 1, 2, 3}}

    assert conventions(values) == {
        first: convention,
        second: convention,
        "BraTS-GLI-00001-000": BRATS2023,
    }


def test_4_in_another_release_tells_nothing_about_paediatric_maps() -> None:
    values = {"BraTS-PED-00001-000": {0, 1, 2}, "BraTS-GLI-00005-100": {0, 1, 2, 3, 4}}

    assert conventions(values) == {
        "BraTS-PED-00001-000": BRATS2023,
        "BraTS-GLI-00005-100": BRATS2024,
    }


def test_a_task_with_its_own_numbering_is_read_in_it() -> None:
    """Without the fourth label paediatric maps look like those of 2023."""
    protocol = protocol_named("lesionwise2024", "PED")

    assert conventions({"a": {0, 1, 2}}, protocol) == {"a": BRATS2024_PED}
