"""Find the DICOM examinations below a folder, and the series of each with what their headers say.

Only headers are read. The patient's name, number, birth date and accession number are compared with
each other and with the names of folders, and are not kept: no value of this module holds them.
"""

import hashlib
import logging
import os
import re
import struct
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from brats_seg.cases.find import LONGEST_ID, walk_folders
from brats_seg.errors import EnvironmentalError, UsageError, counted, printable
from brats_seg.files import check_regular

log = logging.getLogger(__name__)

INSTALL_DICOM = "pip install 'brats_seg[dicom]'"
"""Command that installs what DICOM needs."""

_GAP_TOLERANCE = 0.1
"""Share of the usual distance of slices by which a distance may differ."""
_SAME_PLACE_MM = 0.01
_SHORTEST_IDENTIFIER = 3
"""Characters of an identifier that is looked for in the name of a folder."""
_IDENTIFIERS = (
    *("PatientID", "PatientName", "PatientBirthDate", "OtherPatientIDs", "AccessionNumber"),
)
_TAGS = (
    *("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "Modality"),
    *("SeriesNumber", "SeriesDescription", "ProtocolName", "SequenceName", "ImageType"),
    *("ScanningSequence", "EchoTime", "RepetitionTime", "InversionTime", "DiffusionBValue"),
    *("ContrastBolusAgent", "ContrastBolusVolume", "ImagePositionPatient", "InstanceNumber"),
    *("ImageOrientationPatient", "PixelSpacing", "Rows", "Columns", "PatientIdentityRemoved"),
    *("ImagesInAcquisition", "NumberOfFrames"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "EchoPulseSequence"),
    *("InversionRecovery", "EchoPlanarPulseSequence", "ContrastBolusAgentSequence"),
    *_IDENTIFIERS,
)
_KEPT = frozenset(_TAGS).difference(
    _IDENTIFIERS, ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
)
_OF_FRAMES = {
    "ImagePositionPatient": ("PlanePositionSequence", "ImagePositionPatient"),
    "ImageOrientationPatient": ("PlaneOrientationSequence", "ImageOrientationPatient"),
    "PixelSpacing": ("PixelMeasuresSequence", "PixelSpacing"),
    "EchoTime": ("MREchoSequence", "EffectiveEchoTime"),
    "RepetitionTime": ("MRTimingAndRelatedParametersSequence", "RepetitionTime"),
    "InversionTime": ("MRModifierSequence", "InversionTimes"),
    "DiffusionBValue": ("MRDiffusionSequence", "DiffusionBValue"),
}
"""Place in the functional groups of enhanced MR, whose slices are frames of one file, of what other
files state at their top."""
HEADER_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, EOFError, OSError, NotImplementedError),
    *(IndexError, OverflowError, RecursionError, MemoryError, struct.error),
)
"""Errors of pydicom and highdicom on a file that is damaged or not as the standard says."""
_StudyKey: TypeAlias = tuple[str, str]
"""UID of an examination, and hash of the patient."""
_SEVERAL_PATIENTS = "the images of one examination name several patients"
_NO_AGENT = frozenset({"", "none", "no", "n", "without", "0"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Images of one series and echo time of an examination, and what their headers say."""

    number: int
    """Number that the scanner gave it; 0 if it has none."""
    description: str
    """Description, or else the name of the protocol or of the sequence."""
    kind: str
    """Modality of DICOM, such as `MR` or `CT`."""
    n_slices: int
    files: tuple[Path, ...]
    """Files in the order of the slices; one file of enhanced MR holds them all."""
    image_type: tuple[str, ...] = ()
    techniques: tuple[str, ...] = ()
    """Scanning sequences: SE spin echo, GR gradient echo, IR inversion recovery, EP echo planar."""
    echo_ms: float | None = None
    repetition_ms: float | None = None
    inversion_ms: float | None = None
    has_agent: bool = False
    """Whether the header names a contrast agent."""
    is_diffusion: bool = False
    spacing_mm: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Distance of columns, rows and slices."""
    problem: str = ""
    """Reason why it cannot be converted; empty if it can."""

    def __str__(self) -> str:
        """Return number, description and size for a message."""
        size = "x".join(f"{mm:.2g}" for mm in self.spacing_mm)
        return (
            f'series {self.number} "{self.description}" '
            f"({counted(self.n_slices, 'slice')}, {size} mm)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DicomStudy:
    """One examination of one patient."""

    name: str
    """Name for the case: that of its folder, or `study-` and a hash if it may identify the patient."""
    folder: Path
    """Highest folder that holds no other examination."""
    series: tuple[Series, ...]
    problem: str = ""
    """Reason why it cannot be used as a whole; empty if it can."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Image:
    """Header of one file."""

    path: Path
    values: Mapping[str, Any]
    patient: str
    """Hash of name and number."""
    identifiers: tuple[str, ...]
    """Letters and digits of what identifies the patient; dropped with this value."""

    def text(self, name: str) -> str:
        """Return a value as text, empty if there is none."""
        return printable(str(self.values.get(name) or "").strip())

    def number(self, name: str) -> float | None:
        """Return a value as a number, None if there is none."""
        value = self.values.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = value[0] if value else None
        return None if value is None or value == "" else float(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the parts of a value of several texts."""
        value = self.values.get(name) or ()
        return tuple(map(str, [value] if isinstance(value, str) else value))


def find_studies(root: Path, *, with_identifiers: bool = False) -> tuple[DicomStudy, ...]:
    """Return the examinations below a folder, in the order of their names.

    Files that are not DICOM are ignored; links are followed.

    Args:
        root: Folder with DICOM files at any depth.
        with_identifiers: Whether an examination may be named after a folder that is called after
            the patient.

    Raises:
        UsageError: No DICOM image is below the folder.
        EnvironmentalError: pydicom is not installed.
    """
    images = _images_below(root)
    if not images:
        msg = f"{root} holds no DICOM images; expected the files of an MR examination"
        raise UsageError(msg)
    n_patients = len({patient for _, patient in images})
    if n_patients > 1:
        log.warning("%s holds %s: each examination is a case", root, counted(n_patients, "patient"))
    n_of_uid = Counter(uid for uid, _ in images)
    folders = _study_folders(root, images)
    names = {
        key: _name(root, folders[key], group[0], with_identifiers=with_identifiers)
        for key, group in images.items()
    }
    n_of_name = Counter(names.values())
    studies = [
        DicomStudy(
            name=names[key]
            if names[key] and n_of_name[names[key]] == 1
            else f"study-{_hash('^'.join(key))[:8]}",
            folder=folders[key] or _common_folder(group),
            series=_all_series(group),
            problem=_SEVERAL_PATIENTS if n_of_uid[key[0]] > 1 else "",
        )
        for key, group in images.items()
    ]
    return tuple(sorted(studies, key=lambda study: study.name))


def frames_of(header: Any) -> list[dict[str, Any]]:
    """Return position, orientation, spacing and times of each frame of an image; of most images one.

    Args:
        header: A `pydicom.Dataset`; what it does not state is None.
    """
    groups = header.get("PerFrameFunctionalGroupsSequence")
    if not groups:
        return [{name: header.get(name) for name in _OF_FRAMES}]
    shared = header.get("SharedFunctionalGroupsSequence") or [{}]
    return [
        {name: _in_groups((frame, shared[0]), *place) for name, place in _OF_FRAMES.items()}
        for frame in groups
    ]


def _in_groups(groups: Sequence[Any], sequence: str, name: str) -> Any:
    """Return an element from the first of several functional groups that has it, or None."""
    for group in groups:
        items = group.get(sequence)
        if items and name in items[0]:
            return items[0].get(name)
    return None


def plane_of(values: Mapping[str, Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the directions (3, 3) of columns, rows and slices of an image, and its position (3,).

    Both are in the axes of DICOM: towards the patient's left, back and head.
    """
    directions = np.array([float(value) for value in values["ImageOrientationPatient"]])
    along, down = directions.reshape(2, 3)
    position = np.array([float(value) for value in values["ImagePositionPatient"]])
    return np.stack([along, down, np.cross(along, down)]), position


def read_header(path: Path, tags: Sequence[str] | None = None) -> Any:
    """Return the header of a DICOM file as a `pydicom.Dataset`, or None if it is not DICOM.

    Args:
        path: The file.
        tags: Names of the elements to read; all of them by default, without the pixels.

    Raises:
        EnvironmentalError: pydicom is not installed.
    """
    try:
        import pydicom
        from pydicom.errors import InvalidDicomError
    except ImportError:
        msg = f"DICOM files need pydicom, which is not installed: {INSTALL_DICOM}"
        raise EnvironmentalError(msg) from None
    check_regular(path)
    wanted = None if tags is None else [*tags]
    try:
        return pydicom.dcmread(path, stop_before_pixels=True, specific_tags=wanted)
    except InvalidDicomError:
        return None


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings of pydicom, which quote values that may identify the patient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _images_below(root: Path) -> dict[_StudyKey, list[_Image]]:
    """Return the images of each study, each image once although it may be there in several copies."""
    images: dict[_StudyKey, dict[str, _Image]] = defaultdict(dict)
    n_damaged = 0
    for path in (root / one.path / name for one in walk_folders(root) for name in one.others):
        try:
            with without_warnings():
                frames = _read(path)
        except HEADER_ERRORS:
            n_damaged += 1
            continue
        for number, image in enumerate(frames):
            uid = f"{image.text('SOPInstanceUID')}.{number}"
            images[image.text("StudyInstanceUID"), image.patient].setdefault(uid, image)
    if n_damaged:
        damaged = counted(n_damaged, "file")
        log.warning("%s: %s could not be read as DICOM and left out", root, damaged)
    return {key: list(group.values()) for key, group in images.items()}


def _read(path: Path) -> list[_Image]:
    """Return the slices in a file: none if it is not DICOM, one, or those of enhanced MR."""
    header = read_header(path, _TAGS)
    # a segmentation that was made from the scans may lie beside them, without the patient's name
    if header is None or "SOPInstanceUID" not in header or header.get("Modality") == "SEG":
        return []
    values = {name: header.get(name) for name in _TAGS}
    # of DOE^JOHN both names
    texts = [re.split(r"[\^=\\ ]", str(values.get(name) or "")) for name in _IDENTIFIERS]
    identifiers = [_plain(part) for parts in texts for part in parts]
    patient = "^".join(str(values.get(name)) for name in ("PatientID", "PatientName"))
    kept = {name: value for name, value in values.items() if name in _KEPT}
    return [
        _Image(
            path=path,
            values={**kept, **frame, "InstanceNumber": values["InstanceNumber"] or number},
            patient=_hash(patient),
            identifiers=tuple(one for one in identifiers if len(one) >= _SHORTEST_IDENTIFIER),
        )
        for number, frame in enumerate(frames_of(header))
    ]


def _plain(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _common_folder(images: Sequence[_Image]) -> Path:
    return Path(os.path.commonpath([image.path.parent for image in images]))


def _study_folders(
    root: Path, images: Mapping[_StudyKey, Sequence[_Image]]
) -> dict[_StudyKey, Path | None]:
    """Return the highest folder from `root` down that holds nothing but a study; None without one."""
    n_studies = Counter(
        folder
        for group in images.values()
        for folder in {above for image in group for above in image.path.parents}
    )
    highest: dict[_StudyKey, Path | None] = {}
    for key, group in images.items():
        common = _common_folder(group)
        above = [one for one in (common, *common.parents) if one.is_relative_to(root)]
        highest[key] = next((one for one in reversed(above) if n_studies[one] == 1), None)
    return highest


def _name(root: Path, folder: Path | None, image: _Image, *, with_identifiers: bool) -> str:
    """Return a name after the folder of an examination; empty if it has none that can be shown."""
    if folder is None:
        return ""
    name = "_".join(folder.relative_to(root).parts) or folder.resolve().name
    if name != printable(name) or len(name.encode()) > LONGEST_ID:
        return ""
    is_anonymous = image.text("PatientIdentityRemoved").upper() == "YES"
    identifies = any(identifier in _plain(name) for identifier in image.identifiers)
    return name if with_identifiers or is_anonymous or not identifies else ""


def _all_series(images: Sequence[_Image]) -> tuple[Series, ...]:
    groups: dict[tuple[str, str], list[_Image]] = defaultdict(list)
    for image in images:
        groups[image.text("SeriesInstanceUID"), image.text("EchoTime")].append(image)
    found = map(_series, groups.values())
    return tuple(sorted(found, key=lambda one: (one.number, one.echo_ms or 0)))


def _series(images: Sequence[_Image]) -> Series:
    first = min(images, key=lambda image: (image.number("InstanceNumber") or 0, str(image.path)))
    try:
        files, distance, problem = _ordered(images)
        rows, columns = first.texts("PixelSpacing") or ("0", "0")
        spacing = float(columns), float(rows), distance
    except (KeyError, TypeError, ValueError):
        files, spacing = sorted(image.path for image in images), (0.0, 0.0, 0.0)
        problem = "its headers do not say where its slices lie"
    named = ("SeriesDescription", "ProtocolName", "SequenceName")
    return Series(
        number=int(first.number("SeriesNumber") or 0),
        description=next(filter(None, map(first.text, named)), ""),
        kind=first.text("Modality"),
        n_slices=len(images),
        files=tuple(dict.fromkeys(files)),
        image_type=first.texts("ImageType"),
        techniques=_techniques(first),
        echo_ms=first.number("EchoTime"),
        repetition_ms=first.number("RepetitionTime"),
        inversion_ms=first.number("InversionTime"),
        has_agent=_has_agent(first),
        is_diffusion=bool(first.number("DiffusionBValue")),
        spacing_mm=spacing,
        problem=problem,
    )


def _has_agent(image: _Image) -> bool:
    named = image.text("ContrastBolusAgent").lower() not in _NO_AGENT
    listed = bool(image.values.get("ContrastBolusAgentSequence"))
    return named or listed or bool(image.number("ContrastBolusVolume"))


def _techniques(image: _Image) -> tuple[str, ...]:
    """Return the scanning sequences, also where enhanced MR states them in other elements."""
    pulse = {"SPIN": "SE", "GRADIENT": "GR"}.get(image.text("EchoPulseSequence"))
    others = {"IR": "InversionRecovery", "EP": "EchoPlanarPulseSequence"}
    found = [name for name, element in others.items() if image.text(element) == "YES"]
    return (*image.texts("ScanningSequence"), *([pulse] if pulse else []), *found)


def _ordered(images: Sequence[_Image]) -> tuple[list[Path], float, str]:
    """Return the files along the normal of the slices, their distance in mm, and what is wrong."""
    files = [image.path for image in images]
    planes = [plane_of(image.values) for image in images]
    if any(not np.allclose(plane[0], planes[0][0], atol=1e-3) for plane in planes):
        return files, 0.0, "its slices have several directions"
    size = ("Rows", "Columns")
    if len({(*map(i.text, size), *i.texts("PixelSpacing")) for i in images}) > 1:
        return files, 0.0, "its slices have several sizes"
    along = np.array([position @ directions[2] for directions, position in planes])
    order = np.argsort(along)
    files = [files[index] for index in order]
    if len(files) == 1:
        return files, 0.0, ""
    steps = np.diff(along[order])
    usual = float(np.median(steps))
    return files, usual, _gap(images, steps, usual)


def _gap(images: Sequence[_Image], steps: npt.NDArray[np.float64], usual: float) -> str:
    """Return what is wrong with the distances of neighbouring slices."""
    if steps.min() < _SAME_PLACE_MM:
        return "it has several images at one place, as of several times or contrasts"
    widest = float(steps.max())
    if widest > usual * (1 + _GAP_TOLERANCE) or steps.min() < usual * (1 - _GAP_TOLERANCE):
        return (
            f"slices are missing, or not evenly spaced: {widest:.2f} mm between two neighbours, and "
            f"{usual:.2f} mm between most"
        )
    expected = images[0].number("ImagesInAcquisition") or 0
    if len(images) < expected:
        return f"slices are missing: {len(images)} of {expected:.0f}"
    return ""
