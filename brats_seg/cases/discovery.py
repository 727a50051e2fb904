"""Find the cases below a data folder, and the files that belong to each of them.

A folder contains one case or many. Files belong together if the same text precedes the modality in
their names, and this text is the id of the case. If it is the id of no release, a folder with one
file of each modality is one case with the name of the folder, because file names from scanners, such
as `AX_T1_POST_12_t1c` and `AX_T2_3_t2`, have nothing in common.

Folders with a `dataset.json`, of the Medical Segmentation Decathlon or raw data of nnU-Net, are read
as the file describes:

    dataset.json               the modalities in their order, and the labels
    imagesTr/, imagesTs/       one 4-D file CASE.nii.gz per case in the decathlon,
                               CASE_0000.nii.gz, CASE_0001.nii.gz, ... in nnU-Net
    labelsTr/, labelsTs/       CASE.nii.gz
"""

import hashlib
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.folders import Folder, NiftiFile, advise, describe, walk_folders
from brats_seg.cases.layouts import (
    DECATHLON,
    LABEL,
    MEN_RT,
    NNUNET,
    UNKNOWN,
    grade_of,
    modality_named,
    parse_case_id,
)
from brats_seg.errors import CaseError, LayoutError, counted
from brats_seg.files import check_regular
from brats_seg.labels import CONVENTIONS, MODALITIES

log = logging.getLogger(__name__)

LONGEST_ID = 200
"""Bytes of the longest case id: a file name has 255, and results add a few words and a suffix."""

_DATASET_FOLDERS = ("imagesTr", "labelsTr", "imagesTs", "labelsTs")
_DESCRIPTION = "dataset.json"
_VALUE = re.compile(r"[0-9]{1,5}")
_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")
_WHY_IGNORED = "their names contain no modality, or their case has other files for it"
_EXPECTED_NAMES = "CASE_t1, CASE_t1ce, CASE_t2 and CASE_flair, or CASE-t1n, -t1c, -t2w and -t2f"


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """The cases below a data folder."""

    cases: tuple[Case, ...]
    """Cases in the order of their ids; no file has been opened."""
    notices: tuple[str, ...]
    """Files that were ignored although they may be scans."""


class _Description(BaseModel):
    """The parts of a `dataset.json` that are used."""

    channels: dict[int, str] = Field(validation_alias=AliasChoices("channel_names", "modality"))
    """Modality by index along the fourth axis, or by the number in the file name."""
    labels: dict[str, str | int | list[int]]
    """Tissue by value, value by tissue, or values by region."""

    @property
    def modalities(self) -> dict[int, str | None]:
        """Modality at each index; None for one that BraTS does not have."""
        return {place: modality_named(name) for place, name in self.channels.items()}


