"""Test that an exported model predicts as its runs do, that damaged ones are refused, and its card."""

import hashlib
import json
import math
import pickle
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.config import StartConfig
from brats_seg.errors import EnvironmentalError, ResumeError, UsageError
from brats_seg.evaluation.metrics import region_counts
from brats_seg.evaluation.scores import summarise_counts
from brats_seg.files import alone_at
from brats_seg.inference.export import CrossValidationScores, export_model
from brats_seg.inference.model import load_model
from brats_seg.runtime.weights import SHIPPED, FittedPrediction, read_trained
from brats_seg.training.losses import RunningSums
from brats_seg.training.state import Progress
from brats_seg.voxels.regions import Decoding
from tests.builders import limited_files
from tests.faults.test_hostile_inputs import UNREADABLE
from tests.inference_builders import CONFIG, CPU, write_run

# rows: true positive, false positive, false negative, true negative; columns: WT, TC, ET
PERFECT = [[4, 4, 0], [0, 0, 0], [0, 0, 0], [12, 12, 16]]
HALF = [[2, 2, 2], [2, 2, 2], [2, 2, 2], [10, 10, 10]]
DECODING = Decoding(thresholds=(0.4, 0.5, 0.6))


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    fitted = FittedPrediction(decoding=DECODING)
    runs = [write_run(folder / f"run{n}", seed=n, fitted=fitted) for n in range(2)]
    export_model(runs, folder / "model")
    return folder


@pytest.fixture
def exported(exported_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported_once, tmp_path, dirs_exist_ok=True) / "model"


def test_an_exported_model_predicts_as_its_runs(exported: Path, tmp_path: Path) -> None:
    again = export_model([exported], tmp_path / "again").fingerprint
    model = load_model([exported], CPU)
    original = load_model([tmp_path / "run0", tmp_path / "run1"], CPU)
    assert model.fingerprint == original.fingerprint == again
    assert model.fingerprint == load_model([tmp_path / "again"], CPU).fingerprint
    assert model.identity == original.identity
    assert model.decoding == original.decoding == DECODING
    for one, other in zip(model.members, original.members, strict=True):
        assert (one.name, one.window, one.multiple) == (other.name, other.window, other.multiple)
        for name, value in one.network.state_dict().items():
            assert torch.equal(value, other.network.state_dict()[name])


def test_it_names_no_folder_of_the_user(tmp_path: Path) -> None:
    start = tmp_path / "of somebody"
    config = CONFIG.model_copy(update={"start": StartConfig(path=str(start))})
    export_model([write_run(tmp_path / "run", config=config)], tmp_path / "model")
    assert start.name in str(read_trained(tmp_path / "run")[0].card)
    written = [path for path in (tmp_path / "model").iterdir() if path.suffix != ".safetensors"]
    assert not [path for path in written if start.name in path.read_text()]
    assert "/" not in json.dumps(json.loads((SHIPPED / "model.json").read_text())["members"])


def test_it_holds_weights_and_no_pickle(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description = json.loads((exported / "model.json").read_text())
    names = ["README.md", "member0.safetensors", "member1.safetensors", "model.json"]
    assert sorted(path.name for path in exported.iterdir()) == names
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1
    assert description["labels"]["brats2017"]["meanings"] == {"1": "NCR/NET", "2": "ED", "4": "ET"}
    card = card_of(exported)
    assert "Research use only." in card
    assert description["fingerprint"] in card
    assert "| ET | enhancing tumour | 0.6 | 0 |" in card
    for library in (torch, pickle):
        monkeypatch.setattr(library, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    assert len(read_trained(exported)) == 2
    # the test of the test
    with pytest.raises(ResumeError, match="not callable"):
        read_trained(exported.parent / "run0")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0.6", "0.7", r"model\.json is not what was exported: it has another fingerprint"),
        ('"members"', '"member"', r"model\.json cannot be read as a model"),
        ("{", "[", r"model\.json cannot be read as a model"),
        ("{", "[" * 100_000, r"model\.json cannot be read as a model"),
        ('"format_version": 2', '"format_version": 3', "found format version 3; expected 2"),
        ('"format_version": 2', f'"format_version": {"9" * 5000}', "cannot be read as a model"),
        ("member0.s", "member9.s", r"member9\.safetensors is damaged.*No such"),
        # a file outside of the folder is not read
        ("member0.safetensors", "../run0/best.pt", r"model/best\.pt is damaged"),
    ],
)
def test_a_changed_description_is_refused(exported: Path, old: str, new: str, message: str) -> None:
    path = exported / "model.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UsageError, match=message):
        load_model([exported], CPU)


