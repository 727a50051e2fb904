"""Test surface figures and rotating GIFs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from brats_seg.errors import CaseError
from brats_seg.figures.mesh import surface_of
from brats_seg.figures.surface import (
    Camera,
    Layer,
    _cameras,
    _draw_letters,
    _with_one_palette,
    models_of,
    render,
    surface_figure,
    write_surface_gif,
)
from brats_seg.figures.view import open_view
from tests.builders import write_case


def both_sides(brats_root: Path):
    view = open_view(brats_root)
    return replace(view, prediction=view.reference)


def test_reference_and_prediction_are_side_by_side_at_one_scale(brats_root: Path) -> None:
    figure = surface_figure(models_of(both_sides(brats_root)))

    left, right = figure.axes
    assert left.get_title() == "BraTS2021_00000, reference"
    assert right.get_title() == "BraTS2021_00000, prediction"
    np.testing.assert_array_equal(left.images[0].get_array(), right.images[0].get_array())


def test_one_side_alone_is_drawn(brats_root: Path) -> None:
    assert len(surface_figure(models_of(open_view(brats_root))).axes) == 1


def letters_of(axes) -> list[str]:
    found = {text.get_gid(): text.get_text() for text in axes.texts}
    return [found[edge] for edge in ("left", "right", "top", "bottom")]


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (0, ["R", "L", "S", "I"]),
        (90, ["A", "P", "S", "I"]),
        (180, ["L", "R", "S", "I"]),
        (30, ["RA", "LP", "S", "I"]),
        (300, ["PR", "AL", "S", "I"]),
    ],
)
def test_every_model_names_the_sides_of_the_patient(
    brats_root: Path, degrees: float, expected: list[str]
) -> None:
    figure = surface_figure(models_of(both_sides(brats_root)), azimuth_degrees=degrees, n_pixels=40)

    assert [letters_of(axes) for axes in figure.axes] == [expected] * 2


def test_the_letters_of_a_gif_turn_with_it(brats_root: Path) -> None:
    models = models_of(open_view(brats_root))
    figure = surface_figure(models, n_pixels=40)
    before = len(figure.axes[0].texts)

    for degrees, right in ((90, "P"), (180, "R"), (0, "L")):
        (camera,) = _cameras(models, degrees, 40)
        _draw_letters(figure.axes[0], models[0], camera)
        assert letters_of(figure.axes[0])[1] == right
    assert len(figure.axes[0].texts) == before


def test_the_scale_bar_is_as_long_as_the_model_shows(brats_root: Path) -> None:
    figure = surface_figure(models_of(both_sides(brats_root)), n_pixels=60)
    FigureCanvasAgg(figure).draw()
    models = models_of(both_sides(brats_root))

    for axes in figure.axes:
        (bar,) = axes.lines
        ends = bar.get_transform().transform(np.column_stack(bar.get_data()))
        (words,) = (text.get_text() for text in axes.texts if text.get_text().endswith(" mm"))
        (camera, _) = _cameras(models, 0, 60)
        share = float(words.split()[0]) / (2 * camera.reach_mm)
        assert np.ptp(ends[:, 0]) == pytest.approx(share * axes.get_window_extent().width)


def test_a_long_title_is_inside_the_figure(brats_root: Path) -> None:
    figure = surface_figure(
        models_of(replace(both_sides(brats_root), case_id="W" * 60)), n_pixels=40
    )
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    left, right = (axes.title.get_window_extent(canvas.get_renderer()) for axes in figure.axes)

    assert left.x0 > 0
    assert left.x1 < right.x0
    assert right.x1 < figure.bbox.x1
    assert max(left.y1, right.y1) < figure.bbox.y1


def test_a_region_without_surface_is_not_in_the_legend(tmp_path: Path) -> None:
    write_case(tmp_path, with_et=False)

    figure = surface_figure(models_of(open_view(tmp_path)), n_pixels=40)

    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["WT", "TC"]


def test_a_gif_turns_and_leaves_no_other_file(brats_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "pictures" / "turn.gif"

    write_surface_gif(models_of(both_sides(brats_root)), path, n_frames=4)

    with Image.open(path) as gif:
        frames = []
        for number in range(gif.n_frames):
            gif.seek(number)
            frames.append(np.asarray(gif.convert("RGB")))
        assert gif.info["loop"] == 0
    assert len(frames) == 4
    assert all((frames[0] != frame).any() for frame in frames[1:])
    assert [other.name for other in path.parent.iterdir()] == ["turn.gif"]


def test_a_case_without_tumour_shows_its_brain(brats_root: Path) -> None:
    view = open_view(brats_root)
    empty = replace(view.reference, label_map=np.zeros_like(view.reference.label_map))

    figure = surface_figure(models_of(replace(view, reference=empty)))

    assert figure.axes[0].images[0].get_array().max() > 0


def test_a_case_without_label_map_is_an_error(brats_root: Path) -> None:
    with pytest.raises(CaseError, match="neither reference nor prediction"):
        models_of(replace(open_view(brats_root), reference=None))


def test_a_colour_that_only_a_later_frame_has_is_kept() -> None:
    """A colour may appear only when the models have turned."""
    shades = [Image.linear_gradient("L").convert("RGB") for _ in range(8)]
    shades[5].paste((213, 94, 0), (0, 0, 128, 128))

    frames = _with_one_palette(shades)

    shown = np.asarray(frames[5].convert("RGB"))[64, 64].astype(int)
    assert np.abs(shown - (213, 94, 0)).max() < 12


RED, GREEN = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
N = 60


def cube(at: tuple[int, int, int], edge: int = 6, *, colour=RED, opacity: float = 1.0) -> Layer:
    mask = np.zeros((40, 40, 40), bool)
    mask[tuple(slice(start, start + edge) for start in at)] = True
    return Layer(mesh=surface_of(mask, (1.0, 1.0, 1.0)), colour=colour, opacity=opacity)


def seen_from(degrees: float, *layers: Layer) -> np.ndarray:
    view = Camera(
        azimuth=np.radians(degrees), centre_mm=np.full(3, 20.0), reach_mm=30.0, n_pixels=N
    )
    return render(layers, view)


def place(picture: np.ndarray) -> tuple[float, float]:
    """Return how far right and how far up the drawn pixels are, -1 to 1."""
    rows, columns = np.nonzero(picture.sum(axis=2))
    return 2 * columns.mean() / (N - 1) - 1, 1 - 2 * rows.mean() / (N - 1)


@pytest.mark.parametrize(
    ("degrees", "right"), [(0, 1), (180, -1), (90, 0), (270, 0)], ids=["front", "back", "left", "r"]
)
def test_the_patients_left_is_on_the_right_from_the_front(degrees: float, right: int) -> None:
    x, _ = place(seen_from(degrees, cube((33, 17, 17))))

    assert x == pytest.approx(0.53 * right, abs=0.05)


def test_the_nose_points_left_as_seen_from_the_left_side() -> None:
    x, _ = place(seen_from(90, cube((17, 1, 17))))

    assert x < -0.4


def test_the_head_is_up() -> None:
    _, y = place(seen_from(0, cube((17, 17, 33))))

    assert y > 0.4


def test_what_is_solid_has_no_holes() -> None:
    picture = seen_from(30, cube((8, 8, 8), 24))
    rows = picture.sum(axis=2) > 0

    # in a convex body the pixels of a row are one run
    runs = [np.count_nonzero(np.diff(row.astype(int)) == 1) for row in np.pad(rows, 1)]
    assert max(runs) == 1


def test_the_inner_shines_through_the_outer() -> None:
    inner, outer = cube((15, 15, 15), 10), cube((8, 8, 8), 24, colour=GREEN, opacity=0.3)

    middle = seen_from(0, inner, outer)[N // 2, N // 2]
    veiled_by_nothing = seen_from(0, inner)[N // 2, N // 2]

    assert middle[0] == pytest.approx(0.7 * veiled_by_nothing[0])
    assert middle[1] > 0


def test_what_is_in_front_hides_what_lies_behind_whatever_is_drawn_first() -> None:
    front, behind = cube((13, 2, 13), 14), cube((13, 24, 13), 14, colour=GREEN)
    covered = (seen_from(0, front)[..., 0] > 0) & (seen_from(0, behind)[..., 1] > 0)
    assert covered.any()

    for layers in ((front, behind), (behind, front)):
        assert (seen_from(0, *layers)[covered][:, 0] > 0).all()
        assert (seen_from(0, *layers)[covered][:, 1] == 0).all()


def test_from_the_left_side_the_left_is_in_front() -> None:
    left, right = cube((24, 13, 13), 14), cube((2, 13, 13), 14, colour=GREEN)
    covered = (seen_from(90, left)[..., 0] > 0) & (seen_from(90, right)[..., 1] > 0)
    assert covered.any()

    assert (seen_from(90, left, right)[covered][:, 1] == 0).all()
    assert (seen_from(270, left, right)[covered[:, ::-1]][:, 0] == 0).all()


def test_a_haze_is_densest_at_its_rim() -> None:
    n = np.indices((40, 40, 40)) - 20
    mesh = surface_of((n**2).sum(axis=0) < 18**2, (1.0, 1.0, 1.0))

    picture = seen_from(0, Layer(mesh=mesh, colour=(1, 1, 1), opacity=1.0, rim_only=True))

    assert picture[N // 2, N // 2, 0] < 0.05
    assert picture.max() > 0.3


def test_nothing_is_drawn_of_nothing() -> None:
    empty = surface_of(np.zeros((4, 4, 4), bool), (1.0, 1.0, 1.0))

    assert seen_from(0, Layer(mesh=empty, colour=RED, opacity=1.0)).max() == 0
