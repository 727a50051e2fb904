"""Find the DICOM examinations below a folder, and the series of each with what their headers say.

Only headers are read. The patient's name, number, birth date and accession number are compared with
each other and with the names of folders, and are not kept: no value of this module holds them.
"""

import hashlib
import logging
import os
import re
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.cases.layouts import LONGEST_ID, WORDS, files_below
from brats_seg.errors import UsageError, counted, printable, some_of
from brats_seg.files import check_regular, table_beside
from brats_seg.voxels.grids import Spacing
from brats_seg.voxels.shapes import group_by

log = logging.getLogger(__name__)

_GAP_TOLERANCE = 0.1
"""Share of the usual distance of slices by which a distance may differ."""
_SAME_POSITION_MM = 0.01
_SHORTEST_IDENTIFIER = 3
"""Characters of an identifier that is looked for in the name of a folder."""
ELEMENTS = table_beside(__file__)
"""Names of the elements of DICOM headers that are read, and what they may hold."""
GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
"""Functional groups of enhanced MR: of all frames, and of each frame."""
_TAGS = [*ELEMENTS["kept"], *ELEMENTS["of_frames"], *ELEMENTS["identity"], *GROUPS]
_SIZES = ("Rows", "Columns", "PixelSpacing")
_NO_AGENT = rf"(?:{'|'.join(ELEMENTS['no_agent'])})?(?:[\s_]|\.?$)"


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
    spacing_mm: Spacing = (0.0, 0.0, 0.0)
    """Distance of columns, rows and slices."""
    problem: str = ""
    """Reason why it cannot be converted; empty if it can."""
    modality: str = ""
    """Modality that it is taken for: `t1n`, `t1c`, `t2w`, `t2f`, or empty if it is not used."""
    reason: str = ""
    """Why it is taken for that modality, or is not used."""

    def __str__(self) -> str:
        """Return number, description and size for a message."""
        size = "x".join(f"{mm:.2g}" for mm in self.spacing_mm)
        return f'series {self.number} "{self.description}" ({counted(self.n_slices, "slice")}, {size} mm)'


@dataclass(frozen=True, kw_only=True, slots=True)
class DicomStudy:
    """One examination of one patient."""

    case_id: str
    """Name of its folder, or `hashed_id` if that may identify the patient or is not its own."""
    hashed_id: str
    """`study-` and a hash of the examination and of the patient."""
    folder: Path
    """Highest folder that holds no other examination."""
    series: tuple[Series, ...]
    problem: str = ""
    """Reason why it cannot be used as a whole; empty if it can."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Image:
    """Header of one file, or of one frame of it."""

    path: Path
    texts: Mapping[str, tuple[str, ...]]
    """Values of each element, none if it is missing or empty."""
    patient: str
    """Hash of name and number."""
    identifiers: tuple[str, ...]
    """Letters and digits of what identifies the patient; dropped with this value."""

    def text(self, name: str) -> str:
        """Return an element as text, empty if there is none."""
        return "\\".join(self.texts[name])

    def number(self, name: str) -> float | None:
        """Return the first value of an element as a number, None if it is missing or no number."""
        try:
            value = float(next(iter(self.texts[name]), ""))
        except ValueError:
            return None
        return value if np.isfinite(value) else None


def find_studies(root: Path, *, with_identifiers: bool = False) -> tuple[DicomStudy, ...]:
    """Return the examinations below a folder, in the order of their names.

    Files that are not DICOM are ignored; links are followed. An examination is named after a folder that
    is called after the patient only `with_identifiers`. `UsageError` is raised if no DICOM image is there.
    """
    if not (images := _images_below(root)):
        msg = f"{root} holds no DICOM images; expected the folder of an MR examination, unpacked"
        raise UsageError(msg)
    n_studies = Counter(
        folder
        for group in images.values()
        for folder in {parent for image in group for parent in image.path.parents}
    )
    folders = {key: _study_folder(root, group, n_studies) for key, group in images.items()}
    name = partial(_name, root, with_identifiers=with_identifiers)
    names = {key: name(folders[key], group[0]) for key, group in images.items()}
    n_of_name, n_of_uid = Counter(names.values()), Counter(uid for uid, _ in images)
    studies = []
    for key, group in images.items():
        hashed_id = f"study-{_hash('^'.join(key))[:8]}"
        is_own = n_studies[folders[key]] == n_of_name[names[key]] == 1
        is_shared = n_of_uid[key[0]] > 1
        study = DicomStudy(
            case_id=names[key] if names[key] and is_own else hashed_id,
            hashed_id=hashed_id,
            folder=folders[key],
            series=_all_series(group),
            problem="the images of one examination name several patients" if is_shared else "",
        )
        studies.append(study)
    return tuple(sorted(studies, key=lambda study: study.case_id))


def read_frames(header: Any) -> list[dict[str, Any]]:
    """Return position, orientation, spacing and times of each frame of an image; of most images one.

    `header` is a `pydicom.Dataset`; what it does not state is None.
    """
    shared, frames = map(header.get, GROUPS)
    of_frames = ELEMENTS["of_frames"]
    if not frames:
        return [{name: header.get(name) for name in of_frames}]

    def element(frame: Any, sequence: str, name: str) -> Any:
        items = frame.get(sequence) or (shared or [{}])[0].get(sequence) or [{}]
        return items[0].get(name)

    return [
        {name: element(frame, *source) for name, source in of_frames.items()} for frame in frames
    ]


def read_plane(
    values: Mapping[str, Any],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the directions (3, 3) of columns, rows and slices of an image, and its position (3,).

    Both are in the axes of DICOM: towards the patient's left, back and head.
    """
    along, down = np.reshape(values["ImageOrientationPatient"], (2, 3)).astype(float)
    position = np.array(values["ImagePositionPatient"], dtype=float)
    return np.stack([along, down, np.cross(along, down)]), position


