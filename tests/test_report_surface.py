"""The regions in space, still and turning."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from brats_seg.errors import CaseError
from brats_seg.report.case_view import open_view
from brats_seg.report.surface import _with_one_palette, models_of, surface_figure, write_surface_gif


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
    """A tumour may come round the corner."""
    shades = [Image.linear_gradient("L").convert("RGB") for _ in range(8)]
    shades[5].paste((213, 94, 0), (0, 0, 128, 128))

    frames = _with_one_palette(shades)

    shown = np.asarray(frames[5].convert("RGB"))[64, 64].astype(int)
    assert np.abs(shown - (213, 94, 0)).max() < 12
