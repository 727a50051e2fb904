"""Prepare cases: crop them to the brain, normalise them, and keep them up to date.

A case is prepared again only if its files or the settings have changed. Files with the same name,
size and time of change count as unchanged; otherwise the hashes of their contents are compared, so
that a data folder may be copied. Every file is read once.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from brats_seg.cases.case import Case, CaseFiles, load_case, read_case_files
from brats_seg.cases.many import Failure, map_cases
from brats_seg.cases.nifti import read_geometry
from brats_seg.config import StoreConfig
from brats_seg.data.brain import Brain, extract_brain
from brats_seg.data.store import (
    FOREGROUND_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    SourceFile,
    Voxels,
    array_name,
    check_compression,
    read_manifest,
    sources_of,
    write_array,
)
from brats_seg.errors import CaseError, EnvironmentalError, UsageError
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
    n_workers: int = 0,
    track: Track = untracked,
) -> tuple[Failure, ...]:
    """Prepare the cases that are not up to date, each into a folder of its own below `folder`.

    If the process is stopped, every prepared case is complete, and the next call prepares the rest.
    A second process waits until the first has finished with the folder.

    Args:
        cases: Cases without problems, from `find_cases`, `index_cases` or `read_index`.
        folder: Folder of all prepared cases; created if it does not exist.
        config: Settings of the store: plain or compressed arrays.
        n_workers: Processes, which take up to 300 MB each; 0 works in this process.
        track: Shows the progress.

    Returns:
        The cases that could not be prepared, in the order of `cases`.

    Raises:
        EnvironmentalError: The disk has too little free space, the folder cannot be written to, a
            worker was killed, or `blosc2` is missing.
        UsageError: Cases would be replaced on which another process trains a run.

    Example:
        >>> import tempfile
        >>> from brats_seg.cases.index import index_cases
        >>> from brats_seg.cases.phantom import write_phantom_cases
        >>> root = Path(tempfile.mkdtemp())
        >>> write_phantom_cases(root / "scans", n_cases=1, seed=0)
        >>> prepare_cases(index_cases(root / "scans").cases, root / "prepared", StoreConfig())
        ()
    """
    jobs = [_Job(case=case, folder=folder, config=config) for case in cases]
    if all(map(_is_current, jobs)):
        return ()
    if config.compressed:
        check_compression()
    with ExitStack() as stack:
        stack.enter_context(locked(folder / _LOCK_NAME))
        remove_leftovers(folder, folders=True)
        jobs = [job for job in jobs if not _is_current(job)]
        if any(job.path.exists() for job in jobs):
            stack.enter_context(replacing(folder, when_read=_in_use(folder)))
        check_space([job.case for job in jobs], folder, config)
        return map_cases(
            _prepare,
            jobs,
            "preparing cases",
            n_workers=n_workers,
            track=track,
            when_killed=_WHEN_KILLED,
        ).failures


def required_bytes(cases: Sequence[Case], folder: Path, config: StoreConfig) -> int:
    """Return the disk space that preparing the cases takes, estimated from the headers of scans.

    Each case counts as a box of `LARGEST_BRAIN_MM3`, or as its whole volume if that is smaller, minus
    the size of an earlier version. Real cases take about three quarters of the estimate.
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
        f"preparing {len(cases)} cases needs about {_size(needed)} in {folder}, where "
        f"{_size(free)} are free"
    )
    if needed > free:
        msg = f"{claim}. {_when_full(config)}"
        raise EnvironmentalError(msg)
    log.info(claim)


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


def _in_use(folder: Path) -> UsageError:
    return UsageError(
        f"a run is being trained on the cases in {folder}, and other scans or settings would replace "
        "them. Wait for it to end, or choose another folder with --prepared."
    )


def _is_current(job: _Job) -> bool:
    manifest = read_manifest(job.path)
    if manifest is None or not _has_settings(manifest, job):
        return False
    try:
        return manifest.sources == sources_of(job.case)
    except OSError:
        return False


def _has_settings(manifest: Manifest, job: _Job) -> bool:
    return (manifest.compressed, manifest.convention) == (
        job.config.compressed,
        job.case.label_convention,
    )


def _case_bytes(case: Case, config: StoreConfig) -> int:
    scan = case.images[0]
    try:
        geometry = read_geometry(case.path_of(scan), case_id=case.case_id, volume=scan.volume)
    except CaseError:
        # preparing the case fails and reports the reason
        return 0
    n_voxels = min(prod(geometry.shape), LARGEST_BRAIN_MM3 / prod(geometry.spacing_mm))
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
    manifest = read_manifest(job.path)
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
    brain = extract_brain(job.case_id, loaded.volumes, loaded.label)
    manifest = Manifest(
        version=FORMAT_VERSION,
        compressed=job.config.compressed,
        convention=loaded.convention.name if loaded.convention else "",
        sources=sources,
        contents=loaded.contents,
        box=brain.box,
        geometry=loaded.volumes[0].geometry,
        means=brain.means,
        stds=brain.stds,
    )
    with whole_folder(job.path, when_full=_when_full(job.config)) as folder:
        _write(folder, manifest, brain)


def _write(folder: Path, manifest: Manifest, brain: Brain) -> None:
    compressed = manifest.compressed
    # n values of standard deviation 1 are at most sqrt(n): any brain fits into float16 (65504)
    image = brain.image.astype(np.float16)
    write_array(folder / array_name("image", compressed=compressed), image)
    foreground = np.empty((0, 4), dtype=np.int32)
    if brain.labels is not None:
        write_array(folder / array_name("labels", compressed=compressed), brain.labels)
        foreground = select_foreground(brain.labels, convention_named(manifest.convention))
    write_array(folder / FOREGROUND_NAME, foreground)
    with whole_file(folder / MANIFEST_NAME) as beside:
        beside.write_text(manifest.to_json())
