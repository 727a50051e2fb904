"""Index a folder of scans, make folds, prepare the cases, and open one fold for training.

The results are files in one folder: `cases.csv`, a fold table for each setting of the folds, and a
folder for each case. They are updated only where scans or settings have changed.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from brats_seg.cases import folds
from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.clinical import read_clinical_tables, with_clinical
from brats_seg.cases.find import EXPECTED_LABELS
from brats_seg.cases.folds import FoldTable, Split
from brats_seg.cases.index import index_cases, read_index, remark_lines, write_index
from brats_seg.cases.releases import parse_case_id
from brats_seg.config import Config, Section
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.normalisation import USUAL_MM, spacing_text
from brats_seg.data.prepare import check_replaceable, prepare_cases
from brats_seg.data.store import MANIFEST_NAME, read_case_manifest
from brats_seg.errors import (
    CaseError,
    CaseProblemsError,
    EnvironmentalError,
    FoldError,
    LayoutError,
    counted,
)
from brats_seg.files import alone_at
from brats_seg.progress import Track, untracked
from brats_seg.voxels.box import triple
from brats_seg.voxels.grids import Spacing

log = logging.getLogger(__name__)

CASES_NAME = "cases.csv"
"""Name of the table of cases in a folder of prepared cases."""
Seen = Literal["no", "unknown", "yes"]
"""Whether a network was trained on a patient."""


class TrainingCases(Section):
    """The cases that a network, and the weights that it started from, were trained on.

    Example:
        >>> cases = TrainingCases(ids=("BraTS-GLI-00005-000",), is_complete=True)
        >>> cases.seen("BraTS-GLI-00005-001"), cases.seen("BraTS-GLI-00006-000")
        ('yes', 'no')
    """

    ids: tuple[str, ...] = ()
    is_complete: bool = False
    """Whether there are no others; False where a run, or the weights before it, have no record of them."""

    def seen(self, *ids: str) -> Seen:
        """Return whether one of the cases is of the patient with these ids."""
        if self.seen_among([ids]):
            return "yes"
        return "no" if self.is_complete else "unknown"

    def seen_among(self, cases: Iterable[Sequence[str]]) -> list[str]:
        """Return the first id of each of some cases that has an id of a patient among these."""
        # the tables of the releases disagree about upper and lower case
        patients = {parse_case_id(name)[1].lower() for name in self.ids}
        return [c[0] for c in cases if any(parse_case_id(n)[1].lower() in patients for n in c)]


NO_RECORD = TrainingCases()


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """The labelled cases of a data folder, indexed, prepared and divided into folds."""

    index: CaseIndex
    """All cases of the data folder."""
    folds: FoldTable
    folds_path: Path
    """File of the fold table."""
    case_ids: frozenset[str]
    """Cases that could be prepared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldData:
    """The prepared cases that one fold is trained and validated on."""

    folder: Path
    """Folder of the prepared cases."""
    split: Split
    conventions: tuple[str, ...]
    """Names of the label conventions that occur."""
    fingerprint: str
    """Hash of the cases, their contents and the split."""
    largest_shape: tuple[int, int, int]
    """Largest number of voxels of the brain crops along X, Y and Z."""
    spacing_mm: Spacing = USUAL_MM
    """Spacing that the cases were prepared at."""
    folds_path: Path | None = None
    """File of the fold table; None for a split that was stored with a run."""
    patient_of: Mapping[str, str] = field(default_factory=dict)
    """Patients of the cases whose ids do not show them, as in a table of paths, by the id of the case."""


