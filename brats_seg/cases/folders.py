"""The folders below a data folder, and the NIfTI files in each.

Hidden files and folders are passed over, and so is a folder that holds a file `brats_seg.json`,
with everything below: that marks what the package itself has written.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from brats_seg.cases.layouts import FileName, parse_file_name

OUTPUT_MARKER = "brats_seg.json"
"""Name of the file that marks a folder of results."""

_MAC_COPIES = "__MACOSX"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """A NIfTI file, or a folder of such a name that holds one file."""

    name: FileName
    path: Path
    """Of the file, relative to the data folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """One folder, its own files only."""

    path: Path
    """Relative to the data folder."""
    scans: tuple[Scan, ...] = ()
    others: tuple[str, ...] = ()
    """Names of the files that are not NIfTI."""
    refused: str = ""
    """Why the folder cannot be listed."""


def walk_folders(root: Path) -> Iterator[Folder]:
    """Go through a data folder in alphabetical order, each folder once, links followed."""
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


def _is_output(path: Path, entries: list[os.DirEntry[str]]) -> bool:
    # the data folder itself was named by the user, who will want what is in it
    return path != Path() and any(entry.name == OUTPUT_MARKER for entry in entries)


def _sorted_out(path: Path, entries: list[os.DirEntry[str]]) -> tuple[Folder, list[Path]]:
    """Tell the scans from other files and from the folders to visit."""
    scans, others, below = [], [], []
    for entry in entries:
        # copies made on a Mac hold a `._x.nii.gz` beside every `x.nii.gz`
        if entry.name.startswith(".") or entry.name == _MAC_COPIES:
            continue
        name = parse_file_name(entry.name)
        if not entry.is_dir():
            if name:
                scans.append(Scan(name=name, path=path / entry.name))
            else:
                others.append(entry.name)
        elif name and (inner := _only_file(Path(entry.path))):
            # Kaggle unpacks some archives to x.nii/y.nii: the name that counts is the folder's
            scans.append(Scan(name=name, path=path / entry.name / inner))
        else:
            below.append(path / entry.name)
    return Folder(path=path, scans=tuple(scans), others=tuple(others)), below


def _only_file(folder: Path) -> str:
    """Return the name of the one file in a folder, or nothing if that is not what it holds."""
    try:
        inside = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return ""
    return inside[0].name if len(inside) == 1 and inside[0].is_file() else ""
