"""Convert the MR series of DICOM examinations to NIfTI, as cases that can be predicted.

SCANS/CASE/CASE-t1n.nii.gz, -t1c, -t2w, -t2f   voxels, without any text of the DICOM headers
SCANS/CASE/dicom.json                          series of each modality, the reason, and their files

dcm2niix converts. A case whose scans are not registered, not skull-stripped or not of 1 mm has a
problem that says so, unless `preprocess` is asked to prepare them.
"""

import hashlib
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pydantic import Field, ValidationError

from brats_seg.cases.case import Case, have_one_grid
from brats_seg.cases.find import single_input
from brats_seg.cases.many import map_cases
from brats_seg.cases.nifti import Volume, read_volume, write_volume
from brats_seg.config import Section
from brats_seg.dicom.modalities import OVERRIDE, SortedSeries, missing_words, sort_series
from brats_seg.dicom.preprocess import (
    ONE_MM,
    check_tools,
    has_skull,
    has_spacing,
    how_to_prepare,
    prepare,
)
from brats_seg.dicom.series import INSTALL_DICOM, DicomStudy, Series, find_studies
from brats_seg.errors import CaseError, EnvironmentalError, counted, some_of
from brats_seg.files import whole_file
from brats_seg.labels import MODALITIES
from brats_seg.progress import Track, untracked

log = logging.getLogger(__name__)

SOURCE_NAME = "dicom.json"
"""Name of the file that says which DICOM files a case was converted from."""
_SEPARATE = "Separate the patients' files, or export the examination again."
_NOT_ENOUGH = (
    "--preprocess was not enough: look at the scans, and prepare them with other programs."
)
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


class SourceSeries(Section):
    """Series that a modality was converted from."""

    number: int
    description: str
    reason: str
    files: tuple[str, ...]
    """DICOM files in the order of the slices."""


