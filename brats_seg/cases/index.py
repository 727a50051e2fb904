"""Index a data folder: find its cases, open their files, and report what is wrong with them.

All files of each case are read once and checked as `load_case` does; what is unusual becomes a
remark, what cannot be used a problem. The label maps of a release have one numbering, so that what
the clear ones show is held against all of them.
`case_table` stores the index as `cases.csv`.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import (
    Case,
    CaseIndex,
    Examination,
    ScanFile,
    check_one_grid,
    check_right_angles,
    check_voxels,
    examine,
)
from brats_seg.cases.conventions import check_values, resolve
from brats_seg.cases.discovery import find_cases
from brats_seg.cases.layouts import NNUNET, UNKNOWN
from brats_seg.cases.nifti import Volume, read_packed, unpack_label_map, unpack_volume
from brats_seg.cases.path_table import data_folder
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap, convention_named
from brats_seg.progress import Track, untracked
from brats_seg.quality.label_map import (
    NO_ROLES,
    OTHERS_DIFFER,
    LabelRoles,
    Numbering,
    differ,
    judge_numbering,
    rival_of,
)
from brats_seg.quality.near_copies import fingerprint_of, with_near_copies
from brats_seg.voxels.grids import MM3_PER_ML

log = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_INT16 = np.iinfo(np.int16)


def index_cases(
    root: Path,
    *,
    previous: CaseIndex | None = None,
    labels: str | None = None,
    label_files: str | None = None,
    n_workers: int = 0,
    track: Track = untracked,
) -> CaseIndex:
    """Find the cases of a data folder, or of a table of paths, open their files, and resolve their label conventions.

    Args:
        root: The data folder, or a `.csv` or `.json` table of paths.
        previous: An earlier index of the folder. Its cases without problems are not opened again
            unless their files have changed.
        labels: Name of the label convention, if names and values do not identify the right one.
        label_files: Pattern of the names of the label maps; see `find_cases`.
        n_workers: Threads that open files; 0 opens them in this thread. Decompressing and hashing
            release the interpreter lock.
        track: Shows the progress.

    Raises:
        LayoutError: The folder contains no case.
        ConfigError: No convention has the given name.

    Example:
        >>> import tempfile
        >>> from brats_seg.cases.phantom import write_phantom_cases
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_phantom_cases(Path(folder), n_cases=2, seed=0)
        ...     index = index_cases(Path(folder))
        >>> [(case.case_id, case.label_convention, case.usable) for case in index.cases]
        [('BraTS2021_00000', 'brats2017', True), ('BraTS2021_00001', 'brats2017', True)]
    """
    if labels:
        convention_named(labels)
    discovery = find_cases(root, label_files=label_files)
    for notice in discovery.notices:
        log.warning("%s: %s", root, notice)
    known = {case.files_key: case for case in previous.usable} if previous else {}
    new = [case for case in discovery.cases if case.files_key not in known]
    inspections = track(_inspect_all(new, n_workers), what="index", total=len(new))
    opened = {
        case.files_key: OpenedCase.inspected(case, inspection)
        for case, inspection in zip(new, inspections, strict=True)
    }
    cases = [
        opened.get(case.files_key) or OpenedCase.recalled(case, known[case.files_key])
        for case in discovery.cases
    ]
    kept = without_duplicates(with_conventions(cases, labels or ""))
    return CaseIndex(root=data_folder(root), cases=with_near_copies(kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Content of the files of one case."""

    shape: tuple[int, int, int] | None
    """Voxels of the first modality; None if it cannot be read."""
    voxel_hash: str
    """Hash of the voxels of the first modality, independent of the stored number type; empty if it
    cannot be read."""
    fingerprint: str
    """Fingerprint of the first modality; empty if it cannot be read or shows no brain."""
    label_counts: tuple[tuple[int, int], ...]
    """Label values and their numbers of voxels; empty without a label map."""
    label_voxel_mm3: float
    """Volume of a voxel of the label map."""
    problems: tuple[str, ...]
    """Everything that is wrong with the files."""
    remarks: tuple[str, ...] = ()
    """Sentences about unusual modalities, or a label map of unclear place."""
    roles: LabelRoles = NO_ROLES
    """Label values that are clearly oedema and enhancing tumour."""

    @property
    def label_values(self) -> tuple[int, ...]:
        """Label values that occur, ascending."""
        return tuple(value for value, _ in self.label_counts)

    def tumour_ml(self, convention: LabelConvention) -> float:
        """Return the volume of the whole tumour."""
        whole_tumour = convention.regions[0]
        n_voxels = sum(n for value, n in self.label_counts if value in whole_tumour)
        return n_voxels * self.label_voxel_mm3 / MM3_PER_ML


