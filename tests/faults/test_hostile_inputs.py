"""Names, tables, settings and models that somebody made to break the program, or that are just broken.

Each is refused with a message, or is one row of `failures.csv`: no traceback, no hang, no code that is
run, no file outside the output folder, and the good cases beside a bad one are processed.
"""

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.faults.campaign import Campaign, NewCampaign
from tests.faults.programs import Ended, LimitedMemory, run
from tests.faults.stages import COMMANDS, TRAIN, Stages

MEMORY = LimitedMemory(2 << 30)
TIMEOUT_S = 40.0
OWNED = "owned"
"""File that hostile code would write."""

Break: TypeAlias = Callable[[Path], object]
"""Makes something hostile at a path."""


def attack(words: str, folder: Path) -> Ended:
    """Run a command that is given something hostile, with little memory and time."""
    return run(words, folder, MEMORY, timeout_s=TIMEOUT_S)


def harmless(ended: Ended, folder: Path, *codes: int) -> tuple[str, ...]:
    """Return the problems of an end that should have one of those codes."""
    outside = [path.name for path in folder.parent.iterdir() if path.name == OWNED]
    owned = "code was run" if (folder / OWNED).exists() or outside else ""
    silent = "" if ended.code == 0 or ended.shown.strip() else "it said nothing"
    return ended.expect(*codes), owned, silent


# --- names


def _socket(path: Path) -> None:
    # the path of a socket may have 107 characters
    here = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _into_itself(path: Path) -> None:
    path.symlink_to(path.parent.parent)


IN_PLACE_OF_A_SCAN: Mapping[str, Break] = {
    "a FIFO": os.mkfifo,
    "a device": _device,
    "a socket": _socket,
    "a link to itself": _loop,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a folder": Path.mkdir,
    "a link into a circle": _into_itself,
}
BESIDE_THE_SCANS: Mapping[str, Break] = {
    "a link to itself": lambda root: _loop(root / "loop"),
    "a link to itself named like a scan": lambda root: _loop(root / "BraTS2021_00009_t1.nii.gz"),
    "a FIFO named like a scan": lambda root: os.mkfifo(root / "BraTS2021_00009_t1.nii.gz"),
    "a FIFO named like a table": lambda root: os.mkfifo(root / "survival_info.csv"),
    "a device named like a table": lambda root: _device(root / "name_mapping.csv"),
    "a table that is a link to itself": lambda root: _loop(root / "survival_info.csv"),
    "a name that is not UTF-8": lambda root: _case_named(root, os.fsdecode(b"scan_\xff\xfe")),
    "a name of many characters": lambda root: _case_named(root, "a" * 240),
    "a name with a line break": lambda root: _case_named(root, "BraTS2021\n00009"),
    "a name that is a formula": lambda root: _case_named(root, "=cmd|' /C calc'!A0"),
    "a name with a terminal sequence": lambda root: _case_named(root, "scan\x1b]0;owned\x07"),
    "a name of markup": lambda root: _case_named(root, "[bold]x[/nothing]"),
    "a name with a hash sign": lambda root: _case_named(root, "scan#1"),
    "a name with a comma and quotes": lambda root: _case_named(root, 'a,"b'),
    "a hidden name": lambda root: _case_named(root, ".scan"),
    "a thousand empty folders": lambda root: [(root / f"e{n}").mkdir() for n in range(1000)],
    "folders below folders": lambda root: Path(root, *("d" * 50 for _ in range(40))).mkdir(
        parents=True
    ),
}
GOOD_IDS = ("BraTS2021_00000", "BraTS2021_00001")
SCANNING = {
    "index": "index scans -o cases.csv",
    "prepare": "prepare scans --prepared new --skip-bad --set folds.n_folds=2",
    "predict": "predict scans -o out --model runs/fold0 --precision fp32 --no-preview",
    "features": "features scans -o features/features.csv",
}


def _case_named(root: Path, name: str) -> None:
    folder = root / name
    folder.mkdir()
    for number, modality in enumerate(("t1", "t1ce", "t2", "flair", "seg")):
        source = root / GOOD_IDS[number % 2] / f"{GOOD_IDS[number % 2]}_{modality}.nii.gz"
        (folder / f"{name[:200]}_{modality}.nii.gz").write_bytes(source.read_bytes())


