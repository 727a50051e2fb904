"""The frame that every page has."""

import base64
import gzip
import hashlib
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure

from brats_seg.errors import UsageError
from brats_seg.pages.html import _TEMPLATES, load_niivue, number_text, picture_uri, write_page

NIIVUE_0_69_0 = "47b896b77ec4a5be3ef1949c33ad393b6f45629921f326c279000bcf51bdb4af"
"""SHA-256 of `dist/niivue.umd.js` of the npm package."""


def test_a_page_says_research_use_only_and_its_policy_forbids_requests(tmp_path: Path) -> None:
    write_page(tmp_path / "new" / "a.html", "page.html", title="caf\udce9")
    page = (tmp_path / "new" / "a.html").read_text()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.html"]
    assert "caf\\udce9" in page
    assert "Research use only" in page
    assert not re.findall(r"https?:", page)
    links = re.findall(r"""(?:src|href)=["']?([^"'>]+)""", page)
    assert [link for link in links if not link.startswith(("data:", "#"))] == []
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy"\s+content="([^"]+)"', page)
    assert "default-src 'none'" in policy
    sources = {word for rule in policy.split(";") for word in rule.split()[1:]}
    assert sources == {"'none'", "'unsafe-inline'", "data:", "blob:"}


def test_another_ending_and_a_value_that_a_template_lacks_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a.pdf ends in .pdf"):
        write_page(tmp_path / "a.pdf", "page.html", title="A")
    with pytest.raises(UndefinedError, match="title"):
        _TEMPLATES.get_template("page.html").render(version="1")


def test_a_small_number_does_not_become_0_and_a_rounding_error_does() -> None:
    shown = [number_text(value, 2) for value in (0.003, -0.003, 0.0, 1e-15, 0.5, None)]
    assert shown == ["0.003", "-0.003", "0.00", "0.00", "0.50", "n/a"]


def test_letters_that_the_font_lacks_give_no_warning() -> None:
    figure = Figure()
    figure.suptitle("日本")
    assert picture_uri(figure).startswith("data:image/webp;base64,")


def test_the_vendored_viewer_and_its_licence_are_in_the_package() -> None:
    script, licence = load_niivue()
    assert hashlib.sha256(gzip.decompress(base64.b64decode(script))).hexdigest() == NIIVUE_0_69_0
    assert "Redistribution and use" in licence
