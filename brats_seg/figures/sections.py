"""Draw sections through a scan, and define the style of all figures.

Arrays have the axes of BraTS: `X` to the patient's left, `Y` to the back, `Z` to the head. Sections
are drawn as in ITK-SNAP and 3D Slicer: the patient's left is on the right, and in sagittal sections the
face is on the left. The letters at their edges are those of the affine of the array. The colours are
those of Okabe and Ito (2008), which people with any kind of colour vision can distinguish; those of the
regions differ in brightness too.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import nibabel as nib
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.labels import MODALITIES, RegionMasks
from brats_seg.voxels.box import Mask, Triple, triple
from brats_seg.voxels.grids import AXES, MM3_PER_ML, Affine, Spacing
from brats_seg.voxels.shapes import number_components

Image: TypeAlias = npt.NDArray[np.floating[Any] | np.integer[Any]]
LineStyle: TypeAlias = Literal["-", "--"] | tuple[float, tuple[float, ...]]

PLANES = {"axial": 2, "coronal": 1, "sagittal": 0}
"""Axis that is perpendicular to each plane."""
AXIAL = PLANES["axial"]

REGION_COLOURS = ("#56B4E9", "#F0E442", "#D55E00")
"""Colours of WT, TC and ET: sky blue, yellow, vermilion."""
_OUTLINES: tuple[tuple[float, LineStyle], ...] = ((2.4, "-"), (1.3, (0, (4, 2))), (0.7, "-"))
"""Widths in points and styles of the outlines of WT, TC and ET. An outer outline is seen next to an
inner one on it, and between the dashes of the core."""
_FILL = 0.35
"""Opacity of the enhancing tumour."""
OTHER_TISSUE_COLOURS = ("#CC79A7", "#009E73")
"""Colours of the other tissues: purple, green."""
FIRST_COLOUR, SECOND_COLOUR = "#0072B2", "#E69F00"
"""Colours of two things compared that are not regions: blue, orange."""
MODALITY_NAMES = dict(zip(MODALITIES, ("T1", "T1c", "T2", "FLAIR"), strict=True))
"""Names of the modalities in pictures, as radiologists write them; files and options keep their own."""
RESEARCH_USE = "research use only"
ORIENTATION = "the patient's left is on the right, in sagittal sections the face is on the left"
SMALL_PRINT = f"{RESEARCH_USE}; {ORIENTATION}"
SUFFIXES = (".png", ".svg", ".pdf")
"""Formats that a figure can be written in."""

_GREY_PERCENTILES = (1.0, 99.5)
_MARGIN = 0.08
"""Background that is left around the brain, as a share of its length, for the letters."""
_OPPOSITE = dict(zip("LRAPSI", "RLPAIS", strict=True))
_EDGES = {
    "left": {"x": 0.01, "y": 0.5, "ha": "left", "va": "center"},
    "right": {"x": 0.99, "y": 0.5, "ha": "right", "va": "center"},
    "top": {"x": 0.5, "y": 0.99, "ha": "center", "va": "top"},
    "bottom": {"x": 0.5, "y": 0.01, "ha": "center", "va": "bottom"},
}
"""Position of the letter at each edge, as shares of the panel."""
_BARS_MM = (50.0, 20.0, 10.0, 5.0, 2.0, 1.0)
"""Lengths of a scale bar, the preferred one first."""
_LONGEST_BAR = 0.4
"""Longest bar as a share of the panel."""
_BAR_X, _BAR_Y = 0.03, 0.035
_DPI = 150
_TITLE_SHARE = 0.9
"""Widest title, as a share of the width of the figure."""
_KEY_SIZE, _KEY_INCHES = 10.0, 0.75
"""Size of the words of a legend in points, and width of a sample and of the space around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Size and directions of the voxels of an array."""

    spacing_mm: Spacing
    directions: tuple[str, str, str] = AXES
    """Side of the patient that X, Y and Z run to: one of L, R, A, P, S and I each."""

    @classmethod
    def of(cls, affine: Affine) -> Self:
        """Return the grid of an affine; of oblique axes, the nearest directions."""
        x_mm, y_mm, z_mm = map(float, np.linalg.norm(affine[:3, :3], axis=0))
        return cls(spacing_mm=(x_mm, y_mm, z_mm), directions=nib.orientations.aff2axcodes(affine))

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel."""
        return float(np.prod(self.spacing_mm)) / MM3_PER_ML


def centre_of(regions: RegionMasks | None, image: Image) -> Triple:
    """Return the section along each axis with most of the largest tumour, or with most brain."""
    mask = image != 0
    if regions is not None and regions[0].any():
        components = number_components(regions[0])
        mask = components == 1 + np.bincount(components[components > 0] - 1).argmax()
    return triple(int(mask.sum(axis=axes).argmax()) for axes in ((1, 2), (0, 2), (0, 1)))


