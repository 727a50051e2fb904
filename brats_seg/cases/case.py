"""Describe one case, and load it: read, check, orient, find release and label convention.

Arrays are `(X, Y, Z)`. `load_case` is the only way from the files of a case to its voxels.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import nibabel as nib
import numpy as np
import numpy.typing as npt

from brats_seg.cases.conventions import check_values, resolve
from brats_seg.cases.layouts import LABEL, parse_case_id
from brats_seg.cases.nifti import (
    Geometry,
    Volume,
    oriented,
    read_packed,
    unpack_label_map,
    unpack_volume,
)
from brats_seg.errors import CaseError, UnusableCaseError, counted, printable
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap
from brats_seg.quality.label_map import (
    NO_ROLES,
    LabelRoles,
    check_placement,
    judge_numbering,
    roles_of,
)
from brats_seg.quality.scan import (
    MIXED_UP,
    check_all_different,
    check_are_scans,
    sample_brain,
    scan_remarks,
)

AFFINE_TOLERANCE = 1e-3
"""Largest difference in mm between the entries of two affines of one grid: rounding errors."""
SKEW_TOLERANCE = 0.01
"""Largest cosine between two axes of a grid that counts as a right angle."""
LARGEST_INTENSITY = 1e30
"""Largest intensity whose differences float32 can hold, in which volumes are normalised."""

_VOLUME = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanFile:
    """Location of one volume: a file, or one volume of a 4-D file."""

    path: Path
    """Path relative to the data folder."""
    volume: int | None = None
    """Index along the fourth axis, for releases that keep all modalities in one file."""

    def __str__(self) -> str:
        """Return the form of `cases.csv`: `a/b.nii.gz`, or `a/b.nii.gz#2` for a volume of a 4-D file."""
        name = self.path.as_posix()
        return name if self.volume is None else f"{name}#{self.volume}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the form that `str` returns."""
        name, hash_sign, volume = text.rpartition("#")
        if hash_sign and _VOLUME.fullmatch(volume):
            return cls(path=Path(name), volume=int(volume))
        return cls(path=Path(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One imaging time point."""

    case_id: str
    patient_id: str
    root: Path = Path()
    """Folder that the file names are relative to; not stored in `cases.csv`."""
    timepoint: str = ""
    """Time point in the case id, if the release has time points."""
    release: str
    """Release, for example `brats2021`, `brats2024-gli`, `msd`, or `unknown`."""
    label_convention: str = ""
    """Name of the convention, confirmed from the voxels; empty without a label map."""
    t1n: ScanFile | None = None
    t1c: ScanFile | None = None
    t2w: ScanFile | None = None
    t2f: ScanFile | None = None
    label: ScanFile | None = None
    problems: tuple[str, ...] = ()
    """Reasons why the case cannot be used; empty if it can."""
    remarks: tuple[str, ...] = ()
    """Irregularities that do not prevent its use, such as a label map with an unusual name."""
    scan_remarks: tuple[str, ...] = ()
    """Those of the remarks that are about the voxels of the modalities, kept for the next index."""
    label_values: tuple[int, ...] = ()
    """Voxel values that occur in the label map."""
    outermost_label: int | None = None
    """Label value that surrounds the others, as oedema does; None where it is not clear."""
    enhancing_label: int | None = None
    """Label value that takes up contrast agent; None where it is not clear."""
    grade: str = ""
    """Grade `HGG` or `LGG`, if the release states it."""
    age_years: float | None = None
    tumour_ml: float | None = None
    """Volume of the whole tumour in the label map."""
    near_copies: tuple[str, ...] = ()
    """Ids of the cases of other patients whose first modality is nearly the same scan."""
    fingerprint: str = ""
    """Fingerprint of the first modality, which near copies of a scan share; see `near_copies`."""
    voxel_hash: str = ""
    """Hash of the voxels of the first modality: equal for the same scan under two ids."""
    files_key: str = ""
    """Hash of names, sizes and times of change: differs if a file of the case is replaced."""

    @classmethod
    def named(cls, case_id: str, files: Mapping[str, ScanFile]) -> Self:
        """Return a case whose release, patient and time point are parsed from its id.

        Args:
            case_id: Id of the case; see `printable` for characters that cannot be printed.
            files: Files by modality, and under `LABEL` the label map.
        """
        case_id = printable(case_id)
        name = parse_case_id(case_id)
        return cls(
            case_id=case_id,
            patient_id=name.patient_id,
            timepoint=name.timepoint,
            release=name.release,
            t1n=files.get("t1n"),
            t1c=files.get("t1c"),
            t2w=files.get("t2w"),
            t2f=files.get("t2f"),
            label=files.get(LABEL),
        )

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities that have a file, in the order of `MODALITIES`."""
        return tuple(name for name in MODALITIES if getattr(self, name) is not None)

    @property
    def images(self) -> tuple[ScanFile, ...]:
        """Files of the modalities that exist, in the order of `MODALITIES`."""
        found = (getattr(self, modality) for modality in MODALITIES)
        return tuple(scan for scan in found if scan is not None)

    @property
    def folder(self) -> Path:
        """Folder of the first file, relative to the data folder."""
        return next((scan.path.parent for scan in self.images), Path())

    @property
    def place(self) -> str:
        """The folder of the files, for messages; their names if they lie in the data folder itself."""
        if self.folder != Path():
            return f"{self.folder.as_posix()}/"
        return " and ".join(scan.path.name for scan in self.images) or "(none)"

    @property
    def read_as(self) -> dict[str, str]:
        """File that is read as each modality, with the index in a 4-D file."""
        return {
            modality: (self.root / str(scan)).as_posix()
            for modality in MODALITIES
            if (scan := getattr(self, modality)) is not None
        }

    @property
    def usable(self) -> bool:
        """Whether the case has no problem."""
        return not self.problems

    @property
    def other_problems(self) -> tuple[str, ...]:
        """Problems besides that of missing modalities, which some models predict without."""
        missing = missing_problem(self)
        return tuple(problem for problem in self.problems if problem != missing)

    def path_of(self, scan: ScanFile) -> Path:
        """Return the path of one of the files."""
        return self.root / scan.path


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseIndex:
    """The cases of a data folder, sorted by id."""

    root: Path
    """Data folder, which file names are relative to."""
    cases: tuple[Case, ...]

    @property
    def usable(self) -> tuple[Case, ...]:
        """The cases without problems."""
        return tuple(case for case in self.cases if case.usable)

    @property
    def trainable(self) -> tuple[Case, ...]:
        """The cases without problems that have a label map."""
        return tuple(case for case in self.usable if case.label is not None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseFiles:
    """The content of the files of a case, as stored on the disk."""

    packed: Mapping[Path, bytes]
    """Content of each file, still compressed, by the path in `ScanFile`."""
    contents: tuple[str, ...]
    """SHA-256 of each modality and then of the label map, with the index in a 4-D file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Result of checking the voxels of a case: its modalities and its labels."""

    remarks: tuple[str, ...] = ()
    """Sentences about unusual modalities, or a label map of unclear place."""
    roles: LabelRoles = NO_ROLES
    """Label values that are clearly oedema and enhancing tumour."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedCase:
    """The voxels of a case that has passed all checks."""

    case: Case
    volumes: tuple[Volume, ...]
    """A volume for each of the modalities, in the axes of BraTS."""
    label: Volume | None
    """Label map in the same axes, uint8."""
    geometry: Geometry
    """Grid of the files as they are stored."""
    release: str
    """Release by the names of the files and the shape of the volumes."""
    convention: LabelConvention | None
    """Convention of the label map; None without one."""
    remarks: tuple[str, ...]
    """Irregularities that do not prevent its use."""
    modalities: tuple[str, ...] = MODALITIES
    """Modalities of the volumes: all four, but for models that predict without some."""
    contents: tuple[str, ...] = ()
    """SHA-256 of each modality and then of the label map, with the index in a 4-D file."""


def missing_problem(case: Case) -> str | None:
    """Return the problem of a case that lacks modalities; None if it has all four."""
    missing = [name for name in MODALITIES if name not in case.modalities]
    if not missing:
        return None
    found, expected = f"no {', '.join(missing)}", ", ".join(MODALITIES)
    next_step = "Add the missing files, or leave the case out."
    return str(CaseError(case.case_id, case.place, found, expected, next_step))


def load_case(
    case: Case,
    *,
    labels: str = "",
    with_label: bool = True,
    files: CaseFiles | None = None,
    modalities: Sequence[str] = MODALITIES,
) -> LoadedCase:
    """Read a case, check it, reorient it to the axes of BraTS, and find its label convention.

    Args:
        case: A case of `find_cases`, `read_index` or `find_inputs`.
        labels: Name of the label convention; empty to take the one of the case, or else to infer it
            from the release and the voxels.
        with_label: Whether the label map is read, if there is one.
        files: The files of the case if they have been read already, with `read_case_files`.
        modalities: Modalities that the case must have, in the order of `MODALITIES`.

    Raises:
        CaseError: The case has problems, a file cannot be read, the grids differ or are sheared, a
            modality is constant, not finite or a label map, or two modalities are one image.
        LabelError: The label map has values that its convention does not know, is clearly in
            another convention than the release, or does not lie on a tumour of the scan.
        ConfigError: No convention has the given name.

    Example:
        >>> import tempfile
        >>> from brats_seg.cases.discovery import find_cases
        >>> from brats_seg.cases.phantom import write_phantom_cases
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_phantom_cases(Path(folder), n_cases=1, seed=0)
        ...     loaded = load_case(find_cases(Path(folder)).cases[0])
        >>> len(loaded.volumes), loaded.release, loaded.convention.name
        (4, 'brats2021', 'brats2017')
    """
    if case.problems:
        raise UnusableCaseError(case.case_id, case.problems)
    files = files or read_case_files(case, with_label=with_label)
    volumes = [
        unpack_volume(files.packed[scan.path], scan.path, case_id=case.case_id, volume=scan.volume)
        for scan in case.images
    ]
    label = None
    if with_label and case.label is not None:
        packed = files.packed[case.label.path]
        label = unpack_label_map(packed, case.label.path, case_id=case.case_id)
    check_volumes(case.case_id, volumes, label, modalities)
    check_right_angles(case.case_id, volumes[0])
    loaded = _loaded(case, volumes, label, labels=labels, modalities=tuple(modalities))
    return replace(loaded, contents=files.contents)


def case_of_arrays(
    case_id: str,
    images: npt.NDArray[Any],
    affine: npt.NDArray[np.float64],
    modalities: Sequence[str] = MODALITIES,
) -> LoadedCase:
    """Check a case given as arrays, and reorient it, as `load_case` does.

    Args:
        case_id: Id of the case, which may name a release.
        images: (n, X, Y, Z), an image for each of the modalities.
        affine: (4, 4), from voxel indices to millimetres.
        modalities: Modalities of the images, in the order of `MODALITIES`.

    Raises:
        CaseError: The case cannot be used.
    """
    name = parse_case_id(case_id)
    x, y, z = images.shape[1:]
    geometry = Geometry(shape=(x, y, z), affine=affine, qform=affine, qform_code=1, sform_code=1)
    volumes = [
        Volume(array=image, geometry=geometry, file=modality)
        for modality, image in zip(modalities, images, strict=False)
    ]
    check_volumes(case_id, volumes, None, modalities)
    check_right_angles(case_id, volumes[0])
    case = Case(case_id=case_id, patient_id=name.patient_id, release=name.release)
    return _loaded(case, volumes, None, modalities=tuple(modalities))


def examine(
    case_id: str,
    volumes: Sequence[Volume],
    label: Volume | None,
    modalities: Sequence[str] = MODALITIES,
) -> Examination:
    """Check that the modalities are what they are called, and that the label map is of the scan.

    Args:
        case_id: Id of the case.
        volumes: Volumes that `check_volumes` has passed, as stored.
        label: The label map, as stored; None without one.
        modalities: Modality of each volume.

    Raises:
        CaseError: A modality is a label map, or two modalities are one image.
        LabelError: The label map does not lie on a tumour of the scan.
    """
    turned = [oriented(volume) for volume in volumes]
    turned_label = label and oriented(label)
    sample = sample_brain(turned, turned_label)
    if sample is None:
        return Examination()
    check_are_scans(case_id, turned, sample)
    check_all_different(case_id, turned, sample, modalities)
    remarks = tuple(scan_remarks(volumes[0].geometry, sample))
    # in other modalities than it is told to be, a tumour does not look like itself
    if turned_label is None or any(remark.startswith(MIXED_UP) for remark in remarks):
        return Examination(remarks=remarks)
    remarks += check_placement(case_id, turned, turned_label, sample)
    return Examination(remarks=remarks, roles=roles_of(sample))


def read_case_files(case: Case, *, with_label: bool = True) -> CaseFiles:
    """Read and hash the files of a case, each once, without decompressing them.

    Raises:
        CaseError: A file cannot be read.
    """
    scans = case.images
    if with_label and case.label is not None:
        scans = (*scans, case.label)
    packed = {
        path: read_packed(case.root / path, case_id=case.case_id)
        for path in dict.fromkeys(scan.path for scan in scans)
    }
    hashes = {path: hashlib.sha256(content).hexdigest() for path, content in packed.items()}
    return CaseFiles(
        packed=packed, contents=tuple(f"{hashes[scan.path]}#{scan.volume}" for scan in scans)
    )


def label_values_of(label_map: LabelMap) -> frozenset[int]:
    """Return the values that occur in a label map."""
    return frozenset(np.flatnonzero(np.bincount(label_map.ravel(order="K"))).tolist())


def check_volumes(
    case_id: str,
    volumes: Sequence[Volume],
    label: Volume | None,
    modalities: Sequence[str] = MODALITIES,
) -> None:
    """Raise `CaseError` unless there are all modalities, on one grid with the label map.

    The modalities must be finite and not constant.
    """
    if not volumes or len(volumes) != len(modalities):
        files = ", ".join(volume.file for volume in volumes)
        the = "the four " if len(modalities) == len(MODALITIES) else ""
        found, expected = f"{len(volumes)} modalities", f"{the}{', '.join(modalities)}"
        raise CaseError(case_id, files, found, expected, "Add the missing files.")
    all_volumes = [*volumes, label] if label else list(volumes)
    check_one_grid(case_id, [(volume.file, volume.geometry) for volume in all_volumes])
    for volume in volumes:
        check_voxels(case_id, volume)


def check_one_grid(case_id: str, grids: Sequence[tuple[str, Geometry]]) -> None:
    """Raise `CaseError` unless all files, given by name and geometry, have the grid of the first."""
    if not grids:
        return
    first_file, first = grids[0]
    others = [(file, grid) for file, grid in grids if not have_one_grid(grid, first)]
    if others:
        raise CaseError(
            case_id,
            " and ".join(file for file, _ in others),
            " and ".join(_described(grid, first) for _, grid in others),
            f"the grid of {first_file}: {_described(first, first)}",
            "Register and resample all files of the case to one grid (for BraTS the SRI24 atlas "
            "at 1 mm, without the skull).",
        )


def have_one_grid(one: Geometry, other: Geometry) -> bool:
    """Return whether voxels of equal index are at the same position."""
    return one.shape == other.shape and np.allclose(
        one.affine, other.affine, rtol=0, atol=AFFINE_TOLERANCE
    )


def check_voxels(case_id: str, volume: Volume) -> None:
    """Raise `CaseError` if a modality has voxels that are not finite, or only one value."""
    low, high = volume.array.min(), volume.array.max()
    # if any voxel is NaN, so are the minimum and the maximum
    if not (np.isfinite(low) and np.isfinite(high)):
        n_broken = int(np.count_nonzero(~np.isfinite(volume.array)))
        found, expected = f"NaN or infinity in {counted(n_broken, 'voxel')}", "finite intensities"
        raise CaseError(case_id, volume.file, found, expected, "Repair or convert the scan again.")
    if max(-float(low), float(high)) > LARGEST_INTENSITY:
        found, expected = f"intensities from {low:g} to {high:g}", f"at most {LARGEST_INTENSITY:g}"
        raise CaseError(case_id, volume.file, found, expected, "Convert the scan again.")
    if low == high:
        found, expected = f"a constant volume, {low} everywhere", "a scan"
        raise CaseError(case_id, volume.file, found, expected, "Copy or convert the scan again.")


def check_right_angles(case_id: str, volume: Volume) -> None:
    """Raise `CaseError` if the axes of the grid are not perpendicular."""
    directions = volume.geometry.affine[:3, :3] / volume.geometry.spacing_mm
    cosine = float(np.abs(np.triu(directions.T @ directions, k=1)).max())
    if cosine > SKEW_TOLERANCE:
        degrees = 90 - float(np.degrees(np.arccos(min(cosine, 1.0))))
        found = f"a sheared grid, whose axes are {degrees:.1f} degrees off a right angle"
        next_step = "Resample the four modalities to a grid of right angles."
        raise CaseError(case_id, volume.file, found, "axes at right angles", next_step)


def _loaded(
    case: Case,
    volumes: Sequence[Volume],
    label: Volume | None,
    *,
    labels: str = "",
    modalities: tuple[str, ...] = MODALITIES,
) -> LoadedCase:
    examined = examine(case.case_id, volumes, label, modalities)
    values = label_values_of(label.array) if label else frozenset[int]()
    found = resolve(
        release=case.release,
        shape=volumes[0].geometry.shape,
        values=values,
        declared=labels or case.label_convention,
    )
    remarks = [*case.remarks, *examined.remarks]
    if label:
        check_values(values, found.convention, case.case_id, label.file)
        numbering = judge_numbering(examined.roles, values, found.convention)
        # the index, or a person, has decided otherwise
        is_decided = bool(labels or case.label_values)
        if numbering.fitting and not is_decided:
            raise numbering.refusal(case.case_id, label.file, found.convention)
        if numbering.contradiction:
            remarks.append(numbering.remark(found.convention))
    return LoadedCase(
        case=case,
        volumes=tuple(oriented(volume) for volume in volumes),
        label=label and oriented(label),
        geometry=volumes[0].geometry,
        release=found.release,
        convention=found.convention if label else None,
        # an index has found some of them already
        remarks=tuple(dict.fromkeys(remarks)),
        modalities=modalities,
    )


def _described(grid: Geometry, first: Geometry) -> str:
    voxels = "x".join(map(str, grid.shape))
    spacing = "x".join(f"{mm:.2f}" for mm in grid.spacing_mm)
    axes = "".join(nib.aff2axcodes(grid.affine))
    origin = ", ".join(f"{mm:.2f}" for mm in grid.affine[:3, 3])
    off = np.abs(grid.affine - first.affine).max()
    # the other numbers are rounded, so this may be the only visible difference
    apart = f", affine off by up to {off:.3g}" if grid.shape == first.shape and off else ""
    return f"{voxels} voxels of {spacing} mm, axes {axes}, origin ({origin}){apart}"
