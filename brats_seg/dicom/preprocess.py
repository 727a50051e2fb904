"""Prepare scans as the scanner made them, and bring label maps back to their grids.

greedy registers the modalities to t1c, and the brain of t1c to an atlas (rigid, normalised mutual
information); deepbet finds the brain, with weights that it carries. Voxels are interpolated once, from
the file to the grid of the atlas.

FOLDER/CASE/CASE-t1n.nii.gz, -t1c, -t2w, -t2f   the brain at 1 mm, on the grid of the atlas
FOLDER/CASE/source.json, steps.png              how it was made, and a picture of each step
"""

import hashlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from nibabel.affines import apply_affine
from pydantic import Field
from scipy.ndimage import affine_transform

from brats_seg import wings
from brats_seg.cases import nifti
from brats_seg.cases.anatomy import template_at
from brats_seg.cases.case import Case, ScanFile, have_one_grid
from brats_seg.cases.layouts import STEPS_NAME
from brats_seg.cases.many import Failure, Item, attempt
from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.config import Section
from brats_seg.dicom.series import Series
from brats_seg.errors import CaseError, EnvironmentalError, UsageError
from brats_seg.files import explained_writing, file_state, read_bounded, table_beside, write_json
from brats_seg.labels import MODALITIES, LabelMap
from brats_seg.progress import Track, untracked
from brats_seg.voxels.box import Mask, brain_mask
from brats_seg.voxels.grids import MM3_PER_ML, Affine, Resampling, Spacing

Volumes: TypeAlias = dict[str, Volume]
Atlas: TypeAlias = tuple[Volume, Geometry]
"""A brain to register brains to, and the grid of prepared scans, in the same millimetres."""

SOURCE_NAME = "source.json"
"""Name of the file that says what a case was converted from, and how it was prepared."""
_LONGEST = 1 << 24
"""Bytes of the longest such file, which names every DICOM file."""
ONE_MM: Spacing = (1.0, 1.0, 1.0)
"""Voxel size of BraTS."""
ATLASES = table_beside(__file__)
"""Shape and affine of the grid of an atlas, and the transform from its millimetres to those of MNI's."""

_TIMEOUT_S = 3600
_FIXED = ("t1c", "t1n")
"""Modalities that the others are registered to, the preferred one first: t1c outlines the tumour core."""
_MOST_AROUND_BRAIN = 1.3
"""Largest foreground of a scan without skull, as a multiple of the brain that is found in it."""
_GREEDY = "import sys, picsl_greedy; picsl_greedy.Greedy3D().execute(sys.argv[1])"
_RIGID = "-d 3 -V 0 -seed 1 -a -dof 6 -m NMI -ia start.mat -n 100x50x10 -i fixed.nii moving.nii -o rigid.mat"
_DEEPBET = (
    "import deepbet; deepbet.run_bet(['head.nii.gz'], mask_paths=['brain_bet.nii.gz'], "
    "no_gpu=True, skip_broken=False)"
)
_NEXT_STEP = "Prepare the scans with programs of your own."
_SHOWN_STEPS = ("before", "registered", "without skull")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanOptions:
    """Choices of a user about scans as the scanner made them."""

    series: Mapping[str, str] = field(default_factory=dict)
    """DICOM series by modality, as a number or a part of the description; see `parse_overrides`."""
    with_identifiers: bool = False
    """Whether the patient's name and number are written to DICOM files, and folders that are named
    after the patient name the case."""
    atlas: str = ""
    """Where scans are prepared: one of `ATLASES`, or the file of a T1 image without skull; empty if
    they are predicted as they are."""


class Native(NamedTuple):
    """A file of the scanner, and the way to it from the prepared scan."""

    scan: ScanFile
    to_native: list[list[float]]
    """Matrix (4, 4) from the millimetres of the prepared scan to those of the file."""