def open_fold(
    root: Path,
    *,
    fold: int,
    config: Config,
    prepared_path: Path | None = None,
    repair: bool = False,
    track: Track = untracked,
) -> FoldData:
    """Index and prepare the scans below `root`, and return the cases of one fold.

    A folder of prepared cases that is up to date is only read.

    Args:
        root: Folder of scans of any layout, or table of their paths; see `find_cases`.
        fold: Index of the fold that is held out for validation.
        config: Settings; those of `cases`, `folds` and `store` are used.
        prepared_path: Folder for the tables and the prepared cases; None for `prepared_path_of`.
        repair: Whether prepared cases are verified, and prepared again if they are damaged.
        track: Shows the progress.

    Raises:
        LayoutError: There are no labelled cases.
        CaseProblemsError: Labelled cases cannot be used, and `cases.skip_bad` is not set.
        FoldError: There is no such fold, which is noticed before anything is written, or the fold
            table leaks patients or lacks a case.

    Example:
        >>> from brats_seg.config import load_config
        >>> config = load_config(preset="demo", values={"folds.n_folds": 2})
        >>> data = open_fold(Path("data"), fold=0, config=config, prepared_path=Path("ready"))
        >>> len(data.split.train) + len(data.split.validation)
        6
    """
    folder = prepared_path or prepared_path_of(root)
    folds.check_fold(fold, folder, config.folds)
    prepared = prepare_data(root, config=config, prepared_path=folder, repair=repair, track=track)
    split = prepared.folds.split(fold)
    missing = sorted({*split.train, *split.validation} - prepared.case_ids)
    if missing and not config.cases.skip_bad:
        msg = f"{prepared.folds_path} has cases that {root} lacks: {', '.join(missing)}. Restore them, or use --skip-bad (cases.skip_bad=true)"
        raise FoldError(msg)
    train, validation = (
        tuple(case_id for case_id in case_ids if case_id in prepared.case_ids)
        for case_ids in (split.train, split.validation)
    )
    if not train or not validation:
        msg = f"no case of the fold is left to {'validate' if train else 'train'} on"
        raise FoldError(msg)
    opened = open_split(folder, Split(train=train, validation=validation))
    patients = ((case.case_id, case.patient_id) for case in prepared.index.cases)
    hidden = {name: patient for name, patient in patients if patient != parse_case_id(name)[1]}
    return replace(opened, folds_path=prepared.folds_path, patient_of=hidden)


def prepare_data(
    root: Path,
    *,
    config: Config,
    prepared_path: Path,
    repair: bool = False,
    track: Track = untracked,
) -> PreparedData:
    """Index the scans below `root`, divide the labelled cases into folds, and prepare them.

    The arguments and errors are those of `open_fold`.
    """
    cases_path = prepared_path / CASES_NAME
    index, is_new = _current_index(root, cases_path, config, available_cpus(), track)
    check_replaceable(index.usable, prepared_path)
    if is_new:
        _try_to_write(index, cases_path)
        for line in remark_lines(index.trainable):
            log.warning(line)
    cases = _labelled(index, skip_bad=config.cases.skip_bad)
    folds_path = folds.fold_table_path(prepared_path, config.folds)
    table = open_folds(cases, folds_path, config)
    failures = prepare_cases(
        cases, prepared_path, config.store, repair=repair, n_workers=available_cpus(), track=track
    )
    if failures and not config.cases.skip_bad:
        raise CaseProblemsError([failure.message for failure in failures])
    for failure in failures:
        log.warning("left out: %s", failure.message)
    failed = {failure.case_id for failure in failures}
    return PreparedData(
        index=index,
        folds=table,
        folds_path=folds_path,
        case_ids=frozenset(case.case_id for case in cases) - failed,
    )


def prepared_path_of(root: Path) -> Path:
    """Return the default folder of the prepared cases of a data folder, from any current folder.

    The prepared cases of `BraTS2021` are in `BraTS2021-prepared` beside it, on the disk that has space
    for scans; or in the user's cache folder, if nothing may be written beside the scans, as on Kaggle.
    Those of a table `BraTS2021.csv`, which may be a part of them, are in `BraTS2021.csv-prepared`.
    Prepared cases that are found in either place are used there.
    """
    path = root.resolve()
    digest = hashlib.blake2b(os.fsencode(path), digest_size=3).hexdigest()
    next_to_scans = path.parent / f"{path.name}-prepared"
    # without a home folder, "~" would be the name of one; two folders called `Training` do not share one
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache").removeprefix("~/")  # noqa: PTH111
    cached = Path(above, "brats_seg", "prepared", f"{path.name}-{digest}")
    for known in (next_to_scans, cached):
        if (known / CASES_NAME).exists():
            return known
    return next_to_scans if _may_write(path.parent) else cached


