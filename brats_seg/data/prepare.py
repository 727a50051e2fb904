"""Prepare cases: resample them to one spacing, crop them to the brain, and normalise them.

A case is prepared again only if its files or the settings have changed. Files with the same name,
size and time of change count as unchanged; otherwise the hashes of their contents are compared, so
that a data folder may be copied. Every file is read once. Cases that are up to date are used where
they are, also on a file system that cannot be written to.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from brats_seg.cases.case import Case, CaseFiles, load_case, read_case_files
from brats_seg.cases.many import Failure, map_cases
from brats_seg.cases.nifti import Geometry, read_geometry
from brats_seg.config import StoreConfig
from brats_seg.data.brain import Brain, extract_brain
from brats_seg.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    SourceFile,
    StoredFile,
    read_manifest,
    sources_of,
)
from brats_seg.data.spacing import at_spacing, choose_spacing, grid_of, spacing_line
from brats_seg.data.store import (
    FOREGROUND_NAME,
    MEASURES_NAME,
    Voxels,
    array_name,
    check_compression,
    write_array,
)
from brats_seg.data.verify import is_replaceable, verify_cases
from brats_seg.errors import CaseError, EnvironmentalError, UsageError, counted
from brats_seg.files import (
    folder_bytes,
    free_bytes,
    locked,
    remove_leftovers,
    replacing,
    whole_file,
    whole_folder,
)
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap, convention_named, regions_of
from brats_seg.progress import Track, untracked
from brats_seg.quality.profile import measure_crop, measures_text
from brats_seg.voxels.brain import Array
from brats_seg.voxels.grids import Resampling, Spacing

log = logging.getLogger(__name__)

LARGEST_BRAIN_MM3 = 150 * 190 * 150
"""Volume of a box around an adult brain, 4.3 l; the largest of fourteen BraTS cases took 3.6 l."""
COMPRESSED_SHARE = 0.4
"""Size of compressed arrays as a fraction of plain ones; real cases take a third."""
BYTES_PER_VOXEL = 2 * len(MODALITIES) + 1
"""Bytes of four modalities in float16 and the labels."""
FOREGROUND_VOXELS = 4096
"""Largest number of voxels of a region that are kept to place patches on."""

_BYTES_BESIDES = 2**18
"""Largest number of bytes of a prepared case that are not voxels."""
_LOCK_NAME = ".preparing.lock"
_WHEN_KILLED = "Close other programs, or prepare the cases on a machine with more memory."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One case to prepare."""

    case: Case
    folder: Path
    """Folder of all prepared cases."""
    config: StoreConfig
    """Settings, with the spacing that was chosen."""
    is_damaged: bool = False
    """Whether a file of the prepared case differs from what was written."""

    @property
    def case_id(self) -> str:
        return self.case.case_id

    @property
    def path(self) -> Path:
        return self.folder / self.case.case_id


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
        cases: Cases without problems, from `find_cases`, `index_cases` or `read_index`.
        folder: Folder of all prepared cases; created if it does not exist.
        config: Settings of the store: plain or compressed arrays, and the spacing. Without one it is
            chosen from all of the cases by `choose_spacing`.
        repair: Whether cases that are up to date are verified, and prepared again if they are damaged.
        n_workers: Processes, which take up to 300 MB each, or 600 where scans are resampled; 0 works
            in this process.
        track: Shows the progress.

    Returns:
        The cases that could not be prepared, in the order of `cases`.

    Raises:
        EnvironmentalError: The disk has too little free space, the folder cannot be written to, a
            worker was killed, or `blosc2` is missing.
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
    config = with_spacing(cases, folder, config)
    jobs = [_Job(case=case, folder=folder, config=config) for case in cases]
    outdated = _outdated(jobs, repair=repair, track=track)
    if not outdated:
        return ()
    if config.compressed:
        check_compression()
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / _LOCK_NAME))
        except EnvironmentalError as error:
            _require_same_contents(outdated, error, n_workers=n_workers, track=track)
            return ()
        remove_leftovers(folder, folders=True)
        # another process may have prepared them in the meantime
        outdated = [job for job in outdated if job.is_damaged or not _is_current(job)]
        if any(job.path.exists() for job in outdated):
            check_replaceable([job.case for job in outdated], folder)
            stack.enter_context(replacing(folder, when_read=_in_use(folder)))
        check_space([job.case for job in outdated], folder, config)
        return map_cases(
            _prepare,
            outdated,
            "preparing cases",
            n_workers=n_workers,
            track=track,
            when_killed=_WHEN_KILLED,
        ).failures


