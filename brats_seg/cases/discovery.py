"""Find the cases below a data folder, and the files that belong to each of them.

A folder contains one case or many; `scan_groups` decides which files belong together and how the
cases are called, `label_files` finds the label maps, `dataset_json` reads folders with a
`dataset.json`, and `path_table` tables of paths.
"""

import hashlib
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.case import Case, ScanFile, missing_problem
from brats_seg.cases.dataset_json import DATASET_FOLDERS, cases_of_dataset, is_dataset
from brats_seg.cases.folders import Folder, NiftiFile, advise, describe, walk_folders
from brats_seg.cases.label_files import (
    FoundCase,
    ignored,
    is_packed,
    marked,
    space_of,
    with_label_maps,
)
from brats_seg.cases.layouts import LABEL, MEN_RT, grade_of
from brats_seg.cases.path_table import data_folder, is_path_table, read_path_table
from brats_seg.cases.scan_groups import ScanGroup, group_scans, most_complete, named_apart
from brats_seg.errors import CaseError, LayoutError, counted, printable, some_of
from brats_seg.labels import MODALITIES

log = logging.getLogger(__name__)

LONGEST_ID = 200
"""Bytes of the longest case id: a file name has 255, and results add a few words and a suffix."""

_WHY_LESS = "another folder of the data set has more of their modalities, or a derivative of them"
_WHY_IGNORED = "their names show no modality and no label map, or their case has other files for it"
_EXPECTED_NAMES = "CASE_t1, CASE_t1ce, CASE_t2 and CASE_flair, or CASE-t1n, -t1c, -t2w and -t2f"


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """The cases below a data folder."""

    cases: tuple[Case, ...]
    """Cases in the order of their ids; no file has been opened."""
    notices: tuple[str, ...]
    """Files that were ignored although they may be scans."""


def find_cases(
    root: Path, *, label_files: str | None = None, with_labels: bool = True
) -> Discovery:
    """Find the cases of all layouts below a folder, or in a table of paths, without opening scans.

    Args:
        root: Folder of scans, or a `.csv` or `.json` table of their paths.
        label_files: Pattern of the names of the label maps, such as `*_tumour.nii.gz`, or of their
            paths below the folder, such as `masks/*`. By default they are found by their names.
        with_labels: Whether label maps are looked for.

    Raises:
        LayoutError: The folder does not exist, contains no case, or has no file of the pattern.
        UsageError: The table cannot be read.

    Example:
        >>> import tempfile
        >>> from brats_seg.cases.phantom import write_phantom_cases
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_phantom_cases(Path(folder), n_cases=2, seed=0)
        ...     found = find_cases(Path(folder))
        >>> [(case.case_id, case.release) for case in found.cases]
        [('BraTS2021_00000', 'brats2021'), ('BraTS2021_00001', 'brats2021')]
    """
    if not os.path.exists(root):  # noqa: PTH110 - Path.exists raises if the name is too long
        msg = f"{root} does not exist; expected the folder of scans"
        raise LayoutError(msg)
    if is_path_table(root):
        listed = [_completed(case, data_folder(root)) for case in read_path_table(root)]
        chosen = listed if with_labels else [replace(case, label=None) for case in listed]
        return Discovery(cases=_sorted(chosen), notices=())
    if not os.path.isdir(root):  # noqa: PTH112 - as above
        msg = (
            f"{root} is a file; expected the folder of scans, or a .csv or .json table of paths. An "
            "archive must be unpacked first."
        )
        raise LayoutError(msg)
    return _find_below(root, label_files, with_labels=with_labels)


def id_problems(case: Case) -> Iterator[str]:
    """Yield what is wrong with an id that results and prepared cases cannot be named after."""
    n_bytes = len(case.case_id.encode())
    if n_bytes > LONGEST_ID:
        found = f"an id of {n_bytes} bytes"
        files = " and ".join(scan.path.name for scan in case.images) or "(none)"
        next_step = "Rename the folder and the files of the case."
        yield str(CaseError(case.case_id, files, found, f"at most {LONGEST_ID}", next_step))


