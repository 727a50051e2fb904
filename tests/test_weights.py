"""Test the entries of a checkpoint that prediction reads."""

import os
import zipfile
from pathlib import Path

import pytest
import torch

from brats_seg.cases.folds import Split, write_split
from brats_seg.config import Config
from brats_seg.errors import ResumeError, UsageError
from brats_seg.runtime import weights
from tests.inference_builders import save_run, write_run

CARD = weights.ModelCard(
    identity=weights.ModelIdentity(conventions=("brats2017",), patch=(8, 8, 8), fingerprint="f"),
    config=Config(),
)
WEIGHTS = {"weight": torch.arange(300.0)}


def test_weights_identity_and_settings_are_read(tmp_path: Path) -> None:
    save_run(tmp_path / "best.pt", WEIGHTS, CARD)
    trained = weights.load_trained(tmp_path / "best.pt")
    assert torch.equal(trained.weights["weight"], torch.arange(300.0))
    assert trained.card == CARD


def test_a_card_is_stored_and_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    save_run(path, WEIGHTS, CARD)
    before = torch.load(path, weights_only=True)
    fitted = weights.FittedPrediction(decoding=weights.Decoding(thresholds=(0.4, 0.5, 0.6)))
    card = CARD.model_copy(update={"fitted": fitted, "notes": {"part": [1, {"value": 2.5}]}})
    weights.store_card(path, card)
    after = torch.load(path, weights_only=True)
    assert weights.load_trained(path).card == card
    assert torch.equal(after.pop("model")["weight"], before.pop("model")["weight"])
    del before["card"], after["card"]
    assert before == after
    assert [entry.name for entry in tmp_path.iterdir()] == ["best.pt"]


@pytest.mark.parametrize("place", [0.2, 0.5, 0.7, 0.9])
def test_a_flipped_byte_is_found(tmp_path: Path, place: float) -> None:
    """Torch itself loads such weights without an error."""
    path = tmp_path / "best.pt"
    save_run(path, WEIGHTS, CARD)
    content = bytearray(path.read_bytes())
    start = content.index(torch.arange(300.0).numpy().tobytes())
    content[start + int(1200 * place)] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path)["model"]["weight"], torch.arange(300.0))
    with pytest.raises(ResumeError, match=r"best\.pt is not a checkpoint .* is damaged"):
        weights.load_trained(path)


def changed(tmp_path: Path, **entries: object) -> Path:
    path = tmp_path / "best.pt"
    save_run(path, WEIGHTS, CARD)
    torch.save({**torch.load(path, weights_only=True), **entries}, path)
    return path


@pytest.mark.parametrize(
    ("train", "started_from", "case_id", "seen"),
    [
        (("A", "B"), None, "a", "yes"),
        (("A", "B"), None, "C", "no"),
        # another time point of a patient, and the same patient in another year
        (("BraTS-GLI-00005-000",), None, "BraTS-GLI-00005-001", "yes"),
        (("Brats17_TCIA_201_1",), None, "Brats18_TCIA01_201_1", "yes"),
        (("BraTS-GLI-00005-000",), None, "BraTS-GLI-00006-000", "no"),
        ((), None, "A", "unknown"),
        # weights that it started from
        (("A",), {"learnt_from": ("B",), "is_complete": True}, "B", "yes"),
        (("A",), {"learnt_from": ("B",), "is_complete": True}, "C", "no"),
        (("A",), {"learnt_from": (), "is_complete": False}, "A", "yes"),
        (("A",), {"learnt_from": (), "is_complete": False}, "C", "unknown"),
        ((), {"learnt_from": ("B",), "is_complete": True}, "B", "yes"),
    ],
)
def test_patients_of_the_training_are_known(tmp_path, train, started_from, case_id, seen):
    write_run(tmp_path, started_from=started_from, patients=("bert",))
    if train:
        write_split(Split(train=train, validation=("held",)), tmp_path / "split.csv")
    cases = weights.load_trained(tmp_path / "best.pt").cases
    assert (cases.seen(case_id), cases.seen("june", "Bert")) == (seen, "yes")