def with_spacing(cases: Sequence[Case], folder: Path, config: StoreConfig) -> StoreConfig:
    """Return the settings with the spacing to prepare the cases at, and log which are resampled.

    Cases that cannot be read do not count; preparing them fails and reports the reason.

    Args:
        cases: All cases that are prepared together.
        folder: Folder of all prepared cases; their manifests are read faster than headers of scans.
        config: Settings; a spacing that they have is kept.
    """
    spacings = list(_spacings(cases, folder))
    chosen = config.spacing_mm or choose_spacing(spacings)
    if line := spacing_line(spacings, chosen):
        log.info(line)
    return config.model_copy(update={"spacing_mm": chosen})


def required_bytes(cases: Sequence[Case], folder: Path, config: StoreConfig) -> int:
    """Return the disk space that preparing the cases takes, estimated from the headers of scans.

    Each case counts as a box of `LARGEST_BRAIN_MM3`, or as its whole volume if that is smaller, at the
    spacing of the settings, minus the size of an earlier version. Real cases take about three
    quarters of the estimate.
    """
    return sum(
        max(0, _case_bytes(case, config) - folder_bytes(folder / case.case_id)) for case in cases
    )


def check_space(cases: Sequence[Case], folder: Path, config: StoreConfig) -> None:
    """Log the disk space that the prepared cases need.

    Raises:
        EnvironmentalError: The disk has too little free space.
    """
    needed, free = required_bytes(cases, folder, config), free_bytes(folder)
    claim = (
        f"preparing {counted(len(cases), 'case')} needs about {_size(needed)} in {folder}, where "
        f"{_size(free)} are free"
    )
    if needed > free:
        msg = f"{claim}. {_when_full(config)}"
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
    places = [folder / case.case_id for case in cases]
    others = [place for place in places if place.exists() and not is_replaceable(place)]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        msg = (
            f"prepared cases would replace {others[0]}{more}, which hold other files. Choose another "
            "folder for them with --prepared."
        )
        raise UsageError(msg)


def select_foreground(labels: LabelMap, convention: LabelConvention) -> Voxels:
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
        there = [job.case_id for job in jobs if read_manifest(job.path) is not None]
        errors = verify_cases(there, jobs[0].folder, track=track) if there else ()
        for error in errors:
            log.warning("%s", error)
        damaged = {error.case_id for error in errors}
    jobs = [replace(job, is_damaged=job.case_id in damaged) for job in jobs]
    return [job for job in jobs if job.is_damaged or not _is_current(job)]


def _in_use(folder: Path) -> UsageError:
    return UsageError(
        f"a run is being trained on the cases in {folder}, and other scans or settings would replace "
        "them. Wait for it to end, or choose another folder with --prepared."
    )


def _is_current(job: _Job) -> bool:
    manifest = read_manifest(job.path)
    return manifest is not None and _has_settings(manifest, job) and _is_of(manifest, job.case)


def _is_of(manifest: Manifest, case: Case) -> bool:
    """Return whether the files of a case are as they were when it was prepared."""
    try:
        return manifest.sources == sources_of(case)
    except OSError:
        return False


def _has_settings(manifest: Manifest, job: _Job) -> bool:
    return (manifest.compressed, manifest.convention, manifest.spacing_mm) == (
        job.config.compressed,
        job.case.label_convention,
        job.config.spacing_mm,
    )


def _require_same_contents(
    jobs: Sequence[_Job], error: EnvironmentalError, *, n_workers: int, track: Track
) -> None:
    """Raise the error of writing to the folder, unless only times or names of scans have changed."""
    compared = map_cases(
        _compare_contents,
        jobs,
        "comparing scans",
        n_workers=n_workers,
        track=track,
        when_killed=_WHEN_KILLED,
    )
    n_same = sum(compared.results)
    if n_same < len(jobs):
        n_outdated = len(jobs) - n_same
        msg = (
            f"{error} {n_outdated} of its cases must be prepared: --prepared names another folder."
        )
        raise EnvironmentalError(msg) from error


def _compare_contents(job: _Job) -> bool:
    """Return whether a prepared case was made with these settings from scans of this content."""
    manifest = None if job.is_damaged else read_manifest(job.path)
    return (
        manifest is not None
        and _has_settings(manifest, job)
        and manifest.contents == read_case_files(job.case).contents
    )


