"""Prepare cases: resample them to one spacing, crop them to the brain, and normalise them.

A case is prepared again only if its files or the settings have changed. Files with the same name,
size and time of change count as unchanged; otherwise the hashes of their contents are compared, so
that a data folder may be copied, also while a run is trained on the prepared cases or little space is
left. Cases that are up to date are used where they are, also on a file system that cannot be written to.
"""

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case, load_case, read_case_files
from brats_seg.cases.many import Failure, map_cases
from brats_seg.cases.nifti import read_geometry
from brats_seg.config import StoreConfig
from brats_seg.data import normalisation, store
from brats_seg.errors import CaseError, EnvironmentalError, UsageError, counted, some_of
from brats_seg.files import (
    READING_NAME,
    free_bytes,
    locked,
    remove_leftovers,
    size_text,
    whole_folder,
)
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap, regions_of
from brats_seg.progress import Track, untracked
from brats_seg.voxels.box import Triple
from brats_seg.voxels.grids import Spacing

log = logging.getLogger(__name__)

LARGEST_BRAIN_MM3 = 150 * 190 * 150
"""Volume of a box around an adult brain, 4.3 l; the largest of fourteen BraTS cases took 3.6 l."""
BYTES_PER_VOXEL = 2 * len(MODALITIES) + 1
"""Bytes of four modalities in float16 and the labels."""
FOREGROUND_VOXELS = 4096
"""Largest number of voxels of a region that are kept to place patches on."""

