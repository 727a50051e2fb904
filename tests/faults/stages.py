"""Commands under test, the folders that they start from, and the results to compare.

Every command runs in a folder with `scans`: four labelled cases of 24x24x16 voxels, in two folds. The
network has a few hundred weights.
"""

import csv
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from brats_seg.files import locked
from tests.builders import write_case
from tests.faults.programs import Ended, n_moments, run

N_CASES = 4
_FOLDS = "--set folds.n_folds=2"
_FIXED = "--prepared prepared --precision fp32"
_NETWORK = (
    f"{_FOLDS} --set training.n_epochs=2 --set training.effective_batch=2 --set patch.size=16,16,16 "
    "--set model.widths=[4,8] --set training.n_workers=0 "
    "--set training.augment=full "
    # a checkpoint after every batch
    "--set training.checkpoint_minutes=1e-9"
)
_TIMES = frozenset({"seconds", "peak_memory_mb", "spent_s"})
"""Entries that differ from run to run."""
_TEMPORARY = re.compile(r"\.\d+-.+|\..+\.lock")
_GIVEN = ("scans/", "other/")


class Command(NamedTuple):
    words: str
    stage: str


TRAIN = f"train --data scans {_FIXED} {_NETWORK}"
_PREDICT = "predict scans -o out --model runs/fold0 --precision fp32"
_FEATURES = f"features scans -o features/features.csv --model runs/fold0 {_FIXED}"
COMMANDS: Mapping[str, Command] = {
    "index": Command("index scans -o cases.csv", "scans"),
    "prepare": Command(f"prepare scans --prepared prepared {_FOLDS}", "scans"),
    "train": Command(f"{TRAIN} --fold 0", "prepared"),
    "tune": Command(f"tune runs/fold0 runs/fold1 {_FIXED}", "trained"),
    "crossval": Command(f"crossval --data scans {_FIXED} {_NETWORK}", "scans"),
    "predict": Command(_PREDICT, "trained"),
    "predict, label maps alone": Command(f"{_PREDICT} --set preview=false", "trained"),
    "features": Command(_FEATURES, "trained"),
    "export": Command("export runs/fold0 runs/fold1 -o model", "trained"),
    "certify": Command("certify --run runs/fold0", "trained"),
    "evaluate": Command("evaluate scans out -o scores/scores.csv", "predicted"),
    "figure sample": Command("figure sample scans -o sample.png", "scans"),
    "figure history": Command("figure history runs/fold0 -o curves.png", "trained"),
    "phantom": Command("phantom other --number 2", "scans"),
}
_STEPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "prepared": ("scans", (COMMANDS["prepare"].words,)),
    "trained": ("prepared", (f"{TRAIN} --fold 0", f"{TRAIN} --fold 1")),
    "predicted": ("trained", (COMMANDS["predict"].words,)),
}
"""Stage before each, and the commands that lead from there."""


class Undisturbed(NamedTuple):
    n_changes: int
    seconds: float
    results: Mapping[str, str]

    def moment(self, share: float) -> int:
        return 1 + int(share * self.n_changes)


class Stages:
    """Folders that commands start from, each made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "stages"
        self._undisturbed: dict[Command, Undisturbed] = {}

    def start(self, stage: str, folder: Path) -> Path:
        shutil.copytree(self._at(stage), folder)
        return folder

    def undisturbed(self, command: Command, folder: Path) -> Undisturbed:
        if command not in self._undisturbed:
            self.start(command.stage, folder)
            started_s = time.monotonic()
            n_changes = n_moments(command.words, folder)
            seconds = time.monotonic() - started_s
            self._undisturbed[command] = Undisturbed(n_changes, seconds, results(folder))
        return self._undisturbed[command]

    def _at(self, stage: str) -> Path:
        path = self._folder / stage
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / f"{stage}.lock"):
            if not path.exists():
                self._make(stage, path.with_name(f"{stage}-beside")).rename(path)
        return path

    def _make(self, stage: str, path: Path) -> Path:
        if stage == "scans":
            for number in range(N_CASES):
                write_case(path / "scans", f"BraTS2021_{number:05d}", seed=number)
            return path
        before, steps = _STEPS[stage]
        shutil.copytree(self._at(before), path)
        for words in steps:
            ended = run(words, path)
            if ended.code:
                raise RuntimeError(f"{words}: {ended.shown}")
        return path


def results(folder: Path) -> dict[str, str]:
    """Return the content of every file that commands have written, without times.

    Locks and the temporary files of killed processes are no results, and the folder itself, which
    records name, is written as a dot.
    """
    contents = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_temporary = any(map(_TEMPORARY.match, name.parts))
        if path.is_file() and not str(name).startswith(_GIVEN) and not is_temporary:
            read = _READERS.get(path.suffix, Path.read_bytes)
            contents[str(name)] = repr(_plain(read(path))).replace(str(folder), ".")
    return contents


def differences(found: Mapping[str, object], expected: Mapping[str, object]) -> str:
    names = sorted(found.keys() | expected.keys())
    differing = [
        f"{name} ({'missing' if name not in found else 'extra' if name not in expected else 'other content'})"
        for name in names
        if found.get(name) != expected.get(name)
    ]
    return f"other results: {', '.join(differing)}" if differing else ""


def lost(found: Mapping[str, object], earlier: Mapping[str, object]) -> str:
    return differences({name: found[name] for name in earlier if name in found}, earlier)


def ending(ended: Ended, folder: Path, expected: Mapping[str, object]) -> tuple[str, ...]:
    return ended.expect(0), differences(results(folder), expected)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items() if key not in _TIMES}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _records(path: Path) -> Any:
    """Return the last record of each case; a line that was cut off counts as none."""
    records = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[record["case_id"]] = record
    return sorted(records.items())


def _object(path: Path) -> Any:
    """Return a JSON object; a file that was cut off as it is."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return path.read_bytes()


def _arrays(path: Path) -> Any:
    with np.load(path) as stored:
        return {name: (stored[name].shape, stored[name].tobytes()) for name in stored.files}


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".pt": lambda path: torch.load(path, weights_only=True),
    ".csv": lambda path: list(csv.DictReader(path.read_text().splitlines())),
    ".jsonl": _records,
    ".json": _object,
    ".npz": _arrays,
}
