"""Convert the MR series of DICOM examinations to NIfTI, as cases that can be predicted.

SCANS/CASE/CASE-t1n.nii.gz, -t1c, -t2w, -t2f   voxels, without any text of the DICOM headers
SCANS/CASE/dicom.json                          series of each modality, the reason, and their files

dcm2niix converts. A case whose scans are not registered, not skull-stripped or not of 1 mm has a
problem that says so, unless `preprocess` is asked to prepare them.
"""

import hashlib
import logging
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from brats_seg.cases.case import Case
from brats_seg.cases.find import single_input
from brats_seg.cases.many import map_cases
from brats_seg.cases.nifti import Volume, read_volume, write_volume
from brats_seg.config import Section
from brats_seg.dicom.modalities import OVERRIDE, missing_words, sort_series
from brats_seg.dicom.preprocess import check_tools, prepare, unready_words
from brats_seg.dicom.series import INSTALL_DICOM, DicomStudy, Series, find_studies
from brats_seg.errors import CaseError, EnvironmentalError, counted, some_of
from brats_seg.files import write_json
from brats_seg.labels import MODALITIES
from brats_seg.progress import Track, untracked

log = logging.getLogger(__name__)

SOURCE_NAME = "dicom.json"
"""Name of the file that says which DICOM files a case was converted from."""
_SEPARATE = "Separate the patients' files, or export the examination again."
_NOT_ENOUGH = "--preprocess was not enough: prepare the scans with other programs."
_PREPARE = "Add --preprocess (greedy, HD-BET), or prepare the converted files with other programs."
_LOOK = "Convert it with dcm2niix and look at what it prints, or name another series."
_ADVICE = (OVERRIDE, _SEPARATE, _NOT_ENOUGH, _PREPARE, _LOOK)
"""Next steps of examinations; each is told with the first examination that needs it."""
_TIMEOUT_S = 600
"""Longest time of converting one series: the largest take a few seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DicomOptions:
    """Choices of a user about DICOM examinations."""

    series: Mapping[str, str] = field(default_factory=dict)
    """Series by modality, as a number or a part of the description; see `parse_overrides`."""
    with_identifiers: bool = False
    """Whether the patient's name and number are written to the segmentation, and folders that are
    named after the patient name the case."""
    preprocess: bool = False
    """Whether scans are registered, resampled to 1 mm and skull-stripped where they are not."""


class DicomSource(Section):
    """Content of `dicom.json`: the DICOM files of a case."""

    key: str
    """Hash of the files and options; conversion is repeated where it differs."""
    series: dict[str, Series]
    """Series of each modality, with absolute paths."""
    preparation: tuple[str, ...] = ()
    """Steps of preprocessing."""
    unready: tuple[str, ...] = ()
    """Reasons why the scans are not as BraTS provides them; empty if they are."""
    with_identifiers: bool = False
    """Whether the patient's name and number are written to the segmentation."""


class Conversion(NamedTuple):
    """An examination with its sorted series, and the case that it becomes."""

    study: DicomStudy
    case: Case


DEFAULT_OPTIONS = DicomOptions()


def cases_of_dicom(
    root: Path, scans: Path, options: DicomOptions = DEFAULT_OPTIONS, *, track: Track = untracked
) -> tuple[Case, ...]:
    """Convert the examinations below a folder; one that cannot be used is a case with a problem."""
    return tuple(one.case for one in convert_studies(root, scans, options, track=track))


def convert_studies(
    root: Path, scans: Path, options: DicomOptions = DEFAULT_OPTIONS, *, track: Track = untracked
) -> tuple[Conversion, ...]:
    """Convert the examinations below a folder to `scans`, and return their series and cases.

    Raises:
        UsageError: The folder holds no DICOM images.
        EnvironmentalError: pydicom, dcm2niix or a program of preprocessing is not there, or the
            folder of the scans cannot be written to.
    """
    if not _converter():
        msg = f"converting DICOM needs dcm2niix, which is not installed: {INSTALL_DICOM}"
        raise EnvironmentalError(msg)
    if options.preprocess:
        check_tools()
    studies = [
        replace(study, series=sort_series(study.series, options.series))
        for study in find_studies(root, with_identifiers=options.with_identifiers)
    ]
    for study in studies:
        for series in study.series:
            line = f"{series.modality or 'not used'}: {series}, {series.reason}"
            log.info("%s: %s", study.case_id, line)
    convert = partial(_converted, scans=scans, options=options)
    done = map_cases(convert, studies, "converting DICOM", track=track)
    cases = {case.case_id: case for case in done.results}
    given: set[str] = set()
    for failure in done.failures:
        message = failure.message
        for advice in filter(message.endswith, _ADVICE):
            message = message.removesuffix(f" {advice}") if advice in given else message
            given.add(advice)
        cases[failure.case_id] = replace(Case.named(failure.case_id, {}), problems=(message,))
    return tuple(Conversion(study, cases[study.case_id]) for study in studies)


