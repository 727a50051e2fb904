"""No hostile file, name, setting, table or record breaks a command.

A bad file or name is one row of the failures, and the good cases are processed; settings, tables and
records that are broken are refused with a message. Hostile settings and tables of paths are in
`test_config.py` and `test_find.py`.
"""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import chdir
from functools import partial
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.stages import COMMANDS


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    # the path of a socket may have 107 characters
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)


UNREADABLE: Mapping[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a device": make_endless,
    "a socket": make_socket,
    "a link to itself": make_loop,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a folder": Path.mkdir,
    "a link into a circle": lambda path: path.symlink_to(path.parent.parent),
}
"""What may stand in the place of a file."""
SCAN = "BraTS2021_00003/BraTS2021_00003_t2.nii.gz"
NAMES = {
    "not UTF-8": os.fsdecode(b"scan_\xff\xfe"),
    "of many characters": "a" * 240,
    "with a line break": "BraTS2021\n00009",
    "a formula": "=cmd|'calc'!A0",
    "with a terminal sequence": "scan\x1b]0;owned\x07",
    "of markup": "[bold]x[link=y]",
    "with a hash sign": "scan#1",
    "with a comma and quotes": 'a,"b',
    "hidden": ".scan",
}
GOOD_IDS = ("BraTS2021_00000", "BraTS2021_00001")


def write_case_named(name: str, root: Path) -> None:
    folder = root / name
    folder.mkdir()
    for number, modality in enumerate(("t1", "t1ce", "t2", "flair", "seg")):
        source = root / GOOD_IDS[number % 2] / f"{GOOD_IDS[number % 2]}_{modality}.nii.gz"
        (folder / f"{name[:200]}_{modality}.nii.gz").write_bytes(source.read_bytes())


def replace_scan(make: Callable[[Path], object], root: Path) -> None:
    (root / SCAN).unlink()
    make(root / SCAN)


REPLACED = {what: partial(replace_scan, make) for what, make in UNREADABLE.items()}
ADDED: Mapping[str, Callable[[Path], object]] = {
    "a link to itself": lambda root: make_loop(root / "loop"),
    "a link to itself named like a scan": lambda root: make_loop(root / "smith_t1.nii.gz"),
    "a FIFO named like a scan": lambda root: os.mkfifo(root / "BraTS2021_00009_t1.nii.gz"),
    "a FIFO named like a table": lambda root: os.mkfifo(root / "survival_info.csv"),
    "a device named like a table": lambda root: make_endless(root / "name_mapping.csv"),
    "a table that is a link to itself": lambda root: make_loop(root / "survival_info.csv"),
    **{f"a name {what}": partial(write_case_named, name) for what, name in NAMES.items()},
    "a thousand empty folders": lambda root: [(root / f"e{n}").mkdir() for n in range(1000)],
    "folders below folders": lambda root: Path(root, *("d" * 50,) * 40).mkdir(parents=True),
}
SCANNING = {
    "index": ("index scans -o cases.csv", "cases.csv"),
    "prepare": (
        "prepare scans --prepared new --skip-bad --set folds.n_folds=2",
        "new/{}/case.json",
    ),
    "predict": (COMMANDS["predict, label maps alone"].words, "out/{}.nii.gz"),
    "features": ("features scans -o features/features.csv", "features/features.csv"),
}
"""Commands that read scans, and the file of each case, or the table in which it has a row."""


def missing_cases(pattern: str, folder: Path) -> str:
    def has_result(case_id: str) -> bool:
        path = folder / pattern.format(case_id)
        is_table = path.exists() and path.suffix == ".csv"
        return case_id in path.read_text(errors="replace") if is_table else path.exists()

    missing = [case_id for case_id in GOOD_IDS if not has_result(case_id)]
    return f"no result for {missing}" if missing else ""


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANNING)
@pytest.mark.parametrize("faults", [REPLACED, ADDED])
def test_no_file_or_name_stops_a_batch(faults, name, campaign):
    words, pattern = SCANNING[name]
    for number, (what, make) in enumerate(faults.items()):
        folder = campaign.start("trained", number)
        make(folder / "scans")
        campaign.attack(f"{name}: {what}", words, folder, 0, 1)
        campaign.note(f"{name}: {what}", missing_cases(pattern, folder))


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
READ_AGAIN = {
    "prepared/cases.csv": (COMMANDS["prepare"].words, "prepared", 0, 2),
    "prepared/folds-2-seed55.csv": (COMMANDS["prepare"].words, "prepared", 2),
    "prepared/folds.csv": (COMMANDS["prepare"].words, "prepared", 2),
    "prepared/BraTS2021_00001/case.json": (COMMANDS["prepare"].words, "prepared", 0),
    "cases.csv": (*COMMANDS["index"], 0, 2),
    "runs/fold0/split.csv": (*COMMANDS["tune"], 2),
    "runs/fold0/history.csv": (*COMMANDS["figure history"], 2),
    "out/manifest.jsonl": (COMMANDS["predict"].words, "predicted", 0),
    "out/brats_seg.json": (COMMANDS["predict"].words, "predicted", 0, 2),
    "scans/survival_info.csv": (*COMMANDS["index"], 0, 2),
    "scans/name_mapping.csv": (*COMMANDS["features"], 0, 2),
    "features.csv": ("survival features.csv --clinical table.csv -o survival", "scans", 2),
    "scores.csv": ("figure scores scores.csv -o scores.png", "scans", 2),
}
"""Files that a command reads, the command, the stage it starts from, and its exit codes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_AGAIN)
def test_no_damaged_file_of_its_own_breaks_a_command(name: str, campaign: Campaign) -> None:
    words, stage, *codes = READ_AGAIN[name]
    folder = campaign.start(stage)
    (folder / "table.csv").write_text("ID,Age,Survival_days\na,60,300\n")
    for what, content in GARBAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        campaign.attack(f"{name}: {what}", words, folder, *codes)
