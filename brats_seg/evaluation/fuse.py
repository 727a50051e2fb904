"""Fuse several label maps of each case to one: by majority, or by STAPLE (Warfield et al. 2004).

Each region is fused by itself. By majority a voxel is in a region if more than half of the label maps
say so: a tie is outside. STAPLE estimates how sensitive and how specific each of them is, and asks
whether the voxel is more likely inside. Where TC is, is WT, and where ET is, is TC.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import check_one_grid, label_values_of
from brats_seg.cases.layouts import OUTPUT_MARKER, resolve_all
from brats_seg.cases.nifti import Volume, read_label_map, write_volume
from brats_seg.errors import LabelError, UsageError, some_of
from brats_seg.evaluation.evaluate import case_of, label_maps_in
from brats_seg.files import write_json
from brats_seg.labels import label_map_of, regions_of
from brats_seg.progress import Track, untracked
from brats_seg.voxels.box import Triple
from brats_seg.voxels.shapes import nested_regions

Masks = npt.NDArray[np.bool_]
Probabilities = npt.NDArray[np.float32]

_N_STEPS, _TOLERANCE = 100, 1e-7
"""Most steps of STAPLE, and change of sensitivities and specificities at which it ends."""


def fuse_label_maps(
    inputs: Sequence[Path], output: Path, method: str = "majority", *, track: Track = untracked
) -> tuple[Path, ...]:
    """Fuse the label maps of each case, and return the files that were written.

    All label maps are read before the first are fused, so that nothing is written if one is wrong.

    Args:
        inputs: Folders of label maps of the same cases, or label maps of one case. They may be in
            different label conventions; that of the first is written.
        output: Folder to write `CASE.nii.gz` to.
        method: `majority` or `staple`.
        track: Shows the progress.

    Raises:
        UsageError: There are fewer than two inputs, a case is not in all of them, or the output folder
            is one of them.
        LayoutError: A folder holds no label map.
        CaseError: A label map cannot be read, has another grid than the first of its case, or values
            that regions do not distinguish.
    """
    cases = _cases_in(inputs, output)
    seen: list[dict[str, tuple[Triple, frozenset[int]]]] = [{} for _ in inputs]
    for case_id, files in cases.items():
        for of_input, volume in zip(seen, _read(case_id, files), strict=True):
            of_input[case_id] = volume.geometry.shape, label_values_of(volume.array)
    conventions = [resolve_all(of_input) for of_input in seen]
    for path, of_input, known in zip(inputs, seen, conventions, strict=True):
        for case_id, (_, values) in of_input.items():
            if lost := sorted(values - {0, *known[case_id].painted}):
                found, expected = f"label values {lost}", f"only those of {known[case_id]}"
                next_step = "Other tissues cannot be fused: renumber or remove them."
                raise LabelError(case_id, str(path), found, expected, next_step)
    write_json(output / OUTPUT_MARKER, {"holds": "predictions"})
    written = []
    for case_id, files in track(cases.items(), what="fusing", total=len(cases)):
        volumes, painted = _read(case_id, files), [known[case_id] for known in conventions]
        sides = [regions_of(v.array, one) for v, one in zip(volumes, painted, strict=True)]
        inside = np.stack([METHODS[method](masks) for masks in np.stack(sides, axis=1)])
        regions = nested_regions(inside, (0.5, 0.5, 0.5), smallest=(0, 0, 0), smallest_et=0)
        written.append(output / f"{case_id}.nii.gz")
        write_volume(written[-1], label_map_of(regions, painted[0]), volumes[0].geometry)
    return tuple(written)


def majority(masks: Masks) -> Probabilities:
    """Return the share of the masks (n, X, Y, Z) that each voxel (X, Y, Z) is in."""
    return masks.mean(axis=0, dtype=np.float32)


def staple(masks: Masks) -> Probabilities:
    """Return the probability (X, Y, Z) by STAPLE that a voxel of masks (n, X, Y, Z) is inside.

    Where none of the masks is, it is 0. Voxels of equal votes are one term of each sum.
    """
    marked = masks.any(axis=0)
    votes, kinds, counts = np.unique(
        masks[:, marked], axis=1, return_inverse=True, return_counts=True
    )
    # no vote is the first kind
    inside = np.pad(votes, ((0, 0), (1, 0)))
    n_voxels, prior = np.r_[np.count_nonzero(~marked), counts], float(masks.mean())
    rates = np.full((2, len(masks), 1), 0.99999)
    for _ in range(_N_STEPS):
        sensitivity, specificity = rates
        yes = prior * np.where(inside, sensitivity, 1 - sensitivity).prod(axis=0)
        no = (1 - prior) * np.where(inside, 1 - specificity, specificity).prod(axis=0)
        is_inside = np.divide(yes, yes + no, out=np.zeros_like(yes), where=yes + no > 0)
        weights = np.stack([is_inside, 1 - is_inside]) * n_voxels
        agreed = weights[:, None] * np.stack([inside, ~inside])
        before, rates = rates, agreed.sum(axis=-1, keepdims=True)
        rates /= np.maximum(weights.sum(axis=-1), 1)[:, None, None]
        if np.abs(rates - before).max() < _TOLERANCE:
            break
    probabilities = np.zeros(marked.shape, np.float32)
    probabilities[marked] = is_inside[1:][kinds.ravel()]
    return probabilities


METHODS = {"majority": majority, "staple": staple}


def _cases_in(inputs: Sequence[Path], output: Path) -> dict[str, list[Path]]:
    """Return the label maps of each case, in the order of the inputs."""
    folders = {path.resolve() if path.is_dir() else path.resolve().parent for path in inputs}
    is_mixed = len({path.is_dir() for path in inputs}) > 1
    if len(inputs) < 2 or is_mixed or output.resolve() in folders:
        msg = (
            f"expected two or more label maps, or folders of them, and another folder than {output}"
        )
        raise UsageError(msg)
    case_ids = () if inputs[0].is_dir() else (case_of(inputs[0]),)
    found = [label_maps_in(path, case_ids) for path in inputs]
    every = sorted(set().union(*found))
    for path, files in zip(inputs, found, strict=True):
        if missing := [case_id for case_id in every if case_id not in files]:
            msg = f"{path} has no label map of {some_of(missing)}; expected the same cases in all"
            raise UsageError(msg)
    return {case_id: [files[case_id] for files in found] for case_id in every}


def _read(case_id: str, files: Sequence[Path]) -> list[Volume]:
    volumes = [read_label_map(path, case_id=case_id) for path in files]
    names = zip(map(str, files), (volume.geometry for volume in volumes), strict=True)
    check_one_grid(case_id, list(names))
    return volumes
