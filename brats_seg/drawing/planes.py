"""Three planes through the tumour."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from brats_seg.drawing.look import dark_figure
from brats_seg.drawing.sections import (
    PLANES,
    Image,
    Spacing,
    centre_of,
    draw_outlines,
    draw_section,
)
from brats_seg.labels import RegionMasks

SHOWN = ("t1c", "t2f")
"""Enhancement is seen in the one, oedema in the other."""


def planes_figure(images: Mapping[str, Image], regions: RegionMasks, spacing_mm: Spacing) -> Figure:
    """Draw axial, coronal and sagittal sections, a row for each image, with the regions outlined.

    Args:
        images: `(X, Y, Z)` by modality, 0 outside the brain.
        regions: `(3, X, Y, Z)`; the sections go through the largest tumour.
        spacing_mm: Edges of a voxel.
    """
    figure = dark_figure(9, 3.3 * len(images))
    centre = centre_of(regions, next(iter(images.values())))
    grid = figure.subplots(len(images), len(PLANES), squeeze=False)
    for row, (modality, image) in zip(grid, images.items(), strict=True):
        for axes, (plane, axis) in zip(row, PLANES, strict=True):
            draw_section(axes, image, axis, centre[axis], spacing_mm)
            draw_outlines(axes, regions, axis, centre[axis])
            axes.set_title(f"{modality}, {plane} {centre[axis]}", color="white", fontsize="small")
    return figure
