"""Draw sections through a scan: greys, outlines of the regions, letters of the sides, scale bar.

Arrays have the axes of BraTS: `X` to the patient's left, `Y` to the back, `Z` to the head. Sections
are drawn in radiological orientation, the patient's left on the right. The letters at the edges of a
section are those of the affine of the array, and would be right for an array of other axes too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import nibabel as nib
import numpy as np
import numpy.typing as npt

from brats_seg.figures.style import OUTLINE_DASHES, OUTLINE_WIDTHS, REGION_COLOURS, LineStyle
from brats_seg.labels import RegionMasks
from brats_seg.voxels.box import Triple
from brats_seg.voxels.grids import AXES, Affine
from brats_seg.voxels.shapes import number_components

Image: TypeAlias = npt.NDArray[np.floating[Any] | np.integer[Any]]
Spacing: TypeAlias = tuple[float, float, float]
Directions: TypeAlias = tuple[str, str, str]

PLANES = (("axial", 2), ("coronal", 1), ("sagittal", 0))
"""Name of each plane and the axis that is perpendicular to it."""
AXIAL = 2

_GREY_PERCENTILES = (1.0, 99.5)
_COARSE = 2
"""Every second voxel is enough for the percentiles."""
_MARGIN = 0.08
"""Background that is left around the brain, as a share of its length: room for the letters."""

_OPPOSITE = dict(zip("LRAPSI", "RLPAIS", strict=True))
_OBLIQUE = 0.4
"""Smallest component of a unit vector that has a letter: directions within 24 degrees of an axis have
one letter, others two."""
_EDGES = {
    "left": {"x": 0.01, "y": 0.5, "ha": "left", "va": "center"},
    "right": {"x": 0.99, "y": 0.5, "ha": "right", "va": "center"},
    "top": {"x": 0.5, "y": 0.99, "ha": "center", "va": "top"},
    "bottom": {"x": 0.5, "y": 0.01, "ha": "center", "va": "bottom"},
}
"""Place of the letter at each edge, as shares of the panel."""
_BARS_MM = (50.0, 20.0, 10.0, 5.0, 2.0, 1.0)
"""Lengths of a scale bar, the preferred one first."""
_LONGEST_BAR = 0.4
"""Longest bar as a share of the panel."""
_BAR_AT = (0.03, 0.035)
"""Place of the left end of the bar, as shares of the panel."""
_BEHIND = {"facecolor": "black", "edgecolor": "none", "alpha": 0.6, "pad": 1.0}
"""Dark box behind the words in a picture, which makes them legible on bright tissue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Size and directions of the voxels of an array."""

    spacing_mm: Spacing
    """Edges of a voxel."""
    directions: Directions = AXES
    """Side of the patient that X, Y and Z run to: one of L, R, A, P, S and I each."""

    @classmethod
    def of(cls, affine: Affine) -> Self:
        """Return the grid of an affine; of oblique axes, the nearest directions."""
        x_mm, y_mm, z_mm = map(float, np.linalg.norm(affine[:3, :3], axis=0))
        x, y, z = nib.orientations.aff2axcodes(affine)
        return cls(spacing_mm=(x_mm, y_mm, z_mm), directions=(x, y, z))

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel."""
        return float(np.prod(self.spacing_mm)) / 1000

    def letters(self, vector: npt.ArrayLike) -> str:
        """Return the letter of the side that a vector (3,) along X, Y and Z points to.

        A vector that is oblique has two or three letters, the one of its largest component first.

        Example:
            >>> Grid(spacing_mm=(1, 1, 1)).letters((0.8, -0.6, 0))
            'LA'
        """
        parts = np.asarray(vector, float) / np.linalg.norm(vector)
        order = np.argsort(-np.abs(parts), kind="stable")
        return "".join(
            self.directions[i] if parts[i] > 0 else _OPPOSITE[self.directions[i]]
            for i in order
            if abs(parts[i]) >= _OBLIQUE
        )

    def letters_at_edges(self, to_right: npt.ArrayLike, to_top: npt.ArrayLike) -> dict[str, str]:
        """Return the letters of the edges `left`, `right`, `top` and `bottom` of a picture.

        Args:
            to_right: Vector (3,) along X, Y and Z that points to the right in the picture.
            to_top: The one that points up.
        """
        right, top = np.asarray(to_right, float), np.asarray(to_top, float)
        vectors = {"left": -right, "right": right, "top": top, "bottom": -top}
        return {edge: self.letters(vector) for edge, vector in vectors.items()}


def centre_of(regions: RegionMasks, image: Image) -> Triple:
    """Return the section along each axis with most of the largest tumour, or with most brain."""
    mask = image != 0
    if regions[0].any():
        components = number_components(regions[0])
        mask = components == 1 + np.bincount(components[components > 0] - 1).argmax()
    x, y, z = (int(mask.sum(axis=others).argmax()) for others in ((1, 2), (0, 2), (0, 1)))
    return x, y, z