def find_cases(root: Path) -> Discovery:
    """Find the cases of all layouts below a folder, without opening their files.

    Raises:
        LayoutError: The folder does not exist or contains no case.

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
    if not os.path.isdir(root):  # noqa: PTH112 - as above
        msg = f"{root} is a file; expected the folder of scans. An archive must be unpacked first."
        raise LayoutError(msg)
    folders = {folder.path: folder for folder in walk_folders(root)}
    cases = [_completed(case, root) for case in _cases_in(folders, root)]
    used = {scan.path for case in cases for scan in (*case.images, case.label) if scan}
    unused = [s.path for f in folders.values() for s in f.scans if s.path not in used]
    notices = [
        *advise(root, folders.values()),
        *describe("NIfTI files were ignored", unused, _WHY_IGNORED),
    ]
    if not cases:
        reason = "; ".join(notices) or "it holds no scans"
        msg = (
            f"{root} holds no cases: {reason}. Expected a release of BraTS, the decathlon's "
            f"Task01_BrainTumour, or NIfTI files called {_EXPECTED_NAMES}."
        )
        raise LayoutError(msg)
    cases.sort(key=lambda case: (case.case_id, case.images[0].path))
    return Discovery(cases=tuple(cases), notices=tuple(notices))


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


def _cases_in(folders: Mapping[Path, Folder], root: Path) -> Iterator[Case]:
    of_datasets: set[Path] = set()
    for path, folder in folders.items():
        if _is_dataset(folder, folders):
            of_datasets |= {path / name for name in _DATASET_FOLDERS}
            yield from _cases_of_dataset(root, folder, folders)
        elif path not in of_datasets:
            yield from _cases_of(folder, (root.resolve() / path).name)


def _is_dataset(folder: Folder, folders: Mapping[Path, Folder]) -> bool:
    """Return whether a folder has a `dataset.json` and images for training."""
    return _DESCRIPTION in folder.others and folder.path / "imagesTr" in folders


def _cases_of_dataset(root: Path, folder: Folder, folders: Mapping[Path, Folder]) -> Iterator[Case]:
    """Yield the cases of a folder with a `dataset.json`; none if it has no modality of BraTS.

    Raises:
        LayoutError: The `dataset.json` is not valid.
    """
    description = _read_description(root / folder.path / _DESCRIPTION)
    if not any(description.modalities.values()):
        return
    empty = Folder(path=folder.path)
    training, training_labels, test, test_labels = (
        folders.get(folder.path / name, empty).scans for name in _DATASET_FOLDERS
    )
    yield from _cases_described(description, training, training_labels)
    yield from _cases_described(description, test, test_labels)


def _read_description(path: Path) -> _Description:
    try:
        check_regular(path)
        return _Description.model_validate_json(path.read_bytes())
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}. Check its permissions, or remove it."
        raise LayoutError(msg) from error
    except ValidationError as error:
        found = ", ".join(
            f"{'.'.join(map(str, part['loc'])) or 'file'}: {part['msg']}" for part in error.errors()
        )
        msg = (
            f"{path} is not valid ({found}). Expected the names of the modalities by their "
            "index under 'modality' or 'channel_names', and the values under 'labels'."
        )
        raise LayoutError(msg) from error


def _cases_described(
    description: _Description, images: Sequence[NiftiFile], labels: Sequence[NiftiFile]
) -> Iterator[Case]:
    label_of = {scan.name.stem: ScanFile(path=scan.path) for scan in labels}
    files: defaultdict[str, dict[str, ScanFile]] = defaultdict(dict)
    for scan in images:
        channel = _CHANNEL.fullmatch(scan.name.stem)
        for place, modality in description.modalities.items():
            if modality and channel and int(channel["channel"]) == place:
                files[channel["case"]][modality] = ScanFile(path=scan.path)
            elif modality and not channel:
                files[scan.name.stem][modality] = ScanFile(path=scan.path, volume=place)
    for case_id, found in files.items():
        label = label_of.get(case_id)
        is_msd = any(scan.volume is not None for scan in found.values())
        yield replace(
            Case.named(case_id, found),
            release=DECATHLON if is_msd else NNUNET,
            label_convention=_convention_of(description.labels) if label else "",
            label=label,
        )


def _convention_of(labels: Mapping[str, str | int | list[int]]) -> str:
    """Return the convention with the same values for oedema and enhancing tumour, or nothing."""
    values = dict(map(_name_and_values, labels.items()))
    enhancing = [v for name, v in values.items() if name.startswith("enhancing") or name == "et"]
    oedema = [v for name, v in values.items() if "edema" in name or name in {"ed", "snfh"}]
    if not oedema and len(values) > 1:
        # labels are regions: the whole tumour is the core and the oedema
        core, whole = sorted(values.values(), key=len)[-2:]
        oedema = [whole - core]
    for convention in CONVENTIONS:
        wt, tc, et = map(frozenset, convention.regions)
        all_known = frozenset().union(*values.values()) <= convention.values
        if enhancing == [et] and oedema == [wt - tc] and all_known:
            return convention.name
    return ""


def _name_and_values(label: tuple[str, str | int | list[int]]) -> tuple[str, frozenset[int]]:
    key, value = label
    if isinstance(value, str):
        return value.lower(), frozenset({int(key)} if _VALUE.fullmatch(key) else ())
    return key.lower(), frozenset(value if isinstance(value, list) else {value})


def _cases_of(folder: Folder, name: str) -> Iterator[Case]:
    groups = {
        case_id: scans
        for case_id, scans in _grouped(folder, name).items()
        if any(scan.name.kind in MODALITIES for scan in scans)
    }
    for case_id, scans in groups.items():
        unnamed = [scan for scan in folder.scans if not scan.name.kind] if len(groups) == 1 else []
        yield _assembled(case_id, scans, unnamed)


def _grouped(folder: Folder, name: str) -> Mapping[str, Sequence[NiftiFile]]:
    """Group the scans of a folder by case id; `name` is the name of the folder."""
    groups: defaultdict[str, list[NiftiFile]] = defaultdict(list)
    for scan in folder.scans:
        if scan.name.kind:
            groups[scan.name.case or name].append(scan)
    if name in groups and parse_case_id(name).release != UNKNOWN:
        # the folder of one case: files with other names are derived from it
        return {name: groups[name]}
    if any(parse_case_id(case_id).release != UNKNOWN for case_id in groups):
        return groups
    kinds = [scan.name.kind for scan in folder.scans if scan.name.kind]
    if len(groups) == 1 or len(set(kinds)) == len(kinds):
        return {name: [scan for scans in groups.values() for scan in scans]}
    return groups


def _assembled(case_id: str, scans: Sequence[NiftiFile], unnamed: Sequence[NiftiFile]) -> Case:
    candidates = {
        kind: _plainest([scan for scan in scans if scan.name.kind == kind])
        for kind in (*MODALITIES, LABEL)
    }
    remarks = [
        f"{ignored.path.name} was ignored in favour of {chosen.path.name}"
        for chosen, *others in filter(None, candidates.values())
        for ignored in others
        if ignored.name.stem == chosen.name.stem
    ]
    problems = [
        str(_ambiguous(case_id, kind, found))
        for kind, found in candidates.items()
        if len({scan.name.stem for scan in found}) > 1
    ]
    files = {kind: ScanFile(path=found[0].path) for kind, found in candidates.items() if found}
    if LABEL not in files and (label := _misnamed_label(case_id, unnamed)):
        files[LABEL] = ScanFile(path=label.path)
        remarks.append(
            f"{label.path.name} was taken as the label map, although its name does not say so"
        )
    case = Case.named(case_id, files)
    return replace(case, problems=tuple(problems), remarks=tuple(remarks))


def _plainest(scans: Sequence[NiftiFile]) -> list[NiftiFile]:
    """Return the unprocessed files if there are any, uncompressed ones first."""
    plain = [scan for scan in scans if not scan.name.processed] or list(scans)
    return sorted(plain, key=lambda scan: (scan.name.stem, scan.path.suffix.lower() == ".gz"))


def _ambiguous(case_id: str, kind: str, found: Sequence[NiftiFile]) -> CaseError:
    files = " and ".join(scan.path.name for scan in found)
    what = "label map" if kind == LABEL else kind
    return CaseError(
        case_id, files, f"{len(found)} files for {what}", "one", "Remove or rename the other."
    )


def _misnamed_label(case_id: str, unnamed: Sequence[NiftiFile]) -> NiftiFile | None:
    """Return the only file without a modality in its name, if the case should have a label map.

    The label map of case 355 of BraTS 2020 is `W39_1998.09.19_Segm.nii`. A file that is named after
    the case but not after a segmentation, such as a brain mask, is something else.
    """
    if parse_case_id(case_id).release == UNKNOWN or "validation" in case_id.lower():
        return None
    if len(unnamed) != 1:
        return None
    stem = unnamed[0].name.stem.lower()
    is_derived = stem.startswith(case_id.lower()) and "seg" not in stem
    return None if is_derived else unnamed[0]


def _completed(case: Case, root: Path) -> Case:
    """Add the fields that do not depend on the layout."""
    folder = case.images[0].path.parent
    return replace(
        case,
        root=root,
        problems=(*case.problems, *_missing(case, folder), *id_problems(case)),
        grade=grade_of(reversed((root.resolve() / folder).parts)),
        files_key=_files_key(case, root),
    )


def _missing(case: Case, folder: Path) -> Iterator[str]:
    missing = [modality for modality in MODALITIES if getattr(case, modality) is None]
    found, expected = f"no {', '.join(missing)}", ", ".join(MODALITIES)
    next_step = "Add the missing files, or leave the case out."
    if case.release == MEN_RT:
        found = "a case of the radiotherapy task, which has one modality and another target"
        next_step = "Leave it out: this task is not supported."
    if missing:
        yield str(CaseError(case.case_id, f"{folder.as_posix()}/", found, expected, next_step))


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
