"""List the folders below a data folder with the NIfTI files in each, and unread files.

Hidden files and folders are ignored. Folders that contain a file `brats_seg.json`, which marks the
results of this package, are ignored with everything below them.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from brats_seg.cases.layouts import FileName, parse_file_name
from brats_seg.errors import printable
from brats_seg.files import check_regular

OUTPUT_MARKER = "brats_seg.json"
"""Name of the file that marks a folder of results."""

_MAC_FOLDER = "__MACOSX"

_ARCHIVES = (".tar", ".tgz", ".zip", ".gz", ".bz2", ".xz", ".7z", ".rar")
_SLICES = (".h5", ".hdf5")
_DICOM = (".dcm", ".ima")
_DICOM_MAGIC = b"DICM"
_DICOM_MAGIC_START = 128

_UNPACK = "unpack them (tar -xf FILE -C FOLDER, or unzip FILE -d FOLDER) and give that folder"
_TAKE_VOLUMES = (
    "they hold 2-D slices, and whole volumes are needed (on Kaggle "
    "awsaf49/brats20-dataset-training-validation instead of awsaf49/brats2020-training-data)"
)
_CONVERT = (
    "convert them (brats-seg convert FOLDER -o SCANS) and give the folder SCANS; predict takes them "
    "as they are"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NiftiFile:
    """A NIfTI file, or a folder with such a name that contains one file."""

    name: FileName
    path: Path
    """Path of the file, relative to the data folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """One folder, without its subfolders."""

    path: Path
    """Path relative to the data folder."""
    scans: tuple[NiftiFile, ...] = ()
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
        place = (status.st_dev, status.st_ino)
        if place in seen or _is_output(path, entries):
            continue
        seen.add(place)
        folder, below = _sorted_out(path, entries)
        yield folder
        pending += reversed(below)


def advise(root: Path, folders: Collection[Folder]) -> tuple[str, ...]:
    """Return one sentence for each kind of unread file: how many there are and what to do."""
    archives = _ending(folders, _ARCHIVES)
    slices = _ending(folders, _SLICES)
    dicom = [path for folder in folders for path in _dicom_files(root, folder)]
    return (
        *describe("archives are not read", archives, _UNPACK),
        *describe("HDF5 files are not read", slices, _TAKE_VOLUMES),
        *describe("DICOM files are not read", dicom, _CONVERT),
        *(
            f"the folder {printable(folder.path.as_posix())} cannot be read ({folder.refused})"
            for folder in folders
            if folder.refused
        ),
    )


def holds_dicom(root: Path) -> bool:
    """Return whether DICOM files are below a folder, and no NIfTI file is."""
    found = False
    for folder in walk_folders(root):
        if folder.scans:
            return False
        found = found or bool(_dicom_files(root, folder))
    return found


def describe(what: str, paths: Sequence[Path], next_step: str) -> Iterator[str]:
    """Yield a sentence about files, with their number and an example, if there are any."""
    if paths:
        example = printable(paths[0].as_posix())
        yield f"{what}, such as {example} ({len(paths)} in all): {next_step}"


def _is_output(path: Path, entries: list[os.DirEntry[str]]) -> bool:
    # the data folder itself is read in any case: the user has named it
    return path != Path() and any(entry.name == OUTPUT_MARKER for entry in entries)


def _sorted_out(path: Path, entries: list[os.DirEntry[str]]) -> tuple[Folder, list[Path]]:
    """Separate scans, other files and the folders to visit."""
    scans, others, below = [], [], []
    for entry in entries:
        # archives made on a Mac contain a `._x.nii.gz` beside every `x.nii.gz`
        if entry.name.startswith(".") or entry.name == _MAC_FOLDER:
            continue
        name = parse_file_name(entry.name)
        if not _is_folder(entry):
            if name:
                scans.append(NiftiFile(name=name, path=path / entry.name))
            else:
                others.append(entry.name)
        elif name and (inner := _only_file(Path(entry.path))):
            # Kaggle unpacks some archives to x.nii/y.nii, where the name of the folder is right
            scans.append(NiftiFile(name=name, path=path / entry.name / inner))
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
    except OSError:
        return ""
    return inside[0].name if len(inside) == 1 and _is_file(inside[0]) else ""


def _is_file(path: Path) -> bool:
    try:
        check_regular(path)
    except OSError:
        return False
    return True


def _ending(folders: Iterable[Folder], suffixes: tuple[str, ...]) -> list[Path]:
    return [
        folder.path / name
        for folder in folders
        for name in folder.others
        if name.lower().endswith(suffixes)
    ]


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
