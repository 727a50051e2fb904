"""Render the regions of a case as surfaces in three dimensions, as a figure or a rotating GIF.

The faces towards the viewer are sampled densely, and the nearest sample of each pixel is kept. A
full turn of large tumours takes seconds; matplotlib's 3-D axes take as long for a single view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image as Picture

from brats_seg.figures.mesh import Mesh, surface_of
from brats_seg.figures.sections import Grid, Image, draw_letters, draw_scale_bar
from brats_seg.figures.style import (
    REGION_COLOURS,
    RESEARCH_USE,
    add_dark_legend,
    dark_figure,
    filled_key,
    fitting_size,
)
from brats_seg.figures.view import CaseView, drawn_of
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS, RegionMasks

Pixels: TypeAlias = npt.NDArray[np.float64]
Points: TypeAlias = npt.NDArray[np.float32]

_ELEVATION = np.radians(20)
"""Angle of the camera above the horizon, in radians."""
_LIGHT = np.array([-0.4, 0.5, 0.77])
"""Direction of the light in the axes of the screen: right, up, to the viewer."""
_AMBIENT = 0.35
"""Brightness of a face that the light does not reach."""
_SKIN_MM = 1.5
"""Depth in mm up to which an inner surface is not covered by an outer one: the enhancing rim is
often the rim of the core."""
_RIM_POWER = 3
"""Power that limits a haze to its rim."""
_OPACITY = (0.4, 0.5, 1.0)
"""Opacities of WT, TC and ET."""
_BRAIN_COLOUR, _BRAIN_OPACITY, _BRAIN_STEP = "white", 0.5, 3
"""Look of the brain; every third voxel is enough."""
_MARGIN = 1.03
_PANEL_INCHES = 4.3
_TITLE_SIZE = 8.5
_N_PIXELS = 672
"""Edge of the picture of a model, in pixels."""
_N_PIXELS_OF_GIF = 336
"""The same in a GIF: that of its axes, so that it is not resampled."""

N_FRAMES = 36
"""Frames of a full turn."""
_SECONDS_PER_TURN = 4.0
_DPI = 80
_N_COLOURS = 256
"""Colours of a GIF."""
_COARSE, _NEAREST = 3, Picture.Resampling.NEAREST
"""Every third pixel is enough to choose the colours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A surface with its colour and opacity."""

    mesh: Mesh
    colour: tuple[float, float, float]
    opacity: float
    rim_only: bool = False
    """Whether only the rim is visible, as a haze."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Camera:
    """Direction and extent of a view."""

    azimuth: float
    """Angle in radians: 0 from the patient's front, a quarter turn from the left side."""
    centre_mm: npt.NDArray[np.float64]
    """Point (3,) in the middle of the picture."""
    reach_mm: float
    """Distance from the middle of the picture to its edge."""
    n_pixels: int
    """Pixels along each edge."""

    @property
    def screen_axes(self) -> npt.NDArray[np.float64]:
        """Vectors (3, 3) to the right, up and to the viewer, in the axes of the scan."""
        # X runs to the patient's left, Y to the back, Z to the head
        to_viewer = np.array([np.sin(self.azimuth), -np.cos(self.azimuth), np.tan(_ELEVATION)])
        to_viewer /= np.linalg.norm(to_viewer)
        right = np.array([np.cos(self.azimuth), np.sin(self.azimuth), 0.0])
        return np.stack([right, np.cross(to_viewer, right), to_viewer])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SurfaceModel:
    """The surfaces of one label map."""

    title: str
    layers: tuple[Layer, ...]
    """Layers from the innermost to the outermost, which is the brain."""
    grid: Grid
    """Directions of X, Y and Z."""

    @property
    def centre_mm(self) -> npt.NDArray[np.float64]:
        """Middle of the brain (3,)."""
        return self._brain_mm.mean(axis=0) if len(self._brain_mm) else np.zeros(3)

    @property
    def reach_mm(self) -> float:
        """Distance from the middle of the brain to its farthest point."""
        away = np.linalg.norm(self._brain_mm - self.centre_mm, axis=1)
        return float(away.max(initial=1.0))

    @property
    def _brain_mm(self) -> npt.NDArray[np.float64]:
        return self.layers[-1].mesh.vertices_mm


def models_of(view: CaseView) -> tuple[SurfaceModel, ...]:
    """Compute the surfaces of the reference and of the prediction of a case, where it has them.

    Raises:
        CaseError: The case has neither.
    """
    return tuple(
        model_of(f"{view.case_id}, {words}", regions, view.images[0], view.grid)
        for words, regions in drawn_of(view)
    )


