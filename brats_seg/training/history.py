"""What every epoch measured: rows of `history.csv` and the picture `history.png`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.labels import MODALITIES, REGIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, float]

HISTORY_NAME = "history.csv"
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


def phase_columns(phase: str, scores: Row) -> dict[str, float]:
    """Return the columns of `history.csv` for `train` or `val`."""
    return {f"{phase}_{name}": value for name, value in scores.items()}


def write_history(rows: Sequence[Row], run_path: Path) -> None:
    """Write `history.csv` and `history.png` of a run.

    Validation columns are empty in an epoch without validation.
    """
    table = pd.DataFrame([dict(row) for row in rows]).reindex(columns=list(_columns(rows[0])))
    with whole_file(run_path / HISTORY_NAME) as beside:
        table.to_csv(beside, index=False)
    with whole_file(run_path / "history.png") as beside:
        history_figure(table).savefig(beside, dpi=80, format="png")


def read_history(run_path: Path) -> pd.DataFrame:
    """Read `history.csv` of a run.

    Raises:
        UsageError: It is missing, or no history.
    """
    path = run_path / HISTORY_NAME
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        msg = f"{path} does not exist; expected the folder of a run that ended an epoch"
        raise UsageError(msg) from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        msg = f"{path} is not a table ({error}); the next epoch of the run writes it anew"
        raise UsageError(msg) from None
    if table.empty or not {"epoch", "train_loss", "val_loss"} <= {*table.columns}:
        msg = f"{path} holds no epochs; the next epoch of the run writes it anew"
        raise UsageError(msg)
    return table


def _columns(row: Row) -> tuple[str, ...]:
    # the curves first, then what they pooled, part by part
    first = [f"{phase}_{curve.name}" for curve in _curves_of(row) for phase in _PHASES]
    names = [key.removeprefix("train_") for key in row if key.startswith("train_")]
    columns = [f"{phase}_{name}" for phase in _PHASES for name in names]
    rest = [column for column in columns if column not in first]
    return ("epoch", "step", *first, *rest, "lr", "seconds", "peak_memory_mb")


def _curves_of(columns: Collection[str]) -> tuple[Curve, ...]:
    return tuple(curve for curve in CURVES if f"train_{curve.name}" in columns)


def row_line(row: Row, n_epochs: int) -> str:
    """Return the line on screen for an epoch."""
    parts = [f"epoch {row['epoch']}/{n_epochs}"]
    for phase, name in _PHASES.items():
        if f"{phase}_loss" in row:
            words = (_words(row, phase, curve) for curve in _curves_of(row))
            parts.append(f"{name} {' '.join(words)}")
    parts.append(f"lr {row['lr']:.2g}, {row['seconds']:.0f} s, {row['peak_memory_mb']:.0f} MB")
    return " | ".join(parts)


def _words(row: Row, phase: str, curve: Curve) -> str:
    column = f"{phase}_{curve.name}"
    words = f"{curve.title} {row[column]:.{curve.digits}f}"
    if not curve.tells_parts:
        return words
    parts = (f"{part.upper()} {row[f'{column}_{part}']:.{curve.digits}f}" for part in curve.parts)
    return f"{words} ({' '.join(parts)})"


def history_figure(table: pd.DataFrame) -> "Figure":
    """Draw every curve of a history over its epochs, both phases."""
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