def read_header(path: Path, tags: list[str] | None = None) -> Any:
    """Return the header of a DICOM file as a `pydicom.Dataset`, or None if it is not DICOM, nor called so.

    `tags` are the names of the elements to read; all of them by default, without the pixels.
    """
    import pydicom.errors

    check_regular(path)
    try:
        return pydicom.dcmread(path, stop_before_pixels=True, specific_tags=tags)
    except pydicom.errors.InvalidDicomError:
        if path.suffix.lower() in WORDS["dicom"]:
            raise
        return None


def _images_below(root: Path) -> dict[tuple[str, str], list[_Image]]:
    """Return the images by examination and hash of the patient, each once although it may be there in several copies."""
    images: dict[tuple[str, str], dict[str, _Image]] = defaultdict(dict)
    damaged = list[str]()
    for path in files_below(root, with_nifti=False):
        try:
            # pydicom warns with values that may identify the patient
            with warnings.catch_warnings(action="ignore"):
                frames = _read(path)
        except Exception:  # noqa: BLE001 - pydicom raises errors of many kinds for a damaged file
            damaged.append(printable(path.name))
            continue
        for index, image in enumerate(frames):
            uid = f"{image.text('SOPInstanceUID')}.{index}"
            images[image.text("StudyInstanceUID"), image.patient].setdefault(uid, image)
    if damaged:
        log.warning("%s: cut off or damaged, and left out: %s", root, some_of(damaged))
    return {key: list(group.values()) for key, group in images.items()}


def _read(path: Path) -> list[_Image]:
    """Return the slices in a file: none if it is not DICOM, one, or those of enhanced MR."""
    header = read_header(path, _TAGS)
    # the list of a medium, and results of the scans without the patient's name, may lie beside them
    is_list = path.name.upper() == "DICOMDIR"
    if header is None or is_list or header.get("Modality") in ELEMENTS["results"]:
        return []
    if "SOPInstanceUID" not in header:
        raise EOFError
    # of LI^NA each name and both together
    identifiers = {
        _plain(part)
        for name in ELEMENTS["identity"]
        for separators in (r"[=\\]", r"[\^=\\ ]")
        for part in re.split(separators, str(header.get(name) or ""))
    }
    values = {name: header.get(name) for name in ELEMENTS["kept"]}
    return [
        _Image(
            path=path,
            texts={name: _texts(value) for name, value in (values | frame).items()},
            patient=_hash(_plain(f"{header.get('PatientID')}^{header.get('PatientName')}")),
            identifiers=tuple(text for text in identifiers if len(text) >= _SHORTEST_IDENTIFIER),
        )
        for frame in read_frames(header)
    ]


def _texts(value: Any) -> tuple[str, ...]:
    """Return the values of an element, which has one or several, as texts."""
    is_several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    values = value if is_several else [] if value in {None, ""} else [value]
    return tuple(printable(str(text).strip()) for text in values)