def inspect_case(case: Case) -> Inspection:
    """Open the files of a case; problems are collected, not raised."""
    problems: list[str] = []
    opened = _open_files(case, problems)
    images = [volume for scan in case.images if (volume := opened.get(scan))]
    label = opened.get(case.label) if case.label else None
    grids = [(volume.file, volume.geometry) for volume in opened.values()]
    _attempt(problems, check_one_grid, case.case_id, grids)
    if images:
        _attempt(problems, check_right_angles, case.case_id, images[0])
    for image in images:
        _attempt(problems, check_voxels, case.case_id, image)
    examined = Examination()
    if not problems and len(images) == len(MODALITIES):
        examined = _attempt(problems, examine, case.case_id, images, label) or examined
    first = next((opened[scan] for scan in case.images[:1] if scan in opened), None)
    return Inspection(
        shape=first.geometry.shape if first else None,
        voxel_hash=_hash(first.array) if first else "",
        fingerprint=fingerprint_of(first) if first and not problems else "",
        label_counts=_count(label.array) if label else (),
        label_voxel_mm3=_voxel_mm3(label) if label else 0.0,
        problems=tuple(problems),
        remarks=examined.remarks,
        roles=examined.roles,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedCase:
    """A case whose label values are known, but not yet its label convention."""

    case: Case
    """The case; its convention is that of its `dataset.json`, if there is one."""
    inspection: Inspection | None
    """Content of the files; None if an earlier index contains the case."""
    previous: Case | None = None
    """The case in the earlier index."""

    @classmethod
    def inspected(cls, case: Case, inspection: Inspection) -> Self:
        """Add the content of the files to a case."""
        found = resolve(
            release=case.release, shape=inspection.shape, values=inspection.label_values
        )
        case = replace(
            case,
            release=found.release,
            problems=(*case.problems, *inspection.problems),
            scan_remarks=inspection.remarks,
            label_values=inspection.label_values,
            outermost_label=inspection.roles.outermost,
            enhancing_label=inspection.roles.enhancing,
            voxel_hash=inspection.voxel_hash,
            fingerprint=inspection.fingerprint,
        )
        return cls(case=case, inspection=inspection)

    @classmethod
    def recalled(cls, case: Case, previous: Case) -> Self:
        """Take the content of the files from an earlier index."""
        case = replace(
            case,
            release=previous.release,
            scan_remarks=previous.scan_remarks,
            label_values=previous.label_values,
            outermost_label=previous.outermost_label,
            enhancing_label=previous.enhancing_label,
            voxel_hash=previous.voxel_hash,
            fingerprint=previous.fingerprint,
        )
        return cls(case=case, inspection=None, previous=previous)

    @property
    def roles(self) -> LabelRoles:
        """Label values that are clearly oedema and enhancing tumour."""
        return LabelRoles(outermost=self.case.outermost_label, enhancing=self.case.enhancing_label)

    def numbering(self, convention: LabelConvention) -> Numbering:
        """Return whether the labels look like a convention."""
        return judge_numbering(self.roles, self.case.label_values, convention)

    def tumour_ml(self, convention: LabelConvention) -> float | None:
        """Return the volume of the whole tumour in a convention."""
        if self.previous and self.previous.label_convention == convention.name:
            return self.previous.tumour_ml
        return (self.inspection or inspect_case(self.case)).tumour_ml(convention)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """Convention that the label maps of a release are read in, and evidence against it."""

    convention: LabelConvention
    is_named: bool
    """Whether a person named the convention."""
    rival: str
    """Name of the convention that most of them look like, if it is another; empty otherwise."""
    remarks: tuple[str, ...]
    """Remarks on all of them."""
    n_of_one_label: int
    """Number of the label maps if all of them hold label 1 alone, of unknown meaning; else 0."""

    @property
    def numbering(self) -> Numbering:
        """Numbering that most of the label maps show."""
        return Numbering(
            contradiction=OTHERS_DIFFER,
            fitting=(self.rival,),
        )


def with_conventions(opened: Iterable[OpenedCase], labels: str) -> tuple[Case, ...]:
    """Return the cases with their label convention; values outside it become a problem.

    Cases of one release are resolved together.

    Args:
        opened: All cases of the data folder.
        labels: Name of the convention that the user gave; empty to infer it.
    """
    groups: defaultdict[tuple[str, str], list[OpenedCase]] = defaultdict(list)
    for one in opened:
        groups[_source(one.case)].append(one)
    return tuple(case for group in groups.values() for case in _resolved(group, labels))


def without_duplicates(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases by id, one of each set of duplicates; duplicates that differ get a problem.

    Duplicates are equal if the voxels of their first modality are equal, and the values and tumour
    volumes of the label maps of those that have one. The first of equal duplicates by path is kept,
    preferably one with a label map. Duplicates with other problems are all kept.
    """
    kept: list[Case] = []
    by_id = sorted(cases, key=lambda case: case.case_id)
    for _, same_id in groupby(by_id, key=lambda case: case.case_id):
        duplicates = sorted(same_id, key=_folder)
        usable = [case for case in duplicates if case.usable]
        kept += [case for case in duplicates if not case.usable]
        if len(usable) > 1:
            kept += _one_of(usable)
        else:
            kept += usable
    return tuple(sorted(kept, key=lambda case: (case.case_id, _folder(case))))


def _inspect_all(cases: Sequence[Case], n_workers: int) -> Iterator[Inspection]:
    if n_workers == 0:
        yield from (inspect_case(case) for case in cases)
        return
    with ThreadPoolExecutor(n_workers) as pool:
        yield from pool.map(inspect_case, cases)


def _open_files(case: Case, problems: list[str]) -> dict[ScanFile, Volume]:
    """Return the volumes of a case that can be read; each file is read once."""
    packed: dict[Path, bytes | None] = {}
    opened = {}
    for scan in (*case.images, *([case.label] if case.label else [])):
        path = case.path_of(scan)
        if path not in packed:
            packed[path] = _attempt(problems, read_packed, path, case_id=case.case_id)
        content = packed[path]
        if content is None:
            continue
        volume = (
            _attempt(problems, unpack_label_map, content, path, case_id=case.case_id)
            if scan == case.label
            else _attempt(
                problems, unpack_volume, content, path, case_id=case.case_id, volume=scan.volume
            )
        )
        if volume:
            opened[scan] = volume
    return opened


def _attempt(
    problems: list[str],
    work: Callable[Parameters, Result],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Result | None:
    try:
        return work(*args, **kwargs)
    except CaseError as error:
        problems.append(str(error))
        return None


def _hash(array: npt.NDArray[Any]) -> str:
    """Hash the shape and the numbers of an array (X, Y, Z).

    One release stores as float32 what another stores as int16: whole numbers in the range of int16
    are hashed as int16, all others as float32.
    """
    low, high = array.min(), array.max()
    fits = low >= _INT16.min and high <= _INT16.max
    with np.errstate(over="ignore"):
        canonical = array.astype(np.int16 if fits else np.float32, copy=False)
        if not np.array_equal(canonical, array):
            # adding 0 turns negative zeros into positive ones
            canonical = array.astype(np.float32) + np.float32(0)
    key = hashlib.sha256(str(array.shape).encode())
    key.update(np.asfortranarray(canonical).T.data)
    return key.hexdigest()[:32]


def _count(label_map: LabelMap) -> tuple[tuple[int, int], ...]:
    flat = label_map.ravel(order="K")
    # counting the few voxels of the tumour takes a quarter of the time of counting all
    tumour = flat[flat != 0]
    counts = np.bincount(tumour, minlength=1)
    counts[0] = flat.size - tumour.size
    return tuple((int(value), int(counts[value])) for value in np.flatnonzero(counts))


def _voxel_mm3(volume: Volume) -> float:
    return float(abs(np.linalg.det(volume.geometry.affine[:3, :3])))


def _source(case: Case) -> tuple[str, str]:
    """Return a key that is equal for cases which use one label convention."""
    if case.release not in {UNKNOWN, NNUNET}:
        return case.release, ""
    above = case.folder.parent
    # one data set has its cases beside each other, or its patients
    return case.release, (above.parent if above.name == case.patient_id else above).as_posix()


def _resolved(group: Sequence[OpenedCase], labels: str) -> Iterator[Case]:
    values = {value for one in group for value in one.case.label_values}
    declared = next((c for one in group if (c := one.case.label_convention)), "")
    # the shape has been taken into account in the release already
    found = resolve(
        release=group[0].case.release, shape=None, values=values, declared=labels or declared
    )
    remarks: tuple[str, ...] = ()
    if found.is_open:
        remarks = (
            f"the label values {' '.join(map(str, sorted(values)))} were read as "
            f"{found.convention.name}, but the names do not confirm it: if that is wrong, name the "
            "convention with --labels",
        )
    shown = [(one.roles, one.case.label_values) for one in group]
    n_labelled = sum(1 in one.case.label_values for one in group)
    reading = _Reading(
        convention=found.convention,
        is_named=bool(labels),
        rival="" if labels else rival_of(shown, found.convention),
        remarks=remarks,
        n_of_one_label=n_labelled if found.is_open and values <= {0, 1} and n_labelled > 1 else 0,
    )
    for one in group:
        yield _labelled(one, reading)


def _labelled(opened: OpenedCase, reading: _Reading) -> Case:
    case = opened.case
    if not case.label_values:
        return replace(case, label_convention="", remarks=(*case.remarks, *case.scan_remarks))
    problems, remarks = list(case.problems), [*case.scan_remarks, *reading.remarks]
    file = case.label.path.name if case.label else ""
    _attempt(problems, check_values, case.label_values, reading.convention, case.case_id, file)
    if reading.n_of_one_label:
        problems.append(_of_one_label(case, reading.n_of_one_label))
    numbering = opened.numbering(reading.convention)
    if numbering.contradiction and (reading.is_named or not numbering.fitting):
        remarks.append(numbering.remark(reading.convention))
    elif numbering.contradiction or differ(reading.rival, reading.convention, case.label_values):
        numbering = numbering if numbering.fitting else reading.numbering
        problems.append(str(numbering.refusal(case.case_id, file, reading.convention)))
    if case.label_values == (0,):
        remarks.append("the label map holds no tumour")
    return replace(
        case,
        label_convention=reading.convention.name,
        problems=tuple(problems),
        remarks=(*case.remarks, *remarks),
        tumour_ml=opened.tumour_ml(reading.convention),
    )


def _of_one_label(case: Case, n_label_maps: int) -> str:
    file = case.label.path.name if case.label else ""
    found = f"label 1 alone, as in all {n_label_maps} label maps: a mask of the whole tumour"
    next_step = "Give label maps of the tissues, or say with --labels which tissue 1 is."
    expected = "labels of oedema, tumour core and enhancing tumour"
    return str(CaseError(case.case_id, file, found, expected, next_step))


def _one_of(duplicates: Sequence[Case]) -> list[Case]:
    labelled = [case for case in duplicates if case.label]
    if len({case.voxel_hash for case in duplicates}) > 1:
        return [_refused(case, duplicates, "another scan") for case in duplicates]
    if len({(case.label_values, case.tumour_ml) for case in labelled}) > 1:
        what = "the scan with another label map"
        return [_refused(case, duplicates, what) for case in duplicates]
    chosen = (labelled or duplicates)[0]
    remark = f"the same scan is in {_others(chosen, duplicates)}, which was ignored"
    return [replace(chosen, remarks=(*chosen.remarks, remark))]


def _refused(case: Case, duplicates: Sequence[Case], what: str) -> Case:
    error = CaseError(
        case.case_id,
        f"{_folder(case)}/",
        f"{what} of the same id in {_others(case, duplicates)}",
        "one folder per id",
        "Remove or rename the one that is not wanted.",
    )
    return replace(case, problems=(*case.problems, str(error)))


def _others(case: Case, duplicates: Sequence[Case]) -> str:
    return " and ".join(f"{_folder(other)}/" for other in duplicates if other is not case)


def _folder(case: Case) -> str:
    return case.folder.as_posix()
