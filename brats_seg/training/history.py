"""Record the epochs of a run: `history.csv`, `history.png`, and the trackers of the settings.

runs/fold0/tensorboard   events of TensorBoard
runs/mlflow.db           database of MLflow for all runs of the folder
runs/fold0/wandb         offline runs of W&B, for `wandb sync`
runs/fold0/trackers.json ids under which MLflow and W&B know the run, with which it continues there

Nothing leaves the machine unless MLFLOW_TRACKING_URI or WANDB_MODE=online names a server.
"""

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from brats_seg.config import Config, TrackingConfig, flat_settings
from brats_seg.errors import EnvironmentalError
from brats_seg.figures import charts as figures
from brats_seg.files import whole_file, write_json
from brats_seg.progress import left_text

log = logging.getLogger(__name__)

SendRow = Callable[[figures.Row], None]
IDS_NAME = "trackers.json"
PROJECT = "brats_seg"
"""Project of W&B, or experiment of MLflow, where the environment names none."""
DRAWN_EVERY_S = 10.0
"""Time between two pictures of the history, each of which takes up to 0.3 s."""


@contextmanager
def recorded(config: Config, run_path: Path, history: Sequence[figures.Row]) -> Iterator[SendRow]:
    """Open the trackers, and provide a function to call with the row of each epoch that ends.

    It writes the table of all epochs, and their picture unless one was drawn just now. A tracker that
    cannot be opened ends the command before training; one that fails later ends alone.
    """
    drawn_s, n_drawn = -math.inf, 0
    if history:
        # the process may have ended between the checkpoint and the history
        write_history(history, run_path)
    with _trackers(config, run_path) as send:

        def record(row: figures.Row) -> None:
            nonlocal drawn_s, n_drawn
            write_history(history, run_path)
            if time.monotonic() - drawn_s >= DRAWN_EVERY_S:
                write_picture(history, run_path)
                drawn_s, n_drawn = time.monotonic(), len(history)
            send(row)

        yield record
        if len(history) > n_drawn:
            write_picture(history, run_path)


def check_trackers(tracking: TrackingConfig) -> None:
    """Check that the trackers of the settings are installed."""
    for name in tracking.to:
        module, _ = _TRACKERS[name]
        if find_spec(module) is None:
            way = f"pip install 'brats_seg[{name}]', or leave {name} out of tracking.to"
            msg = f"tracking.to names {name}, and {module} is not installed: {way}"
            raise EnvironmentalError(msg)


def phase_columns(phase: str, scores: figures.Row) -> dict[str, float]:
    """Return the columns of `history.csv` for a phase, `train` or `val`."""
    return {f"{phase}_{name}": value for name, value in scores.items()}


def write_history(rows: Sequence[figures.Row], run_path: Path) -> None:
    """Write `history.csv` of a run.

    Validation columns are empty in an epoch without validation.
    """
    with whole_file(run_path / figures.HISTORY_NAME) as beside:
        _table(rows).to_csv(beside, index=False)


def write_picture(rows: Sequence[figures.Row], run_path: Path) -> None:
    """Draw the history of a run as `history.png`."""
    with whole_file(run_path / "history.png") as beside:
        figures.history_figure(_table(rows)).savefig(beside, dpi=80, format="png")


def epoch_line(row: figures.Row, n_epochs: int | None) -> str:
    """Return the line that is logged for an epoch."""
    parts = [f"epoch {row['epoch']}/{n_epochs}"]
    for phase, name in figures.PHASES.items():
        if f"{phase}_loss" in row:
            values = (_value_text(row, f"{phase}_{c.name}", c) for c in figures.curves_of(row))
            parts.append(f"{name} {' '.join(values)}")
    parts.append(f"lr {row['lr']:.2g}, {row['seconds']:.0f} s, {row['peak_memory_mb']:.0f} MB")
    return " | ".join(parts)


def outlook_text(
    best: float | None, watch: str, left_s: float | None, loss: float = math.nan
) -> str:
    """Return the state of a run in words, as far as it is known.

    Example:
        >>> outlook_text(0.7131, "val_dice", 12_000, loss=0.4217)
        'loss 0.422, best Dice 0.713, about 3 h 20 min left'
    """
    title = next(curve.title for curve in figures.CURVES if f"val_{curve.name}" == watch)
    parts = [f"loss {loss:.3f}"] if math.isfinite(loss) else []
    parts += [f"best {title} {best:.3f}"] if best is not None else []
    parts += [left_text(left_s)] if left_s is not None else []
    return ", ".join(parts)


def _table(rows: Sequence[figures.Row]) -> pd.DataFrame:
    return pd.DataFrame([dict(row) for row in rows]).reindex(columns=list(_columns(rows[0])))


