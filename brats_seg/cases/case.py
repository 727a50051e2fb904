"""Describe one case, and load it: read, check, orient, find release and label convention.

Arrays are `(X, Y, Z)`. `open_files` is the only way from the files of a case to its voxels:
`load_case` raises the first of the problems that it returns, and the index keeps all of them.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import nibabel as nib
import numpy as np
import numpy.typing as npt
from pydantic import StringConstraints

from brats_seg.cases import layouts, nifti, releases
from brats_seg.errors import CaseError, counted, printable
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap
from brats_seg.voxels.box import shape_text
from brats_seg.wings import NO_JUDGEMENT, ShownLabels, find_wing

AFFINE_TOLERANCE = 1e-3
"""Largest difference in mm between the entries of two affines of one grid: rounding errors."""
SKEW_TOLERANCE = 0.01
"""Largest cosine between two axes of a grid that counts as a right angle."""
LARGEST_INTENSITY = 1e30
"""Largest intensity whose differences float32 can hold, in which volumes are normalised."""

_VOLUME = re.compile(r"(?P<name>.*)#(?P<volume>[0-9]{1,5})", re.DOTALL)


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
        if match := _VOLUME.fullmatch(text):
            return cls(path=Path(match["name"]), volume=int(match["volume"]))
        return cls(path=Path(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseFacts:
    """What an index has found out about a case, which the next index need not find out again."""

    label_voxels: tuple[tuple[int, int], ...] = ()
    """Each value that occurs in the label map, and its number of voxels."""
    voxel_mm3: float = 0.0
    """Volume of a voxel of the label map."""
    tumour_ml: float | None = None
    """Volume of the whole tumour in the label map."""
    outermost_label: int | None = None
    """Label value that surrounds the others, as oedema does; None where it is not clear."""
    enhancing_label: int | None = None
    """Label value that takes up contrast agent; None where it is not clear."""
    scan_remarks: tuple[str, ...] = ()
    """Those of the remarks that are about the voxels."""
    grade: str = ""
    """Grade `HGG` or `LGG`, if the release states it."""
    age_years: float | None = None
    near_copies: tuple[str, ...] = ()
    """Ids of the cases of other patients whose first modality is nearly the same scan."""
    fingerprint: Annotated[str, StringConstraints(pattern="^[0-9a-f]{272}$")] = ""
    """Fingerprint of the first modality, 1,088 bits that near copies of a scan share."""
    voxel_hash: str = ""
    """Hash of the voxels of the first modality: equal for the same scan under two ids."""
    files_key: str = ""
    """Hash of id, names, sizes and times of change: differs if a file of the case is replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One imaging time point."""

    case_id: str
    patient_id: str
    release: str
    """Release, for example `brats2021`, `brats2024-gli`, `msd`, or `unknown`."""
    root: Path = Path()
    """Folder that the file names are relative to."""
    files: Mapping[str, ScanFile] = field(default_factory=dict)
    """Files by modality, and the label map under `LABEL`."""
    convention: str = ""
    """Name of the label convention; empty if it is not known yet, or without a label map."""
    problems: tuple[str, ...] = ()
    """Reasons why the case cannot be used; missing modalities are a problem once it is opened."""
    remarks: tuple[str, ...] = ()
    """Irregularities that do not prevent its use, such as a label map with an unusual name."""
    facts: CaseFacts = CaseFacts()

    @classmethod
    def named(cls, case_id: str, files: Mapping[str, ScanFile]) -> Self:
        """Return a case whose release and patient are parsed from its id."""
        case_id = printable(case_id)
        release, patient_id = releases.parse_case_id(case_id)
        return cls(case_id=case_id, patient_id=patient_id, release=release, files=files)

    def with_problem(self, found: str, expected: str, next_step: str, file: str = "") -> Self:
        """Return the case with one more reason why it cannot be used."""
        error = CaseError(self.case_id, file or self.location, found, expected, next_step)
        return replace(self, problems=tuple(dict.fromkeys((*self.problems, str(error)))))

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities that have a file, in the order of `MODALITIES`."""
        return tuple(name for name in MODALITIES if name in self.files)

    @property
    def images(self) -> tuple[ScanFile, ...]:
        """Files of the modalities that exist, in the order of `MODALITIES`."""
        return tuple(self.files[name] for name in self.modalities)

    @property
    def label(self) -> ScanFile | None:
        """File of the label map."""
        return self.files.get(layouts.LABEL)

    @property
    def folder(self) -> Path:
        """Folder of the first file, relative to the data folder."""
        return next((scan.path.parent for scan in self.images), Path())

    @property
    def location(self) -> str:
        """The folder of the files, for messages; their names if they lie in the data folder itself."""
        if self.folder != Path():
            return f"{self.folder.as_posix()}/"
        return " and ".join(scan.path.name for scan in self.images) or "(none)"

    @property
    def usable(self) -> bool:
        """Whether the case has no problem, and all modalities."""
        return not self.problems and self.modalities == MODALITIES

    @property
    def label_values(self) -> tuple[int, ...]:
        """Values that an index has found in the label map, ascending."""
        return tuple(value for value, _ in self.facts.label_voxels)

    @property
    def shown_labels(self) -> ShownLabels:
        """The label map as its facts describe it."""
        return ShownLabels(
            case_id=self.case_id,
            file=self.label.path.name if self.label else "",
            values=frozenset(self.label_values),
            outermost=self.facts.outermost_label,
            enhancing=self.facts.enhancing_label,
        )

    def path_of(self, scan: ScanFile) -> Path:
        """Return the path of one of the files."""
        return self.root / scan.path


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseIndex:
    """The cases of a data folder, sorted by id."""

    root: Path
    """Data folder, which file names are relative to."""
    cases: tuple[Case, ...]
    notices: tuple[str, ...] = ()
    """Files that were ignored although they may be scans."""

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
    """Content of each file that can be read, still compressed, by the path in `ScanFile`."""
    hashes: tuple[str, ...]
    """SHA-256 of each modality and then of the label map, with the index in a 4-D file."""
    problems: tuple[CaseError, ...] = ()
    """Errors of the files that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedCase:
    """The voxels of a case that has passed all checks."""

    case: Case
    """The case; its release and its remarks take the voxels into account."""
    volumes: tuple[nifti.Volume, ...]
    """A volume for each of the modalities of the case, in the axes of BraTS."""
    label: nifti.Volume | None
    """Label map in the same axes, uint8."""
    geometry: nifti.Geometry
    """Grid of the files as they are stored."""
    convention: LabelConvention | None
    """Convention of the label map; None without one."""
    hashes: tuple[str, ...] = ()
    """Those of `CaseFiles`."""


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
        modalities: Modalities that the case must have.

    Raises:
        CaseError: The case has problems, a file cannot be read, the grids differ or are sheared, a
            modality is constant, not finite or a label map, or two modalities are one image.
        LabelError: The label map has values that its convention does not know, is clearly in
            another convention than the release, or does not lie on a tumour of the scan.
        ConfigError: No convention has the given name.

    Example:
        >>> import tempfile
        >>> from brats_seg.cases.find import find_cases
        >>> from brats_seg.cases.phantom import write_phantom_cases
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_phantom_cases(Path(folder), n_cases=1, seed=0)
        ...     loaded = load_case(find_cases(Path(folder)).cases[0])
        >>> len(loaded.volumes), loaded.case.release, loaded.convention.name
        (4, 'brats2021', 'brats2017')
    """
    if case.problems:
        raise CaseError(case.case_id, "(all)", "; ".join(case.problems), "", "")
    read = case if with_label else replace(case, files={k: case.files[k] for k in case.modalities})
    files = files or read_case_files(read)
    opened = open_files(read, files, modalities)
    return replace(_check_loaded(case, *opened, labels), hashes=files.hashes)


