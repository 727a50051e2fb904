"""Number the connected components of masks, drop small ones, and group items that share a key."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from scipy.cluster.hierarchy import DisjointSet

from brats_seg.voxels.box import Mask, bounding_box

Lesions = npt.NDArray[np.int32]
"""Lesions `(X, Y, Z)`: 0 outside, else the number of the lesion; numbers may be missing."""

_ALL_NEIGHBOURS = ndimage.generate_binary_structure(3, 3)


def number_components(mask: Mask) -> Lesions:
    """Number the connected components of a mask `(X, Y, Z)` from 1; corners connect voxels.

    Example:
        >>> mask = np.zeros((1, 1, 4), dtype=bool)
        >>> mask[..., [0, 2, 3]] = True
        >>> number_components(mask).tolist()
        [[[1, 0, 2, 2]]]
    """
    lesions = np.zeros(mask.shape, dtype=np.int32)
    box = bounding_box(mask)
    if box is not None:
        # a tumour fills little of a brain
        ndimage.label(mask[box.slices], _ALL_NEIGHBOURS, output=lesions[box.slices])
    return lesions


def nested_regions(
    probabilities: npt.NDArray[np.float32],
    thresholds: Sequence[float],
    *,
    smallest: Sequence[float],
    smallest_et: float,
) -> npt.NDArray[np.bool_]:
    """Threshold probabilities of WT, TC and ET (3, X, Y, Z), nest the masks and drop small components.

    Args:
        probabilities: Of WT, TC and ET.
        thresholds: Probability above which a voxel belongs to each region.
        smallest: Voxels below which a component of each region is dropped.
        smallest_et: Voxels of all ET together below which it is dropped.
    """
    regions = probabilities > np.array(thresholds, dtype=np.float32)[:, None, None, None]
    wt, tc, et = regions
    tc |= et
    wt |= tc
    for region, inner, n_voxels in zip(regions, (tc, et, None), smallest, strict=True):
        _drop_small(region, n_voxels)
        if inner is not None:
            inner &= region
    if np.count_nonzero(et) < smallest_et:
        et[...] = False
    return regions


def _drop_small(mask: Mask, smallest: float) -> None:
    """Empty components of fewer voxels, in place; voxels that share a corner are connected."""
    if smallest <= 1:
        return
    components = number_components(mask)
    kept = np.bincount(components.ravel()) >= smallest
    kept[0] = False
    mask[...] = kept[components]


def first_of_group(keys: Sequence[Iterable[Hashable]]) -> tuple[int, ...]:
    """Return for each item the index of the first item of its group.

    Args:
        keys: Keys of each item. Two items are in one group if they share a key, or if a chain of
            such items connects them.

    Example:
        >>> first_of_group([["patient 1"], ["patient 2", "scan a"], ["patient 1", "scan a"]])
        (0, 0, 0)
    """
    groups = DisjointSet(range(len(keys)))
    first_with: dict[Hashable, int] = {}
    for item, own_keys in enumerate(keys):
        for key in own_keys:
            groups.merge(first_with.setdefault(key, item), item)
    first_in: dict[int, int] = {}
    return tuple(first_in.setdefault(groups[item], item) for item in range(len(keys)))