class ScanSource(Section):
    """Content of `source.json`."""

    key: str
    """Hash of the files and choices; the work is done again where it differs."""
    study: str = ""
    """Hashed id of the DICOM examination; empty of NIfTI files."""
    series: dict[str, Series] = Field(default_factory=dict)
    """DICOM series of each modality, with absolute paths; none of NIfTI files."""
    with_identifiers: bool = False
    """Whether the patient's name and number are written to DICOM files."""
    unready: tuple[str, ...] = ()
    """Reasons why converted scans are not as BraTS provides them; empty if they are."""
    natives: dict[str, Native] = Field(default_factory=dict)
    """File of each scan that was prepared."""
    steps: str = ""
    """What was done to prepare them."""

    def store(self, folder: Path, files: Mapping[str, Path], volumes: Volumes) -> None:
        """Write the volumes of a case, and last this: where it is, they are there."""
        with explained_writing(folder / SOURCE_NAME):
            (folder / SOURCE_NAME).unlink(missing_ok=True)
        for name, volume in volumes.items():
            nifti.write_volume(files[name], volume.array, volume.geometry)
        write_json(folder / SOURCE_NAME, self.model_dump(mode="json"))

    def on_native_grids(
        self, case_id: str, label_map: LabelMap, grid: Geometry
    ) -> Iterator[tuple[str, LabelMap, Geometry]]:
        """Yield the nearest labels of the prepared scans on the grid of each file of the scanner."""
        for modality, (scan, to_native) in self.natives.items():
            target = nifti.read_geometry(scan.path, case_id=case_id, volume=scan.volume)
            matrix = np.linalg.inv(np.array(to_native) @ grid.affine) @ target.affine
            outside = {"output_shape": target.shape, "mode": "grid-constant"}
            yield modality, affine_transform(label_map, matrix, order=0, **outside), target


def prepare_cases(
    cases: Sequence[Case], folder: Path, options: ScanOptions, *, track: Track = untracked
) -> tuple[Case, ...]:
    """Prepare the cases that are not as BraTS provides them; one that fails is given a problem.

    Raises:
        UsageError: The atlas has a skull.
        CaseError: The atlas cannot be read.
        EnvironmentalError: A program is not installed, or the folder cannot be written to.
    """
    check_installed("preprocess", "picsl_greedy", "deepbet")
    atlas = load_atlas(options.atlas)
    prepare = partial(_prepare_case, folder=folder, options=options, atlas=atlas)
    return make_cases(prepare, cases, "preparing scans", track)


def make_cases(
    function: Callable[[Item], Case], items: Sequence[Item], what: str, track: Track
) -> tuple[Case, ...]:
    """Return the case that a function makes of each item; one that fails is a case with a problem."""
    outcomes = track(map(partial(attempt, function), items), what=what, total=len(items))
    return tuple(
        replace(Case.named(outcome.case_id, {}), problems=(outcome.message,))
        if isinstance(outcome, Failure)
        else outcome
        for outcome in outcomes
    )


