"""Sections through a scan: position, orientation, scale and outlines; the style of all figures."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.figures import sections
from brats_seg.voxels.grids import AXES

GRID = sections.Grid(spacing_mm=(1.0, 1.0, 1.0), directions=AXES)


def drawn_axes(image: np.ndarray, axis: int, index: int, grid: sections.Grid = GRID) -> Axes:
    axes = Figure(figsize=(3, 3), dpi=100).subplots()
    sections.draw_section(axes, image, axis, index, grid)
    return axes


def test_the_planes_go_through_the_largest_sections() -> None:
    regions = np.zeros((3, 4, 6, 6), dtype=bool)
    regions[0, :, 1, 2] = True
    regions[0, 3, 2, 2] = True
    regions[0, 0:2, 4:6, 5] = True
    assert sections.centre_of(regions, np.zeros((4, 6, 6), np.float32)) == (3, 1, 2)
    # of all of it, the section at the far end along X and the bar along Y
    assert sections.centre_of(np.zeros_like(regions), regions[0].astype(np.float32)) == (0, 1, 2)


@pytest.mark.parametrize(
    ("directions", "axis", "letters"),
    [
        ("LPS", 2, "R L A P"),
        ("LPS", 1, "R L S I"),
        ("LPS", 0, "A P S I"),
        ("RAS", 2, "L R P A"),
        ("RPI", 1, "L R I S"),
        ("PLS", 2, "A P R L"),
    ],
)
def test_letters_name_the_sides(directions: str, axis: int, letters: str) -> None:
    """The bright voxel is far along all axes, where the letters of the directions are."""
    image = np.ones((20, 20, 20), np.float32)
    image[17, 17, 17] = 9
    axes = drawn_axes(image, axis, 17, replace(GRID, directions=(*directions,)))
    texts = {text.get_gid(): text for text in axes.texts}
    found = [texts[edge] for edge in ("left", "right", "top", "bottom")]
    assert " ".join(text.get_text() for text in found) == letters
    left, right, top, bottom = (text.get_position() for text in found)
    assert left[0] < 0.1 < 0.9 < right[0]
    assert bottom[1] < 0.1 < 0.9 < top[1]
    (row,), (column,) = np.nonzero(axes.images[0].get_array() == 9)
    (x, y) = axes.transAxes.inverted().transform(axes.transData.transform((column, row)))
    assert texts["right" if x > 0.5 else "left"].get_text() in directions
    assert texts["top" if y > 0.5 else "bottom"].get_text() in directions


def bar_pixels(axes: Axes) -> tuple[float, str]:
    FigureCanvasAgg(axes.figure).draw()
    (bar,) = (line for line in axes.lines if line.get_gid() == "scale bar")
    ends = bar.get_transform().transform(np.column_stack(bar.get_data()))
    (words,) = (text.get_text() for text in axes.texts if text.get_text().endswith(" mm"))
    return float(np.ptp(ends[:, 0])), words


def test_the_scale_bar_is_as_long_as_it_says_and_shorter_in_a_small_picture() -> None:
    grid = replace(GRID, spacing_mm=(2.0, 1.0, 3.0))
    for axis in range(3):
        axes = drawn_axes(np.ones((120, 240, 80), np.float32), axis, 10, grid)
        sections.draw_overlay(axes, np.zeros((*axes.images[0].get_array().shape, 4)))
        sections.draw_scale_bar(axes, grid.spacing_mm[1 if axis == 0 else 0])
        length, words = bar_pixels(axes)
        left, right, bottom, top = axes.images[0].get_extent()
        corners = axes.transData.transform([(left, bottom), (right, top)])
        assert words == "50 mm"
        # 240 mm along every axis
        edges = np.abs(np.diff(corners, axis=0))[0]
        assert edges * 50 / 240 == pytest.approx([length] * 2, rel=1e-6)
    for n, expected in ((130, "50 mm"), (60, "20 mm"), (24, "10 mm"), (9, "2 mm")):
        axes = drawn_axes(np.ones((n, n, n), np.float32), 2, 0)
        sections.draw_scale_bar(axes, 1.0)
        assert bar_pixels(axes)[1] == expected


def drawn_colours(regions: np.ndarray) -> list[int]:
    """Return how many pixels are nearest to the colours of WT, TC and ET."""
    figure = Figure(figsize=(3, 3), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(np.zeros((60, 60)), cmap="gray")
    sections.draw_outlines(axes, regions, 2, 0)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    off = [np.linalg.norm(picture - to_rgb(colour), axis=-1) for colour in sections.REGION_COLOURS]
    nearest = np.argmin(off, axis=0)[np.ptp(picture, axis=-1) > 0.3]
    return np.bincount(nearest, minlength=len(sections.REGION_COLOURS)).tolist()


def test_the_whole_tumour_is_seen_where_outlines_coincide() -> None:
    regions = np.zeros((3, 60, 60, 1), dtype=bool)
    assert drawn_colours(regions) == [0, 0, 0]
    regions[0, 10:50, 10:50] = True
    n_pixels_around = 4 * 40 * 450 / 60
    for innermost in (1, 2):
        regions[innermost] = regions[0]
        n_drawn = drawn_colours(regions)
        assert min(n_drawn[0], n_drawn[innermost]) > 0.5 * n_pixels_around


# Machado, Oliveira and Fernandes (2009), complete loss of one kind of cone, on linear light
VISIONS = {
    "deuteranopia": "0.3673 0.8606 -0.2280 0.2801 0.6725 0.0474 -0.0118 0.0429 0.9689",
    "protanopia": "0.1523 1.0526 -0.2049 0.1145 0.7863 0.0992 -0.0039 -0.0481 1.0520",
    "tritanopia": "1.2555 -0.0767 -0.1788 -0.0784 0.9308 0.1476 0.0047 0.6914 0.3039",
}


def smallest_difference(colours: tuple[str, ...], vision: str) -> float:
    matrix = np.array(vision.split(), float).reshape(3, 3)

    def seen(colour: str) -> np.ndarray:
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        light = (matrix @ linear).clip(0, 1)
        return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)

    return min(float(np.linalg.norm(seen(a) - seen(b))) for a, b in combinations(colours, 2))


def test_regions_are_told_apart_with_any_colour_vision() -> None:
    often = ("tab:green", "tab:orange", "tab:red")
    for vision, matrix in VISIONS.items():
        assert smallest_difference(sections.REGION_COLOURS, matrix) > 0.4
        # colours that are often used fail
        assert vision == "tritanopia" or smallest_difference(often, matrix) < 0.3


@pytest.mark.parametrize(("width", "n_rows"), [(12, 1), (7, 2), (4, 3)])
def test_the_entries_of_a_legend_are_inside_in_their_order(width: float, n_rows: int) -> None:
    words = [f"entry number {k}, of some length" for k in range(5)]
    figure = sections.dark_figure(width, 4)
    sections.add_dark_legend(figure, [sections.line_key(text, "red", 1, "-") for text in words])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = figure.legends[0].get_texts()
    boxes = {text.get_text(): text.get_window_extent(canvas.get_renderer()) for text in texts}
    assert min(box.x0 for box in boxes.values()) > 0
    assert max(box.x1 for box in boxes.values()) < figure.bbox.x1
    assert len({round(box.y0) for box in boxes.values()}) >= n_rows
    assert sorted(boxes, key=lambda text: (-round(boxes[text].y0), boxes[text].x0)) == words


def test_the_name_says_the_format_and_one_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    begins = {"a.png": b"\x89PNG", "a.SVG": b"<?xml", "a.pdf": b"%PDF"}
    figure = Figure()
    # the font lacks these letters
    figure.suptitle("日本")
    for name, expected in begins.items():
        sections.write_figure(figure, tmp_path / "new" / name)
        assert (tmp_path / "new" / name).read_bytes().startswith(expected)
    assert {path.name for path in (tmp_path / "new").iterdir()} == begins.keys()
    (tmp_path / "file").touch()
    refused = (("a.jpg", UsageError), ("a", UsageError), ("file/a.png", EnvironmentalError))
    for name, error in refused:
        with pytest.raises(error):
            sections.write_figure(Figure(), tmp_path / name)


@pytest.mark.parametrize("shape", [(8, 8, 1), (1, 8, 8), (3, 3, 3)])
def test_outlines_are_closed_at_the_edge_of_a_volume_and_inside_the_panel(shape) -> None:
    regions = np.ones((3, *shape), bool)
    for axis in range(3):
        axes = drawn_axes(np.ones(shape, np.float32), axis, 0)
        sections.draw_outlines(axes, regions, axis, 0)
        limits = np.sort([axes.get_xlim(), axes.get_ylim()], axis=1).T
        assert len(axes.collections) == 4
        for contour in axes.collections:
            ((line,),) = contour.allsegs
            assert line[0].tolist() == line[-1].tolist()
            assert (limits[0] < line).all()
            assert (line < limits[1]).all()
