"""Where the scans of a command are, and the cases prepared from them."""

import os
from pathlib import Path
from typing import Annotated

import typer

from brats_seg.cli.settings import DEMO_CASES

DEFAULT_PATH = Path("data")
DEMO_PATH = Path("prepared/demo-scans")

DataOption = Annotated[
    Path | None,
    typer.Option(help="Folder of scans. Without it and with nothing under data/: a demo set."),
]


def data_or_demo(data: Path | None, preset: str | None) -> tuple[Path, str | None]:
    """Return the folder of scans and the preset; a demo set, made once, where there are no scans."""
    if data is not None:
        return data, preset
    if _holds_anything(DEFAULT_PATH):
        return DEFAULT_PATH, preset
    print(f"no --data, and nothing under {DEFAULT_PATH}/: training on {DEMO_CASES} phantom cases")
    if not DEMO_PATH.exists():
        from brats_seg.cases.phantom import write_phantom_cases

        beside = DEMO_PATH.with_name(f".{os.getpid()}-{DEMO_PATH.name}")
        write_phantom_cases(beside, n_cases=DEMO_CASES, seed=0)
        beside.rename(DEMO_PATH)
    return DEMO_PATH, preset or "demo"


def prepared_path(data: Path | None, prepared: Path | None) -> Path:
    """Return the folder that `train` with the same flags prepares cases in."""
    from brats_seg.data.fold import prepared_path_of

    if prepared is not None:
        return prepared
    if data is not None:
        return prepared_path_of(data)
    usual = prepared_path_of(DEFAULT_PATH)
    return usual if usual.exists() else prepared_path_of(DEMO_PATH)


def _holds_anything(folder: Path) -> bool:
    return folder.is_dir() and any(path.name != "README.md" for path in folder.iterdir())