def model_of(title: str, regions: RegionMasks, image: Image, grid: Grid) -> SurfaceModel:
    """Compute the surfaces of the brain and of WT, TC and ET.

    Args:
        title: Title of the picture, for example `reference`.
        regions: Region masks `(3, X, Y, Z)`.
        image: Image `(X, Y, Z)`, 0 outside the brain.
        grid: Size and directions of the voxels.
    """
    x, y, z = grid.spacing_mm
    step = _BRAIN_STEP
    brain = Layer(
        mesh=surface_of(image[::step, ::step, ::step] != 0, (step * x, step * y, step * z)),
        colour=to_rgb(_BRAIN_COLOUR),
        opacity=_BRAIN_OPACITY,
        rim_only=True,
    )
    wt, tc, et = (
        Layer(mesh=surface_of(region, grid.spacing_mm), colour=to_rgb(colour), opacity=opacity)
        for region, colour, opacity in zip(regions, REGION_COLOURS, _OPACITY, strict=True)
    )
    return SurfaceModel(title=title, layers=(et, tc, wt, brain), grid=grid)


def surface_figure(
    models: Sequence[SurfaceModel], *, azimuth_degrees: float = 0.0, n_pixels: int = _N_PIXELS
) -> Figure:
    """Draw models side by side, at one scale, seen from a little above.

    The azimuth is the direction of the view: 0 degrees from the patient's front, 90 degrees from
    the left side.
    """
    figure = dark_figure(_PANEL_INCHES * len(models), _PANEL_INCHES + 1.0)
    all_axes = figure.subplots(1, len(models), squeeze=False)[0]
    cameras = _cameras(models, azimuth_degrees, n_pixels)
    for axes, model, camera in zip(all_axes, models, cameras, strict=True):
        axes.imshow(render(model.layers, camera))
        axes.set_axis_off()
        size = fitting_size(model.title, _PANEL_INCHES, _TITLE_SIZE)
        axes.set_title(model.title, color="white", fontsize=size, parse_math=False)
        _draw_letters(axes, model, camera)
        draw_scale_bar(axes, 2 * camera.reach_mm / camera.n_pixels)
    shown = _shown_regions(models)
    words = [REGIONS[k].upper() for k in shown]
    key = filled_key(words, [REGION_COLOURS[k] for k in shown])
    add_dark_legend(figure, key, f"{RESEARCH_USE}; L marks the patient's left")
    return figure


