"""Convert the MR series of DICOM examinations to NIfTI, as cases that can be predicted.

SCANS/CASE/CASE-t1n.nii.gz, -t1c, -t2w, -t2f   voxels, without any text of the DICOM headers
SCANS/CASE/dicom.json                          series of each modality, the reason, and their files

dcm2niix converts. A case whose scans are not registered, not skull-stripped or not of 1 mm has a
problem that says so, unless `preprocess` is asked to prepare them: `greedy` registers (rigid, normalised
mutual information), HD-BET finds the brain. HD-BET is not started before its weights are there.
"""

import hashlib
import importlib.util
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from brats_seg import wings
from brats_seg.cases import nifti
from brats_seg.cases.case import Case, have_one_grid
from brats_seg.cases.find import single_input
from brats_seg.cases.many import map_cases
from brats_seg.cases.nifti import Volume
from brats_seg.config import Section
from brats_seg.dicom.modalities import OVERRIDE, missing_words, sort_series
from brats_seg.dicom.series import INSTALL_DICOM, DicomStudy, Series, find_studies, is_cut_off
from brats_seg.errors import CaseError, EnvironmentalError, counted, some_of
from brats_seg.files import write_json
from brats_seg.labels import MODALITIES
from brats_seg.progress import Track, untracked
from brats_seg.voxels.grids import Resampling, Spacing

log = logging.getLogger(__name__)

SOURCE_NAME = "dicom.json"
"""Name of the file that says which DICOM files a case was converted from."""
INSTALL_PREPROCESS = "pip install 'brats_seg[preprocess]'"
"""Command that installs the programs of preprocessing."""
ONE_MM: Spacing = (1.0, 1.0, 1.0)
"""Voxel size of BraTS."""
WEIGHTS = "hd-bet_params/release_2.0.0/fold_all/checkpoint_final.pth"
"""File below the home folder in which HD-BET 2 keeps its weights."""

_TIMEOUT_S, _CONVERSION_TIMEOUT_S = 3600, 600
"""Longest time of a program, and of dcm2niix, which takes a few seconds for a series."""
_REFERENCE = MODALITIES.index("t1c")
"""Modality that the others are registered to: the tumour core is outlined in it."""
_GREEDY = "import sys, picsl_greedy; picsl_greedy.Greedy3D().execute(sys.argv[1])"
_RIGID = "-a -dof 6 -m NMI -ia-identity -n 100x50x10 -i fixed.nii moving.nii -o rigid.mat"
_RESLICE = "-rf fixed.nii -rt float -rm moving.nii moved.nii -r rigid.mat"


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
    root: Path, scans: Path, options: DicomOptions = DEFAULT_OPTIONS, **choices: Any
) -> tuple[Case, ...]:
    """Convert the examinations below a folder; one that cannot be used is a case with a problem."""
    return tuple(one.case for one in convert_studies(root, scans, options, **choices))