def find_data(places: Iterable[Path]) -> Path | None:
    """Return the folder that contains the labelled cases of one release, or None without any.

    In the first place with labelled cases, the release with most of them is chosen: a mount may
    contain several data sets, at any depth.

    Args:
        places: Folders to search, such as `/kaggle/input`; they need not exist.
    """
    for place in places:
        if not place.is_dir():
            continue
        try:
            found = find_cases(place)
        except LayoutError as error:
            log.warning("%s", error)
            continue
        labelled = [case for case in found.cases if case.label is not None]
        if labelled:
            return _folder_of(place, labelled)
        n_found = counted(len(found.cases), "case")
        log.warning("%s holds %s, and no label map", place, n_found)
    return None


def _find_below(root: Path, label_files: str | None, *, with_labels: bool) -> Discovery:
    walked = walk_folders(root)
    folders = {f.path: f for f in (marked(walked, label_files) if label_files else walked)}
    described, groups = _cases_in(folders, root)
    groups, less = most_complete(groups)
    named = named_apart(groups, root.resolve().name)
    found = with_label_maps(
        [_assembled(group) for group in named],
        {path: folder for path, folder in folders.items() if with_labels},
        label_folders=frozenset(group.folder.path for group in less),
        anywhere=label_files is not None,
    )
    cases = [_completed(_checked(case), root) for case in (*described, *found)]
    of_less = [scan.path for group in less for scan in group.scans]
    used = {scan.path for case in cases for scan in (*case.images, case.label) if scan}.union(
        of_less
    )
    scans = [scan for folder in folders.values() for scan in folder.scans]
    unused = [s.path for s in scans if s.path not in used and (with_labels or s.name.kind != LABEL)]
    notices = [
        *advise(root, folders.values()),
        *_renamed(groups, named),
        *describe("scans of BIDS cases were ignored", of_less, _WHY_LESS),
        *describe("NIfTI files were ignored", unused, _WHY_IGNORED),
    ]
    if not cases:
        raise LayoutError(_without_cases(root, notices))
    if label_files and not any(case.label for case in cases):
        raise LayoutError(_without_match(root, label_files, unused))
    return Discovery(cases=_sorted(cases), notices=tuple(notices))


def _cases_in(folders: Mapping[Path, Folder], root: Path) -> tuple[list[Case], list[ScanGroup]]:
    """Return the cases of descriptions, and the scans of all other cases."""
    of_datasets: set[Path] = set()
    described: list[Case] = []
    groups: list[ScanGroup] = []
    for path, folder in folders.items():
        if is_dataset(folder, folders):
            of_datasets |= {path / name for name in DATASET_FOLDERS}
            described += cases_of_dataset(root, folder, folders)
        elif path not in of_datasets:
            groups += group_scans(folder, (root.resolve() / path).name)
    return described, groups


def _without_cases(root: Path, notices: Sequence[str]) -> str:
    reason = "; ".join(notices) or "it holds no scans"
    return (
        f"{root} holds no cases: {reason}. Expected a release of BraTS, UPENN-GBM, UCSF-PDGM, a BIDS "
        "data set, the decathlon's Task01_BrainTumour, a .csv or .json table of paths, or NIfTI files "
        f"called {_EXPECTED_NAMES}."
    )


def _without_match(root: Path, label_files: str, unused: Sequence[Path]) -> str:
    others = some_of([printable(path.as_posix()) for path in unused])
    return (
        f"no case below {root} has a label map called {label_files!r}; the files that are no scan are "
        f"{others or 'none'}. Expected a pattern of names, such as '*_tumour.nii.gz', or of paths "
        "below the folder, such as 'masks/*'; the names begin with the id of the case, or its folder "
        "holds them."
    )


def _renamed(before: Sequence[ScanGroup], after: Sequence[ScanGroup]) -> Iterator[str]:
    """Yield a sentence about the cases that were named after the folders above their own."""
    changed = [
        (old.case_id, new)
        for old, new in zip(before, after, strict=True)
        if old.case_id != new.case_id
    ]
    if changed:
        folders, example = sorted({old for old, _ in changed}), changed[0][1]
        yield (
            f"several folders are called {some_of(folders)}: {len(changed)} cases are named after the "
            f"folders above, such as {example.case_id} in {example.folder.path.as_posix()}/"
        )


