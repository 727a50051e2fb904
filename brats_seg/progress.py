"""Show the progress of work."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")


class Track(Protocol):
    """Interface of `tracked` and `untracked`."""

    def __call__(self, items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
        """Yield the items unchanged and show how many of `total` are done."""


def untracked(items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
    """Return the items and show nothing: for tests and for nested work."""
    return items


def tracked(items: Iterable[Item], *, what: str, total: int) -> Iterator[Item]:
    """Yield the items and show a progress bar on a terminal and in a notebook, not in a log file."""
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
    # rich needs ipywidgets in a notebook, and prints a warning for every bar without them
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    visible = console.is_terminal or in_notebook
    with Progress(*columns, console=console, transient=True, disable=not visible) as bar:
        yield bar
