"""No file or name beside the scans stops a batch: a bad one is one row, the good cases are processed."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign, NewCampaign
from tests.faults.hostile import Break, attack, harmless, make_device, make_fifo, make_loop
from tests.faults.stages import Stages


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
