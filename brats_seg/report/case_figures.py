"""Draw figures of one case: its modalities, its label maps and the output of an autoencoder."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, RegionMasks
from brats_seg.report.case_view import CaseView, Labelled, drawn_of
from brats_seg.report.sections import (
    AXIAL,
    PLANES,
    Image,
    Spacing,
    centre_of,
    draw_outlines,
    draw_section,
    grey_limits,
)
from brats_seg.report.style import (
    LEFT_IS_RIGHT,
    OTHER_TISSUE_COLOURS,
    REGION_COLOURS,
    RESEARCH_USE,
    add_dark_legend,
    dark_figure,
    filled_key,
    outline_key,
)

SHOWN = ("t1c", "t2f")
"""Modalities of a preview: the first shows enhancement, the second oedema."""
N_SECTIONS = 12
"""Sections of a montage, at most."""

_BACKGROUND = "t2f"
"""Modality below the label map."""
_OPACITY = 0.75
"""Opacity of the label map."""
_N_MONTAGE_COLUMNS = 3
_RECONSTRUCTION_COLUMNS = ("input", "reconstruction", "absolute difference")


def sample_figure(view: CaseView) -> Figure:
    """Draw an axial section of each modality through the tumour, and the label map over FLAIR.

    Each tissue of the label map has its own colour, and the legend names its label value and its
    regions. Without a label map, the section with most brain is drawn.
    """
    labelled = view.reference
    regions = labelled.regions if labelled else np.zeros((3, *view.images.shape[1:]), bool)
    index = centre_of(regions, view.images[0])[AXIAL]
    figure = dark_figure(12, 6.4)
    grid = figure.add_gridspec(2, 4)
    for number, modality in enumerate(MODALITIES):
        axes = figure.add_subplot(grid[number // 2, number % 2])
        draw_section(axes, view.image(modality), AXIAL, index, view.spacing_mm)
        axes.set_title(modality, color="white", fontsize="small")
    axes = figure.add_subplot(grid[:, 2:])
    draw_section(axes, view.image(_BACKGROUND), AXIAL, index, view.spacing_mm)
    words = f"{RESEARCH_USE}; {LEFT_IS_RIGHT}"
    if labelled is None:
        axes.set_title(f"{_BACKGROUND}, no label map", color="white", fontsize="small")
        add_dark_legend(figure, [], words)
    else:
        axes.imshow(_painted(labelled, index), interpolation="nearest")
        axes.set_title(f"label map over {_BACKGROUND}", color="white", fontsize="small")
        add_dark_legend(figure, filled_key(*_legend(labelled.convention)), words)
    figure.suptitle(f"{view.case_id}, axial {index}", color="white", fontsize="medium")
    return figure


def montage_figure(view: CaseView, *, modality: str = "t2f") -> Figure:
    """Draw axial sections from the lower to the upper end of the tumour, with the regions outlined.

    There is one block of sections for each label map of the case.

    Raises:
        CaseError: The case has no label map, neither reference nor prediction.
        UsageError: No modality has that name.
    """
    image, labelled = view.image(modality), drawn_of(view)
    tumour = np.logical_or.reduce([regions[0] for _, regions in labelled])
    shown = tumour if tumour.any() else image != 0
    indices = _spread(np.flatnonzero(shown.any(axis=(0, 1))))
    n_rows = -(-len(indices) // _N_MONTAGE_COLUMNS)
    figure = dark_figure(1.7 * _N_MONTAGE_COLUMNS * len(labelled), 1.9 * n_rows + 0.8)
    blocks = figure.subfigures(1, len(labelled), squeeze=False)[0]
    for block, (words, regions) in zip(blocks, labelled, strict=True):
        block.set_facecolor("black")
        block.suptitle(words, color="white", fontsize="medium")
        for axes, index in zip(
            block.subplots(n_rows, _N_MONTAGE_COLUMNS).flat, indices, strict=False
        ):
            draw_section(axes, image, AXIAL, index, view.spacing_mm)
            draw_outlines(axes, regions, AXIAL, index)
            axes.set_title(f"{index}", color="grey", fontsize="x-small")
        for axes in block.axes[len(indices) :]:
            axes.set_axis_off()
    figure.suptitle(f"{view.case_id}, {modality}", color="white", fontsize="medium")
    add_dark_legend(figure, outline_key(), f"{RESEARCH_USE}; {LEFT_IS_RIGHT}")
    return figure


def view_figure(view: CaseView) -> Figure:
    """Draw axial, coronal and sagittal sections with the regions of the prediction outlined.

    Without a prediction, the regions of the reference are outlined.

    Raises:
        CaseError: The case has neither.
    """
    words, regions = drawn_of(view)[-1]
    figure = planes_figure({name: view.image(name) for name in SHOWN}, regions, view.spacing_mm)
    figure.suptitle(f"{view.case_id}, {words}", color="white", fontsize="medium")
    add_dark_legend(figure, outline_key(), f"{RESEARCH_USE}; {LEFT_IS_RIGHT}")
    return figure


def planes_figure(images: Mapping[str, Image], regions: RegionMasks, spacing_mm: Spacing) -> Figure:
    """Draw axial, coronal and sagittal sections, a row for each image, with the regions outlined.

    Args:
        images: Images `(X, Y, Z)` by modality, 0 outside the brain.
        regions: Region masks `(3, X, Y, Z)`; the sections go through the largest tumour.
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