def draw_section(axes: Any, image: Image, axis: int, index: int, grid: Grid) -> None:
    """Draw one section of an image `(X, Y, Z)` in grey, cut to the brain, with letters at its edges.

    Args:
        axes: Axes of matplotlib.
        image: Image that is 0 outside the brain.
        axis: Axis that is perpendicular to the section.
        index: Position on that axis, in voxels.
        grid: Size and directions of the voxels.
    """
    right, up = _across(axis)
    section = section_of(image, axis, index)
    # all sections of an image share one scale
    low, high = grey_limits(image[::_COARSE, ::_COARSE, ::_COARSE])
    axes.imshow(
        np.where(section == 0, low, section),
        cmap="gray",
        vmin=low,
        vmax=high,
        origin="upper" if axis == AXIAL else "lower",
        aspect=grid.spacing_mm[up] / grid.spacing_mm[right],
    )
    # all sections of a case at one scale
    _zoom(axes, (image != 0).any(axis=axis).T)
    axes.set_axis_off()
    draw_section_letters(axes, axis, grid)


def draw_section_letters(axes: Any, axis: int, grid: Grid) -> None:
    """Write which side of the patient is at each edge of a section, whichever way the axes run."""
    to_right, to_top = np.zeros(3), np.zeros(3)
    across, up = _across(axis)
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    to_right[across], to_top[up] = np.sign(right - left), np.sign(top - bottom)
    draw_letters(axes, grid.letters_at_edges(to_right, to_top))


def draw_letters(axes: Any, letters: Mapping[str, str]) -> None:
    """Write the letters of `letters_at_edges` at the edges of a picture, or replace those there."""
    for text in [text for text in axes.texts if text.get_gid() in letters]:
        text.remove()
    for edge, words in letters.items():
        _draw_mark(axes, words, **_EDGES[edge], gid=edge)


def draw_scale_bar(axes: Any, mm_per_unit: float) -> None:
    """Draw a scale bar of 50 mm, or a shorter one in a picture of something small.

    Args:
        axes: Axes of matplotlib whose limits are set.
        mm_per_unit: Length of a unit of the horizontal axis, such as a voxel.
    """
    left, right = axes.get_xlim()
    width_mm = abs(right - left) * mm_per_unit
    length_mm = next((mm for mm in _BARS_MM if mm <= _LONGEST_BAR * width_mm), _BARS_MM[-1])
    x, y = _BAR_AT
    share = length_mm / width_mm
    axes.plot(
        [x, x + share],
        [y, y],
        transform=axes.transAxes,
        color="white",
        linewidth=2,
        solid_capstyle="butt",
        gid="scale bar",
    )
    _draw_mark(axes, f"{length_mm:g} mm", x=x, y=y + 0.02, ha="left", va="bottom")


def draw_section_bar(axes: Any, axis: int, grid: Grid) -> None:
    """Draw the scale bar of a section."""
    draw_scale_bar(axes, grid.spacing_mm[_across(axis)[0]])


def draw_overlay(axes: Any, colours: npt.NDArray[np.float64]) -> None:
    """Draw colours (rows, columns, 4) over a section, in which opacity may be 0."""
    # imshow would make the voxels of the section squares
    axes.imshow(colours, interpolation="nearest", aspect=axes.get_aspect())


def draw_outlines(axes: Any, regions: RegionMasks, axis: int, index: int) -> None:
    """Draw the outlines of the regions `(3, X, Y, Z)` over a section.

    The lines of inner regions are thinner, and those of the core dashed, so that an outer one is
    seen where they have one boundary.
    """
    styles = zip(REGION_COLOURS, OUTLINE_WIDTHS, OUTLINE_DASHES, strict=True)
    for region, (colour, width, dashes) in zip(regions, styles, strict=True):
        section = section_of(region, axis, index)
        draw_outline(axes, section, color=colour, linewidth=width, linestyle=dashes)


def draw_outline(
    axes: Any,
    section: npt.NDArray[np.bool_],
    *,
    color: str,
    linewidth: float,
    linestyle: LineStyle = "-",
) -> None:
    """Draw the outline of a section `(rows, columns)` of a mask, if there is anything in it."""
    if section.any():
        axes.contour(
            section,
            levels=[0.5],
            colors=[color],
            linewidths=[linewidth],
            linestyles=[linestyle],
            origin=None,
        )


def grey_limits(image: Image) -> tuple[float, float]:
    """Return the values of an image that are drawn black and white; voxels of 0 are not counted."""
    brain = image[image != 0]
    low, high = np.percentile(brain, _GREY_PERCENTILES) if brain.size else (0.0, 1.0)
    return float(low), max(float(high), float(low) + 1e-6)


def section_of(array: npt.NDArray[Any], axis: int, index: int) -> npt.NDArray[Any]:
    """Return a section of an array `(X, Y, Z)` as rows and columns of a picture."""
    return np.moveaxis(array, axis, 0)[index].T


def _across(axis: int) -> tuple[int, int]:
    """Return the axes along the width and along the height of a section."""
    width, height = (i for i in range(3) if i != axis)
    return width, height


def _zoom(axes: Any, brain: npt.NDArray[np.bool_]) -> None:
    """Set the limits to the brain, whichever way the axes run."""
    for axis, set_limits, limits in (
        (0, axes.set_xlim, axes.get_xlim()),
        (1, axes.set_ylim, axes.get_ylim()),
    ):
        found = np.flatnonzero(brain.any(axis=axis))
        if found.size:
            margin = _MARGIN * (found[-1] - found[0] + 1)
            near, far = found[0] - margin, found[-1] + margin
            set_limits((near, far) if limits[0] < limits[1] else (far, near))


def _draw_mark(axes: Any, words: str, **place: Any) -> None:
    axes.text(
        s=words,
        transform=axes.transAxes,
        color="white",
        fontsize="x-small",
        fontweight="bold",
        bbox=_BEHIND,
        **place,
    )
