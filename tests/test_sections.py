"""Test sections through a scan: position, orientation and outlines."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from brats_seg.report.sections import centre_of, draw_outlines, draw_section
from brats_seg.report.style import REGION_COLOURS

ONE_MM = (1.0, 1.0, 1.0)


def drawn_axes(image: np.ndarray, axis: int, index: int, spacing=ONE_MM):
    axes = Figure().subplots()
    draw_section(axes, image, axis, index, spacing)
    return axes


def test_the_planes_go_through_the_largest_sections() -> None:
    """Expected by hand: a bar along X at y = 1, z = 2 with a voxel beside it, and a far square."""
    regions = np.zeros((3, 4, 6, 6), dtype=bool)
    regions[0, :, 1, 2] = True
    regions[0, 3, 2, 2] = True
    regions[0, 0:2, 4:6, 5] = True

    assert centre_of(regions, np.zeros((4, 6, 6), np.float32)) == (3, 1, 2)
    # of all of it, the section at the far end along X and the bar along Y
    assert centre_of(np.zeros_like(regions), regions[0].astype(np.float32)) == (0, 1, 2)


def test_the_patients_left_is_on_the_right_and_the_front_at_the_top() -> None:
    """In LPS axes X runs to the left, Y to the back, Z to the head."""
    image = np.zeros((8, 8, 8), np.float32)
    image[2:7, 1:6, 2:7] = 1
    image[6, 1, 4] = 9  # left, front

    axes = drawn_axes(image, 2, 4)

    (shown,) = axes.images
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    assert shown.get_array()[1, 6] == 9
    assert left < right
    assert top < bottom  # row 1, the front, is above row 6
    assert drawn_axes(image, 0, 4).get_ylim()[0] < drawn_axes(image, 0, 4).get_ylim()[1]


def test_all_sections_of_a_case_have_one_scale() -> None:
    image = np.zeros((20, 20, 6), np.float32)
    image[2:18, 3:17, 2] = 1
    image[9, 9, 4] = 1  # a crumb of brain near the top

    limits = {
        (drawn_axes(image, 2, k).get_xlim(), drawn_axes(image, 2, k).get_ylim()) for k in (2, 4)
    }

    assert len(limits) == 1


def test_a_grey_means_the_same_in_all_sections() -> None:
    image = np.ones((20, 20, 6), np.float32)
    image[..., 3:] = 9

    greys = {drawn_axes(image, 2, k).images[0].get_clim() for k in range(6)}

    assert greys == {(1, 9)}


def test_voxels_that_are_no_cubes_are_drawn_as_long_as_they_are() -> None:
    image = np.ones((4, 4, 4), np.float32)

    assert drawn_axes(image, 1, 0, (1.0, 1.0, 3.0)).get_aspect() == 3
    assert drawn_axes(image, 2, 0, (1.0, 2.0, 3.0)).get_aspect() == 2


def test_an_empty_image_can_be_drawn() -> None:
    drawn_axes(np.zeros((4, 4, 4), np.float32), 2, 0).figure.canvas.draw()


@pytest.mark.parametrize("present", [(True, True, True), (True, True, False), (False,) * 3])
def test_each_region_that_is_there_is_outlined_in_its_colour(present: tuple[bool, ...]) -> None:
    regions = np.zeros((3, 9, 9, 3), dtype=bool)
    for k, there in enumerate(present):
        regions[k, 1 + k : 8 - k, 1 + k : 8 - k, 1] = there
    axes = Figure().subplots()

    draw_outlines(axes, regions, 2, 1)

    colours = [to_hex(outline.get_edgecolor()[0]).upper() for outline in axes.collections]
    assert colours == [c for c, there in zip(REGION_COLOURS, present, strict=True) if there]
