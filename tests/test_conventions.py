"""Find the release and the label convention of cases and of folders of label maps."""

import pytest

from brats_seg.cases.conventions import LabelContent, resolve, resolve_all
from brats_seg.errors import ConfigError
from brats_seg.evaluation.protocols import ScoringProtocol, protocol_named
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD, LabelConvention

SHAPE_2024 = (182, 218, 182)
SHAPE = (240, 240, 155)
CASE_2024 = "BraTS-GLI-00001-000"


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
        ("msd", SHAPE, (0, 1, 2, 3), ("msd", "msd")),
        ("nnunet", SHAPE, (0, 1, 2, 4), ("nnunet", "brats2017?")),
        ("unknown", SHAPE, (0, 1, 2, 4), ("unknown", "brats2017?")),
        ("unknown", SHAPE, (0, 1, 2, 3), ("unknown", "brats2023?")),
        ("unknown", SHAPE, (0, 1, 2, 3, 4), ("unknown", "brats2024?")),
        ("unknown", SHAPE, (), ("unknown", "brats2023?")),
    ],
)
def test_release_shape_and_values_tell_the_convention(
    release: str,
    shape: tuple[int, int, int] | None,
    values: tuple[int, ...],
    expected: tuple[str, str],
) -> None:
    """A question mark: neither name nor values decide."""
    found = resolve(release=release, shape=shape, values=values)

    assert (found.release, found.convention.name + "?" * found.is_ambiguous) == expected


def test_a_declared_convention_is_taken_as_it_is() -> None:
    found = resolve(release="brats2023-gli", shape=SHAPE_2024, values={1}, declared="msd")

    assert (found.release, found.convention.name) == ("brats2024-gli", "msd")
    assert not found.is_ambiguous
    with pytest.raises(ConfigError, match="'brats1999' is unknown"):
        resolve(release="unknown", shape=None, values=(), declared="brats1999")


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


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # one map with 3 and 4 tells what 4 is in the others
        ({"a": {0, 1, 2, 4}, "b": {0, 3, 4}, "c": {0, 3}}, [BRATS2024] * 3),
        # maps of two conventions in one folder are each read in their own
        ({"a": {0, 1, 2, 4}, "b": {0, 1, 2, 3}}, [BRATS2017, BRATS2023]),
        # 4 in another release tells nothing about paediatric maps
        (
            {"BraTS-PED-00001-000": {0, 1, 2}, "BraTS-GLI-00005-100": {0, 1, 2, 3, 4}},
            [BRATS2023, BRATS2024],
        ),
        # after treatment 4 is the cavity, though nothing enhances
        ({"BraTS-GLI-00005-100": {0, 1, 2, 4}}, [BRATS2024]),
    ],
)
def test_maps_of_a_folder_tell_about_each_other(
    values: dict[str, set[int]], expected: list[LabelConvention]
) -> None:
    assert list(conventions(values).values()) == expected


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


def test_a_task_with_its_own_numbering_is_read_in_it() -> None:
    """Without the fourth label paediatric maps look like those of 2023."""
    protocol = protocol_named("lesionwise2024", "PED")

    assert conventions({"a": {0, 1, 2}}, protocol) == {"a": BRATS2024_PED}