def case_of_arrays(
    case_id: str,
    images: npt.NDArray[Any],
    affine: npt.NDArray[np.float64],
    modalities: Sequence[str] = MODALITIES,
) -> LoadedCase:
    """Check a case given as arrays (n, X, Y, Z), one for each modality, as `load_case` does."""
    # tensors too, which MONAI's transforms return
    images = np.asarray(images)
    case = Case.named(case_id, {name: ScanFile(path=Path(name)) for name in modalities})
    is_whole = images.ndim == 4 and images.size > 0 and len(images) == len(modalities)
    if not is_whole or case.modalities != tuple(modalities):
        problem = f"an array of shape {images.shape} for {', '.join(modalities)}"
        expected = f"an image (X, Y, Z) for each, in the order {', '.join(MODALITIES)}"
        raise CaseError(case_id, "(array)", problem, expected, "Give the images in that order.")
    geometry = nifti.Geometry.at(np.asarray(affine), images.shape[1:], qform_code=1)
    volumes = {
        modality: nifti.Volume(array=image, geometry=geometry, file=modality)
        for modality, image in zip(modalities, images, strict=True)
    }
    return _check_loaded(case, volumes, *_judge(case, volumes), "")


def read_case_files(case: Case) -> CaseFiles:
    """Read and hash the files of a case, each once, without decompressing them."""
    scans = [case.files[kind] for kind in layouts.KINDS if kind in case.files]
    packed: dict[Path, bytes] = {}
    problems = []
    for path in dict.fromkeys(scan.path for scan in scans):
        try:
            packed[path] = nifti.read_packed(case.root / path, case_id=case.case_id)
        except CaseError as error:
            problems.append(error)
    sha = {path: hashlib.sha256(content).hexdigest() for path, content in packed.items()}
    hashes = tuple(f"{sha[scan.path]}#{scan.volume}" for scan in scans if scan.path in sha)
    return CaseFiles(packed=packed, hashes=hashes, problems=tuple(problems))


