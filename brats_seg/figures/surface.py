"""Draw the regions of a case as surfaces in three dimensions, as a figure or a rotating GIF.

A surface is the outermost voxels of a mask, moved to where the smoothed mask is one half. Each pixel
shows the point that a ray from the viewer hits first, lit by the gradient of the smoothed mask.
"""

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image as Picture
from scipy.ndimage import binary_erosion, gaussian_filter, maximum_filter, zoom

from brats_seg.figures import sections
from brats_seg.figures.cases import CaseView, drawn_of
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS
from brats_seg.voxels.box import Mask, bounding_box
from brats_seg.voxels.grids import Spacing

Pixels: TypeAlias = npt.NDArray[np.float64]

_ELEVATION = np.radians(20)
"""Angle of the camera above the horizon."""
_LIGHT = np.array([-0.4, 0.5, 0.77])
"""Direction of the light in the axes of the screen: right, up, to the viewer."""
_AMBIENT = 0.35
"""Brightness of a surface that the light does not reach."""
_SKIN_MM = 1.5
"""Depth up to which an inner surface is not covered by an outer one: the enhancing rim is often the
rim of the core."""
_COLOURS = tuple(map(to_rgb, (*sections.REGION_COLOURS[::-1], "white")))
_OPACITIES = (1.0, 0.5, 0.4, 0.5)
"""Colours and opacities of ET, TC, WT and the brain."""
_RIM_POWER = 3
"""The brain is a haze, of which only the rim is visible."""
_STEP_MM = 1.0
"""Distance of the points on a surface."""
_N_PIXELS = 336
"""Edge of the picture of a model."""
_PANEL_INCHES, _GIF_DPI = 4.3, 80
_SECONDS_PER_TURN = 4.0


class Surface(NamedTuple):
    """Points on the surface of a mask."""

    points_mm: Pixels
    """(n, 3), along X, Y and Z from the corner of the array."""
    normals: Pixels
    """Unit vectors (n, 3) out of the mask."""


def surface_figure(view: CaseView, *, azimuth_degrees: float = 30.0) -> Figure:
    """Draw the reference and the prediction of a case side by side, seen from a little above.

    The azimuth is the direction of the view: 0 degrees from the patient's front, 90 degrees from
    the left side.
    """
    figure, turn = _turning_figure(view)
    turn(azimuth_degrees)
    return figure


