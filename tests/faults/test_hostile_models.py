"""Models and checkpoints that are broken, or made to break the program, are refused, and run no code."""

import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.campaign import NewCampaign
from tests.faults.hostile import OWNED, Break, attack, harmless, make_device, make_fifo, make_loop
from tests.faults.programs import run
from tests.faults.stages import COMMANDS, TRAIN, Stages


def _change(content: Any, name: str, value: Any) -> None:
    """Change the entry of a dotted name."""
    *above, last = name.split(".")
    reduce(lambda entry, part: entry.setdefault(part, {}), above, content)[last] = value


def _network(name: str, value: Any) -> Break:
    """Return what changes an entry of the first network in `model.json`."""

    def change(model: Path) -> None:
        path = model / "model.json"
        content = json.loads(path.read_text())
        _change(content["members"][0], name, value)
        path.write_text(json.dumps(content))

    return change


def _description(text: str) -> Break:
    return lambda model: (model / "model.json").write_text(text)


def _many_networks(model: Path) -> None:
    path = model / "model.json"
    content = json.loads(path.read_text())
    content["members"] *= 10_000
    path.write_text(json.dumps(content))


def _weights(content: bytes) -> Break:
    return lambda model: (model / "member0.safetensors").write_bytes(content)


def _replaced(make: Break, name: str = ".") -> Break:
    """Return what replaces a file, or one in the folder of the model."""

    def change(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return change


HUGE = 10**9
NAN = float("nan")
MODELS: Mapping[str, Break] = {
    "a threshold of NaN": _network("card.fitted.decoding.thresholds", [NAN] * 3),
    "an infinite volume": _network("card.fitted.decoding.smallest_et_mm3", float("inf")),
    "a spacing of 10^-9": _network("card.identity.spacing_mm", [1e-9] * 3),
    "a patch of 10^9": _network("card.identity.patch", [HUGE] * 3),
    "no modalities": _network("card.identity.modalities", []),
    "no convention": _network("card.identity.conventions", []),
    "channels of 10^9": _network("card.config.model.widths", [HUGE, HUGE]),
    "a function of the system as network": _network(
        "card.config.model", {"name": "os.system", "arguments": {"command": f"touch {OWNED}"}}
    ),
    "weights elsewhere": _network("weights", "../../runs/fold0/best.pt"),
    "weights of an absolute name": _network("weights", "/etc/passwd"),
    "10,000 networks": _many_networks,
    "no JSON": _description("this is not JSON"),
    "empty": _description(""),
    "100,000 braces": _description('{"a":' * 100_000),
    "a list": _description("[1, 2]"),
    "a version of NaN": _description('{"format_version": NaN, "members": 7}'),
    "empty weights": _weights(b""),
    "weights with a header of 2^60 bytes": _weights(struct.pack("<Q", 1 << 60) + b"{}"),
    "weights of brackets": _weights(struct.pack("<Q", 50_000) + b"[" * 50_000),
    "weights that are a pickle": _weights(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR."),
    "weights that are a FIFO": _replaced(make_fifo, "member0.safetensors"),
    "weights that are a folder": _replaced(Path.mkdir, "member0.safetensors"),
    "weights that are a link to themselves": _replaced(make_loop, "member0.safetensors"),
    "a description that is a FIFO": _replaced(make_fifo, "model.json"),
    "a description that is a folder": _replaced(Path.mkdir, "model.json"),
}
"""Further values of single entries are in `test_export.py`."""


@pytest.fixture
def exported(stages: Stages, place: Path) -> Path:
    """A folder with scans and an exported model."""
    folder = stages.start("trained", place / "given")
    assert run("export runs/fold0 -o model", folder).code == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_no_exported_model_breaks_predict(
    part: int, exported: Path, place: Path, campaign: NewCampaign
) -> None:
    with campaign("hostile models: named error, no code run") as tries:
        for number, (what, change) in enumerate(MODELS.items()):
            if number % 2 != part:
                continue
            folder = place / f"model{number}"
            shutil.copytree(exported, folder)
            change(folder / "model")
            ended = attack("predict scans -o out --model model --set preview=false", folder)
            tries.note(what, *harmless(ended, folder, 1, 2, 3))


class Owned:
    """A pickle that writes a file when it is opened."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (Path(OWNED),)


def _saved(name: str, value: Any) -> Break:
    """Return what changes an entry of a checkpoint."""

    def change(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        _change(content, name, value)
        torch.save(content, path)

    return change


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _flipped(path: Path) -> None:
    """Flip a bit in the middle of the largest entry, not in the padding between entries."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda one: one.file_size)
    content[content.index(b"PK", entry.header_offset + 4) - entry.file_size // 2] ^= 16
    path.write_bytes(content)


def _nan_weights(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    weights = content["model"].items()
    content["model"] = {name: torch.full_like(value, NAN) for name, value in weights}
    torch.save(content, path)


CHECKPOINTS: Mapping[str, Break] = {
    "a pickle that runs code": lambda path: torch.save(
        {"schema_version": 3, "model": Owned()}, path
    ),
    "an old pickle that runs code": lambda path: torch.save(
        Owned(), path, _use_new_zipfile_serialization=False
    ),
    "empty": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "cut off": _cut,
    "with a flipped bit": _flipped,
    "a folder": _replaced(Path.mkdir),
    "a FIFO": _replaced(make_fifo),
    "a device": _replaced(make_device),
    "a link to itself": _replaced(make_loop),
    "a list": lambda path: torch.save([1, 2], path),
    "without entries": lambda path: torch.save({"schema_version": 3}, path),
    "without a model": _saved("model", {}),
    "with weights of another shape": _saved("model", {"weight": torch.zeros(3)}),
    "with a model that is a number": _saved("model", 7),
    "with an identity that is a number": _saved("card.identity", 7),
    "with unknown settings": _saved("card.config", {"a": {"b": 1}}),
    "with 10^9 channels": _saved("card.config.model.widths", [HUGE, HUGE]),
    "with a network to import": _saved("card.config.model.name", "antigravity.x"),
    "with a spacing of NaN": _saved("card.identity.spacing_mm", (NAN,) * 3),
    "with NaN as weights": _nan_weights,
    "with a position that is a text": _saved("progress.epoch", "x"),
    "with a position beyond the end": _saved(
        "progress", {"epoch": -3, "n_batches": 10**9, "n_steps": 0}
    ),
    "with an optimizer that is a list": _saved("optimizer", [1]),
    "with sums that are a text": _saved("progress.sums", "x"),
    "with a history of texts": _saved("progress.history", ("x",)),
}


USES: Mapping[str, tuple[str, str]] = {
    "predict": ("best.pt", "predict scans -o out --model runs/fold0 --set preview=false"),
    "train": ("last.pt", f"{TRAIN} --fold 0"),
    "tune": ("best.pt", COMMANDS["tune"].words),
    "certify": ("last.pt", COMMANDS["certify"].words),
}
HARMLESS = {
    # a link to itself counts as no file: the run begins anew, and one that has finished computes
    # nothing with its weights
    "train": {"a link to itself", "with NaN as weights"},
    # reads best.pt where last.pt is missing, and of last.pt the averaged weights
    "certify": {
        "a link to itself",
        "without a model",
        "with weights of another shape",
        "with NaN as weights",
    },
}
"""Changes of a checkpoint that a command need not refuse."""
USED_BY_TRAINING_ALONE = {
    "with a position that is a text",
    "with a position beyond the end",
    "with an optimizer that is a list",
    "with sums that are a text",
    "with a history of texts",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", USES)
def test_no_checkpoint_breaks_a_command(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    file, words = USES[name]
    with campaign("hostile checkpoints: named error, no code run") as tries:
        for number, (what, change) in enumerate(CHECKPOINTS.items()):
            if what in USED_BY_TRAINING_ALONE and name != "train":
                continue
            folder = stages.start("trained", place / f"checkpoint{number}")
            change(folder / "runs" / "fold0" / file)
            ended = attack(words, folder)
            codes = (0, 2) if what in HARMLESS.get(name, ()) else (1, 2, 3)
            tries.note(f"{name}: {what}", *harmless(ended, folder, *codes))


@pytest.mark.parametrize("what", ["a pickle that runs code", "a FIFO"])
def test_such_a_checkpoint_is_refused(
    what: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    folder = stages.start("trained", place / "here")
    CHECKPOINTS[what](folder / "runs" / "fold0" / "best.pt")
    with campaign("hostile checkpoints: named error, no code run") as tries:
        tries.note(what, *harmless(attack(USES["predict"][1], folder), folder, 2))