def open_files(
    case: Case, files: CaseFiles, modalities: Sequence[str] = MODALITIES
) -> tuple[dict[str, nifti.Volume], list[CaseError], CaseFacts]:
    """Decompress, check and judge the files of a case; problems are collected, not raised.

    Returns:
        The volumes that can be read by kind, all that is wrong, and the facts of the case with what
        its voxels show.
    """
    problems = [*missing_problems(case, modalities), *files.problems]
    volumes: dict[str, nifti.Volume] = {}
    for kind in layouts.KINDS:
        scan = case.files.get(kind)
        if scan and scan.path in files.packed:
            packed, path = files.packed[scan.path], case.path_of(scan)
            try:
                volumes[kind] = nifti.unpack_volume(
                    packed, path, case.case_id, scan.volume, is_label_map=kind == layouts.LABEL
                )
            except CaseError as error:
                problems.append(error)
    return volumes, *_judge(case, volumes, problems)


def missing_problems(case: Case, modalities: Sequence[str] = MODALITIES) -> Iterator[CaseError]:
    """Yield the error of a case that lacks some of these modalities; none if it has all."""
    if missing := ", ".join(name for name in modalities if name not in case.files):
        problem, next_step = f"no {missing}", "Add the missing files, or leave the case out."
        yield CaseError(case.case_id, case.location, problem, ", ".join(modalities), next_step)


def count_labels(label_map: LabelMap) -> dict[int, int]:
    """Return each value that occurs in a label map, ascending, and its number of voxels."""
    flat = label_map.ravel(order="K")
    # counting the few voxels of the tumour takes a quarter of the time of counting all
    tumour = flat[flat != 0]
    counts = np.bincount(tumour, minlength=1)
    counts[0] = flat.size - tumour.size
    return {int(value): int(counts[value]) for value in np.flatnonzero(counts)}


def check_one_grid(case_id: str, grids: Sequence[tuple[str, nifti.Geometry]]) -> None:
    """Raise `CaseError` unless all files, given by name and geometry, have the grid of the first."""
    if differing := [pair for pair in grids if not have_one_grid(pair[1], grids[0][1])]:
        first_file, first = grids[0]
        files = " and ".join(file for file, _ in differing)
        problem = " and ".join(_describe_grid(grid, first) for _, grid in differing)
        expected = f"the grid of {first_file}: {_describe_grid(first, first)}"
        next_step = "Register all files to one grid (for BraTS SRI24, without skull), as predict --preprocess does with scans."
        raise CaseError(case_id, files, problem, expected, next_step)


def have_one_grid(one: nifti.Geometry, other: nifti.Geometry) -> bool:
    """Return whether voxels of equal index are at the same position."""
    return one.shape == other.shape and np.allclose(
        one.affine, other.affine, rtol=0, atol=AFFINE_TOLERANCE
    )


def _judge(
    case: Case, volumes: Mapping[str, nifti.Volume], problems: Sequence[CaseError] = ()
) -> tuple[list[CaseError], CaseFacts]:
    """Add the problems of the voxels, and what they show to the facts of the case.

    Its tissues are judged if it has no problem.
    """
    images = {kind: volume for kind, volume in volumes.items() if kind != layouts.LABEL}
    label = volumes.get(layouts.LABEL)
    problems = [*problems, *_find_problems(case.case_id, [*volumes.values()], [*images.values()])]
    judgement, judge = NO_JUDGEMENT, find_wing("quality.label_map")
    if judge is not None and not problems:
        judgement = judge.judge_scan(case.case_id, images, label)
        problems += [judgement.refusal] if judgement.refusal else []
    return problems, replace(
        case.facts,
        label_voxels=tuple(count_labels(label.array).items()) if label else (),
        voxel_mm3=float(abs(np.linalg.det(label.geometry.affine[:3, :3]))) if label else 0.0,
        outermost_label=judgement.outermost,
        enhancing_label=judgement.enhancing,
        scan_remarks=judgement.remarks,
    )


