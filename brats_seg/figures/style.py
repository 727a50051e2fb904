"""Define the style of all figures, and write figures to files.

The colours are those of Okabe and Ito (2008), which people with any kind of colour vision can
distinguish; those of the regions differ in brightness too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from matplotlib.artist import Artist
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.labels import MODALITIES, REGIONS

LineStyle: TypeAlias = Literal["-", "--"] | tuple[float, tuple[float, ...]]

REGION_COLOURS = ("#56B4E9", "#F0E442", "#D55E00")
"""Colours of WT, TC and ET: sky blue, yellow, vermilion."""
OUTLINE_WIDTHS = (2.4, 1.3, 0.7)
"""Widths in points of the outlines of WT, TC and ET: an outer one is seen beside an inner one on it."""
OUTLINE_DASHES: tuple[LineStyle, ...] = ("-", (0, (4, 2)), "-")
"""Styles of the outlines of WT, TC and ET: between the dashes of the core the whole tumour is seen."""
OTHER_TISSUE_COLOURS = ("#CC79A7", "#009E73")
"""Colours of the other tissues: purple, green."""
FIRST_COLOUR, SECOND_COLOUR = "#0072B2", "#E69F00"
"""Colours of two things compared that are not regions: blue, orange."""

MODALITY_NAMES = dict(zip(MODALITIES, ("T1", "T1c", "T2", "FLAIR"), strict=True))
"""Names of the modalities in pictures, as radiologists write them; files and options keep their own."""

RESEARCH_USE = "research use only"
LEFT_IS_RIGHT = "the patient's left is on the right"

SUFFIXES = (".png", ".svg", ".pdf")
"""Formats that a figure can be written in."""

_REGION_NAMES = tuple(region.upper() for region in REGIONS)
_ALL_REGIONS = (True,) * len(REGIONS)
_DPI = 150
_TITLE_SIZE = 10.0
"""Size of a title, in points."""
_KEY_SIZE = 10.0
"""Size of the words of a legend, in points."""
_KEY_INCHES = 0.75
"""Width of a sample in a legend and of the space around it."""
_TITLE_SHARE = 0.9
"""Widest title, as a share of the width of the figure."""


def dark_figure(width: float, height: float) -> Figure:
    """Return an empty black figure for scans; the size is in inches."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="black")


def light_figure(width: float, height: float) -> Figure:
    """Return an empty white figure for charts, marked for research use; the size is in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.supxlabel(RESEARCH_USE, fontsize="x-small", color="grey", x=0.99, ha="right")
    return figure


def outline_key(
    words: Sequence[str] = _REGION_NAMES, shown: Sequence[bool] = _ALL_REGIONS
) -> list[Artist]:
    """Return legend entries for the outlines of those of WT, TC and ET that are shown."""
    return [
        Line2D([], [], color=colour, linewidth=width, linestyle=dashes, label=text)
        for text, colour, width, dashes, there in zip(
            words, REGION_COLOURS, OUTLINE_WIDTHS, OUTLINE_DASHES, shown, strict=True
        )
        if there
    ]


def line_key(words: str, colour: str, style: LineStyle) -> Artist:
    """Return the legend entry for one kind of line."""
    return Line2D([], [], color=colour, linestyle=style, linewidth=1, label=words)


def filled_key(words: Sequence[str], colours: Sequence[str]) -> list[Artist]:
    """Return legend entries for filled areas."""
    return [
        Patch(facecolor=colour, label=text) for text, colour in zip(words, colours, strict=True)
    ]


def add_title(figure: Figure | SubFigure, words: str, *, size: float = _TITLE_SIZE) -> None:
    """Write a white title above a figure or a part of it, smaller if it is wider than that."""
    width_inches = figure.bbox.width / figure.dpi
    # the id of a case may contain dollars, which would begin a formula
    figure.suptitle(
        words, color="white", fontsize=fitting_size(words, width_inches, size), parse_math=False
    )


def fitting_size(words: str, width_inches: float, size: float) -> float:
    """Return the size in points at which the longest line is no wider than a figure."""
    widest_inches = max((_inches(line, size) for line in words.splitlines()), default=0.0)
    return size * min(1.0, _TITLE_SHARE * width_inches / max(widest_inches, 0.01))


def add_dark_legend(figure: Figure, entries: Sequence[Artist], words: str) -> None:
    """Add a legend below a dark figure, with a line in small print above its entries.

    The entries have as many rows as they need.
    """
    words_of = [str(entry.get_label()) for entry in entries]
    n_columns = _n_columns(words_of, figure.bbox.width / figure.dpi)
    legend = figure.legend(
        # matplotlib fills column by column
        handles=[entry for k in range(n_columns) for entry in entries[k::n_columns]],
        loc="outside lower center",
        ncols=n_columns,
        facecolor="black",
        labelcolor="white",
        frameon=False,
        fontsize=_KEY_SIZE,
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


def _n_columns(words: Sequence[str], width_inches: float) -> int:
    """Return the number of legend entries in a row, for as few rows as fit."""
    widths = [_inches(word, _KEY_SIZE) + _KEY_INCHES for word in words]
    for n_rows in range(1, len(words) + 1):
        n_columns = -(-len(words) // n_rows)
        if sum(max(widths[k::n_columns]) for k in range(n_columns)) <= width_inches:
            return n_columns
    return 1


def _inches(words: str, size: float) -> float:
    """Return the width of a line of text."""
    # a dollar would begin a formula
    line = words.replace("$", "S")
    return (
        float(TextPath((0, 0), line, size=size).get_extents().width) / 72 if line.strip() else 0.0
    )