def _assembled(group: ScanGroup) -> FoundCase:
    """Choose the file of each modality."""
    variant = _common_variant(group.scans)
    candidates = {
        modality: _plainest([scan for scan in group.scans if scan.name.kind == modality], variant)
        for modality in MODALITIES
    }
    chosen = [found[0] for found in candidates.values() if found]
    case = Case.named(group.case_id, {scan.name.kind: ScanFile(path=scan.path) for scan in chosen})
    prefixes, spaces = {scan.name.case for scan in chosen}, set(map(space_of, chosen))
    return FoundCase(
        case=replace(
            case,
            patient_id=group.patient_id or case.patient_id,
            timepoint=group.timepoint or case.timepoint,
            problems=tuple(_ambiguities(case.case_id, candidates)),
            remarks=tuple(
                ignored(other, first)
                for first, *others in filter(None, candidates.values())
                for other in others
                if other.name.stem == first.name.stem
            ),
        ),
        folder=group.folder.path,
        prefix=prefixes.pop() if len(prefixes) == 1 else "",
        space=spaces.pop() if len(spaces) == 1 else "",
    )


def _common_variant(scans: Sequence[NiftiFile]) -> str:
    """Return the variant that has one file of every modality, if it is the only one; else nothing."""
    files: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for scan in scans:
        files[scan.name.variant].add((scan.name.kind, scan.name.stem))
    whole = [
        variant
        for variant, found in files.items()
        if len(found) == len({kind for kind, _ in found}) == len(MODALITIES)
    ]
    return whole[0] if len(whole) == 1 else ""


def _plainest(scans: Sequence[NiftiFile], variant: str) -> list[NiftiFile]:
    """Return the files of a variant, or else all of them; uncompressed ones first."""
    chosen = [scan for scan in scans if scan.name.variant == variant] or list(scans)
    return sorted(chosen, key=lambda scan: (scan.name.stem, is_packed(scan)))


def _ambiguities(case_id: str, candidates: Mapping[str, Sequence[NiftiFile]]) -> Iterator[str]:
    for modality, found in candidates.items():
        if len({scan.name.stem for scan in found}) > 1:
            files = " and ".join(scan.path.name for scan in found)
            what, next_step = f"{len(found)} files for {modality}", "Remove or rename the other"
            next_step = f"{next_step}, or list the files of the cases in a table of paths."
            yield str(CaseError(case_id, files, what, "one", next_step))


def _checked(case: Case) -> Case:
    """Add what is missing to the problems of a case."""
    return replace(case, problems=(*case.problems, *_missing(case)))


def _completed(case: Case, root: Path) -> Case:
    """Add the fields that do not depend on the layout."""
    return replace(
        case,
        root=root,
        problems=(*case.problems, *id_problems(case)),
        grade=grade_of(reversed((root.resolve() / case.folder).parts)),
        files_key=_files_key(case, root),
    )


def _sorted(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(sorted(cases, key=lambda case: (case.case_id, str(case.images[:1]))))


def _missing(case: Case) -> Iterator[str]:
    problem = missing_problem(case)
    if problem and case.release == MEN_RT:
        found = "a case of the radiotherapy task, which has one modality and another target"
        next_step, expected = "Leave it out: this task is not supported.", ", ".join(MODALITIES)
        yield str(CaseError(case.case_id, f"{case.folder.as_posix()}/", found, expected, next_step))
    elif problem:
        yield problem


def _files_key(case: Case, root: Path) -> str:
    """Hash names, sizes and times of change of the files of a case."""
    key = hashlib.sha256()
    for kind in (*MODALITIES, LABEL):
        scan: ScanFile | None = getattr(case, kind)
        key.update(f"{kind} {scan}\n".encode(errors="surrogateescape"))
        if scan is not None:
            key.update(_status(root / scan.path).encode())
    return key.hexdigest()[:32]


def _status(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        # a dangling link: reading the file reports it
        return "unreadable\n"
    return f"{status.st_size} {status.st_mtime_ns}\n"


def _folder_of(place: Path, cases: Sequence[Case]) -> Path:
    """Return the folder above the case folders of the most common release."""
    by_release = Counter(case.release for case in cases)
    release = min(by_release, key=lambda name: (-by_release[name], name))
    if len(by_release) > 1:
        others = ", ".join(f"{n} of {name}" for name, n in by_release.items() if name != release)
        n_taken = counted(by_release[release], "case")
        log.warning("%s holds %s of %s; ignored: %s", place, n_taken, release, others)
    chosen = [case for case in cases if case.release == release]
    folders = {place / scan.path.parent for case in chosen for scan in case.images}
    # the tables of a release are beside its case folders, not in them
    above = folders if len(folders) < len(chosen) else {folder.parent for folder in folders}
    return Path(os.path.commonpath(above))