def convert_studies(
    root: Path,
    scans: Path,
    options: DicomOptions = DEFAULT_OPTIONS,
    *,
    is_ready: Callable[[Iterable[Path]], bool] | None = None,
    track: Track = untracked,
) -> tuple[Conversion, ...]:
    """Convert the examinations below a folder whose files are ready to `scans`.

    Returned are their series and cases.

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
        if not is_ready or is_ready(path for series in study.series for path in series.files)
    ]
    for study in studies:
        for series in study.series:
            line = f"{series.modality or 'not used'}: {series}, {series.reason}"
            log.info("%s: %s", study.case_id, line)
    convert = partial(_converted, scans=scans, options=options)
    done = map_cases(convert, studies, "converting DICOM", track=track)
    cases = {case.case_id: case for case in done.results}
    for failure in done.failures:
        unusable = Case.named(failure.case_id, {})
        cases[failure.case_id] = replace(unusable, problems=(failure.message,))
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
        other = "" if source.preparation else ", or add --preprocess (greedy, HD-BET)"
        next_step = f"Prepare the converted files with other programs{other}."
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
    next_step = "Export the examination again." if study.problem else OVERRIDE
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
        nifti.write_volume(path, volume.array, volume.geometry)
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
        # without the settings of the user; what it prints may name the patient
        options = "-g i -b n -z n -x i -w 1 -f scan -o"
        command = [_converter(), *options.split(), str(output), str(slices)]
        done = _run(command, output, _CONVERSION_TIMEOUT_S)
        volumes = sorted(output.glob("*.nii"))
        if done.returncode < 0 or len(volumes) != 1:
            if cut_off := [path.name for path in series.files if is_cut_off(path)]:
                found, next_step = f"files cut off: {some_of(cut_off)}", "Export it again."
                raise CaseError(case_id, str(series), found, "whole files", next_step)
            n_volumes = counted(len(volumes), "volume")
            problem = f"exit status {done.returncode} of dcm2niix and {n_volumes}"
            next_step = (
                "Convert it with dcm2niix and look at what it prints, or name another series."
            )
            raise CaseError(case_id, str(series), problem, "one volume", next_step)
        return nifti.read_volume(volumes[0], case_id=case_id)


def _converter() -> str:
    try:
        from dcm2niix import bin as program
    except ImportError:
        return shutil.which("dcm2niix") or ""
    return str(program)


def unready_words(volumes: Sequence[Volume]) -> tuple[str, ...]:
    """Return why scans are not as BraTS provides them: registered, skull-stripped, of 1 mm.

    `volumes` are the four modalities, each on its own grid.
    """
    words = []
    if not _have_one_grid(volumes):
        words.append("the modalities are not on one grid, so that they are not registered")
    if _has_skull(volumes):
        words.append("the skull does not seem to be stripped")
    grids = [volume.geometry for volume in volumes]
    other = [g.spacing_mm for g in grids if Resampling.needed(g.shape, g.spacing_mm, ONE_MM)]
    if other:
        edges = "x".join(f"{mm:.2f}" for mm in other[0])
        words.append(f"the voxels measure {edges} mm, not 1 mm")
    return tuple(words)


def check_tools() -> None:
    """Raise `EnvironmentalError` if a program of preprocessing is not there."""
    missing = []
    if importlib.util.find_spec("picsl_greedy") is None:
        missing.append(f"greedy is not installed: {INSTALL_PREPROCESS}")
    if shutil.which("hd-bet") is None:
        missing.append(f"hd-bet is not installed: {INSTALL_PREPROCESS}")
    elif not (Path.home() / WEIGHTS).is_file():
        fetch = (
            "copy them there, or run hd-bet -i SCAN.nii.gz -o OUT.nii.gz once, which fetches them"
        )
        missing.append(f"hd-bet has no weights in {Path.home() / WEIGHTS}: {fetch}")
    if missing:
        msg = f"--preprocess cannot run: {'; '.join(missing)}"
        raise EnvironmentalError(msg)


def prepare(case_id: str, volumes: Sequence[Volume]) -> tuple[Sequence[Volume], tuple[str, ...]]:
    """Register, resample and skull-strip the modalities of a case where they need it.

    Returns the modalities on one grid of 1 mm, in the place of t1c, and the steps that were taken.
    `CaseError` is raised if a program fails.
    """
    with tempfile.TemporaryDirectory(prefix="brats-seg-") as name:
        folder = Path(name)
        if _have_one_grid(volumes):
            steps = ["resampled to 1 mm"]
            volumes = [_at_one_mm(volume, case_id) for volume in volumes]
        else:
            steps = ["t1c resampled to 1 mm, the others registered to it by greedy (rigid)"]
            fixed = _at_one_mm(volumes[_REFERENCE], case_id)
            nifti.write_volume(folder / "fixed.nii", fixed.array, fixed.geometry)
            volumes = [
                fixed if index == _REFERENCE else _registered(case_id, volume, fixed, folder)
                for index, volume in enumerate(volumes)
            ]
        if _has_skull(volumes):
            steps.append("brain of t1c found by HD-BET")
            outside = _brain(case_id, volumes[_REFERENCE], folder).array == 0
            volumes = [replace(v, array=np.where(outside, 0, v.array)) for v in volumes]
    for step in steps:
        log.info("%s: %s", case_id, step)
    return volumes, tuple(steps)


def _have_one_grid(volumes: Sequence[Volume]) -> bool:
    return all(have_one_grid(volume.geometry, volumes[0].geometry) for volume in volumes)


def _has_skull(volumes: Sequence[Volume]) -> bool:
    """Return whether the skull does not seem to be stripped; unknown without the checks of scans."""
    judges = wings.judges("scan")
    if judges is None:
        return False
    groups = [volumes] if _have_one_grid(volumes) else [[volume] for volume in volumes]
    return any(map(judges.has_skull, groups))


def _at_one_mm(volume: Volume, case_id: str) -> Volume:
    resampling = nifti.planned_resampling(volume, ONE_MM, case_id=case_id)
    return volume if resampling is None else nifti.resampled(volume, resampling)


def _registered(case_id: str, volume: Volume, fixed: Volume, folder: Path) -> Volume:
    """Return a modality on the grid of `fixed`, which is in the folder."""
    nifti.write_volume(folder / "moving.nii", volume.array, volume.geometry)
    for options in (f"-d 3 -V 0 -seed 1 {_RIGID}", f"-d 3 -V 0 {_RESLICE}"):
        _run_on(case_id, "greedy", [sys.executable, "-c", _GREEDY, options], folder)
    moved = nifti.read_volume(folder / "moved.nii", case_id=case_id)
    # with exactly the header of the grid
    return replace(moved, geometry=fixed.geometry)


def _brain(case_id: str, t1c: Volume, folder: Path) -> Volume:
    """Return the mask of the brain that HD-BET finds."""
    nifti.write_volume(folder / "t1c.nii.gz", t1c.array, t1c.geometry)
    device = "cuda" if shutil.which("nvidia-smi") else "cpu --disable_tta"
    command = f"hd-bet -i t1c.nii.gz -o brain.nii.gz --save_bet_mask -device {device}"
    _run_on(case_id, "hd-bet", command.split(), folder)
    return nifti.read_label_map(folder / "brain_bet.nii.gz", case_id=case_id)


def _run_on(case_id: str, name: str, command: Sequence[str], folder: Path) -> None:
    """Run a program in a folder; raise `CaseError` with the end of what it printed if it fails."""
    done = _run(command, folder)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        problem = f"{name} failed with exit code {done.returncode}: {lines[-1]}"
        next_step = "Prepare the scans with programs of your own."
        raise CaseError(case_id, "(all)", problem, "registered, skull-stripped scans", next_step)


def _run(
    command: Sequence[str], folder: Path, timeout_s: float = _TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder; one that takes too long is killed."""
    try:
        return subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        late = f"no result after {timeout_s} s"
        return subprocess.CompletedProcess(command, -signal.SIGKILL, "", late)