class DicomSource(Section):
    """Content of `dicom.json`: the DICOM files of a case."""

    key: str
    """Hash of the files and options; conversion is repeated where it differs."""
    series: dict[str, SourceSeries] = Field(default_factory=dict)
    """Series of each modality."""
    preparation: tuple[str, ...] = ()
    """Steps of preprocessing."""
    unready: tuple[str, ...] = ()
    """Reasons why the scans are not as BraTS provides them; empty if they are."""
    with_identifiers: bool = False
    """Whether the patient's name and number are written to the segmentation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """An examination, its sorted series, and the case that they become."""

    study: DicomStudy
    series: tuple[SortedSeries, ...]
    problem: str
    """Reason why it cannot be converted; empty if it can."""
    case: Case

    @property
    def case_id(self) -> str:
        """Id of the case."""
        return self.study.name

    @property
    def chosen(self) -> dict[str, SortedSeries]:
        """Series of each modality."""
        return {one.modality: one for one in self.series if one.modality}


DEFAULT_OPTIONS = DicomOptions()


def cases_of_dicom(
    root: Path, scans: Path, options: DicomOptions = DEFAULT_OPTIONS, *, track: Track = untracked
) -> tuple[Case, ...]:
    """Convert the examinations below a folder; one that cannot be used is a case with a problem.

    Args:
        root: Folder with DICOM files.
        scans: Folder to write the cases to.
        options: Choices of the user.
        track: Shows the progress.

    Raises:
        UsageError: The folder holds no DICOM images.
        EnvironmentalError: pydicom, dcm2niix or a program of preprocessing is not there, or the
            folder of the scans cannot be written to.
    """
    return tuple(one.case for one in convert_studies(root, scans, options, track=track))


def convert_studies(
    root: Path, scans: Path, options: DicomOptions = DEFAULT_OPTIONS, *, track: Track = untracked
) -> tuple[Conversion, ...]:
    """Convert the examinations below a folder, and return their series and cases.

    The arguments and errors are those of `cases_of_dicom`.
    """
    if not _converter():
        msg = f"converting DICOM needs dcm2niix, which is not installed: {INSTALL_DICOM}"
        raise EnvironmentalError(msg)
    if options.preprocess:
        check_tools()
    studies = find_studies(root, with_identifiers=options.with_identifiers)
    conversions = [_sorted(study, options) for study in studies]
    for conversion in conversions:
        for line in conversion.series:
            log.info("%s: %s", conversion.case_id, line)
    convert = partial(_converted, scans=scans, options=options)
    done = map_cases(convert, conversions, "converting DICOM", track=track)
    cases = {case.case_id: case for case in done.results}
    for failure in done.failures:
        case = Case.named(failure.case_id, {})
        cases[failure.case_id] = replace(case, problems=(failure.message,))
    return tuple(replace(one, case=cases[one.case_id]) for one in conversions)


def _sorted(study: DicomStudy, options: DicomOptions) -> Conversion:
    """Sort the series of an examination into modalities."""
    series = sort_series(study.series, options.series)
    problem = study.problem or missing_words(series, options.series)
    return Conversion(study=study, series=series, problem=problem, case=Case.named(study.name, {}))


def read_source(folder: Path) -> DicomSource | None:
    """Return the DICOM files that the case in a folder was converted from, or None."""
    try:
        source = DicomSource.model_validate_json((folder / SOURCE_NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    return source if set(source.series) == set(MODALITIES) else None


def unready_words(volumes: Sequence[Volume]) -> tuple[str, ...]:
    """Return why scans are not as BraTS provides them: registered, skull-stripped, of 1 mm.

    Args:
        volumes: The four modalities, each on its own grid.
    """
    first = volumes[0].geometry
    words = []
    is_registered = all(have_one_grid(volume.geometry, first) for volume in volumes)
    if not is_registered:
        words.append("the modalities are not on one grid, so that they are not registered")
    if has_skull(volumes, is_registered=is_registered):
        words.append("the skull does not seem to be stripped")
    spacings = [v.geometry.spacing_mm for v in volumes if not has_spacing(v.geometry, ONE_MM)]
    if spacings:
        edges = "x".join(f"{mm:.2f}" for mm in spacings[0])
        words.append(f"the voxels measure {edges} mm, not 1 mm")
    return tuple(words)


def _converted(conversion: Conversion, scans: Path, options: DicomOptions) -> Case:
    """Convert an examination unless the same files have been converted already."""
    case_id = conversion.case_id
    folder = scans / case_id
    _check_usable(conversion)
    key = _key(conversion, options)
    files = {modality: folder / f"{case_id}-{modality}.nii.gz" for modality in MODALITIES}
    source = read_source(folder)
    if source is None or source.key != key or not all(map(Path.exists, files.values())):
        source = _convert(conversion, files, options, key)
    if source.unready:
        words, expected = "; ".join(source.unready), "scans registered, skull-stripped and of 1 mm"
        next_step = _NOT_ENOUGH if source.preparation else how_to_prepare(folder)
        raise CaseError(case_id, str(conversion.study.folder), words, expected, next_step)
    return single_input(case_id, files)


def _check_usable(conversion: Conversion) -> None:
    """Raise `CaseError` if an examination cannot be converted."""
    words, study = conversion.problem, conversion.study
    if not words:
        return
    unused = [f"{one.series}, {one.reason}" for one in conversion.series if not one.modality]
    if unused and len(conversion.chosen) < len(MODALITIES):
        words = f"{words}; not used: {some_of(unused)}"
    expected = f"a whole series for each of {', '.join(MODALITIES)}"
    next_step = _SEPARATE if study.problem else OVERRIDE
    raise CaseError(study.name, str(study.folder), words, expected, next_step)


def _key(conversion: Conversion, options: DicomOptions) -> str:
    """Return a hash of the files of the chosen series, and of the options."""
    key = hashlib.sha256(f"{options.preprocess} {options.with_identifiers}".encode())
    for modality, one in conversion.chosen.items():
        for path in one.series.files:
            status = path.stat()
            line = f"{modality} {path.absolute()} {status.st_size} {status.st_mtime_ns}\n"
            key.update(line.encode(errors="surrogateescape"))
    return key.hexdigest()[:32]


def _convert(
    conversion: Conversion, files: Mapping[str, Path], options: DicomOptions, key: str
) -> DicomSource:
    case_id, chosen = conversion.case_id, conversion.chosen
    volumes = [_volume(chosen[modality].series, case_id) for modality in MODALITIES]
    unready, steps = unready_words(volumes), tuple[str, ...]()
    if unready and options.preprocess:
        volumes, steps = prepare(case_id, volumes)
        unready = unready_words(volumes)
    for path, volume in zip(files.values(), volumes, strict=True):
        write_volume(path, volume.array, volume.geometry)
    source = DicomSource(
        key=key,
        series={
            modality: SourceSeries(
                number=one.series.number,
                description=one.series.description,
                reason=one.reason,
                files=tuple(str(path.absolute()) for path in one.series.files),
            )
            for modality, one in chosen.items()
        },
        preparation=steps,
        unready=unready,
        with_identifiers=options.with_identifiers,
    )
    # after the scans: where it is, they are there
    with whole_file(files["t1c"].with_name(SOURCE_NAME)) as beside:
        beside.write_text(source.model_dump_json(indent=2) + "\n")
    return source


def _volume(series: Series, case_id: str) -> Volume:
    """Convert a series; only its voxels and its grid are taken, no text of the headers.

    Raises:
        CaseError: dcm2niix fails, or makes several volumes of the series.
    """
    with tempfile.TemporaryDirectory(prefix="brats-seg-") as name:
        slices, made = Path(name, "slices"), Path(name, "made")
        slices.mkdir()
        made.mkdir()
        for index, path in enumerate(series.files):
            (slices / f"{index:05d}.dcm").symlink_to(path.absolute())
        code = _run_converter(slices, made)
        volumes = sorted(made.glob("*.nii"))
        if len(volumes) != 1:
            what = f"{counted(len(volumes), 'volume')} made of it by dcm2niix (exit code {code})"
            next_step = (
                "Convert it with dcm2niix and look at what it prints, or name another series."
            )
            raise CaseError(case_id, str(series), what, "one volume", next_step)
        return read_volume(volumes[0], case_id=case_id)


def _run_converter(slices: Path, made: Path) -> int:
    """Run dcm2niix without the settings of the user; what it prints may name the patient."""
    options = ("-g", "i", "-b", "n", "-z", "n", "-x", "i", "-w", "1", "-f", "scan")
    command = [_converter(), *options, "-o", str(made), str(slices)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return -1
    return done.returncode


def _converter() -> str:
    try:
        from dcm2niix import bin as program
    except ImportError:
        return shutil.which("dcm2niix") or ""
    return str(program)
