"""From a folder of scans to the prepared cases of one fold."""

import hashlib
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.case_table import read_index, write_index
from brats_seg.cases.clinical import read_clinical_tables, with_clinical
from brats_seg.cases.folds import (
    FoldTable,
    Split,
    check_covers,
    make_folds,
    read_folds,
    write_folds,
)
from brats_seg.cases.index import index_cases
from brats_seg.config import Config
from brats_seg.data.prepare import prepare_cases
from brats_seg.data.store import open_case
from brats_seg.errors import CaseProblemsError, FoldError, LayoutError
from brats_seg.progress import Track, untracked

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldData:
    """The prepared cases that one fold trains on and is held to."""

    folder: Path
    """Of the prepared cases."""
    split: Split
    conventions: tuple[str, ...]
    """Label conventions that occur."""
    fingerprint: str
    """Changes with the cases, their contents and the way they are split."""
    largest_shape: tuple[int, int, int]
    """Voxels along X, Y, Z that hold the brain crop of any case."""


def prepared_path_of(root: Path) -> Path:
    """Return where the prepared cases of a data folder lie unless told otherwise.

    In the current folder, because a data folder may be read only; named after the data folder and
    its place, so that two folders called `Training` do not meet.
    """
    place = hashlib.blake2b(str(root.resolve()).encode(), digest_size=3).hexdigest()
    return Path("prepared") / f"{root.resolve().name}-{place}"


def open_fold(
    root: Path,
    *,
    fold: int,
    config: Config,
    prepared_path: Path | None = None,
    track: Track = untracked,
) -> FoldData:
    """Index the scans under `root`, share them out, prepare them, and hold one fold out.

    Each stage is a file under `prepared_path`, `cases.csv`, `folds.csv` and a folder a case, and is
    done only where its scans or settings have changed.

    Raises:
        LayoutError: No labelled cases are there.
        CaseProblemsError: Labelled cases cannot be used, and the settings do not say to leave them out.
        FoldError: The fold table leaks, or lacks the fold or a case.
    """
    folder = prepared_path or prepared_path_of(root)
    n_workers = os.cpu_count() or 1
    index = open_index(root, folder / "cases.csv", config, n_workers=n_workers, track=track)
    cases = _labelled(index, skip_bad=config.cases.skip_bad)
    table = open_folds(cases, folder / "folds.csv", config)
    split = table.split(fold)
    failures = prepare_cases(cases, folder, config.store, n_workers=n_workers, track=track)
    if failures and not config.cases.skip_bad:
        raise CaseProblemsError([failure.message for failure in failures])
    for failure in failures:
        log.warning("case %s is left out: %s", failure.case_id, failure.message)
    there = {case.case_id for case in cases} - {failure.case_id for failure in failures}
    missing = sorted({*split.train, *split.validation} - there)
    if missing and not config.cases.skip_bad:
        msg = (
            f"{folder / 'folds.csv'} has cases that are not in {root}: {', '.join(missing)}. Bring "
            "them back, or leave them out with --skip-bad."
        )
        raise FoldError(msg)
    return _fold_data(folder, split, there)


def open_index(
    root: Path, path: Path, config: Config, *, n_workers: int, track: Track
) -> CaseIndex:
    """Index a data folder into `path`, looking again only at the cases whose files have changed."""
    previous = read_index(path, root) if path.exists() else None
    found = index_cases(
        root, previous=previous, labels=config.cases.labels, n_workers=n_workers, track=track
    )
    cases = with_clinical(found.cases, read_clinical_tables(root))
    index = CaseIndex(root=root, cases=cases)
    write_index(index, path)
    return index


def open_folds(cases: Sequence[Case], path: Path, config: Config) -> FoldTable:
    """Read the fold table at `path`, or make it there; it is written once and never changed."""
    if not path.exists():
        write_folds(make_folds(cases, config.folds), path)
    table = read_folds(path)
    check_covers(table, cases)
    n_folds = len(table.folds)
    if config.folds.scheme == "stratified" and n_folds != config.folds.n_folds:
        msg = (
            f"{path} has {n_folds} folds, and folds.n_folds is {config.folds.n_folds}. Set it to "
            f"{n_folds}, or remove the file and new folds are made; runs with the old ones then "
            "cannot go on."
        )
        raise FoldError(msg)
    return table


def _labelled(index: CaseIndex, *, skip_bad: bool) -> tuple[Case, ...]:
    """Return the cases to learn from; those without a label map do not matter here."""
    labelled = [case for case in index.cases if case.label is not None]
    bad = [case for case in labelled if not case.usable]
    if bad and not skip_bad:
        raise CaseProblemsError([f"{case.case_id}: {'; '.join(case.problems)}" for case in bad])
    for case in bad:
        log.warning("case %s is left out: %s", case.case_id, "; ".join(case.problems))
    usable = tuple(case for case in labelled if case.usable)
    if not usable:
        msg = (
            f"{index.root} has {len(index.cases)} cases and none with a label map that can be "
            "used; training needs some. `brats-seg index` shows what was found."
        )
        raise LayoutError(msg)
    return usable


def _fold_data(folder: Path, split: Split, there: Collection[str]) -> FoldData:
    """Return the fold without the cases that are not there."""
    split = Split(
        train=tuple(case_id for case_id in split.train if case_id in there),
        validation=tuple(case_id for case_id in split.validation if case_id in there),
    )
    if not split.train or not split.validation:
        msg = f"of the fold's cases none is left to {'train on' if not split.train else 'hold out'}"
        raise FoldError(msg)
    return open_split(folder, split)


def open_split(folder: Path, split: Split) -> FoldData:
    """Open the prepared cases of a split.

    Raises:
        CaseError: One of them is not prepared.
    """
    cases = [open_case(folder, case_id) for case_id in (*split.train, *split.validation)]
    x, y, z = zip(*(case.shape for case in cases), strict=True)
    content = "\n".join([*(case.key for case in cases), "held out:", *split.validation])
    return FoldData(
        folder=folder,
        split=split,
        conventions=tuple(sorted({case.convention.name for case in cases if case.convention})),
        fingerprint=hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
        largest_shape=(max(x), max(y), max(z)),
    )
