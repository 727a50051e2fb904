"""How work in progress tells how far it is."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")


class Track(Protocol):
    """What `tracked` and `untracked` have in common."""

    def __call__(self, items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
        """Pass items through unchanged, showing how many of `total` are done."""


def untracked(items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
    """Show nothing: for tests and for work inside other work."""
    return items


def tracked(items: Iterable[Item], *, what: str, total: int) -> Iterator[Item]:
    """Show a bar on a terminal and in a notebook, and nothing in a log file."""
    console = Console(stderr=True)
    with _bar(console) as bar:
        task = bar.add_task(what, total=total)
        for item in items:
            yield item
            bar.advance(task)


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    # in a notebook rich needs widgets, and says so at every bar where they are missing
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    visible = console.is_terminal or in_notebook
    with Progress(*columns, console=console, transient=True, disable=not visible) as bar:
        yield bar
