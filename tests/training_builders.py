"""Runs for tests: trained in this process, and stopped where a test wants it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from brats_seg.config import Config, load_config
from brats_seg.data.fold import FoldData
from brats_seg.progress import Item, untracked
from brats_seg.runtime.weights import read_checkpoint
from brats_seg.training import history
from brats_seg.training.timing import StopRequest
from brats_seg.training.trainer import Outcome, Trainer

TINY = ["folds.n_folds=3", "patch.size=8,8,8", "model.widths=4,8", "validation.overlap=0"]
TINY += ["training.precision=fp32", "training.n_workers=0"]
"""Settings of a run of seconds on the six cases of the fixture `data`."""


def tiny_settings(*changes: str) -> Config:
    return load_config(assignments=[*TINY, *changes])


class StopAtCheck(StopRequest):
    """Asks to stop the n-th time it is asked; the trainer asks before each batch and case."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n_left = n

    @property
    def reason(self) -> str | None:
        self.n_left -= 1
        return "the test says so" if self.n_left < 0 else None


def weights(path: Path) -> dict[str, Tensor]:
    return read_checkpoint(path)["model"]


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check_same_runs(run: Path, expected: Path) -> None:
    """Check that two runs have the same checkpoints and history, to the last bit and except for times."""
    for name in ("last.pt", "best.pt"):
        entries = [read_checkpoint(path / name) for path in (run, expected)]
        for key in {"model", "optimizer", "schedule", "criterion"} & entries[1].keys():
            assert same(*(entry[key] for entry in entries)), f"{key} of {name}"
    histories = [pd.read_csv(path / "history.csv") for path in (run, expected)]
    timeless = [table.drop(columns=["seconds", "peak_memory_mb"]) for table in histories]
    pd.testing.assert_frame_equal(*timeless, check_exact=True)


def train(
    data: FoldData, run_path: Path, config: Config, stop: StopRequest | None = None, **given: object
) -> Outcome:
    """Train without `history.png`, which takes as long as all else."""
    trainer = Trainer(data=data, config=config, run_path=run_path, **given)  # type: ignore[arg-type]
    with patch.object(history, "write_picture"):
        return trainer.run(stop=stop, track=untracked)


class Recorder:
    def __init__(self) -> None:
        self.works: list[tuple[str, int]] = []

    def __call__(self, items: Iterable[Item], *, what: str, total: int) -> Iterator[Item]:
        self.works.append((what, 0))
        for n_items, item in enumerate(items, start=1):
            assert n_items <= total
            self.works[-1] = (what, n_items)
            yield item


def saved_bytes(network: nn.Module, image: Tensor) -> int:
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        network(image)
    return sum(n_bytes for pointer, n_bytes in kept.items() if pointer not in own)
