"""Convert the MR series of DICOM examinations to NIfTI, as cases that can be predicted.

SCANS/CASE/CASE-t1n.nii.gz, -t1c, -t2w, -t2f   voxels, without any text of the DICOM headers
SCANS/CASE/source.json                         series of each modality, the reason, and their files

dcm2niix converts. A case whose scans are not registered, not skull-stripped or not of 1 mm has a
problem that says so, unless they are prepared (`dicom.preprocess`).
"""

import logging
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from brats_seg.cases import nifti
from brats_seg.cases.case import Case
from brats_seg.cases.find import single_input
from brats_seg.cases.nifti import Volume
from brats_seg.dicom import preprocess
from brats_seg.dicom.modalities import OVERRIDE, missing_reasons, sort_series
from brats_seg.dicom.preprocess import ScanOptions, ScanSource
from brats_seg.dicom.series import DicomStudy, Series, find_studies
from brats_seg.errors import CaseError, counted, some_of
from brats_seg.labels import MODALITIES
from brats_seg.progress import Track, untracked

log = logging.getLogger(__name__)


class Conversion(NamedTuple):
    """An examination with its sorted series, and the case that it becomes."""

    study: DicomStudy
    case: Case


def convert_studies(
    root: Path,
    scans: Path,
    options: ScanOptions,
    *,
    is_ready: Callable[[Iterable[Path]], bool] | None = None,
    track: Track = untracked,
) -> tuple[Conversion, ...]:
    """Convert the examinations below a folder, if their files are ready, into the folder `scans`.

    Returns their series and cases; one that cannot be used is a case with a problem.

    Raises:
        UsageError: The folder holds no DICOM images.
        EnvironmentalError: pydicom, dcm2niix or a program of preprocessing is not there, or the
            folder of the scans cannot be written to.
    """
    preprocess.check_installed("dicom", "pydicom", "highdicom", "dcm2niix")
    studies = [
        _named_apart(replace(study, series=sort_series(study.series, options.series)), scans)
        for study in find_studies(root, with_identifiers=options.with_identifiers)
        if not is_ready or is_ready(path for series in study.series for path in series.files)
    ]
    for study in studies:
        for series in study.series:
            modality = series.modality or "not used"
            log.info("%s: %s: %s, %s", study.case_id, modality, series, series.reason)
    convert = partial(_convert_study, scans=scans, options=options)
    cases = preprocess.make_cases(convert, studies, "converting DICOM", track)
    return tuple(map(Conversion, studies, cases))


def _named_apart(study: DicomStudy, scans: Path) -> DicomStudy:
    """Return an examination, with its hashed id if another one was converted by its name."""
    earlier = preprocess.read_source(scans / study.case_id)
    is_taken = earlier is not None and earlier.study != study.hashed_id
    return replace(study, case_id=study.hashed_id) if is_taken else study


def _convert_study(study: DicomStudy, scans: Path, options: ScanOptions) -> Case:
    """Convert an examination unless the same files have been converted already."""
    _check_usable(study, options)
    folder, identifiers = scans / study.case_id, options.with_identifiers
    files = {name: folder / f"{study.case_id}-{name}.nii.gz" for name in MODALITIES}
    series = {item.modality: item for item in study.series if item.modality}
    slices = [series[name].files for name in MODALITIES]
    key = preprocess.make_key(chain(*slices), identifiers, slices)
    source = preprocess.read_source(folder, key, files.values())
    if source is None:
        volumes = {name: _volume(series[name], study.case_id) for name in MODALITIES}
        source = ScanSource(
            key=key,
            study=study.hashed_id,
            series=series,
            unready=tuple(preprocess.unready_reasons([*volumes.values()])),
            with_identifiers=identifiers,
        )
        source.store(folder, files, volumes)
    if source.unready and not options.atlas:
        problem = f"{'; '.join(source.unready)} (converted files: {folder})"
        expected = "scans registered, skull-stripped and of 1 mm"
        next_step = "Prepare the converted files with other programs, or use predict --preprocess."
        raise CaseError(study.case_id, "(all)", problem, expected, next_step)
    return single_input(study.case_id, files)


def _check_usable(study: DicomStudy, options: ScanOptions) -> None:
    """Raise `CaseError` if an examination cannot be converted."""
    if problem := study.problem or "; ".join(missing_reasons(study.series, options.series)):
        unused = [f"{item}, {item.reason}" for item in study.series if not item.modality]
        if unused and len(study.series) - len(unused) < len(MODALITIES):
            problem = f"{problem}; not used: {some_of(unused)}"
        expected = f"a whole series for each of {', '.join(MODALITIES)}"
        next_step = "Export the examination again." if study.problem else OVERRIDE
        raise CaseError(study.case_id, "(all)", problem, expected, next_step)


def _volume(series: Series, case_id: str) -> Volume:
    """Convert a series; only its voxels and its grid are taken, no text of the headers.

    Raises:
        CaseError: dcm2niix fails, or makes several volumes of the series.
    """
    import dcm2niix

    with tempfile.TemporaryDirectory(prefix="brats-seg-") as name:
        output, slices = Path(name), Path(name, "slices")
        slices.mkdir()
        for index, path in enumerate(series.files):
            (slices / f"{index:05d}.dcm").symlink_to(path)
        # without the settings of the user; what it prints may name the patient
        options = "-g i -b n -z n -x i -m 1 -w 2 -f scan -o"
        done = preprocess.run([dcm2niix.bin, *options.split(), str(output), str(slices)], output)
        volumes = sorted(output.glob("*.nii")) if done.returncode >= 0 else []
        n_slices = [nifti.read_geometry(path, case_id=case_id).shape[2] for path in volumes]
        # it splits a series where headers differ, and leaves out files without pixels
        if n_slices != [series.n_slices]:
            problem = f"exit {done.returncode} of dcm2niix and {counted(len(volumes), 'volume')}"
            if cut := re.search(r"not large enough .*?(\d{5})\.dcm", done.stdout):
                path = series.files[int(cut[1])]
                problem = f"a file that is cut off inside its pixels, {path.name}"
            expected = f"one volume of {counted(series.n_slices, 'slice')}"
            next_step = f"Export it again without compression, see that {output.parent} has space, or name another series."
            raise CaseError(case_id, str(series), problem, expected, next_step)
        return nifti.read_volume(volumes[0], case_id=case_id)
