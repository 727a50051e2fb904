"""Tell what a file is by its name, and list the files below a folder.

A name shows the modality, or that the file is a label map, and the id of its case: `CASE_t1ce.nii.gz`.
`layouts.toml` has the words of each modality, in the spellings of all releases, and the patterns of other names.
The names of BIDS have more parts.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.files import check_regular, table_beside
from brats_seg.labels import MODALITIES

LABEL = "label"
"""Kind of a file that is a label map by its name."""
KINDS = (*MODALITIES, LABEL)
"""Kinds of the files of a case, in their order in tables and hashes."""
LONGEST_ID = 200
"""Bytes of the longest case id: a file name has 255, and results add a few words and a suffix."""
OUTPUT_MARKER = "brats_seg.json"
"""Name of the file that marks a folder of results."""
STEPS_NAME = "steps.png"
"""Name of the picture of how a case was prepared, in the folder of its scans."""

_BIDS_ID = re.compile(r"sub-[A-Za-z0-9]+(_ses-[A-Za-z0-9]+)?")
WORDS = table_beside(__file__)
"""Words and patterns of the names of files and folders."""
PATTERNS = {
    name: re.compile("|".join(alternatives), re.IGNORECASE | re.DOTALL)
    for name, alternatives in WORDS["patterns"].items()
}
_SPELLINGS: dict[str, list[str]] = WORDS["spellings"]
_OF_ANATOMY = frozenset(WORDS["of_anatomy"])
_SEPARATOR = re.compile("[-_. ]")
_KINDS = {
    spelling.replace(" ", ""): kind
    for kind, spellings in _SPELLINGS.items()
    for spelling in spellings
}


def _join_patterns(spellings: Iterable[str]) -> str:
    return "|".join(spelling.replace(" ", "[-_. ]?") for spelling in spellings)


_SCAN_STEM = re.compile(
    rf"((?P<case>.*?)[-_. ])?"
    rf"(((?P<before>brain|bet)[-_. ])?(?P<modality>{_join_patterns(s for kind in MODALITIES for s in _SPELLINGS[kind])})"
    rf"([-_](?P<processed>bet|brain|bias))?"
    rf"|(({'|'.join(WORDS['of_a_label'])})[-_. ]?)*(?P<label>{_join_patterns(_SPELLINGS[LABEL])}))",
    re.IGNORECASE | re.DOTALL,
)
_DESCRIBING = ("desc-", "label-")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFile:
    """A NIfTI file, or a folder with such a name that contains one file, and the parts of the name."""

    path: Path = Path()
    """Path of the file, relative to the data folder."""
    stem: str
    """The name without `.nii` or `.nii.gz`."""
    case: str = ""
    """Part before the modality: the case id in most releases, empty in `t1.nii.gz`."""
    kind: str = ""
    """A modality, `LABEL`, or empty if the name shows neither."""
    variant: str = ""
    """Other parts of the name, which tell files of one kind apart: `bet` in `_t1_bet`, or
    `acq-axial_run-2` in the name of a BIDS file."""


def parse_file_name(name: str, path: Path = Path()) -> NamedFile | None:
    """Parse a file name; return None if it is not the name of a NIfTI file.

    Masks and segmentations of the brain and of other anatomy have no kind.

    Example:
        >>> found = parse_file_name("sub-01_acq-ax_ce-gadolinium_T1w.nii.gz")
        >>> found.case, found.kind, found.variant
        ('sub-01', 't1c', 'acq-ax')
    """
    nifti = PATTERNS["nifti"].fullmatch(name)
    if nifti is None:
        return None
    bids = PATTERNS["bids"].fullmatch(nifti["stem"])
    case, kind, variant = _bids_parts(bids) if bids else _plain_parts(nifti["stem"])
    return NamedFile(path=path, stem=nifti["stem"], case=case, kind=kind, variant=variant)


def modality_named(word: str) -> str | None:
    """Return the modality of a word such as `FLAIR`, `t1gd` or `T1 post`, or None."""
    kind = kind_named(word)
    return kind if kind in MODALITIES else None


def kind_named(word: str) -> str:
    """Return the modality of a word, `LABEL` for one such as `seg` or `mask`, or nothing."""
    return _KINDS.get(_SEPARATOR.sub("", word).lower(), "")


def is_label_folder(name: str) -> bool:
    """Return whether a folder is for label maps by its name, such as `labels` or `images_segm`."""
    return PATTERNS["label_folder"].fullmatch(name) is not None


def is_in_derivatives(folder: Path) -> bool:
    """Return whether a folder is in the derivatives of a BIDS data set: it holds what was made from the scans."""
    return "derivatives" in map(str.lower, folder.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """One folder, without its subfolders."""

    path: Path
    """Path relative to the data folder."""
    scans: tuple[NamedFile, ...] = ()
    other_names: tuple[str, ...] = ()
    """Names of the files that are not NIfTI."""
    refused: str = ""
    """Reason why the folder cannot be listed; empty if it can."""


def walk_folders(root: Path) -> Iterator[Folder]:
    """Yield the folders below `root` in alphabetical order, each once; links are followed.

    Hidden files, and the folders of results that a file `brats_seg.json` marks, are passed over.
    """
    seen, refused = set[str](), list[OSError]()
    for name, below, files in os.walk(root, followlinks=True, onerror=refused.append):
        path, real = Path(name).relative_to(root), os.path.realpath(name)
        # the data folder itself is read in any case: the user has named it
        is_output = path != Path() and OUTPUT_MARKER in files
        if real in seen or is_output:
            below.clear()
            continue
        seen.add(real)
        folder, below[:] = _split_names(root, path, {*below}, files)
        yield folder
    for error in refused:
        yield Folder(path=Path(error.filename).relative_to(root), refused=error.strerror or "")


def files_below(root: Path, *, with_nifti: bool = True) -> Iterator[Path]:
    """Yield the files below a folder; links count, hidden files do not."""
    for folder in walk_folders(root):
        yield from (root / scan.path for scan in folder.scans if with_nifti)
        yield from (root / folder.path / name for name in folder.other_names)


def holds_dicom(root: Path) -> bool:
    """Return whether DICOM files are below a folder, and no NIfTI file is."""
    if not os.path.isdir(root) or any(folder.scans for folder in walk_folders(root)):  # noqa: PTH112
        return False
    return any(has_dicom(root, folder) for folder in walk_folders(root))


def has_dicom(root: Path, folder: Folder) -> bool:
    """Return whether DICOM files are in a folder; scanners omit the suffix or write numbers after a dot."""
    if any(name.lower().endswith((*WORDS["dicom"], "dicomdir")) for name in folder.other_names):
        return True
    bare = filter(PATTERNS["without_suffix"].fullmatch, folder.other_names)
    # others may precede them, such as CHECKSUM
    return any(_begins_as_dicom(root / folder.path / name) for name in bare)


def _begins_as_dicom(path: Path) -> bool:
    try:
        check_regular(path)
        with path.open("rb") as stream:
            stream.seek(128)
            return stream.read(4) == b"DICM"
    except OSError:
        return False


def bids_name(case_id: str) -> str:
    """Return the name of a case in BIDS: its id, if that is one, or else its letters and digits.

    Example:
        >>> bids_name("sub-01_ses-pre"), bids_name("UPENN-GBM-00001_11")
        ('sub-01_ses-pre', 'sub-UPENNGBM0000111')
    """
    return case_id if _BIDS_ID.fullmatch(case_id) else f"sub-{bids_letters(case_id)}"


def bids_letters(text: str) -> str:
    """Return the letters and digits of a text, which alone may be in a label of BIDS."""
    return re.sub("[^A-Za-z0-9]", "", text)


def _split_names(
    root: Path, path: Path, folders: Set[str], files: Sequence[str]
) -> tuple[Folder, list[str]]:
    """Separate scans, other files and the folders to visit, all in alphabetical order."""
    scans, other_names, below = [], [], []
    for name in sorted([*folders, *files]):
        # archives made on a Mac contain a `._x.nii.gz` for every `x.nii.gz`
        if name.startswith(".") or name == "__MACOSX":
            continue
        file = parse_file_name(name, path / name)
        if name not in folders:
            if file:
                scans.append(file)
            else:
                other_names.append(name)
        elif file and (inner := _only_file(root / file.path)):
            # Kaggle unpacks some archives to x.nii/y.nii, where the name of the folder is right
            scans.append(replace(file, path=file.path / inner))
        else:
            below.append(name)
    return Folder(path=path, scans=tuple(scans), other_names=tuple(other_names)), below


def _only_file(folder: Path) -> str:
    """Return the name of the only entry of a folder if it is a file, else nothing."""
    try:
        inside = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        return inside[0].name if len(inside) == 1 and inside[0].is_file() else ""
    except OSError:
        return ""


def _plain_parts(stem: str) -> tuple[str, str, str]:
    """Return the case, the kind and the variant that a name shows."""
    scan = _SCAN_STEM.fullmatch(stem)
    if scan is None:
        return "", "", ""
    case, word = scan["case"] or "", scan["modality"] or scan["label"]
    kind, (*others, last) = kind_named(word), _SEPARATOR.split(case.lower())
    # programs that remove the skull write the mask of the brain to t1_mask
    is_of_anatomy = last in _OF_ANATOMY or (word.lower() == "mask" and last in _KINDS)
    # CASE_t1ce-t1
    is_difference = bool(others) and modality_named(last) is not None
    if is_of_anatomy if kind == LABEL else is_difference:
        return "", "", ""
    return case, kind, scan["processed"] or scan["before"] or ""


def _bids_parts(bids: re.Match[str]) -> tuple[str, str, str]:
    """Return the case, the kind and the variant, such as `acq-ax_run-2`, that a BIDS name shows."""
    before, kind, processed = _plain_parts(bids["rest"])
    entities = [part for part in bids["entities"].split("_") if part]
    described = [part.split("-")[1].lower() for part in entities if part.startswith(_DESCRIBING)]
    if kind == LABEL and any(word in _OF_ANATOMY or "brain" in word for word in described):
        return "", "", ""
    if kind == "t1n" and any(map(PATTERNS["after_contrast"].fullmatch, entities)):
        kind = "t1c"
        entities = [part for part in entities if not PATTERNS["after_contrast"].fullmatch(part)]
    variant = [*entities, *([before] if kind != LABEL else []), processed]
    return (bids["case"], kind, "_".join(filter(None, variant))) if kind else ("", "", "")
