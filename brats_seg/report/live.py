"""The history of a run as it grows, in a notebook."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brats_seg.progress import Item, untracked


@dataclass(kw_only=True, slots=True)
class LiveHistory:
    """Shows `history.png` of a run in a notebook, anew after every epoch.

    Give it to a trainer, which draws the picture at the end of an epoch and tells when it begins the
    next piece of work. In a text console it shows nothing.

        Trainer(data=data, config=config, run_path=run_path).run(track=LiveHistory(run_path=run_path))
    """

    run_path: Path
    _seen_ns: int = field(default=0, init=False)
    _display: Any = field(default=None, init=False)

    def __call__(self, items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
        """Pass items through unchanged, once the picture is up to date."""
        self.show()
        return untracked(items, what=what, total=total)

    def show(self) -> None:
        """Show the picture if it has changed."""
        path = self.run_path / "history.png"
        if not path.exists() or path.stat().st_mtime_ns == self._seen_ns:
            return
        # IPython is wherever a notebook runs, and nowhere else needed
        from IPython.display import Image, display

        self._seen_ns = path.stat().st_mtime_ns
        picture = Image(data=path.read_bytes())
        if self._display is None:
            self._display = display(picture, display_id=True)
        else:
            self._display.update(picture)
