"""Define the style of all figures, and write figures to files.

The colours are those of Okabe and Ito (2008), which people with any kind of colour vision can
distinguish; those of the regions differ in brightness too.
"""

from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS

REGION_COLOURS = ("#56B4E9", "#F0E442", "#D55E00")
"""Colours of WT, TC and ET: sky blue, yellow, vermilion."""
OTHER_TISSUE_COLOURS = ("#CC79A7", "#009E73")
"""Colours of the other tissues: purple, green."""
FIRST_COLOUR, SECOND_COLOUR = "#0072B2", "#E69F00"
"""Colours of two things compared that are not regions: blue, orange."""

RESEARCH_USE = "research use only"
LEFT_IS_RIGHT = "the patient's left is on the right"

SUFFIXES = (".png", ".svg", ".pdf")
"""Formats that a figure can be written in."""

_REGION_NAMES = tuple(region.upper() for region in REGIONS)
_DPI = 100


def dark_figure(width: float, height: float) -> Figure:
    """Return an empty black figure for scans; the size is in inches."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="black")


def light_figure(width: float, height: float) -> Figure:
    """Return an empty white figure for charts, marked for research use; the size is in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.supxlabel(RESEARCH_USE, fontsize="x-small", color="grey", x=0.99, ha="right")
    return figure


def outline_key(words: tuple[str, ...] = _REGION_NAMES) -> list[Artist]:
    """Return legend entries for the outlines of WT, TC and ET."""
    return [
        Line2D([], [], color=colour, label=text)
        for text, colour in zip(words, REGION_COLOURS, strict=True)
    ]


def filled_key(words: tuple[str, ...], colours: tuple[str, ...]) -> list[Artist]:
    """Return legend entries for filled areas."""
    return [
        Patch(facecolor=colour, label=text) for text, colour in zip(words, colours, strict=True)
    ]


def add_dark_legend(figure: Figure, entries: list[Artist], words: str) -> None:
    """Add a legend below a dark figure, with a line in small print above its entries."""
    legend = figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=len(entries),
        facecolor="black",
        labelcolor="white",
        frameon=False,
        title=words,
        title_fontsize="x-small",
    )
    legend.get_title().set_color("grey")


def check_suffix(path: Path) -> None:
    """Raise `UsageError` unless the name of the file ends in one of `SUFFIXES`."""
    if path.suffix.lower() not in SUFFIXES:
        msg = (
            f"{path} ends in {path.suffix or 'nothing'}; expected a name that ends in "
            f"{' or '.join(SUFFIXES)}"
        )
        raise UsageError(msg)


def write_figure(figure: Figure, path: Path, *, dpi: int = _DPI) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of the file name.

    Raises:
        UsageError: The name has another suffix.
        EnvironmentalError: The file cannot be written.
    """
    check_suffix(path)
    with whole_file(path) as beside:
        figure.savefig(beside, dpi=dpi, format=path.suffix.lower().removeprefix("."))
