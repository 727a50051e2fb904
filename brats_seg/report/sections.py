"""Draw sections through a scan, with the outlines of the regions.

Arrays have the axes of BraTS: `X` to the patient's left, `Y` to the back, `Z` to the head. Sections
are drawn in radiological orientation, the patient's left on the right.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from brats_seg.labels import RegionMasks
from brats_seg.report.style import REGION_COLOURS
from brats_seg.voxels.components import number_components

Image: TypeAlias = npt.NDArray[np.floating[Any] | np.integer[Any]]
Spacing: TypeAlias = tuple[float, float, float]

PLANES = (("axial", 2), ("coronal", 1), ("sagittal", 0))
"""Name of each plane and the axis that is perpendicular to it."""
AXIAL = 2

_GREY_PERCENTILES = (1.0, 99.5)
_COARSE = 2
"""Every second voxel is enough for the percentiles."""
_MARGIN = 4
"""Voxels of background that are left around the brain."""


def centre_of(regions: RegionMasks, image: Image) -> tuple[int, int, int]:
    """Return the section along each axis with most of the largest tumour, or with most brain."""
    mask = image != 0
    if regions[0].any():
        components = number_components(regions[0])
        mask = components == 1 + np.bincount(components[components > 0] - 1).argmax()
    x, y, z = (int(mask.sum(axis=others).argmax()) for others in ((1, 2), (0, 2), (0, 1)))
    return x, y, z


def draw_section(axes: Any, image: Image, axis: int, index: int, spacing_mm: Spacing) -> None:
    """Draw one section of an image `(X, Y, Z)` in grey, cut to the brain.

    Args:
        axes: Axes of matplotlib.
        image: Image that is 0 outside the brain.
        axis: Axis that is perpendicular to the section.
        index: Position on that axis, in voxels.
        spacing_mm: Edges of a voxel.
    """
    right, up = (i for i in range(3) if i != axis)
    section = _section(image, axis, index)
    # all sections of an image share one scale
    low, high = grey_limits(image[::_COARSE, ::_COARSE, ::_COARSE])
    axes.imshow(
        np.where(section == 0, low, section),
        cmap="gray",
        vmin=low,
        vmax=high,
        origin="upper" if axis == AXIAL else "lower",
        aspect=spacing_mm[up] / spacing_mm[right],
    )
    # all sections of a case at one scale
    _zoom(axes, (image != 0).any(axis=axis).T)
    axes.set_axis_off()


def draw_outlines(axes: Any, regions: RegionMasks, axis: int, index: int) -> None:
    """Draw the outlines of the regions `(3, X, Y, Z)` over a section."""
    for region, colour in zip(regions, REGION_COLOURS, strict=True):
        outline = _section(region, axis, index)
        if outline.any():
            axes.contour(outline, levels=[0.5], colors=[colour], linewidths=1, origin=None)


def grey_limits(image: Image) -> tuple[float, float]:
    """Return the values of an image that are drawn black and white; voxels of 0 are not counted."""
    brain = image[image != 0]
    low, high = np.percentile(brain, _GREY_PERCENTILES) if brain.size else (0.0, 1.0)
    return float(low), max(float(high), float(low) + 1e-6)


def _section(array: npt.NDArray[Any], axis: int, index: int) -> npt.NDArray[Any]:
    return np.moveaxis(array, axis, 0)[index].T


def _zoom(axes: Any, brain: npt.NDArray[np.bool_]) -> None:
    """Set the limits to the brain, whichever way the axes run."""
    for axis, set_limits, limits in (
        (0, axes.set_xlim, axes.get_xlim()),
        (1, axes.set_ylim, axes.get_ylim()),
    ):
        found = np.flatnonzero(brain.any(axis=axis))
        if found.size:
            near, far = found[0] - _MARGIN, found[-1] + _MARGIN
            set_limits((near, far) if limits[0] < limits[1] else (far, near))
