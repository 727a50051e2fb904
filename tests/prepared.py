"""Prepared cases for tests: plain functions with a default for everything."""

from pathlib import Path

from brats_seg.cases.case import CaseIndex
from brats_seg.cases.index import index_cases
from brats_seg.cases.many import Failure
from brats_seg.config import StoreConfig
from brats_seg.data.prepare import prepare_cases
from brats_seg.errors import BratsError
from tests.builders import SHAPE, write_case


def prepare(root: Path, folder: Path) -> tuple[Failure, ...]:
    return prepare_index(index_cases(root), folder)


def prepare_index(index: CaseIndex, folder: Path, *, n_workers: int = 0) -> tuple[Failure, ...]:
    return prepare_cases(index.cases, folder, StoreConfig(), n_workers=n_workers)


def write_prepared(
    tmp_path: Path, *, n_cases: int = 1, shape: tuple[int, int, int] = SHAPE, labelled: bool = True
) -> Path:
    """Write labelled cases `BraTS2021_00000` and so on, prepare them, and return the folder."""
    root, folder = tmp_path / "scans", tmp_path / "prepared"
    for number in range(n_cases):
        case_id = f"BraTS2021_{number:05d}"
        write_case(root, case_id, seed=number, shape=shape, labelled=labelled)
    failures = prepare(root, folder)
    if failures:
        raise BratsError(failures[0].message)
    return folder
