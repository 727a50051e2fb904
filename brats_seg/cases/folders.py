"""List the files below a data folder: NIfTI files, others, and what is DICOM.

Hidden files, the folders of results that a file `brats_seg.json` marks, and folders that were visited
already by another link are passed over. No scan is opened.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.layouts import NamedFile, parse_file_name
from brats_seg.files import check_regular

LONGEST_ID = 200
"""Bytes of the longest case id: a file name has 255, and results add a few words and a suffix."""
OUTPUT_MARKER = "brats_seg.json"
"""Name of the file that marks a folder of results."""
_MAC_FOLDER = "__MACOSX"
_DICOM = (".dcm", ".ima", "dicomdir")
_DICOM_MAGIC, _DICOM_MAGIC_START = b"DICM", 128


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
            folder, below = _divided(path, entries)
            yield folder
            pending += reversed(below)


def holds_dicom(root: Path) -> bool:
    """Return whether DICOM files are below a folder, and no NIfTI file is."""
    is_dicom = False
    for folder in walk_folders(root):
        if folder.scans:
            return False
        is_dicom = is_dicom or has_dicom(root, folder)
    return is_dicom


def has_dicom(root: Path, folder: Folder) -> bool:
    """Return whether DICOM files are in a folder; scanners omit the suffix or write numbers after a dot."""
    if any(name.lower().endswith(_DICOM) for name in folder.others):
        return True
    suffixes = {name: Path(name).suffix[1:] for name in folder.others}
    bare = [name for name, suffix in suffixes.items() if not suffix or suffix.isdecimal()]
    # one file is read for all of the folder, as there may be thousands
    return bool(bare) and _is_dicom(root / folder.path / bare[0])


def _divided(path: Path, entries: list[os.DirEntry[str]]) -> tuple[Folder, list[Path]]:
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


def _is_dicom(path: Path) -> bool:
    try:
        check_regular(path)
        with path.open("rb") as stream:
            stream.seek(_DICOM_MAGIC_START)
            return stream.read(len(_DICOM_MAGIC)) == _DICOM_MAGIC
    except OSError:
        return False
