"""Sections through a whole tumour, reference and prediction side by side."""

import numpy as np
from matplotlib.figure import Figure

from brats_seg.drawing.look import (
    LEFT_IS_RIGHT,
    RESEARCH_USE,
    add_dark_legend,
    dark_figure,
    outline_key,
)
from brats_seg.drawing.sections import AXIAL, draw_outlines, draw_section
from brats_seg.report.view import CaseView, drawn_of

N_SECTIONS = 12
_N_COLUMNS = 3


def montage_figure(view: CaseView, *, modality: str = "t2f") -> Figure:
    """Draw axial sections from the lower to the upper end of the tumour, with the regions outlined.

    There is a block for each label map of the case, with the same sections.

    Raises:
        CaseError: The case has no label map, neither reference nor prediction.
        UsageError: There is no modality of that name.
    """
    image, labelled = view.image(modality), drawn_of(view)
    tumour = np.logical_or.reduce([regions[0] for _, regions in labelled])
    shown = tumour if tumour.any() else image != 0
    indices = _spread(np.flatnonzero(shown.any(axis=(0, 1))))
    n_rows = -(-len(indices) // _N_COLUMNS)
    figure = dark_figure(1.7 * _N_COLUMNS * len(labelled), 1.9 * n_rows + 0.8)
    blocks = figure.subfigures(1, len(labelled), squeeze=False)[0]
    for block, (words, regions) in zip(blocks, labelled, strict=True):
        block.set_facecolor("black")
        block.suptitle(words, color="white", fontsize="medium")
        for axes, index in zip(block.subplots(n_rows, _N_COLUMNS).flat, indices, strict=False):
            draw_section(axes, image, AXIAL, index, view.spacing_mm)
            draw_outlines(axes, regions, AXIAL, index)
            axes.set_title(f"{index}", color="grey", fontsize="x-small")
        for axes in block.axes[len(indices) :]:
            axes.set_axis_off()
    figure.suptitle(f"{view.case_id}, {modality}", color="white", fontsize="medium")
    add_dark_legend(figure, outline_key(), f"{RESEARCH_USE}; {LEFT_IS_RIGHT}")
    return figure


def _spread(indices: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> list[int]:
    """Return at most `N_SECTIONS` of the indices, evenly, both ends among them."""
    places = np.linspace(0, len(indices) - 1, min(N_SECTIONS, len(indices)))
    return [int(indices[place]) for place in places.round().astype(int)]