def read_source(folder: Path) -> DicomSource | None:
    """Return the DICOM files that the case in a folder was converted from, or None."""
    try:
        source = DicomSource.model_validate_json((folder / SOURCE_NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    return source if set(source.series) == set(MODALITIES) else None


def _converted(study: DicomStudy, scans: Path, options: DicomOptions) -> Case:
    """Convert an examination unless the same files have been converted already."""
    _check_usable(study, options)
    folder = scans / study.case_id
    files = {name: folder / f"{study.case_id}-{name}.nii.gz" for name in MODALITIES}
    series = {one.modality: one for one in study.series if one.modality}
    identifiers = options.with_identifiers
    wanted = DicomSource(key=_key(series, options), series=series, with_identifiers=identifiers)
    source = read_source(folder)
    if source is None or source.key != wanted.key or not all(map(Path.exists, files.values())):
        source = _convert(study.case_id, wanted, files, preprocess=options.preprocess)
    if source.unready:
        found = f"{'; '.join(source.unready)} (converted files: {folder})"
        expected = "scans registered, skull-stripped and of 1 mm"
        next_step = _NOT_ENOUGH if source.preparation else _PREPARE
        raise CaseError(study.case_id, str(study.folder), found, expected, next_step)
    return single_input(study.case_id, files)


def _check_usable(study: DicomStudy, options: DicomOptions) -> None:
    """Raise `CaseError` if an examination cannot be converted."""
    problem = study.problem or missing_words(study.series, options.series)
    if not problem:
        return
    unused = [f"{one}, {one.reason}" for one in study.series if not one.modality]
    if unused and len(study.series) - len(unused) < len(MODALITIES):
        problem = f"{problem}; not used: {some_of(unused)}"
    expected = f"a whole series for each of {', '.join(MODALITIES)}"
    next_step = _SEPARATE if study.problem else OVERRIDE
    raise CaseError(study.case_id, str(study.folder), problem, expected, next_step)


def _key(series: Mapping[str, Series], options: DicomOptions) -> str:
    """Return a hash of the files of the chosen series, and of the options."""
    key = hashlib.sha256(f"{options.preprocess} {options.with_identifiers}".encode())
    for modality, one in series.items():
        for path in one.files:
            status = path.stat()
            key.update(f"{modality} {status.st_size} {status.st_mtime_ns} ".encode() + bytes(path))
    return key.hexdigest()[:32]


def _convert(
    case_id: str, wanted: DicomSource, files: Mapping[str, Path], *, preprocess: bool
) -> DicomSource:
    volumes: Sequence[Volume] = [_volume(wanted.series[name], case_id) for name in MODALITIES]
    unready, steps = unready_words(volumes), tuple[str, ...]()
    if unready and preprocess:
        volumes, steps = prepare(case_id, volumes)
        unready = unready_words(volumes)
    for path, volume in zip(files.values(), volumes, strict=True):
        write_volume(path, volume.array, volume.geometry)
    source = wanted.model_copy(update={"preparation": steps, "unready": unready})
    # after the scans: where it is, they are there
    write_json(files["t1c"].with_name(SOURCE_NAME), source.model_dump(mode="json"))
    return source


def _volume(series: Series, case_id: str) -> Volume:
    """Convert a series; only its voxels and its grid are taken, no text of the headers.

    Raises:
        CaseError: dcm2niix fails, or makes several volumes of the series.
    """
    with tempfile.TemporaryDirectory(prefix="brats-seg-") as name:
        output, slices = Path(name), Path(name, "slices")
        slices.mkdir()
        for index, path in enumerate(series.files):
            (slices / f"{index:05d}.dcm").symlink_to(path)
        ended = _run_converter(slices, output)
        volumes = sorted(output.glob("*.nii"))
        if ended < 0 or len(volumes) != 1:
            found = f"exit status {ended} of dcm2niix and {counted(len(volumes), 'volume')}"
            raise CaseError(case_id, str(series), found, "one volume", _LOOK)
        return read_volume(volumes[0], case_id=case_id)


def _run_converter(slices: Path, output: Path) -> int:
    """Run dcm2niix without the settings of the user; what it prints may name the patient."""
    options = "-g i -b n -z n -x i -w 1 -f scan -o"
    command = [_converter(), *options.split(), str(output), str(slices)]
    try:
        return subprocess.run(
            command, capture_output=True, check=False, timeout=_TIMEOUT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def _converter() -> str:
    try:
        from dcm2niix import bin as program
    except ImportError:
        return shutil.which("dcm2niix") or ""
    return str(program)
