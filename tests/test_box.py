"""Boxes of voxels, held against masks of the same voxels."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from brats_seg.voxels.box import Box, Mask, bounding_box

SHAPE = (5, 6, 7)
CORNERS = st.tuples(*[st.integers(-3, 8)] * 3)
SIZES = st.tuples(*[st.integers(1, 6)] * 3)
BOXES = st.builds(Box.at, CORNERS, SIZES)


def mask_of(box: Box) -> Mask:
    at = np.indices([n + 40 for n in SHAPE]).T - 20
    return ((at >= box.start) & (at < box.stop)).all(axis=-1).T


@given(one=BOXES, other=BOXES)
def test_boxes_are_their_voxels(one: Box, other: Box) -> None:
    whole, outer = Box.at((0, 0, 0), SHAPE), Box.at((-20, -20, -20), (1, 1, 1))
    assert mask_of(one).sum() == np.prod(one.shape)
    assert bounding_box(mask_of(one)) == one.seen_from(outer.start)
    assert bounding_box(mask_of(one) | mask_of(other)) == one.joined(other).seen_from(outer.start)
    inside = one.within(SHAPE)
    np.testing.assert_array_equal(mask_of(inside), mask_of(one) & mask_of(whole))
    # a crop is placed back where it was
    volume = np.arange(np.prod(SHAPE)).reshape(SHAPE) + 1
    placed = inside.placed(volume[inside.slices], SHAPE)
    np.testing.assert_array_equal(placed, volume * mask_of(one)[20:25, 20:26, 20:27])


def test_boxes_outside_of_a_volume_and_masks_without_voxels_are_empty() -> None:
    outside = Box(start=(6, 0, 0), stop=(8, 4, 4)).within((4, 4, 4))
    assert outside == Box(start=(4, 0, 0), stop=(4, 4, 4))
    assert bounding_box(np.zeros((2, 2, 2), dtype=bool)) is None
    mask = np.zeros((6, 7, 8), dtype=bool, order="F")
    mask[1, 3, 4] = mask[4, 2, 7] = True
    assert bounding_box(mask) == Box(start=(1, 2, 4), stop=(5, 4, 8))
