"""Record the epochs of a run: `history.csv`, `history.png`, and TensorBoard if the settings ask for it."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from brats_seg.config import Config, TrackingConfig
from brats_seg.errors import EnvironmentalError
from brats_seg.figures import charts
from brats_seg.files import whole_file
from brats_seg.progress import left_text

log = logging.getLogger(__name__)

SendRow = Callable[[charts.Row], None]
DRAWN_EVERY_S = 10.0
"""Time between two pictures of the history, each of which takes up to 0.3 s."""


@contextmanager
def recording(config: Config, run_path: Path, history: Sequence[charts.Row]) -> Iterator[SendRow]:
    """Provide a function to call with the row of each epoch that ends.

    It writes the table of all epochs, and their picture unless one was drawn just now. Events of
    TensorBoard that cannot be opened end the command before training; those that fail later do not.
    """
    drawn_s, n_drawn = -math.inf, 0
    if history:
        # the process may have ended between the checkpoint and the history
        write_history(history, run_path)
    with _tensorboard(config, run_path) as send:

        def record(row: charts.Row) -> None:
            nonlocal drawn_s, n_drawn
            write_history(history, run_path)
            if time.monotonic() - drawn_s >= DRAWN_EVERY_S:
                write_picture(history, run_path)
                drawn_s, n_drawn = time.monotonic(), len(history)
            send(row)

        yield record
        if len(history) > n_drawn:
            write_picture(history, run_path)


def check_tracking(tracking: TrackingConfig) -> None:
    """Check that the writer of TensorBoard is installed if the settings ask for it."""
    if tracking.to and find_spec("tensorboardX") is None:
        msg = "tracking.to names tensorboard, and tensorboardX is not installed: pip install 'brats_seg[tensorboard]', or --set tracking.to=[]"
        raise EnvironmentalError(msg)


def phase_columns(phase: str, scores: charts.Row) -> dict[str, float]:
    """Return the columns of `history.csv` for a phase, `train` or `val`."""
    return {f"{phase}_{name}": value for name, value in scores.items()}


def write_history(rows: Sequence[charts.Row], run_path: Path) -> None:
    """Write `history.csv` of a run.

    Validation columns are empty in an epoch without validation.
    """
    with whole_file(run_path / charts.HISTORY_NAME) as temporary:
        _table(rows).to_csv(temporary, index=False)


def write_picture(rows: Sequence[charts.Row], run_path: Path) -> None:
    """Draw the history of a run as `history.png`."""
    with whole_file(run_path / "history.png") as temporary:
        charts.history_figure(_table(rows)).savefig(temporary, dpi=80, format="png")


def epoch_line(row: charts.Row, n_epochs: int | None) -> str:
    """Return the line that is logged for an epoch."""
    parts = [f"epoch {row['epoch']}/{n_epochs}"]
    for phase, name in charts.PHASES.items():
        if f"{phase}_loss" in row:
            values = (_value_text(row, f"{phase}_{c.name}", c) for c in charts.select_curves(row))
            parts.append(f"{name} {' '.join(values)}")
    parts.append(f"lr {row['lr']:.2g}, {row['seconds']:.0f} s, {row['peak_memory_mb']:.0f} MB")
    return " | ".join(parts)


def outlook_text(
    best: float | None, watch: str, left_s: float | None, loss: float = math.nan
) -> str:
    """Return a text about the state of a run.

    Example:
        >>> outlook_text(0.7131, "val_dice", 12_000, loss=0.4217)
        'loss 0.422, best Dice 0.713, about 3 h 20 min left'
    """
    title = next(curve.title for curve in charts.CURVES if f"val_{curve.name}" == watch)
    parts = [f"loss {loss:.3f}"] if math.isfinite(loss) else []
    parts += [f"best {title} {best:.3f}"] if best is not None else []
    parts += [left_text(left_s)] if left_s is not None else []
    return ", ".join(parts)


def _table(rows: Sequence[charts.Row]) -> pd.DataFrame:
    # the first epoch may have no validation
    names = [key.removeprefix("train_") for key in rows[0] if key.startswith("train_")]
    scores = [f"{phase}_{name}" for name in names for phase in charts.PHASES]
    patches = ["patch_loss"] if "patch_loss" in rows[0] else []
    columns = ["epoch", "step", *scores, *patches, "lr", "seconds", "peak_memory_mb"]
    return pd.DataFrame([dict(row) for row in rows]).reindex(columns=columns)


def _value_text(row: charts.Row, column: str, curve: charts.Curve) -> str:
    text = f"{curve.title} {row[column]:.{curve.digits}f}"
    if not curve.shows_parts:
        return text
    parts = (f"{part.upper()} {row[f'{column}_{part}']:.{curve.digits}f}" for part in curve.parts)
    return f"{text} ({' '.join(parts)})"


@contextmanager
def _tensorboard(config: Config, run_path: Path) -> Iterator[SendRow]:
    """Provide a function that sends a row to TensorBoard, or nowhere if the settings do not ask for it."""
    check_tracking(config.tracking)
    if not config.tracking.to:
        yield lambda row: None
        return
    import tensorboardX

    folder, is_open = run_path / "tensorboard", True
    try:
        # file names have the time in seconds: a session that begins in the same second has another suffix
        suffix = f".{len(list(folder.glob('*')))}"
        writer = tensorboardX.SummaryWriter(logdir=str(folder), filename_suffix=suffix)
        writer.add_text("settings", f"```\n{config.to_yaml()}\n```")
    except Exception as error:  # of the operating system or of the library
        msg = f"{folder} cannot be written: {type(error).__name__}: {error}. Check the folder, or --set tracking.to=[]"
        raise EnvironmentalError(msg) from error

    def send(row: charts.Row) -> None:
        nonlocal is_open
        if not is_open:
            return
        try:
            for name, value in _metrics(row).items():
                writer.add_scalar(name, value, int(row["epoch"]))
            writer.flush()
        except Exception as error:  # noqa: BLE001 - TensorBoard must not end a training
            is_open = False
            reason = f"{type(error).__name__}: {error}"
            log.warning("TensorBoard gets no more values (%s); history.csv has them all", reason)

    try:
        yield send
    finally:
        with suppress(Exception):
            writer.close()


def _metrics(row: charts.Row) -> dict[str, float]:
    """Return the values of a row by names such as `train/loss` and `val/dice_et`."""
    return {
        key.replace("_", "/", 1) if key.startswith(("train_", "val_")) else key: float(value)
        for key, value in row.items()
        # the epoch is the step of the curves
        if key not in {"epoch", "step"}
    }
