"""Find the release and the label convention of cases and of folders of label maps."""

import pytest

from brats_seg.cases.conventions import release_at, resolve, resolve_all
from brats_seg.errors import ConfigError
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD, LabelConvention

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
    convention, is_ambiguous = resolve(release, values, shape=shape)
    assert (release_at(release, shape), convention.name + "?" * is_ambiguous) == expected


def test_a_declared_convention_is_taken_as_it_is() -> None:
    assert resolve("brats2023-gli", {1}, shape=SHAPE_2024, declared="msd") == (MSD, False)
    with pytest.raises(ConfigError, match="'brats1999' is unknown"):
        resolve("unknown", (), declared="brats1999")


def conventions(
    values: dict[str, set[int]], shape: tuple[int, int, int] = SHAPE
) -> list[LabelConvention]:
    maps = {name: (shape, frozenset(of)) for name, of in values.items()}
    return list(resolve_all(maps).values())


PED, MET, GLI = "BraTS-PED-0000", "BraTS-MET-0000", "BraTS-GLI-0000"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({f"{GLI}1-000": {0, 1, 2, 4}}, [BRATS2017]),
        ({f"{GLI}5-100": {0, 1, 2, 3, 4}}, [BRATS2024]),
        ({"BRATS_001": {0, 1, 2, 3}}, [MSD]),
        ({"patient7": {0}}, [BRATS2023]),
        # one map with 3 and 4 tells what 4 is in the others
        ({"a": {0, 1, 2, 4}, "b": {0, 3, 4}, "c": {0, 3}}, [BRATS2024] * 3),
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
def test_maps_tell_about_each_other(
    values: dict[str, set[int]], expected: list[LabelConvention]
) -> None:
    assert conventions(values) == expected


def test_the_shape_counts_in_folders_of_label_maps_too() -> None:
    assert conventions({f"{GLI}1-000": {0, 1, 2, 4}}, SHAPE_2024) == [BRATS2024]