def write_surface_gif(view: CaseView, path: Path, *, n_frames: int = 36) -> None:
    """Write a GIF of a full turn, which repeats without end.

    Raises:
        CaseError: The case has neither reference nor prediction.
        EnvironmentalError: The file cannot be written.
    """
    figure, turn = _turning_figure(view)
    figure.set_dpi(_GIF_DPI)
    canvas: Any = FigureCanvasAgg(figure)
    frames = []
    for number in range(n_frames):
        turn(360 * number / n_frames)
        canvas.draw()
        figure.set_layout_engine("none")  # computed once, for the first frame
        frames.append(Picture.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    # with a palette for each frame the colours would flicker
    every_third = [np.asarray(frame)[::3, ::3] for frame in frames]
    palette = Picture.fromarray(np.concatenate(every_third)).quantize()
    first, *others = (
        frame.quantize(palette=palette, dither=Picture.Dither.NONE) for frame in frames
    )
    duration = round(1000 * _SECONDS_PER_TURN / n_frames)
    with whole_file(path) as beside:
        first.save(
            beside, format="GIF", save_all=True, append_images=others, duration=duration, loop=0
        )


def _turning_figure(view: CaseView) -> tuple[Figure, Callable[[float], None]]:
    """Return a figure of the sides of a case at one scale, and the function that turns them."""
    sides, grid = drawn_of(view), view.grid
    brain = surface_of(view.images[0] != 0, grid.spacing_mm)
    points = brain.points_mm
    centre_mm = points.mean(axis=0) if len(points) else np.zeros(3)
    # from the middle of a picture to its edge, at which the whole brain is in it
    reach_mm = 1.03 * float(np.linalg.norm(points - centre_mm, axis=1).max(initial=1.0))
    figure = sections.dark_figure(_PANEL_INCHES * len(sides), _PANEL_INCHES + 1.0)
    models = []
    panels = figure.subplots(1, len(sides), squeeze=False)[0]
    for axes, (name, regions) in zip(panels, sides.items(), strict=True):
        axes.imshow(np.zeros((_N_PIXELS, _N_PIXELS, 3)), interpolation="bilinear")
        axes.set_axis_off()
        title = f"{view.case_id}, {name}"
        size = sections.fitting_size(title, _PANEL_INCHES, 8.5)
        axes.set_title(title, color="white", fontsize=size, parse_math=False)
        sections.draw_scale_bar(axes, 2 * reach_mm / _N_PIXELS)
        inner = [surface_of(mask, grid.spacing_mm) for mask in regions[::-1]]
        models.append([Surface(s.points_mm - centre_mm, s.normals) for s in (*inner, brain)])
    key = sections.region_key(
        list(sides.values()), [region.upper() for region in REGIONS], filled=True
    )
    sections.add_dark_legend(figure, key, f"{sections.RESEARCH_USE}; L marks the patient's left")

    def turn(azimuth_degrees: float) -> None:
        azimuth = np.radians(azimuth_degrees)
        # X runs to the patient's left, Y to the back, Z to the head
        to_viewer = np.array([np.sin(azimuth), -np.cos(azimuth), np.tan(_ELEVATION)])
        to_viewer /= np.linalg.norm(to_viewer)
        right = np.array([np.cos(azimuth), np.sin(azimuth), 0.0])
        screen = np.stack([right, np.cross(to_viewer, right), to_viewer])
        for axes, surfaces in zip(panels, models, strict=True):
            axes.images[0].set_data(_picture(surfaces, screen, reach_mm))
            sections.draw_letters(axes, grid, screen[0], screen[1])

    return figure, turn


def surface_of(mask: Mask, spacing_mm: Spacing) -> Surface:
    """Return points on the surface of a mask `(X, Y, Z)`, and its normals there."""
    box = bounding_box(mask)
    if box is None:
        return Surface(np.zeros((0, 3)), np.zeros((0, 3)))
    shape = np.maximum(1, np.rint(np.multiply(box.shape, spacing_mm) / _STEP_MM))
    factors = shape / box.shape
    cut = zoom(mask[box.slices].view(np.uint8), factors, order=0, grid_mode=True, mode="nearest")
    inside = np.pad(cut.astype(bool), 2)
    smooth = gaussian_filter(inside.astype(np.float32), 1.0)
    index = np.argwhere(inside & ~binary_erosion(inside))
    slopes = [
        (smooth[tuple((index + side).T)] - smooth[tuple((index - side).T)]) / 2
        for side in np.eye(3, dtype=int)
    ]
    gradient = np.stack(slopes, axis=1).astype(float)
    slope = np.maximum(np.linalg.norm(gradient, axis=1, keepdims=True), 1e-6)
    normals = -gradient / slope
    outwards = (smooth[tuple(index.T)][:, None] - 0.5) / slope
    points = index - 1.5 + outwards.clip(-0.5, 0.5) * normals
    return Surface((points / factors + box.start) * spacing_mm, normals)


def _picture(surfaces: Sequence[Surface], screen: Pixels, reach_mm: float) -> Pixels:
    """Return the picture (n, n, 3) of ET, TC, WT and the brain around the origin.

    An outer surface is blended over inner ones behind it. The vectors (3, 3) of the screen run to the
    right, up and to the viewer.
    """
    picture = np.zeros((_N_PIXELS, _N_PIXELS, 3))
    nearest = np.full(picture.shape[:2], -np.inf)
    for surface, colour, opacity in zip(surfaces, _COLOURS, _OPACITIES, strict=True):
        if not len(surface.points_mm):
            continue
        placed = surface.points_mm @ screen.T
        first = _first_hits(placed, reach_mm)
        is_hit = first >= 0
        depth = np.where(is_hit, placed[first, 2], -np.inf)
        normals = surface.normals[first] @ screen.T
        light = _AMBIENT + (1 - _AMBIENT) * (normals @ _LIGHT).clip(0, 1)
        is_haze = surface is surfaces[-1]
        haze = (1 - normals[..., 2].clip(0, 1)) ** _RIM_POWER if is_haze else 1.0
        veil = np.where(is_hit & (depth > nearest + _SKIN_MM), opacity * haze, 0.0)[..., None]
        picture += veil * (light[..., None] * colour - picture)
        nearest = np.maximum(nearest, depth)
    return picture


def _first_hits(placed: Pixels, reach_mm: float) -> npt.NDArray[np.int64]:
    """Return for each pixel (n, n) the number of the point (m, 3) nearest to the viewer, or -1."""
    order = np.argsort(placed[:, 2])
    right, up = (placed[order, :2] / (2 * reach_mm) * _N_PIXELS + _N_PIXELS / 2).T
    columns, rows = (np.clip(p, 0, _N_PIXELS - 1).astype(int) for p in (right, _N_PIXELS - up))
    rank = np.zeros((_N_PIXELS, _N_PIXELS), np.int64)
    # of several points in one pixel the last one stays, which is the nearest
    rank[rows, columns] = np.arange(1, len(order) + 1)
    # a point covers the pixels up to its neighbours, so that there are no holes
    pixels_per_step = _STEP_MM * _N_PIXELS / (2 * reach_mm)
    rank = maximum_filter(rank, 2 * ceil(0.65 * pixels_per_step) + 1)
    return np.where(rank > 0, order[rank - 1], -1)
