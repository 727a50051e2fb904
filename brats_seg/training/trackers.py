"""Send the epochs of a run to TensorBoard, MLflow or Weights & Biases, beside `history.csv`.

`tracked_run` opens the trackers of the settings and provides one function, which takes a row of the
history. Nothing leaves the machine unless a server is chosen by the variables of the environment of
MLflow (`MLFLOW_TRACKING_URI`) or W&B (`WANDB_MODE=online`).

runs/fold0/tensorboard   events of TensorBoard
runs/mlflow.db           database of MLflow for all runs of the folder
runs/fold0/wandb         offline runs of W&B, for `wandb sync`
runs/fold0/trackers.json ids under which MLflow and W&B know the run, with which it continues there

A tracker that cannot be opened ends the command before training; one that fails later ends alone.
"""

import json
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from brats_seg.config import Config, TrackingConfig
from brats_seg.config_text import flat_settings
from brats_seg.errors import EnvironmentalError
from brats_seg.figures.history import Row
from brats_seg.files import write_json

log = logging.getLogger(__name__)

IDS_NAME = "trackers.json"
LogRow = Callable[[Row], None]
_MODULES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}
"""Module that each tracker needs."""


def check_trackers(tracking: TrackingConfig) -> None:
    """Check that the trackers of the settings are installed.

    Raises:
        EnvironmentalError: One is not; the message has the command that installs it.
    """
    for name in tracking.to:
        if find_spec(_MODULES[name]) is None:
            msg = (
                f"tracking.to names {name}, and {_MODULES[name]} is not installed: "
                f"pip install 'brats_seg[{name}]', or leave {name} out of tracking.to"
            )
            raise EnvironmentalError(msg)


@contextmanager
def tracked_run(config: Config, run_path: Path) -> Iterator[LogRow]:
    """Open the trackers of the settings, and provide a function that sends them a row of the history.

    Args:
        config: Settings of the run; all are sent as its parameters.
        run_path: Folder of the run, which exists. A run that is resumed continues its curves.

    Raises:
        EnvironmentalError: A tracker is not installed, or cannot be opened or written.
    """
    check_trackers(config.tracking)
    with ExitStack() as stack:
        logs: dict[str, LogRow] = {}
        for name in config.tracking.to:
            opened = _OPENERS[name](config, run_path)
            logs[name] = stack.enter_context(_explained(name, opened))

        def log_row(row: Row) -> None:
            for name, send in tuple(logs.items()):
                if not _sent(name, send, row):
                    del logs[name]

        yield log_row


@contextmanager
def _explained(name: str, opened: Generator[LogRow]) -> Iterator[LogRow]:
    """Run the opener of a tracker to its `yield`, and to its end afterwards."""
    try:
        send = next(opened)
    # each has its own errors, and some raise bare ones
    except Exception as error:
        msg = (
            f"{name} cannot be written: {type(error).__name__}: {error}. Check its folder or server, "
            f"or leave {name} out of tracking.to"
        )
        raise EnvironmentalError(msg) from error
    try:
        yield send
    finally:
        # the last values are written here; the run itself is on the disk already
        _sent(name, lambda _: deque(opened).clear(), {})


def _sent(name: str, send: LogRow, row: Row) -> bool:
    """Send a row, and return whether that worked: a tracker that fails must not end a training."""
    try:
        send(row)
    except Exception as error:  # noqa: BLE001 - each tracker has errors of its own
        log.warning(
            "%s failed and gets no more values (%s: %s); history.csv has them all",
            name,
            type(error).__name__,
            error,
        )
        return False
    return True


def _metrics(row: Row) -> dict[str, float]:
    """Return the values of a row by names such as `train/loss` and `val/dice_et`."""
    parts = ((key.partition("_"), value) for key, value in row.items() if key not in _PLACES)
    return {
        f"{phase}/{name}" if phase in {"train", "val"} else f"{phase}{rest}{name}": float(value)
        for (phase, rest, name), value in parts
    }


_PLACES = ("epoch", "step")
"""Values of a row that say where it is; the epoch is the step of the curves."""


def _tensorboard(config: Config, run_path: Path) -> Generator[LogRow]:
    import tensorboardX

    folder = run_path / "tensorboard"
    # file names have the time in seconds: a session that begins in the same second writes beside
    suffix = f".{len(list(folder.glob('*')))}"
    writer = tensorboardX.SummaryWriter(logdir=str(folder), filename_suffix=suffix)
    writer.add_text("settings", f"```\n{config.to_yaml()}\n```")

    def send(row: Row) -> None:
        for name, value in _metrics(row).items():
            writer.add_scalar(name, value, int(row["epoch"]))
        writer.flush()

    yield send
    writer.close()


def _mlflow(config: Config, run_path: Path) -> Generator[LogRow]:
    import mlflow

    database = f"sqlite:///{run_path.absolute().parent / 'mlflow.db'}"
    client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or database)
    run_id = _known_id(run_path, "mlflow") or _new_mlflow_run(client, config, run_path)
    client.update_run(run_id, status="RUNNING")

    def send(row: Row) -> None:
        for name, value in _metrics(row).items():
            client.log_metric(run_id, name, value, step=int(row["epoch"]))

    yield send
    client.set_terminated(run_id)


def _new_mlflow_run(client: Any, config: Config, run_path: Path) -> str:
    project = config.tracking.project
    known = client.get_experiment_by_name(project)
    experiment = client.create_experiment(project) if known is None else known.experiment_id
    run_id = str(client.create_run(experiment, run_name=run_path.name).info.run_id)
    for key, value in flat_settings(config).items():
        client.log_param(run_id, key, value)
    _keep_id(run_path, "mlflow", run_id)
    return run_id


def _wandb(config: Config, run_path: Path) -> Generator[LogRow]:
    import wandb

    run_id = _known_id(run_path, "wandb")
    if not run_id:
        run_id = secrets.token_hex(4)
        _keep_id(run_path, "wandb", run_id)
    # W&B writes to a temporary folder without a word if this one cannot be written
    (run_path / "wandb").mkdir(exist_ok=True)
    run = wandb.init(
        project=config.tracking.project,
        name=run_path.name,
        id=run_id,
        resume="allow",
        dir=str(run_path),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=flat_settings(config),
        settings=wandb.Settings(silent=True, console="off"),
    )
    yield lambda row: run.log(_metrics(row), step=int(row["epoch"]))
    run.finish()


_OPENERS: dict[str, Callable[[Config, Path], Generator[LogRow]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}


def _known_id(run_path: Path, name: str) -> str:
    """Return the id under which a tracker knows the run; empty if it does not."""
    return str(_ids(run_path).get(name, ""))


def _keep_id(run_path: Path, name: str, run_id: str) -> None:
    write_json(run_path / IDS_NAME, {**_ids(run_path), name: run_id})


def _ids(run_path: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_path / IDS_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
