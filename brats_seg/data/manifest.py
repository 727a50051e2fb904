"""Describe a prepared case on disk: its source files, its grid, and the check sums of its files.

The manifest is the file `case.json` in the folder of a case. Check sums are CRC-32 by libdeflate,
which is 4 times as fast as that of zlib, 8 times as SHA-256 and 10 times as BLAKE2b
(`benchmarks/verify.py`, one core of a Xeon, deflate 0.9.0). They find damage, not forgery.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import deflate
import numpy as np

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.nifti import Geometry
from brats_seg.data.spacing import choose_spacing
from brats_seg.errors import CaseError
from brats_seg.voxels.box import Box
from brats_seg.voxels.grids import Spacing

FORMAT_VERSION = 3
"""Version of the format; cases of another version are prepared again."""
MANIFEST_NAME = "case.json"
_KEY_VERSION = 2
"""Version of the key. Cases of 1 mm that were not resampled keep the key of earlier formats, so that
runs on them can be resumed."""
_SELF = "check_sum"
"""Entry of `case.json` with the check sum of the others."""
_CHUNK_BYTES = 2**20
"""Bytes that are read at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """State of a file when a case was prepared from it."""

    name: str
    """Path relative to the data folder, with `#2` for a volume of a 4-D file, as in `cases.csv`."""
    n_bytes: int
    mtime_ns: int
    """Time of the last change, in nanoseconds since 1970."""

    @classmethod
    def of(cls, root: Path, scan: ScanFile) -> Self:
        """Return the state of a file; raise `OSError` if it does not exist."""
        status = (root / scan.path).stat()
        return cls(name=str(scan), n_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of a prepared case as it was written."""

    name: str
    n_bytes: int
    crc32: int
    """Check sum: it differs after any change of up to 32 neighbouring bits, and after all other damage but
    one in four billion."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the state of a file; raise `OSError` if it cannot be read."""
        return cls(name=path.name, n_bytes=path.stat().st_size, crc32=check_sum(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a prepared case, without its voxels."""

    version: int = FORMAT_VERSION
    compressed: bool
    convention: str
    """Name of the label convention; empty without a label map."""
    sources: tuple[SourceFile, ...]
    """Files of the modalities in the order of `MODALITIES`, then of the label map if there is one."""
    contents: tuple[str, ...]
    """SHA-256 of each source, with the index of the volume in a 4-D file."""
    spacing_mm: Spacing
    """Spacing that the case was prepared at; its own may differ by `SPACING_TOLERANCE`."""
    scan: Geometry
    """Grid of the files in the axes of BraTS, before resampling."""
    geometry: Geometry
    """Grid at the spacing; that of the files if they were not resampled."""
    box: Box
    """Position of the crop in that grid."""
    means: tuple[float, ...]
    """Mean of each modality inside the brain, before normalisation."""
    stds: tuple[float, ...]
    """Standard deviation of each modality inside the brain, before normalisation."""
    files: tuple[StoredFile, ...]
    """The files beside `case.json`."""

    @property
    def is_resampled(self) -> bool:
        """Whether the voxels were interpolated."""
        return self.geometry != self.scan

    @property
    def key(self) -> str:
        """Hash of scans, convention and spacing; independent of file names and compression."""
        parts = [str(_KEY_VERSION), self.convention, *self.contents]
        if self.is_resampled or self.spacing_mm != choose_spacing(()):
            parts.append(f"{self.spacing_mm} mm, resampled: {self.is_resampled}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the content of `case.json`."""
        values = json.loads(json.dumps(asdict(self), default=np.ndarray.tolist))
        return json.dumps({**values, _SELF: _own_check_sum(values)}, indent=1)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a prepared case, or None if there is none of this version.

    A damaged one counts as none: its check sum covers every value.
    """
    try:
        values = json.loads((folder / MANIFEST_NAME).read_text())
        if values["version"] != FORMAT_VERSION or values.pop(_SELF) != _own_check_sum(values):
            return None
        return _parse(values)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def manifest_of(folder: Path, case_id: str) -> Manifest:
    """Return the manifest of a case in a folder of prepared cases.

    Raises:
        CaseError: There is none of this version, or it is damaged.
    """
    manifest = read_manifest(folder / case_id)
    if manifest is None:
        path = str(folder / case_id / MANIFEST_NAME)
        found = "no prepared case of this version, or a damaged one"
        next_step = "Prepare the cases of this data folder with `brats-seg prepare`."
        raise CaseError(case_id, path, found, "a prepared case", next_step)
    return manifest


def sources_of(case: Case) -> tuple[SourceFile, ...]:
    """Return the state of the files of a case, without reading them: modalities, then label map.

    Raises:
        OSError: A file does not exist.
    """
    scans = case.images if case.label is None else (*case.images, case.label)
    return tuple(SourceFile.of(case.root, scan) for scan in scans)


def check_sum(path: Path) -> int:
    """Return the CRC-32 of a file.

    Raises:
        OSError: The file cannot be read.
    """
    found, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while n_bytes := file.readinto(chunk):
            found = deflate.crc32(chunk[:n_bytes], found)
    return found


def _own_check_sum(values: dict[str, Any]) -> int:
    return deflate.crc32(json.dumps(values).encode())


def _parse(values: dict[str, Any]) -> Manifest:
    box = values["box"]
    lists = ("contents", "spacing_mm", "means", "stds")
    parts: dict[str, Any] = {
        **{name: tuple(values[name]) for name in lists},
        "box": Box(start=tuple(box["start"]), stop=tuple(box["stop"])),
        "scan": _geometry(values["scan"]),
        "geometry": _geometry(values["geometry"]),
        "sources": tuple(SourceFile(**source) for source in values["sources"]),
        "files": tuple(StoredFile(**file) for file in values["files"]),
    }
    return Manifest(**{**values, **parts})


def _geometry(values: dict[str, Any]) -> Geometry:
    return Geometry(
        shape=tuple(values["shape"]),
        affine=np.array(values["affine"]),
        qform=np.array(values["qform"]),
        qform_code=values["qform_code"],
        sform_code=values["sform_code"],
    )
