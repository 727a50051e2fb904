"""Find the cases below a folder by the names of files and folders, without opening a scan.

Files belong together if the same text precedes the modality in their names: it is the id of the case.
If it is the id of no release, a folder with one file of each modality is one case with the name of the
folder; folders of one name are named after those above. A label map lies beside its scans, in a folder
called `labels`, `masks` or alike, or in the derivatives of a BIDS data set, and its name begins with the
id of the case. Results of this package, which a file `brats_seg.json` marks, and hidden files are no scans.
"""

import hashlib
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.described import (
    DATASET_FOLDERS,
    DESCRIPTION,
    cases_of_dataset,
    data_folder,
    is_path_table,
    name_problems,
    read_path_table,
)
from brats_seg.cases.layouts import (
    BIDS,
    DERIVATIVES,
    LABEL,
    MEN_RT,
    UNKNOWN,
    NamedFile,
    grade_of,
    is_label_folder,
    parse_case_id,
    parse_file_name,
)
from brats_seg.errors import CaseError, LayoutError, UsageError, counted, printable, some_of
from brats_seg.files import check_regular
from brats_seg.labels import MODALITIES

log = logging.getLogger(__name__)

LONGEST_ID = 200
"""Bytes of the longest case id: a file name has 255, and results add a few words and a suffix."""
OUTPUT_MARKER = "brats_seg.json"
"""Name of the file that marks a folder of results."""
EXPECTED_LABELS = (
    "CASE_seg, -seg, _segm, _segmentation, _dseg, _label, _gt or _mask beside the scans, and CASE "
    "or such a name in a folder called labels, masks, segmentations or alike"
)
"""Names that label maps are looked for by, as words for a message."""

_MAC_FOLDER = "__MACOSX"
_DICOM = (".dcm", ".ima")
_DICOM_MAGIC = b"DICM"
_DICOM_MAGIC_START = 128
_UNREAD = (
    (
        "archives are not read",
        (".tar", ".tgz", ".zip", ".gz", ".bz2", ".xz", ".7z", ".rar"),
        "unpack them (tar -xf FILE -C FOLDER, or unzip FILE -d FOLDER) and give that folder",
    ),
    (
        "HDF5 files are not read",
        (".h5", ".hdf5"),
        "they hold 2-D slices, and whole volumes are needed (on Kaggle "
        "awsaf49/brats20-dataset-training-validation instead of awsaf49/brats2020-training-data)",
    ),
)
_CONVERT = (
    "convert them (brats-seg convert FOLDER -o SCANS) and give the folder SCANS; predict takes them "
    "as they are"
)
_WHY_SUPERSEDED = (
    "another folder of the data set has more of their modalities, or a derivative of them"
)
_WHY_IGNORED = "their names show no modality and no label map, or their case has other files for it"
_EXPECTED_NAMES = "CASE_t1, CASE_t1ce, CASE_t2 and CASE_flair, or CASE-t1n, -t1c, -t2w and -t2f"