def reconstruction_figure(
    image: npt.NDArray[Any], reconstruction: npt.NDArray[Any], *, case_id: str
) -> Figure:
    """Draw an axial section of every modality, its reconstruction, and their difference.

    The section is the one with most brain. A row has one grey scale, so that equal greys are equal
    intensities; the difference is drawn over the width of that scale.

    Args:
        image: Modalities `(4, X, Y, Z)` in the order of `MODALITIES`, 0 outside the brain.
        reconstruction: Their reconstructions `(4, X, Y, Z)`.
        case_id: Id of the case, for the title.
    """
    brain = (image != 0).any(axis=0)
    section = int(brain.sum(axis=(0, 1)).argmax())
    figure = dark_figure(7, 9)
    grid = figure.subplots(len(MODALITIES), len(_RECONSTRUCTION_COLUMNS))
    for row, modality, before, after in zip(
        grid, MODALITIES, image[..., section], reconstruction[..., section], strict=True
    ):
        _draw_row(row, modality, before.astype(float), after.astype(float))
    for axes, words in zip(grid[0], _RECONSTRUCTION_COLUMNS, strict=True):
        axes.set_title(words, color="white", fontsize="small")
    figure.suptitle(f"{case_id}, axial {section}", color="white", fontsize="medium")
    figure.supxlabel(f"{RESEARCH_USE}; {LEFT_IS_RIGHT}", color="grey", fontsize="x-small")
    return figure


def tissue_colours(convention: LabelConvention) -> dict[int, str]:
    """Return the colour of each label value.

    The first tissue that belongs to a region and to no smaller one has the colour of the region: it
    is the visible part where regions are painted over each other.
    """
    colours: dict[int, str] = {}
    left = iter(OTHER_TISSUE_COLOURS)
    taken = set()
    for value, _ in convention.meanings:
        inside = [k for k, values in enumerate(convention.regions) if value in values]
        smallest = inside[-1] if inside else None
        if smallest is None or smallest in taken:
            colours[value] = next(left)
        else:
            taken.add(smallest)
            colours[value] = REGION_COLOURS[smallest]
    return colours


def _painted(labelled: Labelled, index: int) -> npt.NDArray[np.float64]:
    """Return a section of the label map in colours (Y, X, 4), transparent outside the tissues."""
    section = labelled.label_map[:, :, index].T
    picture = np.zeros((*section.shape, 4))
    for value, colour in tissue_colours(labelled.convention).items():
        picture[section == value] = (*to_rgb(colour), _OPACITY)
    return picture


def _legend(convention: LabelConvention) -> tuple[tuple[str, ...], tuple[str, ...]]:
    words = []
    for value, tissue in convention.meanings:
        regions = (
            region.upper()
            for region, values in zip(REGIONS, convention.regions, strict=True)
            if value in values
        )
        words.append(f"{tissue}: label {value}, in {', '.join(regions) or 'no region'}")
    colours = tissue_colours(convention)
    return tuple(words), tuple(colours[value] for value, _ in convention.meanings)


def _spread(indices: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> list[int]:
    """Return at most `N_SECTIONS` of the indices, evenly, both ends among them."""
    places = np.linspace(0, len(indices) - 1, min(N_SECTIONS, len(indices)))
    return [int(indices[place]) for place in places.round().astype(int)]


def _draw_row(
    row: Any, modality: str, before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]
) -> None:
    """Draw the sections (X, Y) of one modality and their difference."""
    low, high = grey_limits(before)
    air = before == 0
    pictures = (
        (np.where(air, low, before), low, high),
        # the reconstruction is not shown outside the brain
        (np.where(air, low, after), low, high),
        (np.where(air, 0, np.abs(after - before)), 0.0, high - low),
    )
    for axes, (picture, darkest, brightest) in zip(row, pictures, strict=True):
        axes.imshow(picture.T, cmap="gray", vmin=darkest, vmax=brightest, origin="upper")
        axes.set(xticks=[], yticks=[])
        axes.set_frame_on(False)
    error = float(np.sqrt(np.mean((after - before)[~air] ** 2))) if not air.all() else 0.0
    row[0].set_ylabel(modality, color="white", fontsize="small")
    row[-1].set_xlabel(f"RMSE here {error:.3g}", color="grey", fontsize="x-small", labelpad=2)
