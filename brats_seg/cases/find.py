"""Find the cases below a folder by the names of files and folders, without opening a scan.

Files belong together if the same text precedes the modality in their names: it is the id of the case.
If it is the id of no release, a folder with one file of each modality is one case with the name of the
folder; folders of one name are named after those above. A label map is in the folder of its scans, in one
called `labels`, `masks` or alike, or in the derivatives of a BIDS data set, and its name begins with the
id of the case.
"""

import hashlib
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from brats_seg.cases import described, layouts, releases
from brats_seg.cases.case import Case, CaseIndex, ScanFile
from brats_seg.cases.layouts import LABEL, Folder, NamedFile, kind_named
from brats_seg.errors import LayoutError, UsageError, printable, some_of
from brats_seg.files import file_state
from brats_seg.labels import MODALITIES
from brats_seg.voxels.shapes import group_by

log = logging.getLogger(__name__)

EXPECTED_LABELS: str = layouts.WORDS["expected_labels"]
"""Names that label maps are looked for by, as words for a message."""

_GRADES = frozenset({"HGG", "LGG"})
"""Names of folders above cases that tell the grade of the tumour."""
_FORBIDDEN = frozenset('/\\:*?"<>|\0')
"""Characters that make a name a path, or that some systems do not allow in names."""
_CONVERT = "convert them (brats-seg convert FOLDER -o SCANS); predict takes a folder of them alone"
_WHY_IGNORED = "their names show no modality and no label map, or their case has other files for it"
_TIMEPOINT = layouts.PATTERNS["timepoint"]
"""Name of a folder that holds one time point of the patient of the folder above."""