@contextmanager
def changed(model: Path) -> Iterator[dict[str, Any]]:
    """Let a test change the description of a model."""
    description = json.loads((model / "model.json").read_text())
    yield description
    (model / "model.json").write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("weights", *pair) for pair in (("n" * 300, "too long"), ("a\0b", "null"), ("", "."))),
        ("weights", "/etc/passwd", "check sum|damaged"),
        ("sha256", "0" * 64, "check sum"),
        *(("spacing_mm", [mm] * 3, "spacing_mm") for mm in (-1, 1e9, math.nan)),
        ("patch", [10**9] * 3, "equal to 1024"),
    ],
)
def test_absurd_values_are_refused(exported: Path, name: str, value: object, message: str) -> None:
    """Absurd values of other parts of the card are tested in `test_weights.py`."""
    with changed(exported) as description:
        member = description["members"][0]
        (member if name in member else member["card"]["identity"])[name] = value
    with pytest.raises(UsageError, match=message):
        load_model([exported], CPU)


@pytest.mark.parametrize(("n", "message"), [(4000, "at most 64 items"), (0, "at least 1 item")])
def test_too_many_networks_and_none_are_refused(exported: Path, n: int, message: str) -> None:
    with changed(exported) as description:
        description["members"] *= n
    with pytest.raises(UsageError, match=rf"{message}.* Copy or export the model again"):
        load_model([exported], CPU)


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("name", ["model.json", "member0.safetensors"])
def test_what_is_no_file_is_refused(exported: Path, name: str, what: str) -> None:
    (exported / name).unlink()
    UNREADABLE[what](exported / name)
    with pytest.raises(UsageError, match=name.partition(".")[0]):
        load_model([exported], CPU)


HEADERS = {
    "of 2^60 bytes": struct.pack("<Q", 1 << 60) + b"{}",
    "of brackets": struct.pack("<Q", 50_000) + b"[" * 50_000,
    "that is a pickle": b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.",
}


@pytest.mark.parametrize("what", HEADERS)
def test_weights_with_a_hostile_header_and_its_check_sum_are_refused(exported, what):
    (exported / "member0.safetensors").write_bytes(HEADERS[what])
    with changed(exported) as description:
        description["members"][0]["sha256"] = hashlib.sha256(HEADERS[what]).hexdigest()
    with pytest.raises(UsageError, match=r"member0\.safetensors"):
        load_model([exported], CPU)


def test_every_flipped_bit_of_the_description_is_found_or_changes_nothing(exported: Path) -> None:
    path = exported / "model.json"
    content = path.read_bytes()
    fingerprint = load_model([exported], CPU).fingerprint
    n_refused = 0
    for position in range(0, len(content), 97):
        flipped = bytearray(content)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        try:
            assert load_model([exported], CPU).fingerprint == fingerprint
        except UsageError:
            n_refused += 1
    assert n_refused > 10


def test_a_new_setting_keeps_the_fingerprint_of_a_model(exported: Path) -> None:
    """Such a file lacks the setting: the default was in force when it was written."""
    with changed(exported) as description:
        for member in description["members"]:
            # as if this version had added these
            del member["card"]["fitted"]["decoding"]["smallest_mm3"]
            del member["card"]["config"]["model"]["name"]
    assert len(load_model([exported], CPU).members) == 2


def test_a_folder_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brats_seg.files._GRACE_S", 0.1)
    run = write_run(tmp_path / "run")
    for name in ("README.md", "notes.txt", "model.json"):
        path = tmp_path / name.lower().partition(".")[0] / name
        path.parent.mkdir()
        path.write_text("mine")
        with pytest.raises(UsageError, match="exists already"):
            export_model([run], path.parent)
        with pytest.raises(EnvironmentalError, match="cannot be written"):
            export_model([run], path / "model")
        assert path.read_text() == "mine"
    another = pytest.raises(UsageError, match=r"another process is writing .*other")
    with alone_at(tmp_path / "other"), another:
        export_model([run], tmp_path / "other")
    for name in (".mine-new-other", ".123-00ff00-new-other"):
        (tmp_path / name).mkdir()
    export_model([run], tmp_path / "other")
    assert {path.name for path in tmp_path.glob(".*")} == {".mine-new-other"}


def test_an_export_to_a_full_disk_leaves_nothing(exported: Path, tmp_path: Path) -> None:
    runs, model = [tmp_path / "run0", tmp_path / "run1"], tmp_path / "new"
    refused = pytest.raises(EnvironmentalError, match=r"member0.safetensors could not .*ulimit -f")
    with limited_files(2000), refused:
        export_model(runs, model)
    assert not model.exists()
    assert len(export_model(runs, model).networks) == 2


def write_validated(
    path: Path, train: Sequence[str] = ("c",), held_out: Sequence[str] = ("a", "b"), **entries: Any
) -> Path:
    """Write a run that was validated on its held-out cases: the first is perfect, the rest half right."""
    counts = dict(zip(held_out, [PERFECT, *[HALF] * (len(held_out) - 1)], strict=True))
    sums = RunningSums(n_patches=len(held_out), counts=counts)
    progress = Progress(sums=sums, history=[{"epoch": 7}])
    environment = {"torch": "2.0", "device": "cpu", "python": "3.12"}
    write_run(path, progress=progress, environment=environment, **entries)
    write_split(Split(train=tuple(train), validation=tuple(held_out)), path / SPLIT_NAME)
    return path


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


