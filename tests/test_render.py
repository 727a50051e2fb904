"""Surfaces to pixels: what is in front is seen, and from the side one looks from."""

import numpy as np
import pytest

from brats_seg.report.mesh import surface_of
from brats_seg.report.surface import Camera, Layer, render

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