def _columns(row: figures.Row) -> tuple[str, ...]:
    # the curves first, then their parts
    first = [
        f"{phase}_{curve.name}" for curve in figures.curves_of(row) for phase in figures.PHASES
    ]
    names = [key.removeprefix("train_") for key in row if key.startswith("train_")]
    columns = [f"{phase}_{name}" for phase in figures.PHASES for name in names]
    rest = [column for column in columns if column not in first]
    patches = ("patch_loss",) if "patch_loss" in row else ()
    return ("epoch", "step", *first, *rest, *patches, "lr", "seconds", "peak_memory_mb")


def _value_text(row: figures.Row, column: str, curve: figures.Curve) -> str:
    text = f"{curve.title} {row[column]:.{curve.digits}f}"
    if not curve.shows_parts:
        return text
    parts = (f"{part.upper()} {row[f'{column}_{part}']:.{curve.digits}f}" for part in curve.parts)
    return f"{text} ({' '.join(parts)})"


@contextmanager
def _trackers(config: Config, run_path: Path) -> Iterator[SendRow]:
    """Open the trackers of the settings, and provide a function that sends them a row."""
    check_trackers(config.tracking)
    trackers = {name: _TRACKERS[name][1](config, run_path) for name in config.tracking.to}
    senders: dict[str, SendRow] = {}
    for name, tracker in trackers.items():
        try:
            senders[name] = next(tracker)
        # each has its own errors, and some raise bare ones
        except Exception as error:
            way = f"Check its folder or server, or leave {name} out of tracking.to"
            msg = f"{name} cannot be written: {type(error).__name__}: {error}. {way}"
            raise EnvironmentalError(msg) from error

    def try_to_send(name: str, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 - a tracker that fails must not end a training
            reason = f"{type(error).__name__}: {error}"
            what = "%s failed and gets no more values (%s); history.csv has them all"
            log.warning(what, name, reason)
            senders.pop(name, None)

    def send_row(row: figures.Row) -> None:
        for name, send in tuple(senders.items()):
            try_to_send(name, partial(send, row))

    try:
        yield send_row
    finally:
        # the last values are written here; the run itself is on the disk already
        for name, tracker in trackers.items():
            try_to_send(name, partial(next, tracker, None))


def _metrics(row: figures.Row) -> dict[str, float]:
    """Return the values of a row by names such as `train/loss` and `val/dice_et`."""
    return {
        key.replace("_", "/", 1) if key.startswith(("train_", "val_")) else key: float(value)
        for key, value in row.items()
        # the epoch is the step of the curves
        if key not in {"epoch", "step"}
    }


def _tensorboard(config: Config, run_path: Path) -> Generator[SendRow]:
    import tensorboardX

    folder = run_path / "tensorboard"
    # file names have the time in seconds: a session that begins in the same second writes beside
    suffix = f".{len(list(folder.glob('*')))}"
    writer = tensorboardX.SummaryWriter(logdir=str(folder), filename_suffix=suffix)
    writer.add_text("settings", f"```\n{config.to_yaml()}\n```")

    def send(row: figures.Row) -> None:
        for name, value in _metrics(row).items():
            writer.add_scalar(name, value, int(row["epoch"]))
        writer.flush()

    yield send
    writer.close()


def _mlflow(config: Config, run_path: Path) -> Generator[SendRow]:
    import mlflow

    database = f"sqlite:///{run_path.absolute().parent / 'mlflow.db'}"
    client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or database)

    def new_run() -> str:
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if known is None else known.experiment_id
        run_id = str(client.create_run(experiment, run_name=run_path.name).info.run_id)
        for key, value in flat_settings(config).items():
            client.log_param(run_id, key, value)
        return run_id

    run_id = _run_id(run_path, "mlflow", new_run)
    client.update_run(run_id, status="RUNNING")

    def send(row: figures.Row) -> None:
        for name, value in _metrics(row).items():
            client.log_metric(run_id, name, value, step=int(row["epoch"]))

    yield send
    client.set_terminated(run_id)


def _wandb(config: Config, run_path: Path) -> Generator[SendRow]:
    import wandb

    # W&B writes to a temporary folder without a word if this one cannot be written
    (run_path / "wandb").mkdir(exist_ok=True)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run_path.name,
        id=_run_id(run_path, "wandb", lambda: secrets.token_hex(4)),
        resume="allow",
        dir=str(run_path),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=flat_settings(config),
        settings=wandb.Settings(silent=True, console="off"),
    )
    yield lambda row: run.log(_metrics(row), step=int(row["epoch"]))
    run.finish()


_TRACKERS: dict[str, tuple[str, Callable[[Config, Path], Generator[SendRow]]]] = {
    "tensorboard": ("tensorboardX", _tensorboard),
    "mlflow": ("mlflow", _mlflow),
    "wandb": ("wandb", _wandb),
}
"""The module that each tracker needs, and what opens, fills and closes it."""


def _run_id(run_path: Path, name: str, new_id: Callable[[], str]) -> str:
    """Return the id under which a tracker knows the run; the first time it is made and kept."""
    path = run_path / IDS_NAME
    try:
        ids = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        ids = {}
    if name not in ids:
        ids[name] = new_id()
        write_json(path, ids)
    return str(ids[name])
