"""Write `history.csv` of a run, a row for each epoch, and draw it as `history.png`."""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from brats_seg.figures.history import (
    CURVES,
    HISTORY_NAME,
    PHASES,
    Curve,
    Row,
    curves_of,
    history_figure,
)
from brats_seg.files import whole_file
from brats_seg.progress import left_text


def phase_columns(phase: str, scores: Row) -> dict[str, float]:
    """Return the columns of `history.csv` for a phase, `train` or `val`."""
    return {f"{phase}_{name}": value for name, value in scores.items()}


def write_history(rows: Sequence[Row], run_path: Path) -> None:
    """Write `history.csv` of a run.

    Validation columns are empty in an epoch without validation.
    """
    with whole_file(run_path / HISTORY_NAME) as beside:
        _table(rows).to_csv(beside, index=False)


def write_picture(rows: Sequence[Row], run_path: Path) -> None:
    """Draw the history of a run as `history.png`."""
    with whole_file(run_path / "history.png") as beside:
        history_figure(_table(rows)).savefig(beside, dpi=80, format="png")


def row_line(row: Row, n_epochs: int) -> str:
    """Return the line that is logged for an epoch."""
    parts = [f"epoch {row['epoch']}/{n_epochs}"]
    for phase, name in PHASES.items():
        if f"{phase}_loss" in row:
            words = (_words(row, phase, curve) for curve in curves_of(row))
            parts.append(f"{name} {' '.join(words)}")
    parts.append(f"lr {row['lr']:.2g}, {row['seconds']:.0f} s, {row['peak_memory_mb']:.0f} MB")
    return " | ".join(parts)


def outlook_text(
    best: float | None, watch: str, left_s: float | None, loss: float = math.nan
) -> str:
    """Return the state of a run in words, as far as it is known.

    Args:
        best: Best watched value so far.
        watch: Name of the watched value, `val_dice` or `val_loss`.
        left_s: Expected seconds to the end of the run.
        loss: Training loss of the epoch so far.

    Example:
        >>> outlook_text(0.7131, "val_dice", 12_000, loss=0.4217)
        'loss 0.422, best Dice 0.713, about 3 h 20 min left'
    """
    title = next(curve.title for curve in CURVES if f"val_{curve.name}" == watch)
    parts = [f"loss {loss:.3f}"] if math.isfinite(loss) else []
    parts += [f"best {title} {best:.3f}"] if best is not None else []
    parts += [left_text(left_s)] if left_s is not None else []
    return ", ".join(parts)


def _table(rows: Sequence[Row]) -> pd.DataFrame:
    return pd.DataFrame([dict(row) for row in rows]).reindex(columns=list(_columns(rows[0])))


def _columns(row: Row) -> tuple[str, ...]:
    # the curves first, then their parts
    first = [f"{phase}_{curve.name}" for curve in curves_of(row) for phase in PHASES]
    names = [key.removeprefix("train_") for key in row if key.startswith("train_")]
    columns = [f"{phase}_{name}" for phase in PHASES for name in names]
    rest = [column for column in columns if column not in first]
    return ("epoch", "step", *first, *rest, "lr", "seconds", "peak_memory_mb")


def _words(row: Row, phase: str, curve: Curve) -> str:
    column = f"{phase}_{curve.name}"
    words = f"{curve.title} {row[column]:.{curve.digits}f}"
    if not curve.shows_parts:
        return words
    parts = (f"{part.upper()} {row[f'{column}_{part}']:.{curve.digits}f}" for part in curve.parts)
    return f"{words} ({' '.join(parts)})"