def write_surface_gif(
    models: Sequence[SurfaceModel], path: Path, *, n_frames: int = N_FRAMES
) -> None:
    """Write a GIF of a full turn, which repeats without end.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    frames = _frames(models, n_frames)
    first, *others = _with_one_palette(frames)
    with whole_file(path) as beside:
        first.save(
            beside,
            format="GIF",
            save_all=True,
            append_images=others,
            duration=round(1000 * _SECONDS_PER_TURN / n_frames),
            loop=0,
        )


def render(layers: Sequence[Layer], camera: Camera) -> Pixels:
    """Return the picture (n, n, 3) of layers from the innermost to the outermost, on black.

    Rows run down. An outer layer is blended over inner ones that are clearly behind it.
    """
    picture = np.zeros((camera.n_pixels, camera.n_pixels, 3))
    nearest = np.full(picture.shape[:2], -np.inf)
    for layer in layers:
        depth, colour, opacity = _drawn(layer, camera)
        veiled = np.where(depth > nearest + _SKIN_MM, opacity, 0.0)[..., None]
        picture += veiled * (colour - picture)
        nearest = np.maximum(nearest, depth)
    return picture


def _cameras(models: Sequence[SurfaceModel], azimuth_degrees: float, n_pixels: int) -> list[Camera]:
    """Return a view of each model, all at one scale."""
    reach_mm = _MARGIN * max(model.reach_mm for model in models)
    return [
        Camera(
            azimuth=np.radians(azimuth_degrees),
            centre_mm=model.centre_mm,
            reach_mm=reach_mm,
            n_pixels=n_pixels,
        )
        for model in models
    ]


def _draw_letters(axes: Any, model: SurfaceModel, camera: Camera) -> None:
    """Write which side of the patient is at each edge, from the direction of the view."""
    to_right, to_top, _ = camera.screen_axes
    draw_letters(axes, model.grid.letters_at_edges(to_right, to_top))


def _shown_regions(models: Sequence[SurfaceModel]) -> list[int]:
    """Return the numbers of the regions that any model has a surface of."""
    of_regions = [model.layers[-2::-1] for model in models]
    return [k for k in range(len(REGIONS)) if any(len(own[k].mesh.quads) for own in of_regions)]


def _frames(models: Sequence[SurfaceModel], n_frames: int) -> list[Picture.Image]:
    """Draw the figure once, and replace its pictures for every frame."""
    figure = surface_figure(models, n_pixels=_N_PIXELS_OF_GIF)
    figure.set_dpi(_DPI)
    canvas: Any = FigureCanvasAgg(figure)
    frames = []
    for number in range(n_frames):
        cameras = _cameras(models, 360 * number / n_frames, _N_PIXELS_OF_GIF)
        for axes, model, camera in zip(figure.axes, models, cameras, strict=True):
            axes.images[0].set_data(render(model.layers, camera))
            _draw_letters(axes, model, camera)
        canvas.draw()
        figure.set_layout_engine("none")  # computed once, for the first frame
        frames.append(Picture.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    return frames


def _with_one_palette(frames: Sequence[Picture.Image]) -> list[Picture.Image]:
    """Reduce the colours of all frames with one palette; with one palette each they would flicker."""
    width, height = (max(1, edge // _COARSE) for edge in frames[0].size)
    together = Picture.new("RGB", (width, height * len(frames)))
    for place, frame in enumerate(frames):
        together.paste(frame.resize((width, height), _NEAREST), (0, height * place))
    palette = together.quantize(_N_COLOURS)
    return [frame.quantize(palette=palette, dither=Picture.Dither.NONE) for frame in frames]


def _drawn(layer: Layer, camera: Camera) -> tuple[Pixels, Pixels, Pixels]:
    """Return depth (n, n) in mm, -inf outside the layer, colour (n, n, 3) and opacity (n, n)."""
    axes = camera.screen_axes
    normals = layer.mesh.normals @ axes.T
    faces_us = normals[:, 2] > 0
    quads, normals = layer.mesh.quads[faces_us], normals[faces_us]
    placed = (layer.mesh.vertices_mm - camera.centre_mm) @ axes.T
    corners = placed.astype(np.float32)[quads]
    brightness = _AMBIENT + (1 - _AMBIENT) * (normals @ _LIGHT).clip(0, 1)
    opacity = np.full(len(quads), layer.opacity)
    if layer.rim_only:
        opacity *= (1 - normals[:, 2]) ** _RIM_POWER
    depth, owner = _nearest(corners, camera)
    covered = owner >= 0
    colour = np.zeros((*owner.shape, 3))
    colour[covered] = brightness[owner[covered], None] * layer.colour
    opacities = np.zeros(owner.shape)
    opacities[covered] = opacity[owner[covered]]
    return depth, colour, opacities


def _nearest(corners: Points, camera: Camera) -> tuple[Pixels, npt.NDArray[np.int64]]:
    """Return the depth and the number (n, n) of the quadrilateral (m, 4, 3) nearest to the viewer."""
    n, per_mm = camera.n_pixels, camera.n_pixels / (2 * camera.reach_mm)
    owner = np.full(n * n, -1)
    edges = np.abs(np.diff(corners[..., :2], axis=1, append=corners[:, :1, :2]))
    heights = corners[..., 2].mean(axis=1)
    order = np.argsort(heights)
    n_along = int(np.ceil(edges.max(initial=0) * per_mm)) + 1
    points = _samples(corners[order, :, :2], n_along)
    columns = ((points[..., 0] + camera.reach_mm) * per_mm).astype(np.int32)
    rows = ((camera.reach_mm - points[..., 1]) * per_mm).astype(np.int32)
    shown = (columns >= 0) & (columns < n) & (rows >= 0) & (rows < n)
    # of several numbers for one pixel the last one stays: that of the nearest
    owner[(rows * n + columns)[shown]] = np.broadcast_to(order[:, None], shown.shape)[shown]
    depth = np.full(n * n, -np.inf)
    depth[owner >= 0] = heights[owner[owner >= 0]]
    return depth.reshape(n, n), owner.reshape(n, n)


def _samples(corners: Points, n_along: int) -> Points:
    """Return points (m, n_along squared, 2) spread over quadrilaterals (m, 4, 2)."""
    share = (np.arange(n_along, dtype=np.float32) + 0.5) / n_along
    s, t = (grid.ravel() for grid in np.meshgrid(share, share))
    weights = np.stack([(1 - s) * (1 - t), s * (1 - t), s * t, (1 - s) * t])
    return np.matmul(corners.transpose(0, 2, 1), weights).transpose(0, 2, 1)
