"""Surfaces of the regions: where they are, from which side, and the rotating GIF."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import binary_fill_holes

from brats_seg.figures import surface
from brats_seg.figures.cases import CaseView, open_view
from brats_seg.figures.surface import surface_figure, surface_of, write_surface_gif
from tests.test_cases import letters_of
from tests.test_sections import bar_pixels

CASE = "BraTS2021_00000"


@pytest.fixture(scope="module")
def view(tiny_scans: Path) -> CaseView:
    found = open_view(tiny_scans)
    return replace(found, prediction=found.reference)


def ball(radius: float = 12, edge: int = 40) -> np.ndarray:
    offsets = np.indices((edge, edge, edge)).T - (edge - 1) / 2
    return (np.linalg.norm(offsets, axis=-1) < radius).T


def test_the_points_of_a_ball_are_on_it_and_its_normals_point_outwards() -> None:
    """Expected from geometry: a ball of radius 12 around (20, 20, 20) mm, from edges of voxels."""
    points_mm, normals = surface_of(ball(), (1.0, 1.0, 1.0))
    flat, _ = surface_of(ball()[:, :, ::3], (1.0, 1.0, 3.0))
    mask = np.zeros((9, 9, 9), bool)
    assert surface_of(mask, (1.0, 1.0, 1.0)).points_mm.shape == (0, 3)
    mask[4, 5, 6] = True
    outwards = points_mm - 20
    distance = np.linalg.norm(outwards, axis=1)
    np.testing.assert_allclose(distance, 12, atol=0.6)
    assert ((outwards * normals).sum(axis=1) / distance).min() > 0.95
    np.testing.assert_allclose(np.ptp(flat, axis=0), 24, atol=3)
    assert surface_of(mask, (1.0, 1.0, 1.0)).points_mm.tolist() == [[4.5, 5.5, 6.5]]


@pytest.mark.parametrize(
    ("degrees", "letters"), [(0, "R L S I"), (90, "A P S I"), (30, "RA LP S I"), (300, "PR AL S I")]
)
def test_both_models_are_drawn_at_one_scale_with_the_sides_of_the_patient(
    view: CaseView, degrees: float, letters: str
) -> None:
    """The whole brain is in the picture, however it is turned, and 3 % of space around it."""
    left, right = surface_figure(view, azimuth_degrees=degrees).axes

    assert (left.get_title(), right.get_title()) == (f"{CASE}, reference", f"{CASE}, prediction")
    assert [" ".join(letters_of(axes).values()) for axes in (left, right)] == [letters] * 2
    np.testing.assert_array_equal(left.images[0].get_array(), right.images[0].get_array())
    points_mm = surface_of(view.images[0] != 0, view.grid.spacing_mm).points_mm
    reach_mm = 1.03 * np.linalg.norm(points_mm - points_mm.mean(axis=0), axis=1).max()
    length, words = bar_pixels(left)
    share = float(words.split()[0]) / (2 * reach_mm)
    assert length == pytest.approx(share * left.get_window_extent().width)


def test_a_tumour_on_the_left_is_where_the_letter_says(view: CaseView) -> None:
    """X runs to the patient's left, which is on the right of a picture from the front."""
    label_map = np.zeros_like(view.reference.label_map)
    label_map[16:20, 10:14, 6:10] = 4
    left = replace(view, reference=replace(view.reference, label_map=label_map), prediction=None)
    for degrees, is_right in ((0, True), (180, False)):
        (axes,) = surface_figure(left, azimuth_degrees=degrees).axes

        picture = np.asarray(axes.images[0].get_array())
        columns = np.nonzero(np.ptp(picture, axis=2) > 0.2)[1]
        assert (columns.mean() > picture.shape[1] / 2) == is_right


def test_a_gif_turns_without_end_with_its_letters_and_leaves_no_other_file(
    view: CaseView, tmp_path: Path
) -> None:
    path = tmp_path / "pictures" / "turn.gif"
    write_surface_gif(view, path, n_frames=4)

    assert [one.name for one in path.parent.iterdir()] == ["turn.gif"]
    with Image.open(path) as gif:
        assert (gif.n_frames, gif.info["loop"], gif.info["duration"]) == (4, 0, 1000)
        frames = []
        for number in range(4):
            gif.seek(number)
            frames.append(np.asarray(gif.convert("RGB")).astype(int))
    assert all(np.abs(frames[0] - other).max() > 50 for other in frames[1:])


def test_a_surface_has_no_holes_however_small_the_brain() -> None:
    """Points are 1 mm apart, and a pixel of a small brain is a fraction of that."""
    for radius in (12, 40):
        points = surface_of(ball(radius, 2 * radius + 5), (1.0, 1.0, 1.0)).points_mm
        hit = surface._first_hits(points - points.mean(axis=0), 1.03 * radius) >= 0

        assert hit.mean() > 0.6
        assert np.array_equal(hit, binary_fill_holes(hit))
