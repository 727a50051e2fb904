"""Figures to files."""

from pathlib import Path

from matplotlib.figure import Figure

from brats_seg.errors import UsageError
from brats_seg.files import whole_file

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