def find_cases(
    root: Path, *, label_files: str | None = None, with_labels: bool = True
) -> CaseIndex:
    """Find the cases of all layouts below a folder, or in a table of paths, without opening scans.

    Args:
        root: Folder of scans, or a `.csv` table of their paths.
        label_files: Pattern of the names of the label maps, such as `*_tumour.nii.gz`, or of their
            paths below the folder, such as `masks/*`. By default they are found by their names.
        with_labels: Whether label maps are looked for.

    Raises:
        LayoutError: The folder does not exist, contains no case, or has no file of the pattern.
        UsageError: The table cannot be read, or a pattern is given in addition.

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
    if (is_table := described.is_path_table(root)) and label_files:
        msg = f"{root} names the label maps in its column label: leave out --label-files"
        raise UsageError(msg)
    if is_table:
        cases, notices = list(described.read_path_table(root)), list[str]()
    elif os.path.isdir(root):  # noqa: PTH112 - as above
        cases, notices = _find_below(root, label_files, with_labels=with_labels)
    else:
        msg = (
            f"{root} is a file; expected the folder of scans, or a .csv table of paths. An "
            "archive must be unpacked first. For one case give --t1n, --t1c, --t2w and --t2f."
        )
        raise LayoutError(msg)
    folder = described.data_folder(root)
    complete = [_complete(case, folder, with_label=with_labels) for case in cases]
    checked = [with_id_checked(case, is_file_name=is_table) for case in complete]
    return CaseIndex(root=folder, cases=_sort_cases(checked), notices=tuple(notices))


def find_inputs(
    paths: Sequence[Path], *, convert: Callable[[Path], Iterable[tuple[object, Case]]] | None = None
) -> tuple[Case, ...]:
    """Return the cases in folders and tables of paths, each of which counts once, sorted by id.

    Their roots are absolute, so that a worker on another machine finds the files. Label maps are not
    looked for. Errors of a case are listed in its `problems`. `convert` returns the DICOM examinations
    below a folder and their cases; without it such a folder holds no cases.
    """
    cases: list[Case] = []
    for path in dict.fromkeys(paths):
        if convert is not None and layouts.holds_dicom(path):
            cases += [case for _, case in convert(path)]
            continue
        # neither a lack of label maps nor a choice of them matters to scans that are predicted
        index = find_cases(path, with_labels=False)
        for notice in index.notices:
            log.warning("%s: %s", path, notice)
        cases += [replace(case, root=case.root.absolute()) for case in index.cases]
    if not paths:
        msg = "no folder of scans and no table of their paths is given; expected at least one"
        raise UsageError(msg)
    n_of_id = Counter(case.case_id for case in cases)
    next_step = "Rename or omit all but one: their results would have the same name."
    for i, case in enumerate(cases):
        n, cases[i] = n_of_id[case.case_id], with_id_checked(case, is_file_name=True)
        if n > 1:
            cases[i] = cases[i].with_problem(f"{n} cases of this id", "one", next_step)
    return _sort_cases(cases)


def single_input(case_id: str | None, files: Mapping[str, Path]) -> Case:
    """Return the case of up to four files, given by words for their modalities.

    The default id is the common part of the file names before the modality, or else the name of the
    folder.

    Raises:
        UsageError: A word names no modality, two name the same, or there is no file.
    """
    scans = {kind_named(word): ScanFile(path=path.absolute()) for word, path in files.items()}
    if not 0 < len(scans) == len(files) or not scans.keys() <= {*MODALITIES}:
        msg = f"files are given under the names {', '.join(files) or '(none)'}; expected those of different modalities of {', '.join(MODALITIES)}"
        raise UsageError(msg)
    if case_id is None:
        ids = {name.case for path in files.values() if (name := layouts.parse_file_name(path.name))}
        folder = next(iter(files.values())).absolute().parent.name
        case_id = (ids.pop() if len(ids) == 1 else "") or folder
    case = replace(Case.named(case_id, scans), root=Path("/"))
    return with_id_checked(case, is_file_name=True)


def _sort_cases(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(sorted(cases, key=lambda case: (case.case_id, str(case.images[:1]))))


def with_id_checked(case: Case, *, is_file_name: bool) -> Case:
    """Return a case with what is wrong with its id; files may be called after it."""
    name, n_bytes = case.case_id, len(case.case_id.encode())
    if case.release == releases.MEN_RT:
        problem = "a case of the radiotherapy task, which has one modality and another target"
        next_step = "Leave it out: this task is not supported."
        case = case.with_problem(problem, ", ".join(MODALITIES), next_step)
    if n_bytes > layouts.LONGEST_ID:
        problem, expected = f"an id of {n_bytes} bytes", f"at most {layouts.LONGEST_ID}"
        case = case.with_problem(problem, expected, "Rename the folder and the files of the case.")
    is_plain = name == name.strip().removeprefix(".") != "" and not _FORBIDDEN & set(name)
    if is_file_name and not is_plain:
        problem, expected = f"the id {name!r}, which cannot be the name of a file", "a plain name"
        case = case.with_problem(problem, expected, "Give the case another id.")
    return case


def _complete(case: Case, root: Path, *, with_label: bool) -> Case:
    """Return a case with what does not depend on the layout: data folder, grade and key of its files."""
    files = {kind: scan for kind, scan in case.files.items() if with_label or kind != LABEL}
    above = (name.upper() for name in reversed((root.resolve() / case.folder).parts))
    grade = next((name for name in above if name in _GRADES), "")
    facts = replace(case.facts, grade=grade, files_key=_files_key(case.case_id, files, root))
    return replace(case, root=root, files=files, facts=facts)


def _files_key(case_id: str, files: Mapping[str, ScanFile], root: Path) -> str:
    """Hash the id of a case, which gives the release, and names, sizes and times of change of its files."""
    key = hashlib.sha256(f"{case_id}\n".encode())
    for kind, scan in sorted(files.items()):
        # reading the file reports a dangling link
        state = file_state(root / scan.path) or "unreadable"
        key.update(f"{kind} {scan}\n{state}\n".encode(errors="surrogateescape"))
    return key.hexdigest()[:32]


def _notices(root: Path, folders: Sequence[Folder], unused: Sequence[Path]) -> Iterator[str]:
    """Yield a sentence for each kind of file that is not read: how many, an example, what to do."""
    names = [folder.path / name for folder in folders for name in folder.other_names]
    kinds = [
        (what, [path for path in names if path.name.lower().endswith(tuple(suffixes))], next_step)
        for what, suffixes, next_step in layouts.WORDS["unread"]
    ]
    dicom = [folder.path for folder in folders if layouts.has_dicom(root, folder)]
    kinds.append(("folders of DICOM files are not read", dicom, _CONVERT))
    kinds.append(("NIfTI files were ignored", list(unused), _WHY_IGNORED))
    for what, paths, next_step in kinds:
        if paths:
            example = printable(paths[0].as_posix())
            yield f"{what}, such as {example} ({len(paths)} in all): {next_step}"
    for folder in folders:
        if folder.refused:
            name = printable(folder.path.as_posix())
            yield f"the folder {name} cannot be read ({folder.refused})"


_Candidate: TypeAlias = tuple[NamedFile, bool]
"""A file that may be a label map, and whether it is in another folder than the scans."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """The scans of one case in one folder, perhaps several of one modality."""

    case_id: str
    folder: Path
    scans: Sequence[NamedFile]
    is_named_by_folder: bool = False
    """Whether the id is the name of the folder, because the file names show none."""
    patient_id: str = ""
    """Patient by the folders above; empty if the id shows it."""

    @cached_property
    def images(self) -> dict[str, list[NamedFile]]:
        """Files of each modality, by name; only those of the variant that has one of each, or plain ones."""
        variants = group_by(self.scans, lambda scan: [scan.variant])
        complete = [same for same in variants if sorted(s.kind for s in same) == sorted(MODALITIES)]
        variant = complete[0][0].variant if len(complete) == 1 else ""
        images = {}
        for modality in MODALITIES:
            if files := [scan for scan in self.scans if scan.kind == modality]:
                images[modality] = [scan for scan in files if scan.variant == variant] or files
        return images

    @cached_property
    def names(self) -> set[str]:
        """Names that a label map in the folder of the scans may begin with."""
        prefixes = {files[0].case for files in self.images.values()}
        return {self.case_id, *(prefixes if len(prefixes) == 1 else ())}

    @property
    def rank(self) -> tuple[int, bool]:
        """Rank among the groups of a case: more modalities, then derivatives, which have one grid and no skull."""
        return len(self.images), layouts.is_in_derivatives(self.folder.parent)


def _find_below(
    root: Path, label_files: str | None, *, with_labels: bool
) -> tuple[list[Case], list[str]]:
    """Return the cases of a folder, and sentences about the files that were ignored."""
    folders = [*layouts.walk_folders(root)]
    unique = [_without_packed_copies(_with_label_pattern(f, label_files)) for f in folders]
    cases, groups = _cases_in({folder.path: folder for folder in unique}, root)
    superseded = _find_superseded(groups)
    groups = [*_separate_names([group for group in groups if group not in superseded])]
    of_labels = unique if with_labels else []
    # label maps may be in folders of scans that are superseded
    searched = {group.folder for group in superseded}
    candidates = _label_candidates(groups, of_labels, searched, is_given=label_files is not None)
    cases += [_assemble(group, candidates.get(group, ())) for group in groups]
    used = {scan.path for case in cases for scan in case.files.values()}
    unused = [
        scan.path
        for folder in folders
        for scan in folder.scans
        if scan.path not in used and (with_labels or scan.kind != LABEL)
    ]
    notices = list(_notices(root, folders, unused))
    if not cases:
        msg = (
            f"{root} holds no cases: {'; '.join(notices) or 'it holds no scans'}. Expected a release "
            "of BraTS, UPENN-GBM or UCSF-PDGM, a BIDS data set, the folder of a dataset.json, a table of "
            "paths, or NIfTI files called CASE_t1, CASE_t1ce, CASE_t2 and CASE_flair."
        )
        raise LayoutError(msg)
    if label_files and not any(case.label for case in cases):
        names = some_of([printable(path.as_posix()) for path in unused]) or "none"
        msg = (
            f"no case below {root} has a label map called {label_files!r}; the files that are no scan "
            f"are {names}. Expected a pattern such as '*_tumour.nii.gz', or 'masks/*' for paths; "
            "those of a dataset.json are in its folder labelsTr."
        )
        raise LayoutError(msg)
    return cases, notices


def _find_superseded(groups: Sequence[_Group]) -> list[_Group]:
    """Return the BIDS cases of which another folder of the data set has more modalities, or a derivative."""

    def key(group: _Group) -> tuple[str, str]:
        # data sets of two sites may have the same ids
        within = "(?i)sub-|rawdata|sourcedata|derivatives"
        return re.split(within, group.folder.as_posix(), maxsplit=1)[0], group.case_id

    of_bids = [group for group in groups if releases.release_of(group.case_id) == releases.BIDS]
    best = {key(group): group.rank for group in sorted(of_bids, key=lambda group: group.rank)}
    return [group for group in of_bids if group.rank < best[key(group)]]


def _with_label_pattern(folder: Folder, pattern: str | None) -> Folder:
    """Return a folder with the files that match a pattern, if there is one, as the only label maps."""
    if pattern is None:
        return folder
    scans = []
    for scan in folder.scans:
        text = scan.path.as_posix() if "/" in pattern else scan.path.name
        is_label = fnmatch(text.lower(), pattern.lower())
        if is_label != (scan.kind == LABEL):
            scan = NamedFile(path=scan.path, stem=scan.stem, kind=LABEL if is_label else "")
        # a dataset.json takes whatever is in its folder of label maps
        if scan.kind or not layouts.is_label_folder(folder.path.name):
            scans.append(scan)
    return replace(folder, scans=tuple(scans))


def _without_packed_copies(folder: Folder) -> Folder:
    """Return a folder without `x.nii.gz` where it has `x.nii`, which comes before it."""
    of_stem = {scan.stem: scan for scan in reversed(folder.scans)}
    return replace(folder, scans=tuple(reversed(of_stem.values())))


def _cases_in(folders: Mapping[Path, Folder], root: Path) -> tuple[list[Case], list[_Group]]:
    """Return the cases of descriptions, and the scans of all other cases."""
    in_datasets: set[Path] = set()
    cases: list[Case] = []
    groups: list[_Group] = []
    for path, folder in folders.items():
        has_images = any(path / name in folders for name in ("imagesTr", "imagesTs"))
        if described.DESCRIPTION in folder.other_names and has_images:
            in_datasets |= {path / name for name in described.DATASET_FOLDERS}
            cases += described.cases_of_dataset(root, path, folders)
        elif path not in in_datasets:
            groups += _groups_in(folder, (root.resolve() / path).name)
    return cases, groups


def _groups_in(folder: Folder, name: str) -> list[_Group]:
    """Return the scans of a folder by case; `name` is the name of the folder."""
    scans = [scan for scan in folder.scans if scan.kind in MODALITIES]
    by_id = {same[0].case or name: same for same in group_by(scans, lambda s: [s.case or name])}
    if name in by_id and _has_release(name):
        # the folder of one case: files with other names are derived from it
        by_id = {name: by_id[name]}
    elif _is_one_case(by_id, is_root=folder.path == Path()):
        return [_Group(case_id=name, folder=folder.path, scans=scans, is_named_by_folder=True)]
    return [_Group(case_id=key, folder=folder.path, scans=scans) for key, scans in by_id.items()]


def _is_one_case(by_id: Mapping[str, Sequence[NamedFile]], *, is_root: bool) -> bool:
    """Return whether the scans of a folder, by the ids in their names, are one case, named by the folder."""
    if any(map(_has_release, by_id)):
        return False
    if len(by_id) == 1:
        # in the data folder itself the only case is called as it would be among others
        return not is_root or any(map(_TIMEPOINT.fullmatch, by_id))
    kinds = [scan.kind for scans in by_id.values() for scan in scans]
    return 0 < len({*kinds}) == len(kinds)


def _has_release(case_id: str) -> bool:
    return releases.parse_case_id(case_id)[0] != releases.UNKNOWN


def _separate_names(groups: Sequence[_Group]) -> Iterator[_Group]:
    """Yield the groups, those of folders of one name, and of time points, named after the folders above.

    `A/raw` and `B/raw` become the cases `A` and `B`. The folder above precedes the name of a time point,
    and of a folder that has others beside it: `A/week1` becomes `A_week1`, and so does `A/week1/raw` if there
    is another `raw`, both of the patient `A`. Folders directly below the data folder keep their names.
    """
    named = [group for group in groups if group.is_named_by_folder]
    names = Counter(group.case_id for group in named)
    times = set(filter(_TIMEPOINT.fullmatch, names))
    is_each_once = all(names[name] == 1 for name in times)
    if is_each_once:
        # the number of a scan may be that of a patient
        times = {name for name in times if "scan" not in name.lower()}
    same = times.union(name for name, n in names.items() if n > 1)
    folders = {group.folder.parent for group in named if group.case_id in same} - {Path()}
    n_above = Counter(folder.name for folder in folders)
    n_below = Counter(group.folder.parent for group in groups)
    # one folder may hold the dates of many patients
    may_be_many = is_each_once and len({group.folder.parent for group in named}) == 1
    for group in groups:
        above = group.folder.parent
        if not group.is_named_by_folder or above not in folders:
            yield group
            continue
        is_time, is_below_time = (_TIMEPOINT.fullmatch(n) for n in (group.case_id, above.name))
        # folders above of one name, and time points, are distinguished by their whole path
        is_enough = n_above[above.name] == 1 and not is_below_time
        name = patient = above.name if is_enough else "_".join(above.parts)
        if is_time or n_below[above] > 1:
            name = f"{name}_{group.case_id}"
            if not is_time or above.name.upper() in _GRADES or (may_be_many and name[-1].isdigit()):
                patient = name
        elif is_below_time:
            patient = above.parent.name
        yield replace(group, case_id=name, patient_id=releases.parse_case_id(patient)[1])


def _prefixes(stem: str) -> list[str]:
    """Return a name and what remains of it without its last word, its last two, and so on."""
    ends = [boundary.start() for boundary in re.finditer("[^a-zA-Z0-9]", stem)]
    return [stem[:end] for end in (None, *reversed(ends))]


def _label_candidates(
    groups: Sequence[_Group], folders: Sequence[Folder], searched: set[Path], *, is_given: bool
) -> Mapping[_Group, Sequence[_Candidate]]:
    """Return the files that may be the label map of each case.

    They are in the folders of the scans, in folders called after label maps, in derivatives and in the folders
    to be searched in addition, or in any folder if a pattern names them. Their names are the ids of cases, or
    those of their folders where the id is made of the folders above.
    """
    in_folder = {same[0].folder: same for same in group_by(groups, lambda group: [group.folder])}
    owners: defaultdict[str, list[_Group]] = defaultdict(list)
    for group in groups:
        for name in {group.case_id, *(group.folder.parts[-1:] if group.is_named_by_folder else ())}:
            owners[name].append(group)
    candidates: defaultdict[_Group, list[_Candidate]] = defaultdict(list)
    for folder in folders:
        path, same_folder = folder.path, in_folder.get(folder.path, [])
        is_searched = is_given or path in searched or layouts.is_in_derivatives(path)
        if same_folder or is_searched or any(map(layouts.is_label_folder, path.parts)):
            for scan in folder.scans:
                names = () if same_folder else _owner_names(scan, folder, is_given=is_given)
                apart = next((owners[name] for name in names if name in owners), [])
                for group in _cases_of(scan, same_folder) if same_folder else _nearest(apart, scan):
                    candidates[group].append((scan, not same_folder))
    return candidates


def _cases_of(scan: NamedFile, groups: Sequence[_Group]) -> Sequence[_Group]:
    """Return the cases of a folder that a file in it may be the label map of."""
    if scan.kind != LABEL:
        return ()
    # a file that a pattern names begins with the id of its case, which others may begin with
    for name in (scan.case,) if scan.case else _prefixes(scan.stem):
        if named := [group for group in groups if name in group.names]:
            return named
    return groups if len(groups) == 1 else ()


def _nearest(groups: Sequence[_Group], scan: NamedFile) -> Sequence[_Group]:
    """Return the cases whose folders differ least from the path of a file: those of its site and its patient."""
    names = {*scan.path.parent.parts, scan.stem}
    n_different = {group: len(names ^ {*group.folder.parts}) for group in groups}
    return [group for group, n in n_different.items() if n == min(n_different.values())]


def _owner_names(scan: NamedFile, folder: Folder, *, is_given: bool) -> Sequence[str]:
    """Return the names by which a file in a folder of label maps may belong to a case, likelier first."""
    is_label, in_derivatives = scan.kind == LABEL, layouts.is_in_derivatives(folder.path)
    if not is_label and (is_given or scan.kind or in_derivatives):
        return ()
    names = [scan.case, *(_prefixes(scan.stem) if is_given else [scan.stem])]
    if not in_derivatives and (is_label or len(folder.scans) == 1):
        names += reversed(folder.path.parts)
    return list(filter(None, names))


def _assemble(group: _Group, candidates: Sequence[_Candidate]) -> Case:
    """Return a case with the first file of each modality, and the likeliest label map."""
    case = Case.named(group.case_id, {})
    case = replace(case, patient_id=group.patient_id or case.patient_id)
    next_step = "Remove or rename the other, or list the files of the cases in a table of paths."
    for kind, files in group.images.items():
        case = _with_file(case, kind, files, next_step)
    ranked = defaultdict(list)
    for scan, is_apart in candidates:
        # folders of a release have files that are named after something else
        if is_apart or scan.case in ("", *group.names) or case.release == releases.UNKNOWN:
            ranked[_label_rank(scan, is_apart=is_apart)].append(scan)
    if ranked:
        next_step = "Remove or rename the others, or name the right ones with --label-files."
        return _with_file(case, LABEL, ranked[min(ranked)], next_step)
    if len(candidates) == 1:
        # the label map of case 355 of BraTS 2020 is W39_1998.09.19_Segm.nii
        file = candidates[0][0]
        remark = f"{file.path.name} was taken as the label map, although its name does not say so"
        return replace(_with_file(case, LABEL, [file], next_step), remarks=(remark,))
    return case


def _label_rank(scan: NamedFile, *, is_apart: bool) -> tuple[bool, ...]:
    """Return the order in which label maps are taken: the smallest comes first."""
    return (
        is_apart,
        # a mask may be of the brain
        scan.stem.lower().endswith("mask"),
        layouts.PATTERNS["automated"].search(scan.path.as_posix()) is not None,
        layouts.PATTERNS["tumour"].search(scan.stem) is None,
    )


def _with_file(case: Case, kind: str, files: Sequence[NamedFile], next_step: str) -> Case:
    """Add the first of some files; any other file is a problem."""
    paths = [file.path for file in files]
    case = replace(case, files={**case.files, kind: ScanFile(path=paths[0])})
    if len(paths) == 1:
        return case
    is_apart = len({path.parent for path in paths}) > 1
    names = " and ".join(str(path) if is_apart else path.name for path in paths)
    problem = f"{len(paths)} files for {'label map' if kind == LABEL else kind}"
    return case.with_problem(problem, "one", next_step, names)