_TIMEPOINT = re.compile(
    r"(ses|session|tp|time|timepoint|visit|week|day|month|year|scan|baseline|fu|follow[-_ ]?up|pre"
    r"|post)([-_ ]?op)?[-_ ]?\d*|\d{8}|\d{4}-\d\d-\d\d",
    re.IGNORECASE,
)
"""Name of a folder that holds one time point of the patient of the folder above."""
_SPACE = re.compile(r"(?:^|_)space-([^_]+)")
_TUMOUR = re.compile(r"tumou?r|lesion|gliom", re.IGNORECASE)
_AUTOMATED = re.compile(r"(?<![a-z])auto(?![a-z]|$)|automat", re.IGNORECASE)
_BOUNDARY = re.compile(r"[^a-zA-Z0-9]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """The cases below a data folder."""

    cases: tuple[Case, ...]
    """Cases in the order of their ids; no file has been opened."""
    notices: tuple[str, ...]
    """Files that were ignored although they may be scans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """One folder, without its subfolders."""

    path: Path
    """Path relative to the data folder."""
    scans: tuple[NamedFile, ...] = ()
    others: tuple[str, ...] = ()
    """Names of the files that are not NIfTI."""
    refused: str = ""
    """Reason why the folder cannot be listed; empty if it can."""


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
        cases, notices = list(read_path_table(root)), list[str]()
    elif os.path.isdir(root):  # noqa: PTH112 - as above
        cases, notices = _find_below(root, label_files, with_labels=with_labels)
    else:
        msg = (
            f"{root} is a file; expected the folder of scans, or a .csv or .json table of paths. An "
            "archive must be unpacked first. For one case give --t1n, --t1c, --t2w and --t2f."
        )
        raise LayoutError(msg)
    completed = [_with_key(case, data_folder(root), with_label=with_labels) for case in cases]
    return Discovery(cases=_sorted(completed), notices=tuple(notices))


def find_inputs(
    paths: Sequence[Path], *, of_dicom: Callable[[Path], Sequence[Case]] | None = None
) -> tuple[Case, ...]:
    """Return the cases in folders and tables of paths, sorted by id.

    Their roots are absolute, so that a worker on another machine finds the files. Label maps are not
    looked for. Errors of a case are listed in its `problems`.
    """
    cases = [case for path in paths for case in _inputs_of(path, of_dicom)]
    if not cases:
        msg = f"{', '.join(map(str, paths)) or 'the input'} lists no cases; expected at least one"
        raise UsageError(msg)
    n_of_id = Counter(case.case_id for case in cases)
    return _sorted(_checked_input(case, n_of_id[case.case_id]) for case in cases)


def single_input(case_id: str | None, files: Mapping[str, Path]) -> Case:
    """Return the case of four files, given by modality.

    The default id is the common part of the file names before the modality, or else the name of the
    folder.
    """
    if case_id is None:
        names = [parse_file_name(path.name) for path in files.values()]
        ids = {name.case for name in names if name}
        folder = next(iter(files.values())).absolute().parent.name
        case_id = (ids.pop() if len(ids) == 1 else "") or folder
    scans = {modality: ScanFile(path=path.absolute()) for modality, path in files.items()}
    case = Case.named(case_id, scans)
    problems = tuple(_id_problems(case))
    return _checked_input(replace(case, root=Path("/"), problems=problems), 1)


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
            cases = find_cases(place).cases
        except LayoutError as error:
            log.warning("%s", error)
            continue
        if labelled := [case for case in cases if case.label]:
            return _folder_of(place, labelled)
        log.warning("%s holds %s, and no label map", place, counted(len(cases), "case"))
    return None


def walk_folders(root: Path) -> Iterator[Folder]:
    """Yield the folders below `root` in alphabetical order, each once; links are followed."""
    seen: set[tuple[int, int]] = set()
    pending = [Path()]
    while pending:
        path = pending.pop()
        try:
            status = (root / path).stat()
            entries = sorted(os.scandir(root / path), key=lambda entry: entry.name)
        except OSError as error:
            yield Folder(path=path, refused=error.strerror or "")
            continue
        identity = (status.st_dev, status.st_ino)
        # the data folder itself is read in any case: the user has named it
        is_output = path != Path() and any(entry.name == OUTPUT_MARKER for entry in entries)
        if identity not in seen and not is_output:
            seen.add(identity)
            folder, below = _sorted_out(path, entries)
            yield folder
            pending += reversed(below)


def holds_dicom(root: Path) -> bool:
    """Return whether DICOM files are below a folder, and no NIfTI file is."""
    has_dicom = False
    for folder in walk_folders(root):
        if folder.scans:
            return False
        has_dicom = has_dicom or bool(_dicom_files(root, folder))
    return has_dicom


def _inputs_of(path: Path, of_dicom: Callable[[Path], Sequence[Case]] | None) -> Iterator[Case]:
    if of_dicom is not None and os.path.isdir(path) and holds_dicom(path):  # noqa: PTH112
        yield from of_dicom(path)
        return
    # neither a lack of label maps nor a choice of them matters to scans that are predicted
    discovery = find_cases(path, with_labels=False)
    for notice in discovery.notices:
        log.warning("%s: %s", path, notice)
    for case in discovery.cases:
        yield replace(case, root=case.root.absolute())


def _checked_input(case: Case, n_of_id: int) -> Case:
    problems = [*case.problems, *name_problems(case)]
    if n_of_id > 1:
        next_step = "Rename or omit all but one: their results would have the same name."
        found = f"{n_of_id} cases of this id"
        problems.append(str(CaseError(case.case_id, case.location, found, "one", next_step)))
    # those of a table have been found before
    return replace(case, problems=tuple(dict.fromkeys(problems)))


def _sorted(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(sorted(cases, key=lambda case: (case.case_id, str(case.images[:1]))))


def _id_problems(case: Case) -> Iterator[str]:
    """Yield what is wrong with a case whose id names another task, or cannot name its results."""
    if case.release == MEN_RT:
        found = "a case of the radiotherapy task, which has one modality and another target"
        next_step = "Leave it out: this task is not supported."
        yield str(CaseError(case.case_id, case.location, found, ", ".join(MODALITIES), next_step))
    n_bytes = len(case.case_id.encode())
    if n_bytes > LONGEST_ID:
        found, expected = f"an id of {n_bytes} bytes", f"at most {LONGEST_ID}"
        next_step = "Rename the folder and the files of the case."
        yield str(CaseError(case.case_id, case.location, found, expected, next_step))


def _with_key(case: Case, root: Path, *, with_label: bool) -> Case:
    """Add what does not depend on the layout."""
    files = {kind: scan for kind, scan in case.files.items() if with_label or kind != LABEL}
    grade = grade_of(reversed((root.resolve() / case.folder).parts))
    facts = replace(case.facts, grade=grade, files_key=_files_key(files, root))
    problems = (*case.problems, *_id_problems(case))
    return replace(case, root=root, files=files, problems=problems, facts=facts)


def _files_key(files: Mapping[str, ScanFile], root: Path) -> str:
    """Hash names, sizes and times of change of the files of a case."""
    key = hashlib.sha256()
    for kind, scan in sorted(files.items()):
        key.update(f"{kind} {scan}\n".encode(errors="surrogateescape"))
        try:
            status = (root / scan.path).stat()
            key.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
        except OSError:
            # a dangling link: reading the file reports it
            key.update(b"unreadable\n")
    return key.hexdigest()[:32]


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


def _sorted_out(path: Path, entries: list[os.DirEntry[str]]) -> tuple[Folder, list[Path]]:
    """Separate scans, other files and the folders to visit."""
    scans, others, below = [], [], []
    for entry in entries:
        # archives made on a Mac contain a `._x.nii.gz` beside every `x.nii.gz`
        if entry.name.startswith(".") or entry.name == _MAC_FOLDER:
            continue
        file = parse_file_name(entry.name, path / entry.name)
        if not _is_folder(entry):
            if file:
                scans.append(file)
            else:
                others.append(entry.name)
        elif file and (inner := _only_file(Path(entry.path))):
            # Kaggle unpacks some archives to x.nii/y.nii, where the name of the folder is right
            scans.append(replace(file, path=file.path / inner))
        else:
            below.append(path / entry.name)
    return Folder(path=path, scans=tuple(scans), others=tuple(others)), below


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # a link that leads to itself: reading the file reports it
        return False


def _only_file(folder: Path) -> str:
    """Return the name of the only entry of a folder if it is a file, else nothing."""
    try:
        inside = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        if len(inside) == 1:
            check_regular(inside[0])
            return inside[0].name
    except OSError:
        pass
    return ""


def _dicom_files(root: Path, folder: Folder) -> list[Path]:
    """Return the DICOM files; scanners omit the suffix or write numbers after a dot."""
    named = [n for n in folder.others if n.lower().endswith(_DICOM) or n.upper() == "DICOMDIR"]
    bare = [n for n in folder.others if Path(n).suffix[1:].isdecimal() or not Path(n).suffix]
    bare = [n for n in bare if n not in named]
    # one file is checked for all of the folder, as there may be thousands
    if bare and not _is_dicom(root / folder.path / bare[0]):
        bare = []
    return [folder.path / name for name in sorted(named + bare)]


def _is_dicom(path: Path) -> bool:
    try:
        check_regular(path)
        with path.open("rb") as stream:
            stream.seek(_DICOM_MAGIC_START)
            return stream.read(len(_DICOM_MAGIC)) == _DICOM_MAGIC
    except OSError:
        return False


def _notes_on_unread(root: Path, folders: Collection[Folder]) -> Iterator[str]:
    """Yield a sentence for each kind of unread file: how many there are and what to do."""
    names = [folder.path / name for folder in folders for name in folder.others]
    for what, suffixes, next_step in _UNREAD:
        paths = [path for path in names if path.name.lower().endswith(suffixes)]
        yield from _noted(what, paths, next_step)
    dicom = [path for folder in folders for path in _dicom_files(root, folder)]
    yield from _noted("DICOM files are not read", dicom, _CONVERT)
    for folder in folders:
        if folder.refused:
            name = printable(folder.path.as_posix())
            yield f"the folder {name} cannot be read ({folder.refused})"


def _noted(what: str, paths: Sequence[Path], next_step: str) -> Iterator[str]:
    """Yield a sentence about files, with their number and an example, if there are any."""
    if paths:
        example = printable(paths[0].as_posix())
        yield f"{what}, such as {example} ({len(paths)} in all): {next_step}"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """The scans of one case in one folder, perhaps several of one modality."""

    case_id: str
    folder: Path
    scans: tuple[NamedFile, ...]
    is_named_by_folder: bool = False
    """Whether the id is the name of the folder, because the file names show none."""
    patient_id: str = ""
    """Patient by the folders above; empty if the id shows it."""
    timepoint: str = ""

    @cached_property
    def candidates(self) -> dict[str, list[NamedFile]]:
        """Files of each modality that is there, those of one variant first, the plainest first."""
        variant = _common_variant(self.scans)
        found = {}
        for modality in MODALITIES:
            files = [scan for scan in self.scans if scan.kind == modality]
            of_variant = [scan for scan in files if scan.variant == variant]
            if files:
                found[modality] = sorted(of_variant or files, key=_uncompressed_first)
        return found

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names that a label map of the case may begin with."""
        prefixes = {files[0].case for files in self.candidates.values()}
        return (self.case_id, *(prefixes if len(prefixes) == 1 else ()))

    @cached_property
    def space(self) -> str:
        """Coordinate space that BIDS names state for all of the scans; empty if they state none."""
        spaces = {_space_of(files[0]) for files in self.candidates.values()}
        return spaces.pop() if len(spaces) == 1 else ""

    @property
    def worth(self) -> tuple[int, bool]:
        """Number of modalities; derivatives are on one grid and without the skull."""
        return len({scan.kind for scan in self.scans}), DERIVATIVES in self.folder.parent.parts

    @property
    def patient(self) -> str:
        """Patient by the folders above, or else by the id."""
        return self.patient_id or parse_case_id(self.case_id).patient_id


def _find_below(
    root: Path, label_files: str | None, *, with_labels: bool
) -> tuple[list[Case], list[str]]:
    """Return the cases of a folder, and sentences about the files that were ignored."""
    walked = list(walk_folders(root))
    folders = [_with_label_pattern(f, label_files) for f in walked] if label_files else walked
    described, found = _cases_in({folder.path: folder for folder in folders}, root)
    superseded = _superseded(found)
    kept = [group for group in found if group not in superseded]
    groups = _named_apart(kept, root.resolve().name)
    searched = folders if with_labels else []
    labelled = _with_labels(groups, searched, superseded, is_given=bool(label_files))
    cases = [*described, *labelled]
    of_superseded = [scan.path for group in superseded for scan in group.scans]
    used = {scan.path for case in cases for scan in case.files.values()} | set(of_superseded)
    scans = [scan for folder in folders for scan in folder.scans if scan.path not in used]
    unused = [scan.path for scan in scans if with_labels or scan.kind != LABEL]
    notices = [
        *_notes_on_unread(root, folders),
        *_notes_on_names(kept, groups),
        *_noted("scans of BIDS cases were ignored", of_superseded, _WHY_SUPERSEDED),
        *_noted("NIfTI files were ignored", unused, _WHY_IGNORED),
    ]
    if not cases:
        msg = (
            f"{root} holds no cases: {'; '.join(notices) or 'it holds no scans'}. Expected a release "
            "of BraTS, UPENN-GBM, UCSF-PDGM, a BIDS data set, the decathlon's Task01_BrainTumour, a "
            f".csv or .json table of paths, or NIfTI files called {_EXPECTED_NAMES}."
        )
        raise LayoutError(msg)
    if label_files and not any(case.label for case in cases):
        others = some_of([printable(path.as_posix()) for path in unused]) or "none"
        msg = (
            f"no case below {root} has a label map called {label_files!r}; the files that are no "
            f"scan are {others}. Expected a pattern of names, such as '*_tumour.nii.gz', or of paths "
            "below the folder, such as 'masks/*'; the names begin with the id of the case, or its "
            "folder holds them."
        )
        raise LayoutError(msg)
    return cases, notices


def _superseded(groups: Sequence[_Group]) -> list[_Group]:
    """Return the BIDS cases of which another folder has more modalities, or a derivative."""
    most = {group.case_id: group.worth for group in sorted(groups, key=lambda group: group.worth)}
    return [
        group
        for group in groups
        if group.worth < most[group.case_id] and parse_case_id(group.case_id).release == BIDS
    ]


def _with_label_pattern(folder: Folder, pattern: str) -> Folder:
    """Return a folder with the files that match a pattern as the only label maps."""

    def renamed(scan: NamedFile) -> NamedFile:
        text = scan.path.as_posix() if "/" in pattern else scan.path.name
        is_label = fnmatch(text.lower(), pattern.lower())
        if is_label == (scan.kind == LABEL):
            return scan
        return NamedFile(path=scan.path, stem=scan.stem, kind=LABEL if is_label else "")

    return replace(folder, scans=tuple(map(renamed, folder.scans)))


def _cases_in(folders: Mapping[Path, Folder], root: Path) -> tuple[list[Case], list[_Group]]:
    """Return the cases of descriptions, and the scans of all other cases."""
    of_datasets: set[Path] = set()
    described: list[Case] = []
    groups: list[_Group] = []
    for path, folder in folders.items():
        if DESCRIPTION in folder.others and path / DATASET_FOLDERS[0] in folders:
            parts = {name: folders.get(path / name, Folder(path=path)) for name in DATASET_FOLDERS}
            of_datasets |= {path / name for name in DATASET_FOLDERS}
            scans = {name: part.scans for name, part in parts.items()}
            described += cases_of_dataset(root, path, scans)
        elif path not in of_datasets:
            groups += _groups_in(folder, (root.resolve() / path).name)
    return described, groups


def _groups_in(folder: Folder, name: str) -> Iterator[_Group]:
    """Yield the scans of a folder by case; `name` is the name of the folder."""
    by_id: defaultdict[str, list[NamedFile]] = defaultdict(list)
    for scan in folder.scans:
        if scan.kind in MODALITIES:
            by_id[scan.case or name].append(scan)
    scans = tuple(scan for group in by_id.values() for scan in group)
    is_one = len(by_id) == 1 or len({scan.kind for scan in scans}) == len(scans)
    if name in by_id and parse_case_id(name).release != UNKNOWN:
        # the folder of one case: files with other names are derived from it
        yield _Group(case_id=name, folder=folder.path, scans=tuple(by_id[name]))
    elif by_id and is_one and all(parse_case_id(key).release == UNKNOWN for key in by_id):
        yield _Group(case_id=name, folder=folder.path, scans=scans, is_named_by_folder=True)
    else:
        for case_id, group in by_id.items():
            yield _Group(case_id=case_id, folder=folder.path, scans=tuple(group))


def _named_apart(groups: Sequence[_Group], root_name: str) -> list[_Group]:
    """Return the groups, those of folders of one name named after the folders above.

    `A/raw` and `B/raw` become the cases `A` and `B`. A folder above that holds other cases too
    precedes the name: `A/week1` and `A/week2` become `A_week1` and `A_week2`, of the patient `A`.
    Folders directly below the data folder keep their names.
    """
    by_folder = [group for group in groups if group.is_named_by_folder]
    n_of_name = Counter(group.case_id for group in by_folder)
    same = {name for name, n in n_of_name.items() if n > 1}
    if any(map(_TIMEPOINT.fullmatch, same)):
        same |= {name for name in n_of_name if _TIMEPOINT.fullmatch(name)}
    above = {group.folder.parent for group in by_folder if group.case_id in same} - {Path()}
    names = _shortest_names(above, root_name)
    n_below = Counter(group.folder.parent for group in groups)
    return [
        _named_after(names[group.folder.parent], group, n_below[group.folder.parent])
        if group.is_named_by_folder and group.folder.parent in names
        else group
        for group in groups
    ]


def _shortest_names(folders: Iterable[Path], root_name: str) -> dict[Path, str]:
    """Return for each folder the fewest of its last names, joined, that no other one has."""
    parts = {folder: (root_name, *folder.parts) for folder in folders}
    names: dict[Path, str] = {}
    for n in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {folder: "_".join(words[-n:]) for folder, words in parts.items()}
        if len(set(names.values())) == len(names):
            break
    return names


def _named_after(above: str, group: _Group, n_below: int) -> _Group:
    """Return a group with the name of the folder above, which holds `n_below` cases."""
    is_timepoint = _TIMEPOINT.fullmatch(group.case_id) is not None
    return replace(
        group,
        case_id=above if n_below == 1 else f"{above}_{group.case_id}",
        patient_id=parse_case_id(above).patient_id if is_timepoint or n_below == 1 else "",
        timepoint=group.case_id if is_timepoint else "",
    )


def _notes_on_names(before: Sequence[_Group], after: Sequence[_Group]) -> Iterator[str]:
    """Yield a sentence about the cases that were named after the folders above their own."""
    pairs = zip(before, after, strict=True)
    changed = [(old.case_id, new) for old, new in pairs if old.case_id != new.case_id]
    if changed:
        folders, example = sorted({old for old, _ in changed}), changed[0][1]
        yield (
            f"several folders are called {some_of(folders)}: {len(changed)} cases are named after the "
            f"folders above, such as {example.case_id} in {example.folder.as_posix()}/"
        )


def _common_variant(scans: Sequence[NamedFile]) -> str:
    """Return the variant that has one file of every modality, if it is the only one; else nothing."""
    files: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for scan in scans:
        files[scan.variant].add((scan.kind, scan.stem))
    whole = [
        variant
        for variant, found in files.items()
        if len(found) == len({kind for kind, _ in found}) == len(MODALITIES)
    ]
    return whole[0] if len(whole) == 1 else ""


def _uncompressed_first(scan: NamedFile) -> tuple[Path, bool]:
    return scan.path.with_name(scan.stem), scan.path.suffix.lower() == ".gz"


def _space_of(scan: NamedFile) -> str:
    match = _SPACE.search(scan.variant)
    return match[1] if match else ""


def _cuts(stem: str) -> Iterator[str]:
    """Yield a name and what remains of it without its last word, its last two, and so on."""
    yield stem
    for boundary in reversed(list(_BOUNDARY.finditer(stem))):
        yield stem[: boundary.start()]


def _with_labels(
    groups: Sequence[_Group],
    folders: Sequence[Folder],
    superseded: Sequence[_Group],
    *,
    is_given: bool,
) -> Iterator[Case]:
    """Yield the cases with their label maps; none are looked for without folders.

    Folders of superseded scans are searched although their names do not say so, and all folders if a
    pattern names the label maps.
    """
    in_folder, of_id, of_patient = (defaultdict[object, list[_Group]](list) for _ in range(3))
    for group in groups:
        in_folder[group.folder].append(group)
        of_id[group.case_id].append(group)
        of_patient[group.patient].append(group)
    of_name = {name: same for name, same in of_patient.items() if len(same) == 1} | of_id
    label_folders = {group.folder for group in superseded}
    candidates: defaultdict[_Group, list[tuple[NamedFile, bool]]] = defaultdict(list)
    unnamed: dict[Path, list[NamedFile]] = {}
    for folder in folders:
        path, beside = folder.path, in_folder.get(folder.path, [])
        is_searched = is_given or path in label_folders or DERIVATIVES in path.parts
        if len(beside) == 1:
            unnamed[path] = [scan for scan in folder.scans if not scan.kind]
        if not beside and not is_searched and not any(map(is_label_folder, path.parts)):
            continue
        for scan in folder.scans:
            names = () if beside else _owner_names(scan, folder, is_given=is_given)
            apart = next((of_name[name] for name in names if name in of_name), [])
            for group in _beside(scan, beside) if beside else apart:
                candidates[group].append((scan, not beside))
    for group in groups:
        yield _labelled(group, candidates[group], unnamed.get(group.folder, []))


def _beside(scan: NamedFile, groups: Sequence[_Group]) -> Sequence[_Group]:
    """Return the case of a folder that a file beside the scans is the label map of."""
    if scan.kind != LABEL:
        return ()
    # a file that a pattern names begins with the id of its case, which others may begin with
    begun = (scan.case,) if scan.case else _cuts(scan.stem)
    for name in begun:
        if named := [group for group in groups if name in group.names]:
            return named if scan.case else named[:1]
    return groups if len(groups) == 1 else ()


def _owner_names(scan: NamedFile, folder: Folder, *, is_given: bool) -> Sequence[str]:
    """Return the names by which a file in a folder of label maps may belong to a case, likelier first."""
    is_label, in_derivatives = scan.kind == LABEL, DERIVATIVES in folder.path.parts
    if not is_label and (is_given or scan.kind or in_derivatives):
        return ()
    names = [scan.case, *(_cuts(scan.stem) if is_given else [scan.stem])]
    if not in_derivatives and (is_label or len(folder.scans) == 1):
        names += reversed(folder.path.parts)
    return list(filter(None, names))


def _labelled(
    group: _Group, candidates: Sequence[tuple[NamedFile, bool]], unnamed: Sequence[NamedFile]
) -> Case:
    """Return a case with its label map.

    Candidates are files, and whether they are in another folder than the scans; `unnamed` are the
    files of no kind beside the scans, if these are the only case of the folder.
    """
    case = _assembled(group)
    foreign = []
    ranked = defaultdict(list)
    for scan, is_apart in candidates:
        # beside the scans of a release lie files that are named after something else
        if scan.case not in ("", *group.names) and not is_apart and case.release != UNKNOWN:
            foreign.append(scan)
        else:
            ranked[_label_rank(scan, group, is_apart=is_apart)].append(scan)
    if not ranked:
        return _with_misnamed(case, [*unnamed, *foreign])
    files = sorted(ranked[min(ranked)], key=_uncompressed_first)
    next_step = "Remove or rename the others, or name the right ones with --label-files."
    case = _with_file(case, LABEL, files, next_step)
    if _AUTOMATED.search(files[0].path.as_posix()):
        remark = "the label map was made by a program, as its name says"
        case = replace(case, remarks=(*case.remarks, remark))
    return case


def _label_rank(scan: NamedFile, group: _Group, *, is_apart: bool) -> tuple[bool, ...]:
    """Return the order in which label maps are taken: the smallest comes first."""
    return (
        is_apart,
        _space_of(scan) != group.space,
        # a mask may be of the brain
        scan.stem.lower().endswith("mask"),
        _AUTOMATED.search(scan.path.as_posix()) is not None,
        _TUMOUR.search(scan.stem) is None,
    )


def _with_misnamed(case: Case, others: Sequence[NamedFile]) -> Case:
    """Add the only file whose name is no modality's, if the case should have a label map.

    The label map of case 355 of BraTS 2020 is `W39_1998.09.19_Segm.nii`. A file that is named after
    the case but not after a segmentation, such as a brain mask, is something else.
    """
    is_release = parse_case_id(case.case_id).release != UNKNOWN
    if not is_release or "validation" in case.case_id.lower() or len(others) != 1:
        return case
    stem, path = others[0].stem.lower(), others[0].path
    if stem.startswith(case.case_id.lower()) and ("seg" not in stem or "brain" in stem):
        return case
    remark = f"{path.name} was taken as the label map, although its name does not say so"
    files = {**case.files, LABEL: ScanFile(path=path)}
    return replace(case, files=files, remarks=(*case.remarks, remark))


def _assembled(group: _Group) -> Case:
    """Return a case with the first file of each modality."""
    case = Case.named(group.case_id, {})
    case = replace(
        case,
        patient_id=group.patient_id or case.patient_id,
        timepoint=group.timepoint or case.timepoint,
    )
    next_step = "Remove or rename the other, or list the files of the cases in a table of paths."
    for kind, files in group.candidates.items():
        case = _with_file(case, kind, files, next_step)
    return case


def _with_file(case: Case, kind: str, files: Sequence[NamedFile], next_step: str) -> Case:
    """Add the first of some files; a packed copy of it is ignored, any other file is a problem."""
    chosen, others, remarks = files[0], list[NamedFile](), list[str]()
    for scan in files[1:]:
        if _uncompressed_first(scan)[0] == _uncompressed_first(chosen)[0]:
            remarks.append(f"{scan.path.name} was ignored in favour of {chosen.path.name}")
        else:
            others.append(scan)
    problems = []
    if others:
        paths = [scan.path for scan in (chosen, *others)]
        apart = len({path.parent for path in paths}) > 1
        names = " and ".join(str(path) if apart else path.name for path in paths)
        found = f"{len(paths)} files for {'label map' if kind == LABEL else kind}"
        problems.append(str(CaseError(case.case_id, names, found, "one", next_step)))
    return replace(
        case,
        files={**case.files, kind: ScanFile(path=chosen.path)},
        problems=(*case.problems, *problems),
        remarks=(*case.remarks, *remarks),
    )
