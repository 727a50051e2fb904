"""Figures to files, in the format that the name says."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.report.style import write_figure


@pytest.mark.parametrize(
    ("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")]
)
def test_the_name_says_the_format(tmp_path: Path, name: str, begins: bytes) -> None:
    write_figure(Figure(), tmp_path / "new" / name)

    assert (tmp_path / "new" / name).read_bytes().startswith(begins)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]


@pytest.mark.parametrize(("name", "ends"), [("a.jpg", ".jpg"), ("a", "nothing")])
def test_other_names_are_refused(tmp_path: Path, name: str, ends: str) -> None:
    with pytest.raises(UsageError, match=f"ends in {ends}; expected .* .png or .svg or .pdf"):
        write_figure(Figure(), tmp_path / name)


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(EnvironmentalError, match="cannot be written"):
        write_figure(Figure(), tmp_path / "file" / "a.png")
