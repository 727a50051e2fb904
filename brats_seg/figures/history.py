"""Read and draw the history of a run: as a figure, and live in a notebook.

A history is a table with a row for each epoch and columns `train_<name>` and `val_<name>`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from brats_seg.errors import UsageError
from brats_seg.figures.sections import MODALITY_NAMES, RESEARCH_USE
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.progress import Item, tracked

Row = Mapping[str, float]
HISTORY_NAME = "history.csv"
PHASES = {"train": "training", "val": "validation"}
"""Phases of an epoch, by their prefix in columns."""
_COLOURS = {"train": "tab:blue", "val": "tab:orange"}
_STYLES = ("--", "-.", ":", (0, (1, 4)))
"""Line styles of the parts of a curve, as many as there are modalities."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A value that is computed in both phases of every epoch."""

    name: str
    """Name in the columns of the history: `train_<name>`, `val_<name>`, and `val_<name>_<part>` for each part."""
    title: str
    """Title in figures."""
    parts: tuple[str, ...] = ()
    """Names of the parts whose mean the value is."""
    limits: tuple[float, float] | None = None
    """Limits of the axis; None fits them to the values."""
    digits: int = 3
    """Digits after the point, in the line that is logged."""
    shows_parts: bool = False
    """Whether that line shows the parts too."""


CURVES = (
    Curve(name="loss", title="loss", digits=4),
    Curve(name="dice", title="Dice", parts=REGIONS, limits=(0, 1), shows_parts=True),
    Curve(name="jaccard", title="Jaccard", parts=REGIONS, limits=(0, 1)),
    Curve(name="rmse", title="RMSE in the brain", parts=MODALITIES, shows_parts=True),
)
"""All curves; a history has those of its task."""


def curves_of(columns: Collection[str]) -> tuple[Curve, ...]:
    """Return the curves that a history with those columns has."""
    return tuple(curve for curve in CURVES if f"train_{curve.name}" in columns)


def read_history(run_path: Path) -> pd.DataFrame:
    """Read `history.csv` of a run.

    Raises:
        UsageError: The file is missing, or holds no history.
    """
    path = run_path / HISTORY_NAME
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        msg = f"{path} does not exist; expected the folder of a run with a finished epoch"
        raise UsageError(msg) from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError):
        table = pd.DataFrame()
    if table.empty or not {"epoch", "train_loss", "val_loss"} <= {*table.columns}:
        msg = f"{path} holds no epochs; the run writes it again after its next epoch"
        raise UsageError(msg)
    return table


def history_figure(table: pd.DataFrame) -> Figure:
    """Draw every curve of a history over its epochs, in both phases."""
    curves = curves_of(table.columns)
    # margins are fixed: computing them takes as long as the rest of the drawing
    figure = Figure(figsize=(8, 3 * len(curves)))
    bottom = 0.24 / len(curves)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.98, bottom=bottom, hspace=0.08)
    (column,) = figure.subplots(len(curves), 1, sharex=True, squeeze=False).T
    for axes, curve in zip(column, curves, strict=True):
        _draw_curve(axes, table, curve)
    column[-1].set_xlabel("epoch")
    column[-1].xaxis.get_major_locator().set_params(integer=True)
    if len(table) == 1:
        column[-1].set_xlim(table["epoch"].iloc[0] - 1, table["epoch"].iloc[0] + 1)
    figure.text(0.98, 0.01, RESEARCH_USE, fontsize="x-small", color="grey", ha="right")
    return figure


def _draw_curve(axes: Any, table: pd.DataFrame, curve: Curve) -> None:
    """Draw the known values of a curve; a line without any has no entry in the legend."""
    lines: dict[str, dict[str, Any]] = {
        f"{phase}_{curve.name}": {"color": _COLOURS[phase], "marker": ".", "label": name}
        for phase, name in PHASES.items()
    }
    for part, style in zip(curve.parts, _STYLES, strict=False):
        label = f"validation {MODALITY_NAMES.get(part, part.upper())}"
        look = {"color": _COLOURS["val"], "linestyle": style, "linewidth": 1, "label": label}
        lines[f"val_{curve.name}_{part}"] = look
    for column, look in lines.items():
        values = table[["epoch", column]].dropna()
        if len(values) == 1:
            look["marker"] = "."  # a line of one epoch would not be seen
        if len(values):
            axes.plot(*values.to_numpy().T, **look)
    if curve.limits is not None:
        axes.set_ylim(curve.limits)
    axes.set_ylabel(curve.title)
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        # looking for the best position takes long with many points: scores rise, losses fall
        position = {"loc": "upper left"} if curve.limits else {"loc": "upper right", "ncols": 3}
        axes.legend(fontsize="small", **position)


@dataclass(kw_only=True, slots=True)
class LiveHistory:
    """Show `history.png` of a run in a notebook, updated after every epoch, with progress bars.

    It is given to a trainer as `track`, and called at the start of each phase of an epoch; call
    `show` for the last epoch. In a text console it shows the progress bars alone.

        Trainer(data=data, config=config, run_path=run_path).run(track=LiveHistory(run_path=run_path))
    """

    run_path: Path
    """Folder of the run."""
    _shown_ns: int = field(default=0, init=False)
    _display: Any = field(default=None, init=False)

    def __call__(self, items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
        """Update the picture, and pass items through unchanged below a progress bar."""
        self.show()
        return tracked(items, what=what, total=total)

    def show(self) -> None:
        """Show the picture if it has changed."""
        path = self.run_path / "history.png"
        if not path.exists() or path.stat().st_mtime_ns == self._shown_ns:
            return
        # IPython is installed wherever a notebook runs, and needed nowhere else
        from IPython.display import Image, display

        self._shown_ns = path.stat().st_mtime_ns
        picture = Image(data=path.read_bytes())
        if self._display is None:
            self._display = display(picture, display_id=True)
        else:
            self._display.update(picture)
