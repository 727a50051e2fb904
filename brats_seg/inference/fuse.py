"""Fuse several label maps of each case to one: by majority, STAPLE or the mean of probabilities.

Each region is fused separately: a voxel is inside if more than half of the votes, or of the
probability, are for it. A tie is outside. Regions stay nested: ET in TC in WT.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from brats_seg.cases import releases
from brats_seg.cases.case import check_one_grid, count_labels
from brats_seg.cases.nifti import Geometry, read_label_map, read_volume, write_volume
from brats_seg.errors import EnvironmentalError, LabelError, UsageError, some_of, unknown_name
from brats_seg.evaluation.evaluate import LabelFile, case_of, label_maps_in, recorded
from brats_seg.evaluation.scores import IN_TRAINING, VOLUMES_NAME
from brats_seg.inference.method import Field
from brats_seg.inference.results import MANIFEST_NAME, OutputFolder, result_files
from brats_seg.labels import LabelConvention, RegionMasks, label_map_of, regions_of
from brats_seg.progress import Track, untracked
from brats_seg.tables import write_table
from brats_seg.voxels.box import Mask, Triple, bounding_box, triple
from brats_seg.voxels.regions import Decoding, decode_regions

METHODS = ("majority", "staple", "mean")
"""Ways to fuse label maps; see `fuse_label_maps`."""
COLUMNS = ("case_id", "convention", IN_TRAINING)
"""Columns of the table of fused label maps, which is read as that of predictions."""


class _LabelMap(NamedTuple):
    """A label map that has been checked; it is read again when its case is fused."""

    file: LabelFile
    geometry: Geometry
    convention: LabelConvention


def fuse_label_maps(
    inputs: Sequence[Path], output: Path, method: str = "majority", *, track: Track = untracked
) -> tuple[Path, ...]:
    """Fuse the label maps of each case, and return the files that were written.

    All label maps are checked before the first are fused, so that nothing is written if one is wrong.

    Args:
        inputs: Folders of label maps of the same cases, or label maps of one case. They may be in
            different label conventions; that of the first is written.
        output: Folder to write `CASE.nii.gz` to, and the label convention of each to `volumes.csv`.
        method: `majority`, `staple` (Warfield et al. 2004), or `mean` of the probabilities that
            `predict --probabilities` wrote to each folder, in the layout `plain`.
        track: Shows the progress.

    Raises:
        UsageError: The method is unknown, there are fewer than two inputs, one lacks a case, or the
            output folder is one of them, or holds predictions or other label maps, or another
            process writes to it.
        LayoutError: A folder holds no label map.
        CaseError: A file cannot be read, has another grid than the first of its case, or values that
            regions do not distinguish.
        EnvironmentalError: SimpleITK is not installed, or a file cannot be written.
    """
    if method not in METHODS:
        raise UsageError(unknown_name(f"method {method!r}", method, METHODS))
    sets = list(map(_read, _find_sets(inputs, output)))
    cases = {case_id: [label_maps[case_id] for label_maps in sets] for case_id in sets[0]}
    for case_id, label_maps in cases.items():
        check_one_grid(case_id, [(str(item.file.path), item.geometry) for item in label_maps])
    with OutputFolder(output).opened():
        # of cases that were fused earlier
        rows, written = recorded(output), list[Path]()
        for case_id, label_maps in track(cases.items(), what="fusing", total=len(cases)):
            regions = _fuse(case_id, label_maps, method)
            written.append(output / f"{case_id}.nii.gz")
            # the table must not be read with an earlier label map
            written[-1].unlink(missing_ok=True)
            first, answers = label_maps[0], {item.file.in_training for item in label_maps}
            in_training = "yes" if "yes" in answers else min(answers)
            cells = case_id, first.convention.name, in_training
            rows[case_id] = dict(zip(COLUMNS, cells, strict=True))
            write_table(output / VOLUMES_NAME, COLUMNS, [row for _, row in sorted(rows.items())])
            write_volume(written[-1], label_map_of(regions, first.convention), first.geometry)
    return tuple(written)


def _fuse(case_id: str, label_maps: Sequence[_LabelMap], method: str) -> RegionMasks:
    """Return the region masks `(3, X, Y, Z)` that the label maps of a case become."""
    if method == "mean":
        inside = _mean_probabilities(case_id, label_maps)
    else:
        masks = [
            regions_of(read_label_map(item.file.path, case_id=case_id).array, item.convention)
            for item in label_maps
        ]
        inside = np.mean(masks, axis=0, dtype=np.float32)
        if method == "staple":
            inside = np.stack([_staple(votes) for votes in zip(*masks, strict=True)])
    return decode_regions(inside, Decoding(), voxel_mm3=1.0)


def _staple(votes: Sequence[Mask]) -> Field:
    """Return the probability by STAPLE that a voxel is inside, in the box around all votes."""
    try:
        import SimpleITK
    except ImportError:
        msg = "STAPLE needs SimpleITK, which is not installed: pip install SimpleITK"
        raise EnvironmentalError(msg) from None
    fused = np.zeros(votes[0].shape, np.float32)
    if box := bounding_box(np.any(votes, axis=0)):
        # with some background, because ITK divides by its size
        inside = box.grown(1).within(triple(fused.shape)).slices
        images = [SimpleITK.GetImageFromArray(mask[inside].astype(np.uint8)) for mask in votes]
        fused[inside] = SimpleITK.GetArrayFromImage(SimpleITK.STAPLE(images, 1.0))
    return fused


def _mean_probabilities(case_id: str, label_maps: Sequence[_LabelMap]) -> Field:
    first, sums = label_maps[0], []
    grid = (str(first.file.path), first.geometry)
    for name in result_files("plain", case_id, first.convention.name).probabilities:
        paths = [label_map.file.path.parent / name for label_map in label_maps]
        if missing := [path for path in paths if not path.exists()]:
            msg = f"{missing[0]} is missing; expected the maps that `predict --probabilities` wrote, in --layout plain"
            raise UsageError(msg)
        volumes = [read_volume(path, case_id=case_id) for path in paths]
        check_one_grid(case_id, [grid, *((volume.file, volume.geometry) for volume in volumes)])
        sums.append(sum(volume.array for volume in volumes))
    return (np.stack(sums) / len(label_maps)).astype(np.float32)


def _find_sets(inputs: Sequence[Path], output: Path) -> list[dict[str, LabelFile]]:
    """Return the label maps of each input by case; raise `UsageError` unless all have the same cases."""
    folders = {(path if path.is_dir() else path.parent).resolve() for path in inputs}
    refusals = {
        "there is one input; expected two label maps or more, or folders": len(inputs) < 2,
        "the inputs are folders and files; expected either": len({p.is_dir() for p in inputs}) > 1,
        f"{output} holds inputs; expected another --output": output.resolve() in folders,
        f"{output} holds predictions; expected another --output": (output / MANIFEST_NAME).exists(),
    }
    for message, is_true in refusals.items():
        if is_true:
            raise UsageError(message)
    sets = [label_maps_in(p, None if p.is_dir() else [case_of(inputs[0])]) for p in inputs]
    for path, label_maps in zip(inputs, sets, strict=True):
        if missing := sorted(set().union(*sets) - label_maps.keys()):
            msg = f"{path} has no label map of {some_of(missing)}; expected the same cases in all"
            raise UsageError(msg)
    return sets


def _read(files: Mapping[str, LabelFile]) -> dict[str, _LabelMap]:
    """Check the label maps of one input; their conventions are known when all have been read."""
    grids: dict[str, Geometry] = {}
    shown: dict[str, tuple[Triple, frozenset[int]]] = {}
    for case_id, file in files.items():
        volume = read_label_map(file.path, case_id=case_id)
        grids[case_id] = volume.geometry
        shown[case_id] = volume.geometry.shape, frozenset(count_labels(volume.array))
    declared = {case_id: file.convention for case_id, file in files.items()}
    conventions = releases.resolve_conventions(shown, declared)
    for case_id, convention in conventions.items():
        if unknown := sorted(shown[case_id][1] - {0, *convention.painted}):
            values, path = f"label values {unknown}", str(files[case_id].path)
            next_step = "Renumber or remove them."
            raise LabelError(case_id, path, values, f"only those of {convention}", next_step)
    return {name: _LabelMap(file, grids[name], conventions[name]) for name, file in files.items()}
