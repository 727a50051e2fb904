"""What every epoch measured: rows of `history.csv` and the picture `history.png`."""

# DOC report/live: The history of a run as it grows, in a notebook.

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.progress import Item, untracked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, float]
_PHASES = {"train": "training", "val": "validation"}
_COLOURS = {"train": "tab:blue", "val": "tab:orange"}
_STYLES = ("--", "-.", ":", (0, (1, 4)))
"""Of the parts of a curve, as many as there are modalities."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A number of every epoch, of either phase."""

    name: str
    """Of its columns: `train_<name>`, `val_<name>`, and `val_<name>_<part>` for each part."""
    title: str
    """What a person reads."""
    parts: tuple[str, ...] = ()
    """What it is the mean of."""
    limits: tuple[float, float] | None = None
    """Of its axis; None fits it to the values."""
    digits: int = 3
    """Behind the point, in the line on screen."""
    tells_parts: bool = False
    """Whether that line has its parts too."""


CURVES = (
    Curve(name="loss", title="loss", digits=4),
    Curve(name="dice", title="Dice", parts=REGIONS, limits=(0, 1), tells_parts=True),
    Curve(name="jaccard", title="Jaccard", parts=REGIONS, limits=(0, 1)),
    Curve(name="rmse", title="RMSE in the brain", parts=MODALITIES, tells_parts=True),
)
"""All that is ever measured; a history has those of its task."""


def _curves_of(columns: Collection[str]) -> tuple[Curve, ...]:
    return tuple(curve for curve in CURVES if f"train_{curve.name}" in columns)


def history_figure(table: pd.DataFrame) -> "Figure":
    """PatchKey every curve of a history over its epochs, both phases."""
    from matplotlib.figure import Figure

    curves = _curves_of(table.columns)
    # margins are set by hand: finding them takes as long as all the rest of the drawing
    figure = Figure(figsize=(8, 3 * len(curves)))
    bottom = 0.24 / len(curves)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.98, bottom=bottom, hspace=0.08)
    (column,) = figure.subplots(len(curves), 1, sharex=True, squeeze=False).T
    for axes, curve in zip(column, curves, strict=True):
        _draw_curve(axes, table, curve)
    column[-1].set_xlabel("epoch")
    column[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.text(0.98, 0.01, "research use only", fontsize="x-small", color="grey", ha="right")
    return figure


def _draw_curve(axes: "Axes", table: pd.DataFrame, curve: Curve) -> None:
    for phase, name in _PHASES.items():
        values = table[["epoch", f"{phase}_{curve.name}"]].dropna()
        axes.plot(*values.to_numpy().T, color=_COLOURS[phase], marker=".", label=name)
    for part, style in zip(curve.parts, _STYLES, strict=False):
        values = table[["epoch", f"val_{curve.name}_{part}"]].dropna()
        axes.plot(
            *values.to_numpy().T,
            color=_COLOURS["val"],
            linestyle=style,
            linewidth=1,
            label=f"validation {part.upper()}",
        )
    if curve.limits is not None:
        axes.set_ylim(curve.limits)
    axes.set_ylabel(curve.title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


@dataclass(kw_only=True, slots=True)
class LiveHistory:
    """Shows `history.png` of a run in a notebook, anew after every epoch.

    Give it to a trainer, which keys the picture at the end of an epoch and tells when it begins the
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