def grey_limits(image: Image) -> tuple[float, float]:
    """Return the values of an image that are drawn black and white; voxels of 0 are not counted."""
    # every second voxel is enough
    coarse = image[::2, ::2, ::2]
    brain = coarse[coarse != 0]
    low, high = np.percentile(brain, _GREY_PERCENTILES) if brain.size else (0.0, 1.0)
    return float(low), max(float(high), float(low) + 1e-6)


def take_section(array: npt.NDArray[Any], axis: int, index: int) -> npt.NDArray[Any]:
    """Return a section of an array `(X, Y, Z)` as rows and columns of a picture."""
    return np.moveaxis(array, axis, 0)[index].T


def draw_section(
    axes: Any,
    image: Image,
    axis: int,
    index: int,
    grid: Grid,
    *,
    limits: tuple[float, float] | None = None,
    brain: Mask | None = None,
) -> None:
    """Draw one section of an image `(X, Y, Z)` in grey, cut to the brain, with letters at its edges.

    The limits of the greys and the brain are by default those of the whole image, so that all its
    sections have one scale.
    """
    right, up = (i for i in range(3) if i != axis)
    section = take_section(image, axis, index)
    low, high = limits or grey_limits(image)
    axes.imshow(
        np.where(section == 0, low, section),
        cmap="gray",
        vmin=low,
        vmax=high,
        origin="upper" if axis == AXIAL else "lower",
        aspect=grid.spacing_mm[up] / grid.spacing_mm[right],
    )
    _zoom(axes, np.any(image != 0 if brain is None else brain, axis=axis).T)
    axes.set_axis_off()
    for edges, side, (start, end) in (
        (("left", "right"), grid.directions[right], axes.get_xlim()),
        (("bottom", "top"), grid.directions[up], axes.get_ylim()),
    ):
        letters = (_OPPOSITE[side], side)
        for edge, letter in zip(edges, letters if start < end else letters[::-1], strict=True):
            _draw_mark(axes, letter, **_EDGES[edge], gid=edge)


def draw_to_one_scale(panels: Sequence[tuple[Any, int]], grid: Grid) -> None:
    """Widen sections, each with its axis, to the largest of them, so that a millimetre has one length."""
    for k, name in enumerate("xy"):
        mm = np.array([[np.delete(grid.spacing_mm, axis)[k]] for _, axis in panels])
        ends = np.array([getattr(axes, f"get_{name}lim")() for axes, _ in panels]) * mm
        middle = ends.mean(axis=1, keepdims=True)
        ends = middle + np.sign(ends - middle) * np.abs(ends - middle).max()
        for (axes, _), limits in zip(panels, ends / mm, strict=True):
            axes.set(**{f"{name}lim": limits})


def draw_scale_bar(axes: Any, mm_per_unit: float) -> None:
    """Draw a scale bar of 50 mm, or a shorter one in a picture of something small.

    The limits of the axes must be set; a unit of the horizontal one is for example a voxel.
    """
    left, right = axes.get_xlim()
    width_mm = abs(right - left) * mm_per_unit
    length_mm = next((mm for mm in _BARS_MM if mm <= _LONGEST_BAR * width_mm), _BARS_MM[-1])
    axes.plot(
        [_BAR_X, _BAR_X + length_mm / width_mm],
        [_BAR_Y, _BAR_Y],
        transform=axes.transAxes,
        color="white",
        linewidth=2,
        solid_capstyle="butt",
        gid="scale bar",
    )
    _draw_mark(axes, f"{length_mm:g} mm", x=_BAR_X, y=_BAR_Y + 0.02, ha="left", va="bottom")


def draw_overlay(axes: Any, colours: npt.NDArray[np.float64], **options: Any) -> None:
    """Draw colours (rows, columns, 4), or values (rows, columns), over a section."""
    # imshow would make the voxels of the section squares
    axes.imshow(colours, **{"interpolation": "nearest", **options}, aspect=axes.get_aspect())


def draw_outlines(axes: Any, regions: RegionMasks, axis: int, index: int) -> None:
    """Draw the outlines of the regions `(3, X, Y, Z)` over a section."""
    for region, colour, (width, style) in zip(regions, REGION_COLOURS, _OUTLINES, strict=True):
        draw_outline(axes, take_section(region, axis, index), colour, width, style)
    # the fill shows where enhancing tumour is all of the core, and both have one outline
    enhancing, fill = take_section(regions[-1], axis, index), REGION_COLOURS[-1]
    _draw_contour(axes.contourf, enhancing, [0.5, 1.5], colors=[fill], alpha=_FILL)


def draw_outline(axes: Any, section: Mask, colour: str, width: float, style: LineStyle) -> None:
    """Draw the outline of a section `(rows, columns)` of a mask, if there is anything in it."""
    _draw_contour(axes.contour, section, [0.5], colors=colour, linewidths=width, linestyles=[style])