def nested(n_levels: int, n_values: int) -> list:
    """Return lists of references to one list: few bytes, and any number of values."""
    value: list = ["x"] * n_values
    for _ in range(n_levels):
        value = [value] * n_values
    return value


def in_card(entries: dict[str, object]) -> dict[str, object]:
    own = {name: value for name, value in entries.items() if name in weights.ModelCard.model_fields}
    rest = {name: value for name, value in entries.items() if name not in own}
    return {**rest, "card": {**CARD.model_dump(), **own}} if own else rest


NAN = float("nan")
IDENTITY = {"conventions": ("brats2017",), "patch": (8, 8, 8), "fingerprint": "f"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"fitted": {"decoding": {"thresholds": (NAN, 0.5, 0.5)}}}, r"thresholds\.0: .*finite"),
        ({"fitted": {"decoding": {"thresholds": (-0.1, 0.5, 0.5)}}}, r"thresholds\.0: .*greater"),
        ({"fitted": {"decoding": {"thresholds": (0.5, 0.5)}}}, "thresholds"),
        *(({"config": {"model": {"widths": n}}}, "widths") for n in ([], [10**9] * 2)),
        ({"fitted": {"decoding": {"thresholds": (0.5, 0.5, 1.0)}}}, r"thresholds\.2: .*less than"),
        ({"fitted": {"decoding": {"smallest_et_mm3": float("inf")}}}, "smallest_et_mm3: .*finite"),
        ({"identity": {**IDENTITY, "patch": (10**9, 8, 8)}}, r"patch\.0: .*equal to 1024"),
        ({"identity": {**IDENTITY, "spacing_mm": (0.0, 1.0, 1.0)}}, r"spacing_mm\.0: .*equal to"),
        ({"identity": {**IDENTITY, "spacing_mm": (NAN,) * 3}}, r"spacing_mm\.0: .*finite"),
        ({"identity": {**IDENTITY, "other": 1}}, "other: Unexpected"),
        ({"identity": 7}, "identity: "),
        # of another version
        ({"config": {"model": {"depth": 7}}}, r"config\.model\.depth: Extra"),
        ({"notes": {"part": {1}}}, "notes"),
        ({"model": [1]}, "found list in place of the weights"),
        ({"model": {"weight": "text"}}, "the weight 'weight' is no tensor"),
        ({"model": {"weight": torch.zeros(1).expand(10**6, 10**6)}}, "more values than the file"),
        ({"history": nested(9, 9)}, "its values are too many"),
        ({"history": nested(40, 1)}, "nested too deeply"),
    ],
)
def test_absurd_entries_refused(tmp_path: Path, entries: dict[str, object], message: str) -> None:
    path = changed(tmp_path, **in_card(entries))
    with pytest.raises(UsageError, match=rf"best\.pt .*{message}.* Copy the file again; .*--fresh"):
        weights.load_trained(path)


def test_a_compressed_checkpoint_is_not_unpacked(tmp_path: Path) -> None:
    path = changed(tmp_path, model={"weight": torch.zeros(100_000)})
    with zipfile.ZipFile(path) as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries.items():
            packed.writestr(name, content)
    with pytest.raises(ResumeError, match="its entries are compressed or overlap"):
        weights.load_trained(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_program_of_torchscript_is_named_as_that(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.trace(torch.nn.ReLU(), torch.zeros(1)).save(path)
    with pytest.raises(ResumeError, match="it is a program of TorchScript, not weights"):
        weights.read_plain(path, "")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_checkpoint(tmp_path: Path, make) -> None:
    make(tmp_path / "last.pt")
    with pytest.raises(ResumeError, match=r"can be read: it is a .*\. Copy .*--fresh"):
        weights.load_trained(tmp_path / "last.pt")


def test_a_name_that_is_too_long_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        weights.read_trained(tmp_path / ("n" * 300))