_BYTES_BESIDES = 2**18
"""Largest number of bytes of a prepared case that are not voxels."""
_LOCK_NAME = ".preparing.lock"
_WHEN_FULL = "Free some space, or choose a folder on a larger disk."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One case to prepare."""

    case: Case
    path: Path
    """Folder of the prepared case."""
    spacing_mm: Spacing
    """Spacing to prepare it at."""
    is_damaged: bool = False
    """Whether a file of the prepared case differs from what was written."""

    @property
    def case_id(self) -> str:
        return self.case.case_id

    @property
    def is_current(self) -> bool:
        """Whether the case is prepared from its files as they are now."""
        manifest = self.manifest()
        return manifest is not None and manifest.files_key == self.case.facts.files_key

    def manifest(self) -> store.Manifest | None:
        """Return the manifest of the case, if it was prepared with these settings and is not damaged."""
        manifest = None if self.is_damaged else store.read_manifest(self.path)
        settings = self.case.convention, self.spacing_mm
        is_same = manifest is not None and (manifest.convention, manifest.spacing_mm) == settings
        return manifest if is_same else None


def prepare_cases(
    cases: Sequence[Case],
    folder: Path,
    config: StoreConfig,
    *,
    repair: bool = False,
    n_workers: int = 0,
    track: Track = untracked,
) -> tuple[Failure, ...]:
    """Prepare the cases that are not up to date, each into a folder of its own below `folder`.

    If the process is stopped, every prepared case is complete, and the next call prepares the rest.
    A second process waits until the first has finished with the folder.

    Args:
        cases: Cases without problems, from `index_cases` or `read_index`, which know the conventions.
        folder: Folder of all prepared cases; created if it does not exist.
        config: Settings of the store. Without a spacing it is chosen from all of the cases by
            `choose_spacing`.
        repair: Whether cases that are up to date are verified, and prepared again if they are damaged.
        n_workers: Processes, which take up to 300 MB each, or 600 where scans are resampled; 0 works
            in this process.
        track: Shows the progress.

    Returns:
        The cases that could not be prepared, in the order of `cases`.

    Raises:
        EnvironmentalError: The disk has too little free space, the folder cannot be written to, a
            worker was killed.
        UsageError: Cases would be replaced on which another process trains a run, or a folder that is
            no prepared case, such as one of scans.

    Example:
        >>> import tempfile
        >>> from brats_seg.cases.index import index_cases
        >>> from brats_seg.cases.phantom import write_phantom_cases
        >>> root = Path(tempfile.mkdtemp())
        >>> write_phantom_cases(root / "scans", n_cases=1, seed=0)
        >>> prepare_cases(index_cases(root / "scans").cases, root / "prepared", StoreConfig())
        ()
    """
    # cases that cannot be read do not count: preparing them fails and reports the reason
    spacings = [grid[1] for case in cases if (grid := _grid(case, folder))]
    spacing_mm = config.spacing_mm or normalisation.choose_spacing(spacings)
    if line := normalisation.spacing_line(spacings, spacing_mm):
        log.info(line)
    jobs = [_Job(case=case, path=folder / case.case_id, spacing_mm=spacing_mm) for case in cases]
    outdated = _outdated(jobs, repair=repair, track=track)
    if not outdated:
        return ()
    run = partial(map_cases, n_workers=n_workers, track=track)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / _LOCK_NAME))
        except EnvironmentalError as error:
            same = run(_manifest_of_same, outdated, "comparing scans").results
            if n_outdated := len(outdated) - sum(map(bool, same)):
                msg = f"{error} {n_outdated} of its cases must be prepared: --prepared names another folder."
                raise EnvironmentalError(msg) from error
            return ()
        remove_leftovers(folder, folders=True)
        run(_keep_same, [job for job in outdated if job.manifest()], "comparing scans")
        # another process may have prepared them in the meantime
        outdated = [job for job in outdated if not job.is_current]
        if not outdated:
            return ()
        if any(job.path.exists() for job in outdated):
            check_replaceable([job.case for job in outdated], folder)
            msg = f"a run is being trained on the cases in {folder}, which would be replaced"
            in_use = UsageError(f"{msg}. Wait for it to end, or choose another --prepared folder.")
            stack.enter_context(locked(folder / READING_NAME, when_taken=in_use))
        check_space([job.case for job in outdated], folder, spacing_mm)
        return run(_prepare, outdated, "preparing cases").failures


def required_bytes(cases: Sequence[Case], folder: Path, spacing_mm: Spacing | None = None) -> int:
    """Return the disk space that preparing the cases takes, estimated from the headers of scans.

    Each case counts as a box of `LARGEST_BRAIN_MM3`, or as its whole volume if that is smaller, at the
    spacing (None: its own), minus the size of an earlier version. Real cases take about three quarters
    of the estimate.
    """
    needed = 0
    for case in cases:
        if grid := _grid(case, folder):
            shape, before_mm = grid
            volume_mm3 = min(prod(shape) * prod(before_mm), LARGEST_BRAIN_MM3)
            n_voxels = volume_mm3 / prod(spacing_mm or before_mm)
            present = sum(path.stat().st_size for path in (folder / case.case_id).glob("*"))
            needed += max(0, int(n_voxels * BYTES_PER_VOXEL) + _BYTES_BESIDES - present)
    return needed


def check_space(cases: Sequence[Case], folder: Path, spacing_mm: Spacing) -> None:
    """Log the disk space that the prepared cases need.

    Raises:
        EnvironmentalError: The disk has too little free space.
    """
    needed, free = required_bytes(cases, folder, spacing_mm), free_bytes(folder)
    need = f"preparing {counted(len(cases), 'case')} needs about {size_text(needed)} in {folder}"
    claim = f"{need}, where {size_text(free)} are free"
    if needed > free:
        msg = f"{claim}. {_WHEN_FULL}"
        raise EnvironmentalError(msg)
    log.info(claim)


def check_replaceable(cases: Sequence[Case], folder: Path) -> None:
    """Check that preparing the cases replaces no scans and no other files of the user.

    Args:
        cases: Cases to prepare, each into a folder of its id.
        folder: Folder of all prepared cases.

    Raises:
        UsageError: Something else has the place of a prepared case.
    """
    paths = (folder / case.case_id for case in cases)
    replaced = [str(path) for path in paths if path.exists() and not store.is_replaceable(path)]
    if replaced:
        msg = f"prepared cases would replace {some_of(replaced)}: choose another folder with --prepared."
        raise UsageError(msg)


def select_foreground(labels: LabelMap, convention: LabelConvention) -> store.VoxelIndices:
    """Return voxels of every region as rows (n, 4): index of the region, then the voxel.

    Of large regions, evenly spaced voxels are kept.
    """
    rows = []
    for region, mask in enumerate(regions_of(labels, convention)):
        inside = np.flatnonzero(mask)
        kept = np.linspace(0, inside.size - 1, min(inside.size, FOREGROUND_VOXELS), dtype=np.intp)
        voxels = np.unravel_index(inside[kept], labels.shape)
        rows.append(np.stack([np.full(kept.size, region), *voxels], axis=1))
    return np.concatenate(rows).astype(np.int32)


def _outdated(jobs: Sequence[_Job], *, repair: bool, track: Track) -> list[_Job]:
    """Return the cases to prepare: those that are not up to date and, if asked for, the damaged."""
    damaged: Collection[str] = ()
    if repair:
        # also those that are not up to date: of touched scans only the manifest is written again
        prepared = [job.case_id for job in jobs if store.read_manifest(job.path) is not None]
        errors = store.verify_cases(prepared, jobs[0].path.parent, track=track) if prepared else ()
        for error in errors:
            log.warning("%s", error)
        damaged = {error.case_id for error in errors}
    jobs = [replace(job, is_damaged=job.case_id in damaged) for job in jobs]
    return [job for job in jobs if not job.is_current]


def _manifest_of_same(job: _Job) -> store.Manifest | None:
    """Return the manifest of a case that was prepared with these settings from these contents."""
    manifest = job.manifest()
    is_same = manifest is not None and manifest.contents == read_case_files(job.case).hashes
    return manifest if is_same else None


def _keep_same(job: _Job) -> None:
    """Write the manifest of a case again if only times or names of its files have changed."""
    if manifest := _manifest_of_same(job):
        replace(manifest, files_key=job.case.facts.files_key).write(job.path)


def _grid(case: Case, folder: Path) -> tuple[Triple, Spacing] | None:
    """Return shape and spacing of a scan, from its manifest where there is one; None if unreadable."""
    manifest = store.read_manifest(folder / case.case_id)
    if manifest is not None and manifest.files_key == case.facts.files_key:
        return normalisation.grid_of(manifest.scan)
    scan = case.images[0]
    try:
        path = case.path_of(scan)
        return normalisation.grid_of(read_geometry(path, case_id=case.case_id, volume=scan.volume))
    except CaseError:
        return None


def _prepare(job: _Job) -> None:
    loaded = load_case(job.case)
    resampled, _ = normalisation.at_spacing(loaded, job.spacing_mm)
    brain = normalisation.extract_brain(job.case_id, resampled.volumes, resampled.label)
    with whole_folder(job.path, when_full=_WHEN_FULL) as folder:
        manifest = store.Manifest(
            convention=loaded.convention.name if loaded.convention else "",
            # of before reading: if a file changes in between, the next call compares it again
            files_key=job.case.facts.files_key,
            contents=loaded.hashes,
            spacing_mm=job.spacing_mm,
            scan=loaded.volumes[0].geometry,
            geometry=resampled.volumes[0].geometry,
            box=brain.box,
            files=_write_files(folder, brain, loaded.convention),
        )
        manifest.write(folder)


def _write_files(
    folder: Path, brain: normalisation.Brain, convention: LabelConvention | None
) -> tuple[store.StoredFile, ...]:
    """Write the arrays of a case, and return names, sizes and check sums."""
    arrays: dict[str, npt.NDArray[np.generic]] = {store.IMAGE_NAME: brain.image}
    foreground = np.empty((0, 4), dtype=np.int32)
    if brain.labels is not None and convention is not None:
        arrays[store.LABELS_NAME] = brain.labels
        foreground = select_foreground(brain.labels, convention)
    arrays[store.FOREGROUND_NAME] = foreground
    for name, array in arrays.items():
        store.write_array(folder / name, array)
    return tuple(store.StoredFile.of(folder / name) for name in arrays)
