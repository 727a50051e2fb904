"""The regions of a case as surfaces in space, as a picture or turning round."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image as Picture

from brats_seg.drawing.look import (
    REGION_COLOURS,
    RESEARCH_USE,
    add_dark_legend,
    dark_figure,
    filled_key,
)
from brats_seg.drawing.sections import Image, Spacing
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS, RegionMasks
from brats_seg.report.mesh import surface_of
from brats_seg.report.render import Layer, View, render
from brats_seg.report.view import CaseView, drawn_of

N_FRAMES = 36
"""Of a full turn."""
_SECONDS_PER_TURN = 4.0
_DPI = 80
_N_PIXELS = 336
"""Edge of a model's picture: that of its axes, so that it is shown as it is."""
_OPACITY = (0.4, 0.5, 1.0)
"""Of WT, TC, ET: what is inside shines through."""
_BRAIN_COLOUR, _BRAIN_OPACITY, _BRAIN_STEP = "white", 0.5, 3
"""The brain is a backdrop: every third voxel does."""
_MARGIN = 1.03
_N_COLOURS = 256
"""All that a GIF may have."""
_COARSE, _NEAREST = 3, Picture.Resampling.NEAREST
"""Every third pixel tells the colours of a frame."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """The surfaces of one label map."""

    title: str
    layers: tuple[Layer, ...]
    """From the innermost to the outermost, which is the brain."""

    @property
    def centre_mm(self) -> npt.NDArray[np.float64]:
        """The middle of the brain (3,)."""
        return self._brain_mm.mean(axis=0) if len(self._brain_mm) else np.zeros(3)

    @property
    def reach_mm(self) -> float:
        """From the middle of the brain to its farthest point."""
        away = np.linalg.norm(self._brain_mm - self.centre_mm, axis=1)
        return float(away.max(initial=1.0))

    @property
    def _brain_mm(self) -> npt.NDArray[np.float64]:
        return self.layers[-1].mesh.vertices_mm


def model_of(title: str, regions: RegionMasks, image: Image, spacing_mm: Spacing) -> Model:
    """Make the surfaces of the brain and of WT, TC and ET.

    Args:
        title: For example `reference`.
        regions: (3, X, Y, Z)
        image: (X, Y, Z), 0 outside the brain.
        spacing_mm: Edges of a voxel.
    """
    x, y, z = spacing_mm
    step = _BRAIN_STEP
    brain = Layer(
        mesh=surface_of(image[::step, ::step, ::step] != 0, (step * x, step * y, step * z)),
        colour=to_rgb(_BRAIN_COLOUR),
        opacity=_BRAIN_OPACITY,
        rim_only=True,
    )
    wt, tc, et = (
        Layer(mesh=surface_of(region, spacing_mm), colour=to_rgb(colour), opacity=opacity)
        for region, colour, opacity in zip(regions, REGION_COLOURS, _OPACITY, strict=True)
    )
    return Model(title=title, layers=(et, tc, wt, brain))


def models_of(view: CaseView) -> tuple[Model, ...]:
    """Make the surfaces of the reference and of the prediction of a case, as far as it has them.

    Raises:
        CaseError: It has neither.
    """
    return tuple(
        model_of(f"{view.case_id}, {words}", regions, view.images[0], view.spacing_mm)
        for words, regions in drawn_of(view)
    )


def surface_figure(models: Sequence[Model], *, azimuth_degrees: float = 0.0) -> Figure:
    """Draw models side by side, at one scale, as seen from the patient's front and a little above.

    With the azimuth one walks round the patient, at 90 degrees to the left side.
    """
    figure = dark_figure(4.3 * len(models), 4.9)
    pictures = _pictures(models, azimuth_degrees)
    all_axes = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model, picture in zip(all_axes, models, pictures, strict=True):
        axes.imshow(picture)
        axes.set_axis_off()
        axes.set_title(model.title, color="white", fontsize="small")
    words = tuple(region.upper() for region in REGIONS)
    add_dark_legend(figure, filled_key(words, REGION_COLOURS), RESEARCH_USE)
    return figure


def write_surface_gif(models: Sequence[Model], path: Path, *, n_frames: int = N_FRAMES) -> None:
    """Write a GIF of a full turn, which goes on for ever.

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


def _pictures(models: Sequence[Model], azimuth_degrees: float) -> list[npt.NDArray[np.float64]]:
    reach_mm = _MARGIN * max(model.reach_mm for model in models)
    return [
        render(
            model.layers,
            View(
                azimuth=np.radians(azimuth_degrees),
                centre_mm=model.centre_mm,
                reach_mm=reach_mm,
                n_pixels=_N_PIXELS,
            ),
        )
        for model in models
    ]


def _frames(models: Sequence[Model], n_frames: int) -> list[Picture.Image]:
    """Draw the figure once and its pictures anew for every frame."""
    figure = surface_figure(models)
    figure.set_dpi(_DPI)
    canvas: Any = FigureCanvasAgg(figure)
    frames = []
    for number in range(n_frames):
        pictures = _pictures(models, 360 * number / n_frames)
        for axes, picture in zip(figure.axes, pictures, strict=True):
            axes.images[0].set_data(picture)
        canvas.draw()
        figure.set_layout_engine("none")  # found once, it stays
        frames.append(Picture.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    return frames


def _with_one_palette(frames: Sequence[Picture.Image]) -> list[Picture.Image]:
    """Reduce the colours of all frames alike: with a palette each they flicker."""
    width, height = (max(1, edge // _COARSE) for edge in frames[0].size)
    together = Picture.new("RGB", (width, height * len(frames)))
    for place, frame in enumerate(frames):
        together.paste(frame.resize((width, height), _NEAREST), (0, height * place))
    palette = together.quantize(_N_COLOURS)
    return [frame.quantize(palette=palette, dither=Picture.Dither.NONE) for frame in frames]
