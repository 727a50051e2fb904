"""Models and checkpoints that are broken, or made to break the program, are refused, and run no code."""

import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.campaign import NewCampaign
from tests.faults.hostile import (
    OWNED,
    Break,
    attack,
    harmless,
    make_device,
    make_fifo,
    make_loop,
)
from tests.faults.programs import run
from tests.faults.stages import COMMANDS, TRAIN, Stages


def _member(**changes: Any) -> Break:
    """Return what changes entries of the first network in `model.json`, by dotted name."""

    def change(model: Path) -> None:
        path = model / "model.json"
        content = json.loads(path.read_text())
        for name, value in changes.items():
            *above, last = name.split("__")
            entry = content["members"][0]
            for part in above:
                entry = entry.setdefault(part, {})
            entry[last] = value
        path.write_text(json.dumps(content))

    return change


def _description(text: str) -> Break:
    return lambda model: (model / "model.json").write_text(text)


def _many_members(model: Path) -> None:
    path = model / "model.json"
    content = json.loads(path.read_text())
    content["members"] *= 10_000
    path.write_text(json.dumps(content))


def _weights(content: bytes) -> Break:
    return lambda model: (model / "member0.safetensors").write_bytes(content)


def _other(name: str, make: Break) -> Break:
    """Return what replaces a file of the model."""

    def change(model: Path) -> None:
        (model / name).unlink()
        make(model / name)

    return change


HUGE = 10**9
MODELS: Mapping[str, Break] = {
    "a threshold of NaN": _member(card__fitted__decoding__thresholds=[float("nan")] * 3),
    "a negative threshold": _member(card__fitted__decoding__thresholds=[-1, 0.5, 0.5]),
    "a threshold of 2": _member(card__fitted__decoding__thresholds=[2, 0.5, 0.5]),
    "two thresholds": _member(card__fitted__decoding__thresholds=[0.5, 0.5]),
    "a negative volume": _member(card__fitted__decoding__smallest_mm3=[-1, 0, 0]),
    "an infinite volume": _member(card__fitted__decoding__smallest_et_mm3=float("inf")),
    "a spacing of 0": _member(card__identity__spacing_mm=[0, 0, 0]),
    "a spacing of NaN": _member(card__identity__spacing_mm=[float("nan")] * 3),
    "a spacing of 10^9": _member(card__identity__spacing_mm=[HUGE] * 3),
    "a spacing of 10^-9": _member(card__identity__spacing_mm=[1e-9] * 3),
    "a negative spacing": _member(card__identity__spacing_mm=[-1, 1, 1]),
    "a patch of 10^9": _member(card__identity__patch=[HUGE] * 3),
    "a patch of 0": _member(card__identity__patch=[0, 0, 0]),
    "another order of modalities": _member(card__identity__modalities=["t1n", "t1n", "t1n", "t1n"]),
    "no modalities": _member(card__identity__modalities=[]),
    "no regions": _member(card__identity__regions=[]),
    "another normalisation": _member(card__identity__normalisation="none"),
    "an unknown convention": _member(card__identity__conventions=["mine"]),
    "no convention": _member(card__identity__conventions=[]),
    "channels of 10^9": _member(card__config__model__widths=[HUGE, HUGE]),
    "no channels": _member(card__config__model__widths=[]),
    "a function of the system as network": _member(
        card__config__model__name="os.system",
        card__config__model__arguments={"command": f"touch {OWNED}"},
    ),
    "weights elsewhere": _member(weights="../../runs/fold0/best.pt"),
    "weights of an absolute name": _member(weights="/etc/passwd"),
    "weights of no name": _member(weights=""),
    "another check sum": _member(sha256="0" * 64),
    "10,000 members": _many_members,
    "no members": _description('{"format_version": 2, "members": []}'),
    "no JSON": _description("this is not JSON"),
    "empty": _description(""),
    "100,000 brackets": _description("[" * 100_000),
    "100,000 braces": _description('{"a":' * 100_000),
    "a list": _description("[1, 2]"),
    "a number of 5000 digits": _description('{"format_version": ' + "9" * 5000 + "}"),
    "a version of NaN": _description('{"format_version": NaN, "members": 7}'),
    "empty weights": _weights(b""),
    "weights with a header of 2^60 bytes": _weights(struct.pack("<Q", 1 << 60) + b"{}"),
    "weights of brackets": _weights(struct.pack("<Q", 50_000) + b"[" * 50_000),
    "weights that are a pickle": _weights(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR."),
    "weights that are a FIFO": _other("member0.safetensors", make_fifo),
    "weights that are a folder": _other("member0.safetensors", Path.mkdir),
    "weights that are a link to themselves": _other("member0.safetensors", make_loop),
    "a description that is a FIFO": _other("model.json", make_fifo),
    "a description that is a folder": _other("model.json", Path.mkdir),
}


@pytest.fixture
def exported(stages: Stages, place: Path) -> Path:
    """A folder with scans and an exported model."""
    folder = stages.start("trained", place / "given")
    assert run("export runs/fold0 -o model", folder).code == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_exported_model_breaks_predict(
    part: int, exported: Path, place: Path, campaign: NewCampaign
) -> None:

    with campaign("hostile models: named error, no code run") as tries:
        for number, (what, change) in enumerate(MODELS.items()):
            if number % 4 != part:
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


def _saved(**changes: Any) -> Break:
    """Return what changes entries of a checkpoint, by dotted name."""

    def change(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        for name, value in changes.items():
            *above, last = name.split("__")
            entry = content
            for part in above:
                entry = entry[part]
            entry[last] = value
        torch.save(content, path)

    return change


def _replaced(make: Break) -> Break:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

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
    "without a model": _saved(model={}),
    "with weights of another shape": _saved(model={"weight": torch.zeros(3)}),
    "with a model that is a number": _saved(model=7),
    "with an identity that is a number": _saved(card__identity=7),
    "with an unknown identity": _saved(card__identity={"a": 1}),
    "with settings that are a number": _saved(card__config=7),
    "with unknown settings": _saved(card__config={"a": {"b": 1}}),
    "with 10^9 channels": _saved(card__config__model__widths=[HUGE, HUGE]),
    "with a network to import": _saved(card__config__model__name="antigravity.x"),
    "with a spacing of NaN": _saved(card__identity__spacing_mm=(float("nan"),) * 3),
    "with NaN as weights": lambda path: _nan_weights(path),
    "with a position that is a text": _saved(progress__epoch="x"),
    "with a position beyond the end": _saved(
        progress={"epoch": -3, "n_batches": 10**9, "n_steps": 0}
    ),
    "with an optimizer that is a list": _saved(optimizer=[1]),
    "with sums that are a text": _saved(progress__sums="x"),
    "with a history of texts": _saved(progress__history=("x",)),
}


def _nan_weights(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["model"] = {
        name: torch.full_like(value, float("nan")) for name, value in content["model"].items()
    }
    torch.save(content, path)


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
