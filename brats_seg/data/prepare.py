"""From scans to prepared cases: cut to the brain, normalised, and kept up to date.

A case is prepared again when its files or the settings have changed, and only then. Files of
unchanged name, size and time of change are trusted; otherwise their contents are compared, so that
a data folder may be copied or touched.
"""

# DOC data/space: Room on disk: how much prepared cases need, and what is said when there is not enough.

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from brats_seg.cases.case import Case, CaseIndex, check_volumes
from brats_seg.cases.many import worker_pool
from brats_seg.cases.nifti import Volume, oriented, read_geometry, read_label_map, read_volume
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
    contents_of,
    read_manifest,
    scans_of,
    sources_of,
    write_array,
)
from brats_seg.errors import CaseError, EnvironmentalError
from brats_seg.files import (
    folder_bytes,
    free_bytes,
    locked,
    remove_leftovers,
    whole_file,
    whole_folder,
)
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap, convention_named, regions_of
from brats_seg.progress import Track, untracked

log = logging.getLogger(__name__)

LARGEST_BRAIN_MM3 = 150 * 190 * 150
"""The box around an adult brain; the largest of fourteen BraTS cases took 3.6 of the 4.3 l."""
COMPRESSED_SHARE = 0.4
"""Of the size of plain arrays, with room to spare: real cases take a third."""
BYTES_PER_VOXEL = 2 * len(MODALITIES) + 1
"""Four modalities in float16 and the labels."""
_BESIDES = 2**18
"""Bytes of all that is not voxels."""


def required_bytes(root: Path, cases: Sequence[Case], folder: Path, config: StoreConfig) -> int:
    """Return what preparing the cases adds to a folder, estimated from the headers of their scans.

    A case is taken to fill a box as large as the largest brain, or its volume if that is smaller;
    what was prepared before is replaced. Real cases take about three quarters of the estimate.
    """
    return sum(
        max(0, _case_bytes(root, case, config) - folder_bytes(folder / case.case_id))
        for case in cases
    )


def check_space(root: Path, cases: Sequence[Case], folder: Path, config: StoreConfig) -> None:
    """Log the room that the prepared cases need; raise `EnvironmentalError` if it is not there."""
    needed, free = required_bytes(root, cases, folder, config), free_bytes(folder)
    claim = (
        f"preparing {len(cases)} cases needs about {_size(needed)} in {folder}, where "
        f"{_size(free)} are free"
    )
    if needed > free:
        msg = f"{claim}. {advice(config)}"
        raise EnvironmentalError(msg)
    log.info(claim)


def advice(config: StoreConfig) -> str:
    """Return what to do where room is short."""
    elsewhere = "Free some space, or choose a folder on a larger disk"
    if config.compressed:
        return f"{elsewhere}."
    return f"{elsewhere}, or set store.compressed to true, which needs about a third."


def _case_bytes(root: Path, case: Case, config: StoreConfig) -> int:
    scan = case.images[0]
    try:
        geometry = read_geometry(root / scan.path, case_id=case.case_id, volume=scan.volume)
    except CaseError:
        # will not be prepared; the work itself says why
        return 0
    n_voxels = min(prod(geometry.shape), LARGEST_BRAIN_MM3 / prod(geometry.spacing_mm))
    share = COMPRESSED_SHARE if config.compressed else 1
    return int(n_voxels * BYTES_PER_VOXEL * share) + _BESIDES


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


FOREGROUND_VOXELS = 4096
"""Most voxels of a region that are kept to place patches on."""
_LOCK_NAME = ".preparing.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One case to prepare."""

    root: Path
    case: Case
    folder: Path
    """Of all prepared cases."""
    config: StoreConfig

    @property
    def path(self) -> Path:
        return self.folder / self.case.case_id


def prepare_cases(
    index: CaseIndex,
    cases: Sequence[Case],
    folder: Path,
    config: StoreConfig,
    *,
    n_workers: int,
    track: Track = untracked,
) -> tuple[CaseError, ...]:
    """Prepare the cases that are not up to date, each into a folder of its own below `folder`.

    Stopped at any moment, what is there is whole, and the next call does the rest. A second process
    that prepares into the same folder waits for the first.

    Args:
        index: Where the scans are.
        cases: Which of its cases are wanted.
        folder: Of all prepared cases; made if it is not there.
        config: Plain or compressed.
        n_workers: Processes, of up to 300 MB each; 0 works in this one.
        track: Shows how far it is.

    Returns:
        What was wrong with the cases that could not be prepared, in their order.

    Raises:
        EnvironmentalError: The disk has too little room, the folder cannot be written to, a worker
            was killed, or `blosc2` is missing.
    """
    jobs = [_Job(root=index.root, case=case, folder=folder, config=config) for case in cases]
    if all(map(_is_current, jobs)):
        return ()
    if config.compressed:
        check_compression()
    with locked(folder / _LOCK_NAME):
        remove_leftovers(folder, folders=True)
        jobs = [job for job in jobs if not _is_current(job)]
        check_space(index.root, [job.case for job in jobs], folder, config)
        results = _results(jobs, n_workers)
        shown = track(results, what="preparing cases", total=len(jobs))
        failures = {place: failure for place, failure in shown if failure is not None}
    return tuple(failures[place] for place in sorted(failures))