def good_cases_done(name: str, folder: Path) -> str:
    """Return which good case has no result of a command, or nothing."""
    table = {"index": "cases.csv", "features": "features/features.csv"}.get(name)
    if table is not None:
        text = (folder / table).read_text(errors="replace") if (folder / table).exists() else ""
        missing = [case_id for case_id in GOOD_IDS if case_id not in text]
    else:
        form = {"prepare": "new/{}/case.json", "predict": "out/{}.nii.gz"}[name]
        missing = [case_id for case_id in GOOD_IDS if not (folder / form.format(case_id)).exists()]
    return f"no result for {missing}" if missing else ""


def attack_scans(name: str, folder: Path, tries: Campaign, what: str) -> None:
    ended = attack(SCANNING[name], folder)
    tries.note(f"{name}: {what}", *harmless(ended, folder, 0, 1), good_cases_done(name, folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANNING)
def test_no_file_in_place_of_a_scan_stops_a_batch(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    with campaign("hostile files: one row of failures, no hang") as tries:
        for what, make in IN_PLACE_OF_A_SCAN.items():
            folder = stages.start("trained", place / what.replace(" ", "-"))
            scan = folder / "scans" / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz"
            scan.unlink()
            make(scan)
            attack_scans(name, folder, tries, what)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANNING)
def test_no_name_stops_a_batch(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    with campaign("hostile names: one row of failures, no hang") as tries:
        for number, (what, make) in enumerate(BESIDE_THE_SCANS.items()):
            folder = stages.start("trained", place / f"name{number}")
            make(folder / "scans")
            attack_scans(name, folder, tries, what)


@pytest.mark.parametrize("what", ["a FIFO", "a link to itself"])
def test_such_a_file_does_not_stop_the_index(
    what: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    folder = stages.start("scans", place / "here")
    scan = folder / "scans" / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz"
    scan.unlink()
    IN_PLACE_OF_A_SCAN[what](scan)
    with campaign("hostile files: one row of failures, no hang") as tries:
        attack_scans("index", folder, tries, what)


# --- tables

_HEADER = "case_id,t1n,t1c,t2w,t2f\n"
_ROW = ",".join(
    f"scans/BraTS2021_00000/BraTS2021_00000_{name}.nii.gz" for name in ("t1", "t1ce", "t2", "flair")
)
TABLES: Mapping[str, tuple[str, bytes]] = {
    "empty": ("in.csv", b""),
    "a header alone": ("in.csv", _HEADER.encode()),
    "binary": ("in.csv", bytes(range(256)) * 9),
    "zeros": ("in.csv", bytes(5000)),
    "a cell with NUL": ("in.csv", f"{_HEADER}a\0b,{_ROW}\n".encode()),
    "not UTF-8": ("in.csv", f"{_HEADER}".encode() + b"\xff\xfe," + _ROW.encode() + b"\n"),
    "an id of 300 characters": ("in.csv", f"{_HEADER}{'a' * 300},{_ROW}\n".encode()),
    "an id that is a path": ("in.csv", f"{_HEADER}../../{OWNED},{_ROW}\n".encode()),
    "an absolute id": ("in.csv", f"{_HEADER}/tmp/{OWNED},{_ROW}\n".encode()),
    "an id of dots": ("in.csv", f"{_HEADER}..,{_ROW}\n".encode()),
    "an id like a file of the program": ("in.csv", f"{_HEADER}manifest.jsonl,{_ROW}\n".encode()),
    "a path of 5000 characters": ("in.csv", f"{_HEADER}a,{'x/' * 2500},b,c,d\n".encode()),
    "a path with NUL": ("in.csv", f"{_HEADER}a,b\0c,b,c,d\n".encode()),
    "devices": ("in.csv", f"{_HEADER}a,/dev/zero,/dev/random,/dev/stdin,/dev/tty\n".encode()),
    "a huge cell": ("in.csv", f"{_HEADER}a,{'x' * 3_000_000},b,c,d\n".encode()),
    "quotes that do not end": ("in.csv", f'{_HEADER}"a,{_ROW}\n'.encode()),
    "a volume of no file": ("in.csv", f"{_HEADER}a,{'x#99999999999999999999,' * 4}\n".encode()),
    "JSON of 100,000 brackets": ("in.json", b"[" * 100_000),
    "JSON that is no list": ("in.json", b"7"),
    "JSON of numbers": ("in.json", b"[1, 2, 3]"),
    "JSON of lists": ("in.json", b'[{"case_id": ["a"], "t1n": {"b": 1}}]'),
    "JSON without cases": ("in.json", b"[]"),
    "JSON of a number with 5000 digits": ("in.json", b'[{"case_id": ' + b"9" * 5000 + b"}]"),
    "JSON with half a pair": ("in.json", b'[{"case_id": "\\ud800", "t1n": "a"}]'),
    "JSON that is not UTF-8": ("in.json", b'[{"case_id": "\xff"}]'),
}


@pytest.mark.slow
def test_no_table_of_paths_breaks_predict(
    stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    folder = stages.start("trained", place / "here")
    with campaign("hostile tables: named error, no traceback") as tries:
        for number, (what, (name, content)) in enumerate(TABLES.items()):
            (folder / name).write_bytes(content)
            ended = attack(f"predict {name} -o out{number} --model runs/fold0", folder)
            tries.note(what, *harmless(ended, folder, 1, 2))


GARBAGE: Mapping[str, bytes] = {
    "empty": b"",
    "zeros": bytes(300),
    "binary": bytes(range(256)),
    "another table": b"a,b\n1,2\n",
    "cut off": b"case_id,fold,patient_id,t1n\nBraTS2021_0",
    "brackets": b"[" * 50_000,
    "braces": b'{"a":' * 50_000,
    "a number": b"7",
    "NaN": b"NaN",
}
READ_AGAIN: Mapping[str, tuple[str, str, tuple[int, ...]]] = {
    "prepared/cases.csv": (COMMANDS["prepare"].words, "prepared", (0, 2)),
    "prepared/folds.csv": (COMMANDS["prepare"].words, "prepared", (2,)),
    "prepared/BraTS2021_00001/case.json": (COMMANDS["prepare"].words, "prepared", (0,)),
    "cases.csv": (COMMANDS["index"].words, "scans", (0, 2)),
    "runs/fold0/split.csv": (COMMANDS["tune"].words, "trained", (2,)),
    "runs/fold0/tuning.json": (COMMANDS["tune"].words, "trained", (0,)),
    "runs/fold0/history.csv": (COMMANDS["figure history"].words, "trained", (2,)),
    "out/manifest.jsonl": (COMMANDS["predict"].words, "predicted", (0,)),
    "out/brats_seg.json": (COMMANDS["predict"].words, "predicted", (0, 2)),
    "scans/survival_info.csv": (COMMANDS["index"].words, "scans", (0, 2)),
    "scans/name_mapping.csv": (COMMANDS["features"].words, "trained", (0, 2)),
    "features.csv": ("survival features.csv --table table.csv -o survival", "scans", (2,)),
    "scores.csv": ("figure bars scores.csv -o bars.png", "scans", (2,)),
}
"""Files that a command reads, the command, the stage it starts from, and its exit codes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_AGAIN)
def test_no_damaged_file_of_its_own_breaks_a_command(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    words, stage, codes = READ_AGAIN[name]
    folder = stages.start(stage, place / "here")
    (folder / "table.csv").write_text("ID,Age,Survival_days\na,60,300\n")
    with campaign("damaged tables and records: named error, or written again") as tries:
        for what, content in GARBAGE.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
            tries.note(f"{name}: {what}", *harmless(attack(words, folder), folder, *codes))


# --- settings

_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
YAMLS: Mapping[str, bytes] = {
    "a value that holds itself": b"model: &a {name: unet, arguments: *a}",
    "a list that holds itself": b"training: &a [*a]",
    "aliases of aliases": _BOMB.encode(),
    "aliases of aliases as a setting": (_BOMB + "\nmodel: {arguments: {x: *a11}}").encode(),
    "100,000 brackets": b"a: " + b"[" * 100_000,
    "100,000 braces": b"{a: " * 100_000,
    "an object of Python": f"!!python/object/apply:os.system ['touch {OWNED}']".encode(),
    "a tag": b"training: !!python/name:os.system",
    "a list": b"- 1\n- 2\n",
    "a number": b"7",
    "binary": bytes(range(256)),
    "not UTF-8": b"model: {name: \xff\xfe}",
    "NUL": b"model: {name: un\0et}",
    "a number of 5000 digits": b"training: {n_epochs: " + b"9" * 5000 + b"}",
    "NaN": b"optimizer: {lr: .nan}",
    "infinity": b"optimizer: {lr: .inf}",
    "keys that are lists": b"? [a, b]\n: 1",
    "keys that are numbers": b"1: 2\ntrue: 3",
    "sections that are lists": b"model: [1]\ntraining: null",
    "a date": b"training: {seed: 2020-01-01}",
    "a merge key": b"a: &a {b: *a}\n<<: *a",
    "a module to import": b"loss: {name: antigravity.x}",
    "a function of the system": f"loss: {{name: os.system, arguments: {{command: 'touch {OWNED}'}}}}".encode(),
    "a patch of 10^9 voxels": b"patch: {size: [1000000000, 1000000000, 1000000000]}",
    "10^9 channels": b"model: {widths: [1000000000, 1000000000]}",
    "10^12 epochs of 10^12 patches": b"training: {n_epochs: 1000000000000, effective_batch: 1000000000000}",
}


@pytest.mark.slow
def test_no_settings_break_prepare(stages: Stages, place: Path, campaign: NewCampaign) -> None:
    """`prepare` reads all settings, and uses few of them."""
    folder = stages.start("prepared", place / "here")
    used = {"a patch of 10^9 voxels", "10^9 channels", "10^12 epochs of 10^12 patches"}
    named = {"a module to import", "a function of the system"}
    with campaign("hostile settings: named error, no code run") as tries:
        for what, content in YAMLS.items():
            if what == "a function of the system":
                continue  # names in settings are imported and called: see SECURITY.md
            (folder / "settings.yaml").write_bytes(content)
            words = f"{COMMANDS['prepare'].words} --config settings.yaml"
            codes = (0, 2) if what in used | named else (2,)
            tries.note(what, *harmless(attack(words, folder), folder, *codes))


# --- models


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
    "a threshold of NaN": _member(prediction__decoding__thresholds=[float("nan")] * 3),
    "a negative threshold": _member(prediction__decoding__thresholds=[-1, 0.5, 0.5]),
    "a threshold of 2": _member(prediction__decoding__thresholds=[2, 0.5, 0.5]),
    "two thresholds": _member(prediction__decoding__thresholds=[0.5, 0.5]),
    "a negative volume": _member(prediction__decoding__smallest_mm3=[-1, 0, 0]),
    "an infinite volume": _member(prediction__decoding__smallest_et_mm3=float("inf")),
    "a window of no voxels": _member(prediction__window=[0, 0, 0]),
    "a window of 10^9": _member(prediction__window=[HUGE] * 3),
    "a negative window": _member(prediction__window=[-8, 8, 8]),
    "a window in words": _member(prediction__window="anything"),
    "a spacing of 0": _member(identity__spacing_mm=[0, 0, 0]),
    "a spacing of NaN": _member(identity__spacing_mm=[float("nan")] * 3),
    "a spacing of 10^9": _member(identity__spacing_mm=[HUGE] * 3),
    "a spacing of 10^-9": _member(identity__spacing_mm=[1e-9] * 3),
    "a negative spacing": _member(identity__spacing_mm=[-1, 1, 1]),
    "a patch of 10^9": _member(identity__patch=[HUGE] * 3),
    "a patch of 0": _member(identity__patch=[0, 0, 0]),
    "another order of modalities": _member(identity__modalities=["t1n", "t1n", "t1n", "t1n"]),
    "no modalities": _member(identity__modalities=[]),
    "no regions": _member(identity__regions=[]),
    "another normalisation": _member(identity__normalisation="none"),
    "an unknown convention": _member(identity__conventions=["mine"]),
    "no convention": _member(identity__conventions=[]),
    "channels of 10^9": _member(config__model__widths=[HUGE, HUGE]),
    "no channels": _member(config__model__widths=[]),
    "a network of another name": _member(config__model__name="os.system"),
    "weights elsewhere": _member(weights="../../runs/fold0/best.pt"),
    "weights of an absolute name": _member(weights="/etc/passwd"),
    "weights of no name": _member(weights=""),
    "another check sum": _member(sha256="0" * 64),
    "10,000 members": _many_members,
    "no members": _description('{"format_version": 1, "members": []}'),
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
    "weights that are a FIFO": _other("member0.safetensors", os.mkfifo),
    "weights that are a folder": _other("member0.safetensors", Path.mkdir),
    "weights that are a link to themselves": _other("member0.safetensors", _loop),
    "a description that is a FIFO": _other("model.json", os.mkfifo),
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
    import shutil

    with campaign("hostile models: named error, no code run") as tries:
        for number, (what, change) in enumerate(MODELS.items()):
            if number % 4 != part:
                continue
            folder = place / f"model{number}"
            shutil.copytree(exported, folder)
            change(folder / "model")
            ended = attack("predict scans -o out --model model --no-preview", folder)
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
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


CHECKPOINTS: Mapping[str, Break] = {
    "a pickle that runs code": lambda path: torch.save(
        {"schema_version": 2, "model": Owned()}, path
    ),
    "an old pickle that runs code": lambda path: torch.save(
        Owned(), path, _use_new_zipfile_serialization=False
    ),
    "empty": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "cut off": _cut,
    "with a flipped bit": _flipped,
    "a folder": _replaced(Path.mkdir),
    "a FIFO": _replaced(os.mkfifo),
    "a device": _replaced(_device),
    "a link to itself": _replaced(_loop),
    "a list": lambda path: torch.save([1, 2], path),
    "without entries": lambda path: torch.save({"schema_version": 2}, path),
    "without a model": _saved(model={}),
    "with weights of another shape": _saved(model={"weight": torch.zeros(3)}),
    "with a model that is a number": _saved(model=7),
    "with an identity that is a number": _saved(identity=7),
    "with an unknown identity": _saved(identity={"a": 1}),
    "with settings that are a number": _saved(config=7),
    "with unknown settings": _saved(config={"a": {"b": 1}}),
    "with 10^9 channels": _saved(config__model__widths=[HUGE, HUGE]),
    "with a network to import": _saved(config__model__name="antigravity.x"),
    "with a spacing of NaN": _saved(identity__spacing_mm=(float("nan"),) * 3),
    "with NaN as weights": lambda path: _nan_weights(path),
    "with a position that is a text": _saved(position="x"),
    "with a position beyond the end": _saved(
        position={"epoch": -3, "n_batches": 10**9, "n_steps": 0}
    ),
    "with an optimizer that is a list": _saved(optimizer=[1]),
    "with sums that are a text": _saved(sums="x"),
    "with a history of texts": _saved(history=("x",)),
}


def _nan_weights(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["model"] = {
        name: torch.full_like(value, float("nan")) for name, value in content["model"].items()
    }
    torch.save(content, path)


USES: Mapping[str, tuple[str, str]] = {
    "predict": ("best.pt", "predict scans -o out --model runs/fold0 --no-preview"),
    "train": ("last.pt", f"{TRAIN} --fold 0"),
    "tune": ("best.pt", COMMANDS["tune"].words),
    "certify": ("last.pt", COMMANDS["certify"].words),
}
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
            tries.note(f"{name}: {what}", *harmless(ended, folder, 1, 2, 3))


@pytest.mark.parametrize("what", ["a pickle that runs code", "a FIFO"])
def test_such_a_checkpoint_is_refused(
    what: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    folder = stages.start("trained", place / "here")
    CHECKPOINTS[what](folder / "runs" / "fold0" / "best.pt")
    with campaign("hostile checkpoints: named error, no code run") as tries:
        tries.note(what, *harmless(attack(USES["predict"][1], folder), folder, 2))
