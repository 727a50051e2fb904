import numpy as np
import pytest

from brats_seg.voxels.box import Box, bounding_box


def test_a_box_knows_its_shape_and_takes_itself_out_of_an_array() -> None:
    box = Box.at((1, 0, 2), (2, 3, 1))
    array = np.arange(4 * 4 * 4).reshape(4, 4, 4)
    assert box == Box(start=(1, 0, 2), stop=(3, 3, 3))
    assert box.shape == (2, 3, 1)
    np.testing.assert_array_equal(array[box.slices], array[1:3, 0:3, 2:3])


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        (Box(start=(-2, 1, 0), stop=(2, 3, 9)), Box(start=(0, 1, 0), stop=(2, 3, 4))),
        (Box(start=(1, 1, 1), stop=(2, 2, 2)), Box(start=(1, 1, 1), stop=(2, 2, 2))),
        # wholly outside: nothing is left
        (Box(start=(6, 0, 0), stop=(8, 4, 4)), Box(start=(4, 0, 0), stop=(4, 4, 4))),
    ],
)
def test_the_part_within_a_volume(box: Box, inside: Box) -> None:
    assert box.within((4, 4, 4)) == inside


def test_a_box_seen_from_another_origin_has_the_same_shape() -> None:
    box = Box.at((5, 6, 7), (2, 2, 2)).seen_from((5, 5, 5))
    assert box == Box.at((0, 1, 2), (2, 2, 2))


def test_joined_boxes_hold_both() -> None:
    one, other = Box.at((0, 5, 2), (2, 2, 2)), Box.at((1, 0, 3), (4, 1, 9))
    assert one.joined(other) == Box(start=(0, 0, 2), stop=(5, 7, 12)) == other.joined(one)


def test_a_crop_is_placed_back_where_it_was() -> None:
    volume = np.zeros((5, 6, 7), dtype=np.uint8)
    volume[1:3, 2:5, 3:4] = 4
    box = Box(start=(1, 1, 3), stop=(4, 5, 6))
    np.testing.assert_array_equal(box.placed(volume[box.slices], (5, 6, 7)), volume)


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_bounding_box_touches_the_outermost_voxels(order: str) -> None:
    mask = np.zeros((6, 7, 8), dtype=bool, order=order)
    mask[1, 3, 4] = mask[4, 2, 7] = True
    assert bounding_box(mask) == Box(start=(1, 2, 4), stop=(5, 4, 8))


def test_an_empty_mask_has_no_bounding_box() -> None:
    assert bounding_box(np.zeros((2, 2, 2), dtype=bool)) is None