@pytest.fixture
def folds(tmp_path: Path) -> list[Path]:
    return [
        write_validated(tmp_path / "fold0", train=("c", "d"), held_out=("a", "b"), seed=0),
        write_validated(tmp_path / "fold1", train=("a", "b"), held_out=("c", "d"), seed=1),
    ]


def exported_card(runs: Sequence[Path], output: Path, **options: Any) -> str:
    export_model(runs, output, **{"case_ids": True, **options})
    return card_of(output)


START = {"path": "/home/me/parent", "fingerprint": "f00", "learnt_from": ("c", "z"), "seen": ("c",)}
CARD = (
    "one network, unet, of ",
    "- licence: CC BY 4.0\\n\\n# Mine\n",
    "Windows: 12x12x12 voxels, overlap 0.5.\n",
    "| 0 | run | 2 | 3 | 7 | 8x8x8 | cases |",
    "- trained with torch 2.0, device cpu\n",
    "of parent, fingerprint f00, which had learnt from 1 of the cases held out: those are left out",
    "`model.json` names them, if all are of public releases",
    # WT of the two others: 1 and 0.5; ET is empty on both sides in the first
    "| WT | 0.750 [0.500, 1.000] | 2 | 0 |",
    "| ET | 0.750 [0.500, 1.000] | 2 | 1 |",
)

UNKNOWN = (
    "Not known: no validation of the networks on whole cases is recorded.",
    "The cases are not recorded.",
    "| 0 | run | not known | not known | not known | 8x8x8 | cases |",
    "- licence: not stated",
    "Less than 50 mm3 of enhancing tumour in all",
)


def test_the_card_has_the_facts_of_a_run(tmp_path: Path) -> None:
    run = write_validated(tmp_path / "run", ("d", "e"), ("a", "b", "c"), started_from=START)
    card = exported_card([run], tmp_path / "model", license_name="CC BY 4.0\n\n# Mine")
    assert [text for text in CARD if text not in card] == []
    assert [text for text in ("single networks", "/home/me", "\n# Mine") if text in card] == []


def test_held_out_cases_of_folds_are_one_summary(folds: list[Path], tmp_path: Path) -> None:
    sharing = [folds[0], write_validated(tmp_path / "run", seed=2)]
    card, of_sharing = exported_card(folds, tmp_path / "a"), exported_card(sharing, tmp_path / "b")
    cases = zip("abcd", [PERFECT, HALF] * 2, strict=True)
    counts = [region_counts(name, rows) for name, rows in cases]
    (wt, _, _) = summarise_counts(counts, np.random.default_rng(0))
    assert f"| WT | {wt.spread('dice').mean_text(4)} | 4 | 0 |" in card
    assert "scores of single networks, not of their mean" in card
    assert of_sharing.count("| WT | 0.750 [0.500, 1.000] | 2 | 0 |") == 2
    assert "Network 1:" in of_sharing


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    fitted = FittedPrediction(decoding=Decoding(smallest_et_mm3=50, surest_et=0.99999))
    run = write_run(tmp_path / "run", fitted=fitted)
    card = exported_card([run], tmp_path / "model")
    decoded = ("Less than 50 mm3 of enhancing", "no voxel of the scan has a probability of 0.99999")
    assert [text for text in (*UNKNOWN, *decoded) if text not in card] == []
    (member,) = json.loads((tmp_path / "model" / "model.json").read_text())["members"]
    assert member["card"]["fitted"] == fitted.model_dump(mode="json")


@pytest.mark.parametrize(
    ("training", "held_out", "is_named"),
    [
        ("Smith", ("Jones", "BraTS2021_00000"), False),
        ("Smith", ("Jones", "BraTS2021_00000"), True),
        ("Brats18_2013_2_1", ("BraTS2021_00000", "BRATS_001"), False),
    ],
)
def test_ids_of_cases_are_left_out_unless_asked_for(tmp_path, training, held_out, is_named):
    """Ids of public releases stay in the description, so that scores of these cases are marked."""
    run = write_validated(tmp_path / "run", train=(training,), held_out=held_out)
    export_model([run], tmp_path / "model", case_ids=is_named, license_name="CC0")
    for path in (tmp_path / "model").glob("*.*"):
        content = path.read_bytes()
        has_ids = [name.encode() in content for name in (training, *held_out)]
        is_named_here = path.name == "model.json" and (is_named or training != "Smith")
        assert has_ids == [is_named_here, False, False], path
    card = card_of(tmp_path / "model")
    assert "| 0 | run | 1 | 2 |" in card
    assert "| WT | 0.750 [" in card


def test_cross_validation_replaces_validation_scores(folds: list[Path], tmp_path: Path) -> None:
    summaries = summarise_counts([region_counts("a", HALF)], np.random.default_rng(0))
    scores = CrossValidationScores(protocol="legacy", summaries=summaries)
    exported_card(folds, tmp_path / "model", replace=True)
    card = exported_card(folds, tmp_path / "model", replace=True, scores=scores)
    assert "Cross-validation, scored by the protocol legacy" in card
    assert "| WT | 0.500 | 1 | 0 |" in card
    assert "during training" not in card
