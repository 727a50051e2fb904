"""Make HTML pages: one file each, which opens by a double click and loads nothing from outside.

A page is a template of the folder `templates` that extends `page.html`: title, style for light and
dark, and the footer "research use only" are the same for all. Whatever a template inserts is escaped.

A template inserts values for a script as `<script type="application/json" id="values">{{ values | tojson
}}</script>`, a number as `{{ ml | number(1) }}`, and a picture as `<img src="{{ picture }}" alt="...">`
with a value of `picture_uri`.
"""

import base64
import math
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from io import BytesIO, StringIO
from pathlib import Path
from typing import NamedTuple

import deflate
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from brats_seg.figures.sections import check_suffix, save_figure
from brats_seg.files import whole_file

_PACKAGE = "brats_seg.pages"
_NIIVUE = files(_PACKAGE).joinpath("niivue")
_COMPRESSION_LEVEL = 9
PAGE_SUFFIX = ".html"
"""Ending of the name of a page."""
_DPI = 110
_NOISE = 1e-6
"""Size of rounding errors, which are shown as 0."""
_SVG_FACTS = ("Creator", "Date", "Format", "Type")
"""What matplotlib would say about a chart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOptions:
    """Choices for the pages of one command."""

    output: Path | None = None
    """Folder for the pages, or the file of a single one; None for `reports` beside the results."""
    prediction: Path | None = None
    """Folder of predictions, or a label map, of cases that are given by their scans."""
    reference: Path | None = None
    """Label maps to compare with; None takes those beside scans that are given, and none for predictions."""
    case_ids: tuple[str, ...] = ()
    """Cases to write; empty for all."""
    with_cases: bool = True
    """Whether a folder of predictions has the pages of its cases written too."""
    scores: Path | None = None
    """Table of scores of the predictions, which saves scoring them."""
    prepared: Path | None = None
    """Folder of the prepared cases that a run was trained on: its held-out cases are predicted,
    unless `tune` or an earlier call has, and scored. None leaves them out."""
    device: str = "auto"
    precision: str = "auto"
    """Device and precision that predict them."""


DEFAULT_OPTIONS = PageOptions()


class Fact(NamedTuple):
    """A line about the origin of what a page shows."""

    name: str
    text: str
    is_code: bool = False
    """Whether the words are a hash or a path."""


def write_page(path: Path, template: str, *, title: str, **values: object) -> None:
    """Write a page to a file.

    Args:
        path: File to write, which ends in `.html`.
        template: Name of a template in the folder `templates`.
        title: Title and heading of the page.
        values: Values that the template names.
    """
    check_suffix(path, [PAGE_SUFFIX])
    page = _TEMPLATES.get_template(template)
    text = page.render(title=title, version=version("brats_seg"), **values)
    with whole_file(path) as temporary:
        # file names need not be UTF-8
        temporary.write_bytes(text.encode(errors="backslashreplace"))


def packed(content: bytes) -> str:
    """Return bytes compressed by gzip and in base64, for `unpacked` of `viewer.js`."""
    return base64.b64encode(deflate.gzip_compress(content, _COMPRESSION_LEVEL)).decode()


@cache
def load_niivue() -> tuple[str, str]:
    """Return the script NiiVue, which draws scans, as `packed` does, and its licence.

    A page that holds the script must show the licence.
    """
    script = _NIIVUE.joinpath("niivue.umd.js").read_bytes()
    return packed(script), _NIIVUE.joinpath("LICENSE").read_text()


def picture_uri(figure: Figure) -> str:
    """Return a figure as a lossless WebP, for the `src` of an image.

    It has two thirds of the bytes of a PNG. With fewer colours a PNG would be as small, but the thin
    yellow outlines of the core turn brown.
    """
    drawn, picture = BytesIO(), BytesIO()
    save_figure(figure, drawn, dpi=_DPI, format="png")
    with Image.open(drawn) as image:
        image.convert("RGB").save(picture, format="WEBP", lossless=True, quality=50, method=2)
    return data_uri(picture.getvalue(), "image/webp")


def inline_svg(figure: Figure) -> str:
    """Return a chart as an element of a page, with its black and white, for `{{ chart | safe }}`."""
    drawn = StringIO()
    # letters stay text, and the same chart has the same ids
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": _PACKAGE}):
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(_SVG_FACTS))
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    return svg.replace("#ffffff", "var(--page)")


def data_uri(content: bytes, media_type: str) -> str:
    """Return bytes as a URI that holds them.

    Example:
        >>> data_uri(b"abc", "text/plain")
        'data:text/plain;base64,YWJj'
    """
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def number_text(value: float | None, digits: int = 1) -> str:
    """Return a number with that many digits after the point, and `n/a` for none or NaN.

    A small number, such as a volume of few voxels, has more digits, so that it does not become 0.

    Example:
        >>> number_text(12.345), number_text(float("nan")), number_text(7.0, 0), number_text(0.003)
        ('12.3', 'n/a', '7', '0.003')
    """
    text = "n/a" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
    return f"{value:.1g}" if value and abs(value) > _NOISE and not text.strip("-0.") else text


_TEMPLATES = Environment(
    loader=PackageLoader(_PACKAGE),
    autoescape=True,
    # a name that a template misspells is an error, and not an empty place
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["number"] = number_text