def _spacings(cases: Sequence[Case], folder: Path) -> Iterator[Spacing]:
    for case in cases:
        manifest = read_manifest(folder / case.case_id)
        if manifest is not None and _is_of(manifest, case):
            yield grid_of(manifest.scan)[1]
        elif (grid := _stored_grid(case)) is not None:
            yield grid_of(grid)[1]


def _stored_grid(case: Case) -> Geometry | None:
    """Return the grid of the first modality; None if it cannot be read."""
    scan = case.images[0]
    try:
        return read_geometry(case.path_of(scan), case_id=case.case_id, volume=scan.volume)
    except CaseError:
        return None


def _case_bytes(case: Case, config: StoreConfig) -> int:
    geometry = _stored_grid(case)
    if geometry is None:
        return 0
    shape, spacing_mm = grid_of(geometry)
    share_of_brain = min(1, LARGEST_BRAIN_MM3 / (prod(shape) * prod(spacing_mm)))
    resampling = Resampling.needed(shape, spacing_mm, config.spacing_mm or spacing_mm)
    n_voxels = prod(shape if resampling is None else resampling.after) * share_of_brain
    share = COMPRESSED_SHARE if config.compressed else 1
    return int(n_voxels * BYTES_PER_VOXEL * share) + _BYTES_BESIDES


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def _when_full(config: StoreConfig) -> str:
    elsewhere = "Free some space, or choose a folder on a larger disk"
    if config.compressed:
        return f"{elsewhere}."
    return f"{elsewhere}, or set store.compressed to true, which needs about a third."


def _prepare(job: _Job) -> None:
    try:
        # before reading: if a file changes in between, the next call prepares the case again
        sources = sources_of(job.case)
    except OSError as error:
        found = f"a file that cannot be read ({error.strerror})"
        next_step = "Check that the file is there, and index the data folder again."
        file = str(error.filename)
        raise CaseError(job.case_id, file, found, "a scan", next_step) from error
    files = read_case_files(job.case)
    manifest = None if job.is_damaged else read_manifest(job.path)
    if (
        manifest is not None
        and _has_settings(manifest, job)
        and manifest.contents == files.contents
    ):
        with whole_file(job.path / MANIFEST_NAME) as beside:
            beside.write_text(replace(manifest, sources=sources).to_json())
    else:
        _prepare_voxels(job, sources, files)


def _prepare_voxels(job: _Job, sources: tuple[SourceFile, ...], files: CaseFiles) -> None:
    loaded = load_case(job.case, files=files)
    spacing_mm = job.config.spacing_mm or choose_spacing(())
    there, _ = at_spacing(loaded, spacing_mm)
    brain = extract_brain(job.case_id, there.volumes, there.label)
    convention = loaded.convention.name if loaded.convention else ""
    with whole_folder(job.path, when_full=_when_full(job.config)) as folder:
        files_written = _write_files(folder, brain, convention, spacing_mm, job.config)
        manifest = Manifest(
            compressed=job.config.compressed,
            convention=convention,
            sources=sources,
            contents=loaded.contents,
            spacing_mm=spacing_mm,
            scan=loaded.volumes[0].geometry,
            geometry=there.volumes[0].geometry,
            box=brain.box,
            means=brain.means,
            stds=brain.stds,
            files=files_written,
        )
        with whole_file(folder / MANIFEST_NAME) as beside:
            beside.write_text(manifest.to_json())


def _write_files(
    folder: Path, brain: Brain, convention: str, spacing_mm: Spacing, config: StoreConfig
) -> tuple[StoredFile, ...]:
    """Write arrays and measures of a case, and return names, sizes and check sums."""
    # n values of standard deviation 1 are at most sqrt(n): any brain fits into float16 (65504)
    image = brain.image.astype(np.float16)
    arrays: dict[str, Array] = {array_name("image", compressed=config.compressed): image}
    foreground = np.empty((0, 4), dtype=np.int32)
    if brain.labels is not None:
        arrays[array_name("labels", compressed=config.compressed)] = brain.labels
        foreground = select_foreground(brain.labels, convention_named(convention))
    arrays[FOREGROUND_NAME] = foreground
    for name, array in arrays.items():
        write_array(folder / name, array)
    measures = measure_crop(image, spacing_mm)
    with whole_file(folder / MEASURES_NAME) as beside:
        beside.write_text(measures_text(measures))
    return tuple(StoredFile.of(folder / name) for name in (*arrays, MEASURES_NAME))
