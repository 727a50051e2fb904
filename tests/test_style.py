"""Test the style of figures, and writing them."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.figures.style import (
    REGION_COLOURS,
    RESEARCH_USE,
    add_dark_legend,
    dark_figure,
    filled_key,
    fitting_size,
    light_figure,
    write_figure,
)

# Machado, Oliveira and Fernandes (2009), complete loss of one kind of cone, on linear light
DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]
PROTANOPIA = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]
TRITANOPIA = [
    [1.255528, -0.076749, -0.178779],
    [-0.078411, 0.930809, 0.147602],
    [0.004733, 0.691367, 0.303900],
]


def seen(colour: str, vision: list[list[float]]) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    light = (np.array(vision) @ linear).clip(0, 1)
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)


def smallest_difference(colours: tuple[str, ...], vision: list[list[float]]) -> float:
    return min(
        float(np.linalg.norm(seen(a, vision) - seen(b, vision)))
        for a, b in combinations(colours, 2)
    )


@pytest.mark.parametrize("vision", [DEUTERANOPIA, PROTANOPIA, TRITANOPIA])
def test_regions_are_told_apart_with_any_colour_vision(vision: list[list[float]]) -> None:
    assert smallest_difference(REGION_COLOURS, vision) > 0.4


def test_green_orange_and_red_would_not_be() -> None:
    """The check must fail for colours that are often used."""
    assert smallest_difference(("tab:green", "tab:orange", "tab:red"), DEUTERANOPIA) < 0.2


def test_a_figure_of_numbers_says_what_it_is_for() -> None:
    assert light_figure(4, 4).get_supxlabel() == RESEARCH_USE


def test_a_title_is_as_large_as_it_can_be() -> None:
    assert fitting_size("short", 4, 10) == 10
    assert fitting_size("W" * 100, 4, 10) < 5
    assert fitting_size("W" * 100 + "\nshort", 4, 10) == fitting_size("W" * 100, 4, 10)
    assert fitting_size("", 4, 10) == 10


@pytest.mark.parametrize(("width", "n_rows"), [(12, 1), (7, 2), (4, 3)])
def test_the_entries_of_a_legend_are_inside_the_figure_in_their_order(
    width: float, n_rows: int
) -> None:
    words = [f"entry number {k}, of some length" for k in range(5)]
    figure = dark_figure(width, 4)
    add_dark_legend(figure, filled_key(words, ["red"] * 5), "small print")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()

    boxes = [
        text.get_window_extent(canvas.get_renderer()) for text in figure.legends[0].get_texts()
    ]
    assert min(box.x0 for box in boxes) > 0
    assert max(box.x1 for box in boxes) < figure.bbox.x1
    rows = sorted({round(box.y0) for box in boxes}, reverse=True)
    assert len(rows) >= n_rows
    by_place = sorted(
        figure.legends[0].get_texts(),
        key=lambda text: (
            rows.index(round(text.get_window_extent().y0)),
            text.get_window_extent().x0,
        ),
    )
    assert [text.get_text() for text in by_place] == words


@pytest.mark.parametrize(
    ("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")]
)
def test_the_name_says_the_format(tmp_path: Path, name: str, begins: bytes) -> None:
    write_figure(Figure(), tmp_path / "new" / name)

    assert (tmp_path / "new" / name).read_bytes().startswith(begins)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]


@pytest.mark.parametrize(("name", "ends"), [("a.jpg", ".jpg"), ("a", "nothing")])
def test_other_names_are_refused(tmp_path: Path, name: str, ends: str) -> None:
    with pytest.raises(UsageError, match=f"ends in {ends}; expected .* .png or .svg or .pdf"):
        write_figure(Figure(), tmp_path / name)


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(EnvironmentalError, match="cannot be written"):
        write_figure(Figure(), tmp_path / "file" / "a.png")
