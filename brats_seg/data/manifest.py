"""What is written beside a prepared case: what it was made from, and its way back to the scan."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.nifti import Geometry
from brats_seg.data.box import Box

FORMAT_VERSION = 2
"""Raised whenever prepared cases change: what an older version wrote is prepared again."""

MANIFEST_NAME = "case.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file that a prepared case was made from, as it was then."""

    name: str
    """Relative to the data folder, with `#2` for a volume of a 4-D file, as in the case table."""
    n_bytes: int
    mtime_ns: int
    """Time of the last change, nanoseconds since 1970."""

    @classmethod
    def of(cls, root: Path, scan: ScanFile) -> Self:
        """Look at a file; raises `OSError` if it cannot be found."""
        status = (root / scan.path).stat()
        return cls(name=str(scan), n_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything about a prepared case but its voxels."""

    version: int = FORMAT_VERSION
    compressed: bool
    convention: str
    """Name of the label convention; empty without a label map."""
    sources: tuple[SourceFile, ...]
    """The modalities in their order, then the label map if there is one."""
    contents: tuple[str, ...]
    """SHA-256 of each source, with the index of the volume in a 4-D file."""
    box: Box
    """Where the crop lies in the scan, once that is turned as all cases are."""
    geometry: Geometry
    """Of the scan, turned so."""
    means: tuple[float, ...]
    """Of each modality inside the brain, before normalisation."""
    stds: tuple[float, ...]
    """Of each modality inside the brain, before normalisation."""

    @property
    def key(self) -> str:
        """Changes with the scans and what is made of them, but not with how it lies on disk."""
        text = "\n".join([str(self.version), self.convention, *self.contents])
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return text that `read_manifest` reads."""
        return json.dumps(asdict(self), default=np.ndarray.tolist, indent=1)


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a prepared case; None if there is none, or not of this version."""
    try:
        values = json.loads((folder / MANIFEST_NAME).read_text())
        return _parse(values) if values["version"] == FORMAT_VERSION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def scans_of(case: Case) -> tuple[ScanFile, ...]:
    """Return the files that a case is prepared from: modalities, then the label map."""
    return case.images if case.label is None else (*case.images, case.label)


def sources_of(root: Path, case: Case) -> tuple[SourceFile, ...]:
    """Look at the files of a case without reading them; raises `OSError` if one is missing."""
    return tuple(SourceFile.of(root, scan) for scan in scans_of(case))


def contents_of(root: Path, scans: Sequence[ScanFile]) -> tuple[str, ...]:
    """Hash files; one that holds several volumes is read once."""
    hashes: dict[Path, str] = {}
    for scan in scans:
        if scan.path not in hashes:
            with (root / scan.path).open("rb") as file:
                hashes[scan.path] = hashlib.file_digest(file, "sha256").hexdigest()
    return tuple(f"{hashes[scan.path]}#{scan.volume}" for scan in scans)


def _parse(values: dict[str, Any]) -> Manifest:
    box, geometry = values["box"], values["geometry"]
    lists: dict[str, Any] = {name: tuple(values[name]) for name in ("contents", "means", "stds")}
    parts: dict[str, Any] = {
        "box": Box(start=tuple(box["start"]), stop=tuple(box["stop"])),
        "geometry": Geometry(
            shape=tuple(geometry["shape"]),
            affine=np.array(geometry["affine"]),
            qform=np.array(geometry["qform"]),
            qform_code=geometry["qform_code"],
            sform_code=geometry["sform_code"],
        ),
        "sources": tuple(SourceFile(**source) for source in values["sources"]),
    }
    return Manifest(**{**values, **lists, **parts})
