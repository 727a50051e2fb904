"""The frame that every page has."""

import base64
import gzip
import hashlib
import re
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure
from PIL import Image

from brats_seg.errors import UsageError
from brats_seg.pages.html import (
    _environment,
    niivue_licence,
    packed_niivue,
    picture_uri,
    render_page,
    write_page,
)

NIIVUE_0_69_0 = "47b896b77ec4a5be3ef1949c33ad393b6f45629921f326c279000bcf51bdb4af"
"""SHA-256 of `dist/niivue.umd.js` of the npm package."""
HOSTILE = "</title><script>alert(1)</script>'\"&"


class Tags(HTMLParser):
    """Collects the tags of a page and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_page_says_research_use_only_and_names_nothing_outside() -> None:
    page = render_page("page.html", title="A case")

    assert "Research use only" in page
    assert not re.findall(r"https?:", page)
    loading = [
        value
        for _, attributes in Tags(page).found
        for name in ("src", "href")
        if (value := attributes.get(name)) and not value.startswith(("data:", "#"))
    ]
    assert loading == []


def test_the_policy_of_a_page_forbids_requests() -> None:
    policies = [
        attributes["content"]
        for tag, attributes in Tags(render_page("page.html", title="A case")).found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]

    (policy,) = policies
    assert "default-src 'none'" in str(policy)
    sources = {word for rule in str(policy).split(";") for word in rule.split()[1:]}
    assert sources == {"'none'", "'unsafe-inline'", "data:", "blob:"}


def test_a_title_cannot_add_tags() -> None:
    plain, hostile = (Tags(render_page("page.html", title=t)).found for t in ("A", HOSTILE))

    assert [tag for tag, _ in hostile] == [tag for tag, _ in plain]


def test_a_page_is_written_whole_with_any_file_name(tmp_path: Path) -> None:
    write_page(tmp_path / "new" / "a.html", "page.html", title="caf\udce9")

    assert "caf\\udce9" in (tmp_path / "new" / "a.html").read_text()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.html"]


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a.pdf ends in .pdf; expected .* ends in .html"):
        write_page(tmp_path / "a.pdf", "page.html", title="A")


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="title"):
        _environment().get_template("page.html").render(version="1")


def test_a_picture_is_inside_the_page() -> None:
    figure = Figure(figsize=(2, 1))

    uri = picture_uri(figure, dpi=50)

    start, _, coded = uri.partition(",")
    assert start == "data:image/webp;base64"
    with Image.open(BytesIO(base64.b64decode(coded))) as picture:
        assert picture.size == (100, 50)


def test_the_vendored_viewer_and_its_licence_are_in_the_package() -> None:
    script = gzip.decompress(base64.b64decode(packed_niivue()))

    assert hashlib.sha256(script).hexdigest() == NIIVUE_0_69_0
    assert "Redistribution and use" in niivue_licence()
