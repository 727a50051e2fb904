"""Which voxels are one lesion."""

import numpy as np
import pytest

from brats_seg.evaluation.lesionwise import join_touching, number_lesions, without_small
from brats_seg.voxels.components import Lesions, number_components

TISSUES = ("netc", "et", "rc", "snfh")


def row(text: str) -> Lesions:
    """Lesions along a row, from their digits; anything else is background."""
    numbers = [int(letter) if letter.isdigit() else 0 for letter in text]
    return np.array(numbers, dtype=np.int32)[:, None, None]


def groups(lesions: Lesions) -> list[int]:
    """How many lesions there are before each voxel of a row is seen: 0 outside, then 1, 2, ..."""
    numbers = lesions[:, 0, 0].tolist()
    order = list(dict.fromkeys(number for number in numbers if number))
    return [order.index(number) + 1 if number else 0 for number in numbers]


def joined(**rows: str) -> dict[str, list[int]]:
    lesions = {name: row(rows.get(name, "." * len(rows["et"]))) for name in TISSUES}
    return {name: groups(found) for name, found in join_touching(lesions).items()}


def test_voxels_that_share_a_corner_are_one_component() -> None:
    mask = np.zeros((4, 4, 4), dtype=bool)
    mask[0, 0, 0] = mask[1, 1, 1] = mask[3, 3, 3] = True

    lesions = number_components(mask)

    assert lesions[0, 0, 0] == lesions[1, 1, 1] != lesions[3, 3, 3]
    assert lesions.max() == 2


@pytest.mark.parametrize("dilation", [1, 3, 5])
def test_components_are_one_lesion_up_to_twice_the_dilation_apart(dilation: int) -> None:
    gap = 2 * dilation
    near, far = "1" + "." * gap + "1", "1" + "." * (gap + 1) + "1"

    assert number_lesions(row(near) > 0, dilation).max() == 1
    assert number_lesions(row(far) > 0, dilation).max() == 2


def test_dilation_reaches_over_edges_but_not_over_corners() -> None:
    over_edges, over_corners = np.zeros((2, 5, 5, 5), dtype=bool)
    over_edges[0, 0, 2] = over_edges[3, 3, 2] = True
    over_corners[0, 0, 0] = over_corners[4, 4, 4] = True

    assert number_lesions(over_edges, 1).max() == 1
    assert number_lesions(over_corners, 1).max() == 2


def test_lesions_cover_the_mask_and_nothing_else(rng: np.random.Generator) -> None:
    mask = rng.random((12, 10, 8)) < 0.05

    assert ((number_lesions(mask, 1) > 0) == mask).all()
    assert not number_lesions(np.zeros_like(mask), 1).any()


def test_lesions_up_to_the_minimum_are_dropped() -> None:
    lesions = row("1.22.333.4444")

    assert groups(without_small(lesions, 2.0, 1.0)) == [0, 0, 0, 0, 0, 1, 1, 1, 0, 2, 2, 2, 2]
    assert groups(without_small(lesions, 2.0, 0.5)) == [0] * 9 + [0, 0, 0, 0]
    assert not without_small(np.zeros((2, 2, 2), np.int32), 1.0, 1.0).any()


def test_lesions_that_touch_one_lesion_of_another_tissue_are_one() -> None:
    found = joined(et="11..22.33", netc="..11.....")

    assert found["et"] == [1, 1, 0, 0, 1, 1, 0, 2, 2]
    assert found["netc"] == [0, 0, 1, 1, 0, 0, 0, 0, 0]


def test_lesions_linked_by_a_chain_of_neighbours_are_one() -> None:
    found = joined(et="1.2.3.4", netc=".1.2...")

    assert found["et"] == [1, 0, 1, 0, 1, 0, 2]
    assert found["netc"] == [0, 1, 0, 1, 0, 0, 0]


def test_a_lesion_joined_late_joins_others_in_the_second_round() -> None:
    """The cavity joins 1 and 2 of ET, which then join those of NETC that only they touch."""
    found = joined(netc="1....2", et=".1..2.", rc="..11..")

    assert found["et"] == [0, 1, 0, 0, 1, 0]
    assert found["netc"] == [1, 0, 0, 0, 0, 1]


def test_oedema_is_joined_but_joins_nothing() -> None:
    assert joined(et="1.2", snfh=".1.")["et"] == [1, 0, 2]
    assert joined(et=".1.", snfh="1.2")["snfh"] == [1, 0, 1]


def test_other_regions_are_left_alone() -> None:
    lesions = {name: row("...") for name in TISSUES} | {"wt": row("1.2"), "et": row(".1.")}

    assert groups(join_touching(lesions)["wt"]) == [1, 0, 2]
