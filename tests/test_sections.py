"""Test sections through a scan: position, orientation and outlines."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from brats_seg.figures.sections import (
    Grid,
    centre_of,
    draw_outlines,
    draw_overlay,
    draw_section,
    draw_section_bar,
)
from brats_seg.figures.style import REGION_COLOURS
from brats_seg.voxels.grids import AXES

ONE_MM = (1.0, 1.0, 1.0)


def drawn_axes(image: np.ndarray, axis: int, index: int, spacing=ONE_MM, directions=AXES):
    axes = Figure(figsize=(3, 3), dpi=100).subplots()
    draw_section(axes, image, axis, index, Grid(spacing_mm=spacing, directions=directions))
    return axes


def letters_of(axes) -> str:
    """Return the letters at the left, right, top and bottom edge."""
    texts = {text.get_gid(): text for text in axes.texts}
    left, right, top, bottom = (texts[edge] for edge in ("left", "right", "top", "bottom"))
    assert left.get_position()[0] < 0.1 < 0.9 < right.get_position()[0]
    assert bottom.get_position()[1] < 0.1 < 0.9 < top.get_position()[1]
    return " ".join(text.get_text() for text in (left, right, top, bottom))


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


@pytest.mark.parametrize(
    ("directions", "axis", "expected"),
    [
        (("L", "P", "S"), 2, "R L A P"),
        (("L", "P", "S"), 1, "R L S I"),
        (("L", "P", "S"), 0, "A P S I"),
        (("R", "A", "S"), 2, "L R P A"),
        (("R", "P", "I"), 1, "L R I S"),
        (("P", "L", "S"), 2, "A P R L"),
    ],
)
def test_the_letters_are_those_of_the_axes_of_the_array(
    directions: tuple[str, str, str], axis: int, expected: str
) -> None:
    axes = drawn_axes(np.ones((20, 20, 20), np.float32), axis, 3, directions=directions)

    assert letters_of(axes) == expected


def test_a_flipped_affine_has_the_other_letters() -> None:
    flipped = np.diag([1.0, 2.0, -3.0, 1.0])
    oblique = np.linalg.qr(np.diag([-1.0, -1.0, 1.0]) + 0.2)[0]

    assert Grid.of(flipped) == Grid(spacing_mm=(1.0, 2.0, 3.0), directions=("R", "A", "I"))
    assert Grid.of(np.diag([-1.0, -1.0, 1.0, 1.0])).directions == ("L", "P", "S")
    turned = np.eye(4)
    turned[:3, :3] = oblique
    assert set(Grid.of(turned).directions) & set("LR")


def test_an_oblique_direction_has_two_letters_the_nearer_first() -> None:
    grid = Grid(spacing_mm=ONE_MM)

    assert grid.letters((0.9, 0.44, 0)) == "LP"
    assert grid.letters((-0.5, -0.86, 0)) == "AR"
    assert grid.letters((0.3, 0, -0.95)) == "I"


def test_a_letter_is_drawn_whole() -> None:
    """A thin foot that falls between two pixels would make an I of an L."""
    for inches in np.linspace(2, 3, 9):
        figure = Figure(figsize=(inches, inches), dpi=100, facecolor="black")
        axes = figure.subplots()
        draw_section(axes, np.ones((30, 30, 5), np.float32), 2, 2, Grid(spacing_mm=ONE_MM))
        axes.images[0].set_visible(False)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        (letter,) = (text for text in axes.texts if text.get_gid() == "right")
        box = letter.get_window_extent()
        rows = slice(int(inches * 100 - box.y1) - 1, int(inches * 100 - box.y0) + 2)
        there = np.asarray(canvas.buffer_rgba())[rows, int(box.x0) : int(box.x1) + 1, 0] > 70
        assert there.any(axis=1).sum() >= 6, "as high as a letter"
        assert there.any(axis=0).sum() >= 4, "with its foot"


def bar_pixels(axes) -> tuple[float, str]:
    """Return the length of the scale bar in pixels and its words, after drawing."""
    FigureCanvasAgg(axes.figure).draw()
    (bar,) = (line for line in axes.lines if line.get_gid() == "scale bar")
    ends = bar.get_transform().transform(np.column_stack(bar.get_data()))
    (words,) = (text.get_text() for text in axes.texts if text.get_text().endswith(" mm"))
    return float(np.ptp(ends[:, 0])), words


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_scale_bar_is_as_long_as_50_mm_of_the_image(axis: int) -> None:
    """Measured against the edges of the picture, whose voxels are 2, 1 and 3 mm long."""
    spacing = (2.0, 1.0, 3.0)
    axes = drawn_axes(np.ones((120, 240, 80), np.float32), axis, 10, spacing)
    draw_section_bar(axes, axis, Grid(spacing_mm=spacing))

    length, words = bar_pixels(axes)

    assert words == "50 mm"
    left, right, bottom, top = axes.images[0].get_extent()
    corners = axes.transData.transform([(left, bottom), (right, top)])
    width, height = np.abs(np.diff(corners, axis=0))[0]
    # 240 mm along every axis
    assert length == pytest.approx(50 / 240 * width, rel=1e-6)
    assert length == pytest.approx(50 / 240 * height, rel=1e-6)


@pytest.mark.parametrize(
    ("n", "words"), [(130, "50 mm"), (60, "20 mm"), (24, "10 mm"), (9, "2 mm")]
)
def test_a_small_picture_has_a_shorter_bar(n: int, words: str) -> None:
    axes = drawn_axes(np.ones((n, n, n), np.float32), 2, 1)
    draw_section_bar(axes, 2, Grid(spacing_mm=ONE_MM))

    assert bar_pixels(axes)[1] == words


def drawn_colours(regions: np.ndarray) -> list[int]:
    """Return how many pixels are nearest to the colours of WT, TC and ET."""
    figure = Figure(figsize=(3, 3), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(np.zeros((60, 60)), cmap="gray")
    draw_outlines(axes, regions, 2, 0)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    off = [np.linalg.norm(picture - to_rgb(colour), axis=-1) for colour in REGION_COLOURS]
    nearest = np.argmin(off, axis=0)[np.ptp(picture, axis=-1) > 0.3]
    return np.bincount(nearest, minlength=len(REGION_COLOURS)).tolist()


@pytest.mark.parametrize("n_coincide", [2, 3])
def test_the_whole_tumour_is_seen_where_outlines_coincide(n_coincide: int) -> None:
    """The last outline drawn used to hide the others."""
    regions = np.zeros((3, 60, 60, 1), dtype=bool)
    regions[:n_coincide, 10:50, 10:50] = True
    n_pixels_around = 4 * 40 * 450 / 60

    n_drawn = drawn_colours(regions)

    assert n_drawn[0] > 0.5 * n_pixels_around
    assert n_drawn[n_coincide - 1] > 0.5 * n_pixels_around


def test_an_overlay_leaves_the_shape_of_the_voxels() -> None:
    axes = drawn_axes(np.ones((4, 4, 4), np.float32), 1, 0, (1.0, 1.0, 3.0))

    draw_overlay(axes, np.zeros((4, 4, 4)))

    assert axes.get_aspect() == 3


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
