"""Run the notebooks on phantoms and write the pages that a code host shows: Markdown with pictures.

A page carries the hash of its notebook, and only the pages of notebooks that have changed are made
again; `--all` makes all of them. The pictures of `NAME.md` are in the folder `NAME`, under the headings
of their sections. `make pages` calls this program.
"""

import argparse
import base64
import hashlib
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PAGES = Path(__file__).parent
NOTEBOOKS = PAGES.parent
BUILD = NOTEBOOKS.parent / "build" / "pages"
"""Where the notebooks run: a folder without scans above or below it."""
LONG = 30
"""Lines of code above which a cell is folded away."""


def read_notebook(name: str) -> nbformat.NotebookNode:
    """Read a notebook, which has not run."""
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def hash_of(notebook: nbformat.NotebookNode) -> str:
    """Return the hash of the cells of a notebook, without what they printed."""
    cells = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(cells.encode()).hexdigest()


def is_current(name: str) -> bool:
    """Return whether the page of a notebook was made from the notebook as it is now."""
    page = PAGES / f"{name}.md"
    return page.exists() and hash_of(read_notebook(name)) in page.read_text()


def main() -> None:
    """Make the pages that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="make also the pages that are current")
    every = parser.parse_args().all
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if is_current(path.stem) and not every:
            print(f"{path.stem}: the page is current")
            continue
        print(f"{path.stem}: running")
        make_page(path.stem)
        print(f"{path.stem}: {PAGES / path.stem}.md")


def make_page(name: str) -> None:
    """Run a notebook in an empty folder and write its page."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    notebook = read_notebook(name)
    # never a user's scans: what is shown here is published
    for variable in ("BRATS_DATA", "BRATS_WORK"):
        os.environ.pop(variable, None)
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}}).execute()
    if (folder / "work").exists() and not (folder / "work" / "demo").exists():
        sys.exit(f"{name}: it found scans on this machine; pages are made from phantoms only")
    page = Page(name=name, folder=folder)
    text = page.render(notebook)
    shutil.rmtree(PAGES / name, ignore_errors=True)
    for file, picture in page.pictures.items():
        (PAGES / name).mkdir(exist_ok=True)
        (PAGES / name / file).write_bytes(picture)
    (PAGES / f"{name}.md").write_text(text)


@dataclass(kw_only=True, slots=True)
class Page:
    """A notebook as Markdown, with its pictures."""

    name: str
    """Name of the notebook."""
    folder: Path
    """Folder in which the notebook ran; its path is left out of the page."""
    pictures: dict[str, bytes] = field(default_factory=dict)
    """Content by file name."""
    _section: str = ""
    _in_section: Counter[str] = field(default_factory=Counter)

    def render(self, notebook: nbformat.NotebookNode) -> str:
        """Return the Markdown of a notebook that has run."""
        parts = [part for cell in notebook.cells for part in self._cell(cell)]
        made = (
            f"*[{self.name}.ipynb](../{self.name}.ipynb) as it runs without scans, on a CPU, with "
            f"brats_seg {version('brats_seg')}, torch {version('torch')} and Python "
            f"{platform.python_version()}. Made by `make pages`.*"
        )
        parts.insert(1, made)
        comment = f"<!-- hash of the cells: {hash_of(notebook)} -->"
        return "\n\n".join([*parts, comment]).replace(f"{self.folder}/", "") + "\n"

    def _cell(self, cell: nbformat.NotebookNode) -> Iterator[str]:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ (.*)$", cell.source, flags=re.MULTILINE)
            if headings:
                self._section = headings[-1]
            yield cell.source
            return
        if cell.source.startswith("%"):
            return
        code = f"```python\n{cell.source}\n```"
        if cell.source.count("\n") < LONG:
            yield code
        else:
            yield f"<details>\n<summary>Code</summary>\n\n{code}\n\n</details>"
        for output in cell.outputs:
            yield from self._output(output)

    def _output(self, output: nbformat.NotebookNode) -> Iterator[str]:
        """Yield what a cell printed or returned; log lines, on stderr, are left out."""
        if output.output_type == "stream":
            if output.name == "stdout":
                yield f"```text\n{output.text.strip()}\n```"
            return
        if "image/png" in output.data:
            yield self._picture(base64.b64decode(output.data["image/png"]))
        elif "text/html" in output.data:
            yield self._html(output.data["text/html"])
        else:
            yield f"```text\n{output.data['text/plain'].strip()}\n```"

    def _html(self, html: str) -> str:
        """Return HTML that code hosts show: without style sheets."""
        html = re.sub(r"<style.*?</style>\n?", "", html, flags=re.DOTALL)
        return "\n".join(line.strip() for line in html.splitlines() if line.strip())

    def _picture(self, content: bytes) -> str:
        self._in_section[self._section] += 1
        number = self._in_section[self._section]
        stem = re.sub(r"\W+", "-", self._section.lower()).strip("-")
        file = f"{stem}{'' if number == 1 else f'-{number}'}.png"
        self.pictures[file] = content
        return f"![{self._section}]({self.name}/{file})"


if __name__ == "__main__":
    main()
