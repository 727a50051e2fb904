"""No hostile file, name, setting, table or record breaks a command.

A bad file or name is one row of the failures, and the good cases are processed; settings, tables and
records that are broken, or made to break the program, are refused with a message, and run no code.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.hostile import OWNED, Break, attack, harmless, make_device, make_fifo, make_loop
from tests.faults.stages import COMMANDS, Stages


def _socket(path: Path) -> None:
    # the path of a socket may have 107 characters
    here = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


def _into_itself(path: Path) -> None:
    path.symlink_to(path.parent.parent)


IN_PLACE_OF_A_SCAN: Mapping[str, Break] = {
    "a FIFO": make_fifo,
    "a device": make_device,
    "a socket": _socket,
    "a link to itself": make_loop,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a folder": Path.mkdir,
    "a link into a circle": _into_itself,
}
BESIDE_THE_SCANS: Mapping[str, Break] = {
    "a link to itself": lambda root: make_loop(root / "loop"),
    "a link to itself named like a scan": lambda root: make_loop(
        root / "BraTS2021_00009_t1.nii.gz"
    ),
    "a FIFO named like a scan": lambda root: make_fifo(root / "BraTS2021_00009_t1.nii.gz"),
    "a FIFO named like a table": lambda root: make_fifo(root / "survival_info.csv"),
    "a device named like a table": lambda root: make_device(root / "name_mapping.csv"),
    "a table that is a link to itself": lambda root: make_loop(root / "survival_info.csv"),
    "a name that is not UTF-8": lambda root: _case_named(root, os.fsdecode(b"scan_\xff\xfe")),
    "a name of many characters": lambda root: _case_named(root, "a" * 240),
    "a name with a line break": lambda root: _case_named(root, "BraTS2021\n00009"),
    "a name that is a formula": lambda root: _case_named(root, "=cmd|'calc'!A0"),
    "a name with a terminal sequence": lambda root: _case_named(root, "scan\x1b]0;owned\x07"),
    "a name of markup": lambda root: _case_named(root, "[bold]x[link=y]"),
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
    "predict": "predict scans -o out --model runs/fold0 --precision fp32 --set preview=false",
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


def attack_scans(
    names: Mapping[str, Break], name: str, stages: Stages, place: Path, new: NewCampaign
) -> None:
    """Put each hostile thing among the scans of a command; the good cases must be done."""
    with new("hostile files and names: one row of failures, no hang") as tries:
        for number, (what, make) in enumerate(names.items()):
            folder = stages.start("trained", place / f"{number}")
            path = folder / "scans"
            if names is not BESIDE_THE_SCANS:
                path = path / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz"
                path.unlink()
            make(path)
            ended = attack(SCANNING[name], folder)
            done = good_cases_done(name, folder)
            tries.note(f"{name}: {what}", *harmless(ended, folder, 0, 1), done)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANNING)
@pytest.mark.parametrize("names", [IN_PLACE_OF_A_SCAN, BESIDE_THE_SCANS], ids=["files", "names"])
def test_no_file_or_name_stops_a_batch(
    names: Mapping[str, Break], name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    attack_scans(names, name, stages, place, campaign)


def test_a_fifo_and_a_loop_do_not_stop_the_index(
    stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    few = {what: IN_PLACE_OF_A_SCAN[what] for what in ("a FIFO", "a link to itself")}
    attack_scans(few, "index", stages, place, campaign)


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


USED_LATER = {
    "a module to import",
    "a function of the system",
    "a patch of 10^9 voxels",
    "10^9 channels",
    "10^12 epochs of 10^12 patches",
}
"""Settings that only training uses."""


@pytest.mark.slow
def test_no_settings_break_prepare_or_train(
    stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    """`prepare` reads all settings, and uses few of them."""
    train = "train --data scans --prepared prepared --set folds.n_folds=2"
    with campaign("hostile settings: named error, no code run") as tries:
        for number, (what, content) in enumerate(YAMLS.items()):
            tried = [(COMMANDS["prepare"].words, (0, 2) if what in USED_LATER else (2,))]
            if what in USED_LATER and "epochs" not in what:
                tried.append((train, (2, 3)))
            for words, codes in tried:
                folder = stages.start("prepared", place / f"{number}{words[:5]}")
                (folder / "settings.yaml").write_bytes(content)
                ended = attack(f"{words} --config settings.yaml", folder)
                tries.note(f"{words[:7]}: {what}", *harmless(ended, folder, *codes))


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
    "prepared/folds-2-seed55.csv": (COMMANDS["prepare"].words, "prepared", (2,)),
    "prepared/folds.csv": (COMMANDS["prepare"].words, "prepared", (2,)),
    "prepared/BraTS2021_00001/case.json": (COMMANDS["prepare"].words, "prepared", (0,)),
    "cases.csv": (COMMANDS["index"].words, "scans", (0, 2)),
    "runs/fold0/split.csv": (COMMANDS["tune"].words, "trained", (2,)),
    "runs/fold0/history.csv": (COMMANDS["figure history"].words, "trained", (2,)),
    "out/manifest.jsonl": (COMMANDS["predict"].words, "predicted", (0,)),
    "out/brats_seg.json": (COMMANDS["predict"].words, "predicted", (0, 2)),
    "scans/survival_info.csv": (COMMANDS["index"].words, "scans", (0, 2)),
    "scans/name_mapping.csv": (COMMANDS["features"].words, "trained", (0, 2)),
    "features.csv": ("survival features.csv --clinical table.csv -o survival", "scans", (2,)),
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
