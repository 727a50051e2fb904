"""What an autoencoder makes of a case."""

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from brats_seg.drawing.look import LEFT_IS_RIGHT, RESEARCH_USE, dark_figure
from brats_seg.labels import MODALITIES

_COLUMNS = ("input", "reconstruction", "absolute difference")
_CASE_SHARE = (1.0, 99.5)
"""Percentiles of the input between which the greys lie, in all three columns alike."""


def reconstruction_figure(
    image: npt.NDArray[Any], reconstruction: npt.NDArray[Any], *, case_id: str
) -> Figure:
    """Draw an axial section of every modality, its reconstruction, and how far they are apart.

    The section is the one with most brain. All of a row have one scale of greys, so that what
    looks alike is alike; the difference is drawn over the width of that scale.

    Args:
        image: (4, X, Y, Z) in the order of `MODALITIES`, 0 outside the brain.
        reconstruction: (4, X, Y, Z)
        case_id: For the title.
    """
    brain = (image != 0).any(axis=0)
    section = int(brain.sum(axis=(0, 1)).argmax())
    figure = dark_figure(7, 9)
    grid = figure.subplots(len(MODALITIES), len(_COLUMNS))
    for row, modality, before, after in zip(
        grid, MODALITIES, image[..., section], reconstruction[..., section], strict=True
    ):
        _draw_row(row, modality, before.astype(float), after.astype(float))
    for axes, words in zip(grid[0], _COLUMNS, strict=True):
        axes.set_title(words, color="white", fontsize="small")
    figure.suptitle(f"{case_id}, axial {section}", color="white", fontsize="medium")
    figure.supxlabel(f"{RESEARCH_USE}; {LEFT_IS_RIGHT}", color="grey", fontsize="x-small")
    return figure


def _draw_row(
    row: Any, modality: str, before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]
) -> None:
    """Draw (X, Y) of one modality: the two, and their difference."""
    brain = before[before != 0]
    low, high = np.percentile(brain, _CASE_SHARE) if brain.size else (0.0, 1.0)
    high = max(high, low + 1e-6)
    air = before == 0
    pictures = (
        (np.where(air, low, before), low, high),
        # what is reconstructed outside the brain is no part of the case
        (np.where(air, low, after), low, high),
        (np.where(air, 0, np.abs(after - before)), 0.0, high - low),
    )
    for axes, (picture, darkest, brightest) in zip(row, pictures, strict=True):
        axes.imshow(picture.T, cmap="gray", vmin=darkest, vmax=brightest, origin="upper")
        axes.set(xticks=[], yticks=[])
        axes.set_frame_on(False)
    error = float(np.sqrt(np.mean((after - before)[~air] ** 2))) if brain.size else 0.0
    row[0].set_ylabel(modality, color="white", fontsize="small")
    row[-1].set_xlabel(f"RMSE here {error:.3g}", color="grey", fontsize="x-small", labelpad=2)