def _plain(text: str) -> str:
    """Return the letters, without accents, and the digits of a text."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKD", text)).lower()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _study_folder(root: Path, images: Sequence[_Image], n_studies: Mapping[Path, int]) -> Path:
    """Return the highest folder below `root` that holds no other study, or else that of all its images."""
    common = Path(os.path.commonpath([image.path.parent for image in images]))
    # not the root itself, whose name cases would share once there are several
    inside = [folder for folder in common.parents if root in folder.parents]
    return next((folder for folder in reversed(inside) if n_studies[folder] == 1), common)


def _name(root: Path, folder: Path, image: _Image, *, with_identifiers: bool) -> str:
    """Return a name after the folder of an examination; empty if it cannot be shown."""
    name = "_".join(folder.relative_to(root).parts) or folder.resolve().name
    if name != printable(name) or len(name.encode()) > LONGEST_ID:
        return ""
    is_anonymous = image.text("PatientIdentityRemoved").upper() == "YES"
    identifies = any(identifier in _plain(name) for identifier in image.identifiers)
    return name if with_identifiers or is_anonymous or not identifies else ""


def _all_series(images: Sequence[_Image]) -> tuple[Series, ...]:
    uid = "SeriesInstanceUID"
    groups = group_by(images, lambda image: [(image.text(uid), image.text("EchoTime"))])
    n_images = Counter(image.text(uid) for image in images)
    every = [_series(group, n_images[group[0].text(uid)]) for group in groups]
    return tuple(sorted(every, key=lambda series: (series.number, series.echo_ms or 0)))


def _series(images: Sequence[_Image], n_images: int) -> Series:
    """Return the series of the images of one echo, of `n_images` of all its echoes."""
    first = min(images, key=lambda image: (image.number("InstanceNumber") or 0, str(image.path)))
    try:
        files, spacing_mm, problem = _order_slices(images)
    except (KeyError, TypeError, ValueError):
        files, spacing_mm = sorted(image.path for image in images), (0.0, 0.0, 0.0)
        problem = "a file is cut off, or lacks the position of its slice or the size of its pixels"
    stated = ELEMENTS["techniques"].items()
    techniques = [name for name, (element, text) in stated if first.text(element) == text]
    expected = first.number("ImagesInAcquisition") or 0
    if not problem and n_images < expected:
        problem = f"slices are missing: {n_images} of {expected:.0f}"
    return Series(
        number=int(first.number("SeriesNumber") or 0),
        description=next(filter(None, map(first.text, ELEMENTS["description"])), ""),
        kind=first.text("Modality"),
        n_slices=len(images),
        files=tuple(dict.fromkeys(map(Path.absolute, files))),
        image_type=first.texts["ImageType"],
        techniques=(*first.texts["ScanningSequence"], *techniques),
        echo_ms=first.number("EchoTime"),
        repetition_ms=first.number("RepetitionTime"),
        inversion_ms=first.number("InversionTime"),
        has_agent=not re.match(_NO_AGENT, first.text("ContrastBolusAgent").lower())
        or bool(first.texts["ContrastBolusAgentSequence"])
        or bool(first.number("ContrastBolusVolume")),
        is_diffusion=bool(first.number("DiffusionBValue")),
        spacing_mm=spacing_mm,
        problem=problem or _wrong_pixels(images),
    )


def _wrong_pixels(images: Sequence[_Image]) -> str:
    """Return why larger values of the pixels may not be brighter; empty if they are."""
    kinds = {image.text("PhotometricInterpretation") for image in images} - {"", "MONOCHROME2"}
    if kinds:
        return f"its pixels are {', '.join(sorted(kinds))}, not MONOCHROME2"
    slopes = {image.text("RescaleSlope"): image.number("RescaleSlope") for image in images}
    wrong = [text for text, slope in slopes.items() if text and (slope or 0) <= 0]
    return f"its rescale slope is {wrong[0]}, not above 0" if wrong else ""


def _order_slices(images: Sequence[_Image]) -> tuple[list[Path], Spacing, str]:
    """Return the files along the normal of the slices, the spacing in mm, and what is wrong."""
    files = [image.path for image in images]
    planes = [read_plane(image.texts) for image in images]
    row_mm, column_mm = map(float, images[0].texts["PixelSpacing"])
    if not min(row_mm, column_mm) > 0:
        raise ValueError
    if not all(np.allclose(plane[0], planes[0][0], atol=1e-3) for plane in planes):
        return files, (column_mm, row_mm, 0.0), "its slices have several directions"
    if len({tuple(image.texts[name] for name in _SIZES) for image in images}) > 1:
        return files, (column_mm, row_mm, 0.0), "its slices have several sizes"
    # along rows, columns and normal
    places = np.array([position - planes[0][1] for _, position in planes]) @ planes[0][0].T
    order = np.argsort(places[:, 2])
    usual_mm, problem = _judge_distances(places[order]) if len(places) > 1 else (0.0, "")
    # positions are rounded: of two runs of one sequence, none has thinner slices
    return [files[index] for index in order], (column_mm, row_mm, round(usual_mm, 2)), problem


def _judge_distances(places: npt.NDArray[np.float64]) -> tuple[float, str]:
    """Return the usual distance of neighbours among slices, by their places (n, 3), and what is wrong."""
    steps = np.diff(places[:, 2])
    usual_mm, problem = float(np.median(steps)), ""
    # dcm2niix stacks slices along their normal, as far apart as the first two, or the last two
    drift_mm = np.abs(steps[[0, -1]] * len(steps) - steps.sum())
    off_mm = max(*np.ptp(places[:, :2], axis=0), *drift_mm)
    if steps.min() < _SAME_POSITION_MM:
        problem = "it has several images at one place, as of several times or contrasts"
    elif np.abs(steps - usual_mm).max() > _GAP_TOLERANCE * usual_mm:
        gaps = f"{steps.max():.2f} mm between two neighbours, and {usual_mm:.2f} mm between most"
        problem = f"slices are missing, or not evenly spaced: {gaps}"
    # positions that are rounded to 0.01 mm add up to 1.7 mm
    elif off_mm > 2:
        problem = f"slices are up to {off_mm:.1f} mm off an even stack, as of a tilted gantry"
    return usual_mm, problem
