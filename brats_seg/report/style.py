"""The look of every picture: colours, and the words that go with them.

The colours are those of Okabe and Ito (2008), which people with any kind of colour vision tell
apart; region by region they differ in brightness too.
"""

# DOC report/saving: Figures to files.

from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS

REGION_COLOURS = ("#56B4E9", "#F0E442", "#D55E00")
"""Of WT, TC, ET: sky blue, yellow, vermilion."""
OTHER_TISSUE_COLOURS = ("#CC79A7", "#009E73")
"""Of tissues that no region of their own has: purple, green."""
FIRST_COLOUR, SECOND_COLOUR = "#0072B2", "#E69F00"
"""Of two things compared that are no regions: blue, orange."""

RESEARCH_USE = "research use only"
LEFT_IS_RIGHT = "the patient's left is on the right"

_REGION_NAMES = tuple(region.upper() for region in REGIONS)


def dark_figure(width: float, height: float) -> Figure:
    """Return an empty figure for scans, in inches: they are black around the brain."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="black")


def light_figure(width: float, height: float) -> Figure:
    """Return an empty figure for numbers, in inches, that says what it is for."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.supxlabel(RESEARCH_USE, fontsize="x-small", color="grey", x=0.99, ha="right")
    return figure


def outline_key(words: tuple[str, ...] = _REGION_NAMES) -> list[Artist]:
    """Return the entries of a legend for outlines of WT, TC and ET."""
    return [
        Line2D([], [], color=colour, label=text)
        for text, colour in zip(words, REGION_COLOURS, strict=True)
    ]


def filled_key(words: tuple[str, ...], colours: tuple[str, ...]) -> list[Artist]:
    """Return the entries of a legend for filled areas."""
    return [
        Patch(facecolor=colour, label=text) for text, colour in zip(words, colours, strict=True)
    ]


def add_dark_legend(figure: Figure, entries: list[Artist], words: str) -> None:
    """Put a legend below a dark figure, with small words above its entries."""
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


SUFFIXES = (".png", ".svg", ".pdf")
_DPI = 100


def check_suffix(path: Path) -> None:
    """Raise `UsageError` unless the file is called as one of the kinds that can be written."""
    if path.suffix.lower() not in SUFFIXES:
        msg = (
            f"{path} ends in {path.suffix or 'nothing'}; expected a name that ends in "
            f"{' or '.join(SUFFIXES)}"
        )
        raise UsageError(msg)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as the name of the file says: PNG, SVG or PDF.

    Raises:
        UsageError: The name ends in something else.
        EnvironmentalError: The file cannot be written.
    """
    check_suffix(path)
    with whole_file(path) as beside:
        figure.savefig(beside, dpi=_DPI, format=path.suffix.lower().removeprefix("."))