def open_index(
    root: Path, path: Path, config: Config, *, n_workers: int = 0, track: Track = untracked
) -> CaseIndex:
    """Index the scans below `root` and write the table of cases, if it has changed.

    Only the cases whose files have changed since the table was written are read again.

    Args:
        root: Folder of scans of any layout, or table of their paths; see `find_cases`.
        path: File of the table, such as `cases.csv`.
        config: Settings; those of `cases` are used.
        n_workers: Threads that open files; 0 opens them in this thread.
        track: Shows the progress.

    Raises:
        LayoutError: There are no cases.
        EnvironmentalError: The table cannot be written.

    Example:
        >>> from brats_seg.config import load_config
        >>> index = open_index(Path("data"), Path("cases.csv"), load_config())
        >>> len(index.trainable)
        6
    """
    index, is_new = _current_index(root, path, config, n_workers, track)
    if is_new:
        write_index(index, path)
    return index


def open_folds(cases: Sequence[Case], path: Path, config: Config) -> FoldTable:
    """Read the fold table at `path`; make it if it does not exist. It is never changed afterwards.

    Args:
        cases: Labelled cases.
        path: Path from `fold_table_path`.
        config: Settings; those of `folds` are used.

    Raises:
        FoldError: The table lacks a case, or the cases cannot be divided into folds.
    """
    if not path.exists():
        # of two processes with other settings, the second keeps the table of the first
        with alone_at(path, wait=True):
            if not path.exists():
                folds.write_folds(folds.make_folds(cases, config.folds), path)
    table = folds.read_folds(path)
    try:
        folds.check_covers(table, cases)
    except FoldError as error:
        msg = f"{path}: {error}"
        raise FoldError(msg) from None
    return table


def open_split(folder: Path, split: Split) -> FoldData:
    """Open the prepared cases of a split.

    Raises:
        CaseError: One of them is not prepared, or at another spacing than the first.
    """
    case_ids = *split.train, *split.validation
    cases = [read_case_manifest(folder, case_id) for case_id in case_ids]
    for case_id, case in zip(case_ids, cases, strict=True):
        if case.spacing_mm != cases[0].spacing_mm:
            problem = f"a case prepared at {spacing_text(case.spacing_mm)} mm"
            expected = f"{spacing_text(cases[0].spacing_mm)} mm as {case_ids[0]}"
            next_step = "Prepare the cases of this data folder again."
            raise CaseError(case_id, MANIFEST_NAME, problem, expected, next_step)
    content = "\n".join([*(case.key for case in cases), "held out:", *split.validation])
    return FoldData(
        folder=folder,
        split=split,
        conventions=tuple(sorted({case.convention for case in cases if case.convention})),
        fingerprint=hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
        largest_shape=triple(map(max, zip(*(case.box.shape for case in cases), strict=True))),
        spacing_mm=cases[0].spacing_mm,
    )


def _may_write(folder: Path) -> bool:
    """Return whether a folder may be written to; one without the permission is left alone by root too."""
    try:
        return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)
    except OSError:
        return False


def _current_index(
    root: Path, path: Path, config: Config, n_workers: int, track: Track
) -> tuple[CaseIndex, bool]:
    """Return the index of the scans below `root`, and whether it differs from the table at `path`."""
    previous = read_index(path, root) if path.exists() else None
    # reading the scans takes minutes, and a table that is wrong none
    clinical = read_clinical_tables(root)
    index = index_cases(
        root,
        previous=previous,
        labels=config.cases.labels,
        label_files=config.cases.label_files,
        n_workers=n_workers,
        track=track,
    )
    index = replace(index, cases=with_clinical(index.cases, clinical))
    return index, previous != index


def _try_to_write(index: CaseIndex, path: Path) -> None:
    """Write the table of cases; if an earlier one cannot be replaced, only log it."""
    try:
        write_index(index, path)
    except EnvironmentalError as error:
        if not path.exists():
            raise
        log.warning("the table of cases is not updated; changed scans are read again: %s", error)


def _labelled(index: CaseIndex, *, skip_bad: bool) -> tuple[Case, ...]:
    """Return the cases that can be trained on."""
    bad = [case for case in index.cases if case.label is not None and not case.usable]
    if bad and not skip_bad:
        raise CaseProblemsError(["; ".join(case.problems) for case in bad])
    for case in bad:
        log.warning("left out: %s", "; ".join(case.problems))
    if not index.trainable:
        problem = f"{index.root} has {counted(len(index.cases), 'case')} and no usable label map, which training needs"
        msg = f"{problem}. Looked below it for {EXPECTED_LABELS}. Name others with --label-files '*_NAME.nii.gz', or give the folder above."
        raise LayoutError(msg)
    return index.trainable
