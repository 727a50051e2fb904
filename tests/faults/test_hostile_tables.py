"""Tables and records that are broken, or made to break the program, are refused or written again."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.hostile import OWNED, attack, harmless
from tests.faults.stages import COMMANDS, Stages

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
    "runs/fold0/tuning.json": (COMMANDS["tune"].words, "trained", (0,)),
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
