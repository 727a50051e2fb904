"""A picture of a result: three planes through the tumour, with the outlines of the regions."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.cases.orientation import turn_of, turned
from brats_seg.evaluation.lesions import number_components
from brats_seg.inference.predict import CaseResult
from brats_seg.inference.scan import Scan
from brats_seg.labels import MODALITIES, REGIONS, RegionMasks, regions_of

SHOWN = ("t1c", "t2f")
"""Enhancement is seen in the one, oedema in the other."""
COLOURS = ("tab:green", "tab:orange", "tab:red")
"""Outlines of WT, TC, ET."""

_PLANES = (("axial", 2), ("coronal", 1), ("sagittal", 0))
_DPI = 100
_MARGIN = 4
"""Voxels of air around the brain."""


def write_preview(scan: Scan, result: CaseResult, path: Path) -> None:
    """Draw a case into a PNG, the patient's left on the right, as radiologists look at it."""
    from matplotlib.figure import Figure

    turn = turn_of(scan.geometry.affine)
    regions = regions_of(turned(result.label_map, turn), result.convention)
    images = [_on_grid(scan, MODALITIES.index(modality), turn) for modality in SHOWN]
    centre = _centre(regions, images[0])
    stored = scan.geometry.spacing_mm
    spacing = [stored[int(axis)] for axis in np.argsort(turn[:, 0])]
    figure = Figure(figsize=(9, 6.6), layout="constrained", facecolor="black")
    grid = figure.subplots(len(SHOWN), len(_PLANES))
    for row, image, modality in zip(grid, images, SHOWN, strict=True):
        for axes, (plane, axis) in zip(row, _PLANES, strict=True):
            _draw_plane(axes, image, regions, axis, centre[axis], spacing)
            axes.set_title(f"{modality}, {plane} {centre[axis]}", color="white", fontsize="small")
    _add_words(figure, result)
    figure.savefig(path, dpi=_DPI, format="png")


def _on_grid(scan: Scan, modality: int, turn: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return a modality (X, Y, Z) on the turned grid of the files."""
    image = scan.on_scan_spacing(scan.image[modality : modality + 1])[0]
    return turned(scan.on_scan_grid(image), turn)


def _centre(regions: RegionMasks, image: npt.NDArray[np.float32]) -> list[int]:
    """Return along each axis the section with most of the largest tumour, or with most brain."""
    mask = image != 0
    if regions[0].any():
        components = number_components(regions[0])
        mask = components == 1 + np.bincount(components[components > 0] - 1).argmax()
    areas = (mask.sum(axis=others) for others in ((1, 2), (0, 2), (0, 1)))
    return [int(area.argmax()) for area in areas]


def _draw_plane(
    axes: Any,
    image: npt.NDArray[np.float32],
    regions: RegionMasks,
    axis: int,
    index: int,
    spacing: list[float],
) -> None:
    right, up = (i for i in range(3) if i != axis)
    axial = axis == 2
    section = np.moveaxis(image, axis, 0)[index].T
    brain = section[section != 0]
    low = float(np.percentile(brain, 1)) if brain.size else 0.0
    high = float(np.percentile(brain, 99.5)) if brain.size else 1.0
    origin = "upper" if axial else "lower"
    aspect = spacing[up] / spacing[right]
    axes.imshow(
        np.where(section == 0, low, section),
        cmap="gray",
        vmin=low,
        vmax=max(high, low + 1e-6),
        origin=origin,
        aspect=aspect,
    )
    for region, colour in zip(regions, COLOURS, strict=True):
        outline = np.moveaxis(region, axis, 0)[index].T
        if outline.any():
            axes.contour(outline, levels=[0.5], colors=[colour], linewidths=1, origin=None)
    _zoom(axes, section != 0)
    axes.set_axis_off()


def _zoom(axes: Any, brain: npt.NDArray[np.bool_]) -> None:
    """Leave out the air around the brain, whichever way the axes run."""
    for axis, set_limits, limits in (
        (0, axes.set_xlim, axes.get_xlim()),
        (1, axes.set_ylim, axes.get_ylim()),
    ):
        found = np.flatnonzero(brain.any(axis=axis))
        if found.size:
            near, far = found[0] - _MARGIN, found[-1] + _MARGIN
            set_limits((near, far) if limits[0] < limits[1] else (far, near))


def _add_words(figure: Any, result: CaseResult) -> None:
    from matplotlib.lines import Line2D

    ml = {part.name: part.ml for part in result.volumes}
    lines = [
        Line2D([], [], color=colour, label=f"{region.upper()} {ml[region]:.1f} ml")
        for region, colour in zip(REGIONS, COLOURS, strict=True)
    ]
    legend = figure.legend(
        handles=lines,
        loc="outside lower center",
        ncols=len(lines),
        facecolor="black",
        labelcolor="white",
        frameon=False,
        title="research use only; the patient's left is on the right",
        title_fontsize="x-small",
    )
    legend.get_title().set_color("grey")
    words = f"{result.case_id}{'' if ml['wt'] else ': no tumour found'}"
    figure.suptitle(words, color="white", fontsize="medium")