def dark_figure(width: float, height: float) -> Figure:
    """Return an empty black figure for scans; the size is in inches."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="black")


def light_figure(width: float, height: float) -> Figure:
    """Return an empty white figure for charts, marked for research use; the size is in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.supxlabel(RESEARCH_USE, fontsize="x-small", color="grey", x=0.99, ha="right")
    return figure


def region_key(labels: Sequence[str]) -> list[Artist]:
    """Return legend entries for the outlines of the regions; a label says where one is empty."""
    entries = zip(labels, REGION_COLOURS, _OUTLINES, strict=True)
    return [line_key(text, colour, *outline) for text, colour, outline in entries]


def line_key(label: str, colour: str, width: float, style: LineStyle) -> Artist:
    """Return the legend entry for one kind of line."""
    return Line2D([], [], color=colour, linewidth=width, linestyle=style, label=label)


def add_title(figure: Figure | SubFigure, text: str, *, size: float = 10.0) -> None:
    """Write a white title above a figure or a part of it, smaller if it is wider than that."""
    size = fitting_size(text, figure.bbox.width / figure.dpi, size)
    # the id of a case may contain dollars, which would begin a formula
    figure.suptitle(text, color="white", fontsize=size, parse_math=False)


def fitting_size(text: str, width_inches: float, size: float) -> float:
    """Return the size in points at which the longest line is no wider than a figure."""
    widest_inches = max((_inches(line, size) for line in text.splitlines()), default=0.0)
    return size * min(1.0, _TITLE_SHARE * width_inches / max(widest_inches, 0.01))


def add_dark_legend(figure: Figure, entries: Sequence[Artist]) -> None:
    """Add a legend below a dark figure, in as many rows as it needs, below a line in small print."""
    widths = [_inches(str(entry.get_label()), _KEY_SIZE) + _KEY_INCHES for entry in entries]
    totals = {n: sum(max(widths[k::n]) for k in range(n)) for n in range(len(entries), 1, -1)}
    n_columns = next((n for n, inches in totals.items() if inches <= figure.get_figwidth()), 1)
    legend = figure.legend(
        # matplotlib fills column by column
        handles=[entry for k in range(n_columns) for entry in entries[k::n_columns]],
        loc="outside lower center",
        ncols=n_columns,
        labelcolor="white",
        frameon=False,
        fontsize=_KEY_SIZE,
        title=SMALL_PRINT,
        title_fontsize="x-small",
    )
    legend.get_title().set_color("grey")


def check_suffix(path: Path, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raise `UsageError` unless the name of the file has one of the suffixes."""
    if path.suffix.lower() not in suffixes:
        msg = f"{path} ends in {path.suffix or 'nothing'}; expected {' or '.join(suffixes)}"
        raise UsageError(msg)


def write_figure(figure: Figure, path: Path, *, dpi: int = _DPI) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of the file name.

    Raises:
        UsageError: The name has another suffix.
        EnvironmentalError: The file cannot be written.
    """
    check_suffix(path)
    with whole_file(path) as temporary:
        save_figure(figure, temporary, dpi=dpi, format=path.suffix.lower().removeprefix("."))


def save_figure(figure: Figure, target: Path | BytesIO, **options: Any) -> None:
    """Write a figure with `savefig`; letters that the font lacks are drawn as boxes, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(target, **options)


def _zoom(axes: Any, brain: Mask) -> None:
    """Set the limits to the brain `(rows, columns)`, whichever way the axes run."""
    for axis, name in enumerate("xy"):
        inside = np.flatnonzero(brain.any(axis=axis))
        if inside.size:
            # the edge of a voxel is half a voxel from its centre
            margin = 0.5 + _MARGIN * (inside[-1] - inside[0] + 1)
            getattr(axes, f"set_{name}bound")(inside[0] - margin, inside[-1] + margin)
    axes.autoscale(enable=False)


def _draw_contour(contour: Any, section: Mask, levels: Sequence[float], **look: Any) -> None:
    """Draw a contour of a section; a border of 0 closes it where the mask ends with the volume."""
    n_rows, n_columns = section.shape
    if section.any():
        contour(np.pad(section, 1), levels, extent=(-1, n_columns, -1, n_rows), **look)


def _draw_mark(axes: Any, text: str, **position: Any) -> None:
    """Write white words on a dark box, which makes them legible on bright tissue."""
    axes.text(
        s=text,
        transform=axes.transAxes,
        color="white",
        fontsize="x-small",
        fontweight="bold",
        bbox={"facecolor": "black", "edgecolor": "none", "alpha": 0.6, "pad": 1.0},
        **position,
    )


def _inches(line: str, size: float) -> float:
    """Return the width of a line of text."""
    if not line.strip():
        return 0.0
    # a dollar would begin a formula
    return float(TextPath((0, 0), line.replace("$", "S"), size=size).get_extents().width) / 72
