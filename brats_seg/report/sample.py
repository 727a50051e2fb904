"""What a case is: its four modalities, and its label map with a legend."""

import numpy as np
import numpy.typing as npt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from brats_seg.drawing.look import (
    LEFT_IS_RIGHT,
    OTHER_TISSUE_COLOURS,
    REGION_COLOURS,
    RESEARCH_USE,
    add_dark_legend,
    dark_figure,
    filled_key,
)
from brats_seg.drawing.sections import AXIAL, centre_of, draw_section
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention
from brats_seg.report.view import CaseView, Labelled

_BESIDE = "t2f"
"""The modality below the label map."""
_OPACITY = 0.75


def sample_figure(view: CaseView) -> Figure:
    """Draw an axial section of each modality through the tumour, and the label map over FLAIR.

    The label map shows each tissue in a colour of its own, and the legend says which value it is
    and which regions it belongs to. Without a label map the section has most brain.
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
    draw_section(axes, view.image(_BESIDE), AXIAL, index, view.spacing_mm)
    words = f"{RESEARCH_USE}; {LEFT_IS_RIGHT}"
    if labelled is None:
        axes.set_title(f"{_BESIDE}, no label map", color="white", fontsize="small")
        add_dark_legend(figure, [], words)
    else:
        axes.imshow(_painted(labelled, index), interpolation="nearest")
        axes.set_title(f"label map over {_BESIDE}", color="white", fontsize="small")
        add_dark_legend(figure, filled_key(*_legend(labelled.convention)), words)
    figure.suptitle(f"{view.case_id}, axial {index}", color="white", fontsize="medium")
    return figure


def tissue_colours(convention: LabelConvention) -> dict[int, str]:
    """Return the colour of each label value.

    The first tissue of a region that no smaller region holds has the colour of the region: where
    regions are painted over each other, it is what is seen of it.
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
    """Return a section of the label map (Y, X, 4) in colours, clear where there is no tissue."""
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