def _find_problems(
    case_id: str, volumes: Sequence[nifti.Volume], images: Sequence[nifti.Volume]
) -> Iterator[CaseError]:
    """Yield what is wrong with volumes: other grids, sheared axes, images whose voxels are no intensities."""
    # files may be stored along different axes
    turned = [nifti.oriented(volume).geometry for volume in volumes]
    if not all(have_one_grid(grid, turned[0]) for grid in turned):
        try:
            check_one_grid(case_id, [(volume.file, volume.geometry) for volume in volumes])
        except CaseError as error:
            yield error
    if images:
        geometry = images[0].geometry
        directions = geometry.affine[:3, :3] / geometry.spacing_mm
        cosine = float(np.abs(np.triu(directions.T @ directions, k=1)).max())
        if cosine > SKEW_TOLERANCE:
            degrees = np.degrees(np.arcsin(min(cosine, 1.0)))
            problem = f"a sheared grid, whose axes are {degrees:.1f} degrees off a right angle"
            next_step = "Resample the four modalities to a grid of right angles."
            yield CaseError(case_id, images[0].file, problem, "axes at right angles", next_step)
    for image in images:
        if problem := _wrong_voxels(image.array):
            expected = f"finite intensities up to {LARGEST_INTENSITY:g}, not all equal"
            yield CaseError(case_id, image.file, problem, expected, "Convert the scan again.")


def _wrong_voxels(array: npt.NDArray[Any]) -> str:
    """Return what is wrong with intensities that are not finite, or all the same; else nothing."""
    low, high = array.min(), array.max()
    # if any voxel is NaN, so are the minimum and the maximum
    if not (np.isfinite(low) and np.isfinite(high)):
        n_broken = int(np.count_nonzero(~np.isfinite(array)))
        return f"NaN or infinity in {counted(n_broken, 'voxel')}"
    if max(-float(low), float(high)) > LARGEST_INTENSITY:
        return f"intensities from {low:g} to {high:g}"
    return f"a constant volume, {low} everywhere" if low == high else ""


def _check_loaded(
    case: Case,
    volumes: Mapping[str, nifti.Volume],
    problems: Sequence[CaseError],
    facts: CaseFacts,
    labels: str,
) -> LoadedCase:
    """Return a case whose files have no problem, with its label convention; raise the first problem."""
    if problems:
        raise problems[0]
    images, label = [volumes[name] for name in case.modalities], volumes.get(layouts.LABEL)
    geometry = images[0].geometry
    shown = replace(case, facts=facts).shown_labels
    release, declared = releases.release_at(case.release, geometry.shape), labels or case.convention
    convention, _ = releases.resolve_convention(release, shown.values, declared=declared)
    remarks = [*case.remarks, *facts.scan_remarks]
    if label:
        # the index, or a person, has decided otherwise
        is_named = bool(labels or case.label_values)
        ((refusals, on_label),) = releases.judge_labels([shown], convention, is_named=is_named)
        if refusals:
            raise refusals[0]
        remarks += on_label
    return LoadedCase(
        # an index has noted some of the remarks already
        case=replace(case, release=release, remarks=tuple(dict.fromkeys(remarks))),
        volumes=tuple(map(nifti.oriented, images)),
        label=label and nifti.oriented(label),
        geometry=geometry,
        convention=convention if label else None,
    )


def _describe_grid(grid: nifti.Geometry, first: nifti.Geometry) -> str:
    spacing = "x".join(f"{mm:.2f}" for mm in grid.spacing_mm)
    axes = "".join(nib.aff2axcodes(grid.affine))
    origin = ", ".join(f"{mm:.2f}" for mm in grid.affine[:3, 3])
    shift = np.abs(grid.affine - first.affine).max()
    # the other numbers are rounded, so this may be the only visible difference
    apart = f", affine off by up to {shift:.3g}" if grid.shape == first.shape and shift else ""
    return f"{shape_text(grid.shape)} voxels of {spacing} mm, axes {axes}, origin ({origin}){apart}"