def check_installed(extra: str, *names: str) -> None:
    """Raise `EnvironmentalError` if a package of an extra is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        msg = f"{' and '.join(missing)} not installed: pip install 'brats_seg[{extra}]'"
        raise EnvironmentalError(msg)


def read_source(folder: Path, key: str = "", files: Iterable[Path] = ()) -> ScanSource | None:
    """Return what the case in a folder was made from, or None if its files are the user's own.

    With a key and files it is also None if the case was made by another key, or lacks one of the files.
    """
    try:
        source = ScanSource.model_validate_json(read_bounded(folder / SOURCE_NAME, _LONGEST))
    except (OSError, ValueError):
        return None
    is_same = key in {"", source.key} and all(map(Path.exists, files))
    is_known = {*source.natives} <= {*MODALITIES} and {*source.series} in (set(), {*MODALITIES})
    return source if is_same and is_known else None


def make_key(files: Iterable[Path], *choices: object) -> str:
    """Return the key of a case: a hash of choices, and of name, size and time of files."""
    states = [(path, file_state(path)) for path in files]
    return hashlib.sha256(repr((choices, states)).encode()).hexdigest()[:32]


def _prepare_case(case: Case, folder: Path, options: ScanOptions, atlas: Atlas) -> Case:
    """Prepare a case unless it is usable already, or the same files have been prepared already."""
    source = read_source(case.root / case.folder) or ScanSource(key="")
    if case.problems or source.natives:
        return case
    case_id, folder = case.case_id, folder.absolute() / case.case_id
    absolute = [replace(scan, path=case.path_of(scan)) for scan in case.images]
    scans = dict(zip(case.modalities, absolute, strict=True))
    atlas_file = [] if options.atlas in ATLASES else [Path(options.atlas)]
    key = make_key([*(scan.path for scan in absolute), *atlas_file], options.atlas, scans)
    files = {name: folder / f"{case_id}-{name}.nii.gz" for name in scans}
    prepared = read_source(folder, key, files.values())
    if prepared is None:
        volumes = {
            name: nifti.read_volume(scan.path, case_id=case_id, volume=scan.volume)
            for name, scan in scans.items()
        }
        if not any(unready_reasons([*volumes.values()])):
            return case
        images, stripped, to_native, steps = register(case_id, volumes, atlas)
        _draw_steps(folder / STEPS_NAME, [volumes, images, stripped])
        natives = {name: Native(scan, to_native[name].tolist()) for name, scan in scans.items()}
        prepared = source.model_copy(update={"key": key, "natives": natives, "steps": steps})
        prepared.store(folder, files, stripped)
    picture = "/".join([*folder.parts[-3:], STEPS_NAME])
    remark = f"prepared from the files of the scanner: look at {picture} [{prepared.steps}]"
    ready = {name: ScanFile(path=path) for name, path in files.items()}
    return replace(case, root=Path("/"), files=ready, remarks=(*case.remarks, remark))


def register(
    case_id: str, volumes: Volumes, atlas: Atlas
) -> tuple[Volumes, Volumes, dict[str, Affine], str]:
    """Register the modalities of a case to one of them, and its brain to an atlas.

    Returns the modalities on the grid of the atlas, the same without what is around the brain, the
    matrices from its millimetres to those of each file, and the steps. `CaseError` is raised if a
    program fails.
    """
    fixed_name = next((name for name in _FIXED if name in volumes), "")
    if not fixed_name:
        problem = f"no {' and no '.join(_FIXED)}"
        raise CaseError(case_id, "(all)", problem, "a T1 image of the brain", "Add one of them.")
    image, grid = atlas
    with tempfile.TemporaryDirectory(prefix="brats-seg-") as temporary:
        folder = Path(temporary)
        fixed = _at_one_mm(volumes[fixed_name], case_id)
        mask, finding = _find_brain(case_id, fixed, folder)
        brain, start = replace(fixed, array=fixed.array * mask), np.eye(4)
        start[:3, 3] = _centre_mm(brain) - _centre_mm(image)
        to_native = dict.fromkeys(volumes, _rigid(case_id, image, brain, start, folder))
        for name, volume in volumes.items():
            if name != fixed_name:
                to_fixed = _rigid(case_id, fixed, volume, np.eye(4), folder)
                to_native[name] = to_fixed @ to_native[name]
    steps = f"registered to {fixed_name}; {finding}; placed in {image.file}"
    images = {name: on_grid(volume, to_native[name], grid) for name, volume in volumes.items()}
    inside = on_grid(replace(fixed, array=1.0 * mask), to_native[fixed_name], grid).array > 0.5
    stripped = {name: replace(scan, array=scan.array * inside) for name, scan in images.items()}
    return images, stripped, to_native, steps


def unready_reasons(volumes: Sequence[Volume]) -> Iterator[str]:
    """Yield why scans are not as BraTS provides them: registered, skull-stripped, of 1 mm.

    `volumes` are the modalities, each on its own grid.
    """
    grids = [volume.geometry for volume in volumes]
    is_registered = all(have_one_grid(grid, grids[0]) for grid in grids)
    groups = [volumes] if is_registered else [[volume] for volume in volumes]
    if not is_registered:
        yield "the modalities are not on one grid, so that they are not registered"
    if any(map(_has_skull, groups)):
        yield "the skull does not seem to be stripped"
    spacings = [g.spacing_mm for g in grids if Resampling.needed(g.shape, g.spacing_mm, ONE_MM)]
    if spacings:
        edges = "x".join(f"{mm:.2f}" for mm in spacings[0])
        yield f"the voxels measure {edges} mm, not 1 mm"


def _has_skull(volumes: Sequence[Volume]) -> bool:
    """Return whether the skull does not seem stripped from volumes of one grid; False without the checks."""
    checks = wings.find_wing("quality.scan")
    return checks is not None and checks.has_skull(volumes)


def _at_one_mm(volume: Volume, case_id: str) -> Volume:
    resampling = nifti.plan_resampling(volume, ONE_MM, case_id=case_id)
    return volume if resampling is None else nifti.resampled(volume, resampling)


def load_atlas(name: str) -> Atlas:
    """Return an atlas: a T1-like picture of the tissues of MNI's template, or the file of a user."""
    if name not in ATLASES:
        image = _at_one_mm(nifti.read_volume(Path(name), case_id="--atlas"), "--atlas")
        if _has_skull([image]):
            msg = f"--atlas {name} seems to have a skull; expected {', '.join(ATLASES)}, or a T1 without it"
            raise UsageError(msg)
        return image, image.geometry
    atlas = ATLASES[name]
    shape, affine, to_mni = atlas["shape"], np.array(atlas["affine"]), np.array(atlas["to_mni"])
    # the template has voxels of 2 mm, and positions to the left, back and head of (0, -17, 5) in MNI
    coarse = affine @ np.diag([2.0, 2.0, 2.0, 1.0])
    voxels = np.moveaxis(np.indices([n // 2 + 1 for n in shape]), 0, -1)
    x, y, z = np.moveaxis(apply_affine(to_mni @ coarse, voxels), -1, 0)
    grey, white, depth, _ = template_at(np.stack([-x, -y - 17, z - 5]))
    array = np.where(depth > 0, 250 + 450 * grey + 750 * white, 0)
    image = Volume(array=array, geometry=Geometry.at(coarse, array.shape), file=name)
    return image, Geometry.at(affine.astype(float), shape, qform_code=4 if name == "mni" else 1)


def _centre_mm(volume: Volume) -> npt.NDArray[np.float64]:
    """Return the middle of what is not 0."""
    return apply_affine(volume.geometry.affine, np.argwhere(volume.array).mean(axis=0))


def on_grid(volume: Volume, to_native: Affine, grid: Geometry) -> Volume:
    """Return a scan on another grid, whose millimetres a matrix turns into those of the scan."""
    matrix = np.linalg.inv(volume.geometry.affine) @ to_native @ grid.affine
    values = volume.array.astype(np.float32)
    array = affine_transform(values, matrix, output_shape=grid.shape, order=1)
    if np.issubdtype(volume.array.dtype, np.integer):
        array = np.rint(array).astype(volume.array.dtype)
    return replace(volume, array=array, geometry=grid)


def _rigid(case_id: str, fixed: Volume, moving: Volume, start: Affine, folder: Path) -> Affine:
    """Return the transform (4, 4) from millimetres of a fixed image to those of a moving one."""
    for name, volume in (("fixed", fixed), ("moving", moving)):
        nifti.write_volume(folder / f"{name}.nii", volume.array.astype(np.float32), volume.geometry)
    np.savetxt(folder / "start.mat", start)
    _run_on(case_id, "greedy", [_GREEDY, _RIGID], folder)
    matrix = np.loadtxt(folder / "rigid.mat")
    # the trace of a rotation by 45 degrees
    if np.trace(matrix[:3, :3]) < 1 + np.sqrt(2):
        problem = "a scan that greedy would turn by more than 45 degrees"
        raise CaseError(case_id, moving.file, problem, "scans of one upright head", _NEXT_STEP)
    return matrix


def _find_brain(case_id: str, head: Volume, folder: Path) -> tuple[Mask, str]:
    """Return the mask of the brain, and how it was found."""
    nifti.write_volume(folder / "head.nii.gz", head.array, head.geometry)
    _run_on(case_id, "deepbet", [_DEEPBET], folder)
    mask = nifti.read_label_map(folder / "brain_bet.nii.gz", case_id=case_id).array > 0
    if not mask.any():
        raise CaseError(case_id, "head", "no brain (deepbet)", "a head in T1", "Look at the scan.")
    foreground = brain_mask([head.array])
    ml = int(mask.sum()) * np.prod(head.geometry.spacing_mm) / MM3_PER_ML
    if foreground.sum() <= _MOST_AROUND_BRAIN * mask.sum():
        return foreground, "the skull had been stripped"
    return mask, f"brain of {ml:.0f} ml found by deepbet"


def _draw_steps(path: Path, rows: Sequence[Volumes]) -> None:
    """Draw a sagittal section of each modality before, when registered, and without skull."""
    # matplotlib takes long to import
    from brats_seg.figures import sections

    figure = sections.dark_figure(2 * len(rows[0]), 2 * len(rows) + 0.5)
    panels = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for row, volumes, step in zip(panels, rows, _SHOWN_STEPS, strict=True):
        for axes, (name, volume) in zip(row, volumes.items(), strict=True):
            turned = nifti.oriented(volume)
            image, grid = turned.array, sections.Grid.of(turned.geometry.affine)
            whole = np.ones(image.shape, dtype=bool)
            sections.draw_section(axes, image, 0, len(image) // 2, grid, brain=whole)
            axes.set_title(f"{sections.MODALITY_NAMES[name]}, {step}", color="grey", fontsize=7)
    sections.add_dark_legend(figure, [])
    sections.write_figure(figure, path, dpi=100)


def _run_on(case_id: str, name: str, program: Sequence[str], folder: Path) -> None:
    """Run Python code in a folder; raise `CaseError` with the end of what it printed if it fails."""
    done = run([sys.executable, "-c", *program], folder)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        problem = f"{name} failed with exit code {done.returncode}: {lines[-1]}"
        raise CaseError(case_id, "(all)", problem, "registered, skull-stripped scans", _NEXT_STEP)


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder; one that takes too long is killed."""
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        late = f"no result after {_TIMEOUT_S} s"
        return subprocess.CompletedProcess(command, -signal.SIGKILL, "", late)