def _results(jobs: Sequence[_Job], n_workers: int) -> Iterator[tuple[int, CaseError | None]]:
    """Yield the place of each job and how it failed, if it did, as they are done."""
    if n_workers == 0:
        yield from enumerate(map(_attempt, jobs))
        return
    when_killed = "Close other programs, or prepare the cases on a machine with more memory."
    with worker_pool(n_workers, when_killed=when_killed) as pool:
        places = {pool.submit(_attempt, job): place for place, job in enumerate(jobs)}
        for future in as_completed(places):
            yield places[future], future.result()


def _attempt(job: _Job) -> CaseError | None:
    try:
        _prepare(job)
    except CaseError as failure:
        return failure
    return None


def _is_current(job: _Job) -> bool:
    manifest = read_manifest(job.path)
    if manifest is None or not _has_settings(manifest, job):
        return False
    try:
        return manifest.sources == sources_of(job.root, job.case)
    except OSError:
        return False


def _has_settings(manifest: Manifest, job: _Job) -> bool:
    return (manifest.compressed, manifest.convention) == (
        job.config.compressed,
        job.case.label_convention,
    )


def _prepare(job: _Job) -> None:
    try:
        # looked at before it is read: a file that changes meanwhile is prepared again next time
        sources = sources_of(job.root, job.case)
        contents = contents_of(job.root, scans_of(job.case))
    except OSError as error:
        found = f"a file that cannot be read ({error.strerror})"
        next_step = "Check that the file is there, and index the data folder again."
        file = str(error.filename)
        raise CaseError(job.case.case_id, file, found, "a scan", next_step) from error
    manifest = read_manifest(job.path)
    if manifest is not None and _has_settings(manifest, job) and manifest.contents == contents:
        with whole_file(job.path / MANIFEST_NAME) as beside:
            beside.write_text(replace(manifest, sources=sources).to_json())
    else:
        _make(job, sources, contents)


def _make(job: _Job, sources: tuple[SourceFile, ...], contents: tuple[str, ...]) -> None:
    case = job.case
    volumes = [
        read_volume(job.root / scan.path, case_id=case.case_id, volume=scan.volume)
        for scan in case.images
    ]
    label = None
    if case.label is not None:
        label = read_label_map(job.root / case.label.path, case_id=case.case_id)
        _check_labels(label, case)
    check_volumes(case.case_id, volumes, label)
    # a network learns in one orientation, whatever the scans were stored in
    volumes, label = [oriented(volume) for volume in volumes], label and oriented(label)
    brain = extract_brain(case.case_id, volumes, label)
    manifest = Manifest(
        version=FORMAT_VERSION,
        compressed=job.config.compressed,
        convention=case.label_convention,
        sources=sources,
        contents=contents,
        box=brain.box,
        geometry=volumes[0].geometry,
        means=brain.means,
        stds=brain.stds,
    )
    with whole_folder(job.path, when_full=advice(job.config)) as folder:
        _write(folder, manifest, brain)


def _check_labels(label: Volume, case: Case) -> None:
    convention = convention_named(case.label_convention)
    unknown = sorted(set(np.unique(label.array).tolist()) - convention.values)
    if unknown:
        found = f"the label values {unknown}"
        expected = f"those of the convention {convention.name}: {sorted(convention.values)}"
        next_step = "Mend the label map, or name another convention with --labels."
        raise CaseError(case.case_id, label.file, found, expected, next_step)


def _write(folder: Path, manifest: Manifest, brain: Brain) -> None:
    compressed = manifest.compressed
    # n values of standard deviation 1 lie within sqrt(n): float16, up to 65504, holds any brain
    image = brain.image.astype(np.float16)
    write_array(folder / array_name("image", compressed=compressed), image)
    foreground = np.empty((0, 4), dtype=np.int32)
    if brain.labels is not None:
        write_array(folder / array_name("labels", compressed=compressed), brain.labels)
        foreground = select_foreground(brain.labels, convention_named(manifest.convention))
    write_array(folder / FOREGROUND_NAME, foreground)
    with whole_file(folder / MANIFEST_NAME) as beside:
        beside.write_text(manifest.to_json())


def select_foreground(labels: LabelMap, convention: LabelConvention) -> Voxels:
    """Return voxels of every region as rows (n, 4): index of the region, then the voxel.

    Large regions are thinned evenly.
    """
    rows = []
    for region, mask in enumerate(regions_of(labels, convention)):
        inside = np.flatnonzero(mask)
        kept = np.linspace(0, inside.size - 1, min(inside.size, FOREGROUND_VOXELS), dtype=np.intp)
        voxels = np.unravel_index(inside[kept], labels.shape)
        rows.append(np.stack([np.full(kept.size, region), *voxels], axis=1))
    return np.concatenate(rows).astype(np.int32)
