"""Things that belong together because they share an id or a hash."""

# DOC evaluation/lesions: Which voxels are one lesion: numbered components, merged, joined and dropped.
#
# Lesions are an integer array `(X, Y, Z)`: 0 outside, else the lesion's number. Numbers may be
# missing from the row.
#

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from brats_seg.voxels.box import Mask


def first_of_group(keys: Sequence[Iterable[Hashable]]) -> tuple[int, ...]:
    """Return for each item the index of the first item of its group.

    Args:
        keys: The keys of each item. Items are in one group when they share a key, or when a chain
            of such items joins them.
    """
    first = list(range(len(keys)))
    seen: dict[Hashable, int] = {}
    for item, own_keys in enumerate(keys):
        for key in own_keys:
            one, other = _root(first, seen.setdefault(key, item)), _root(first, item)
            first[max(one, other)] = min(one, other)
    return tuple(_root(first, item) for item in range(len(keys)))


def _root(first: list[int], item: int) -> int:
    while first[item] != item:
        item = first[item]
    return item


Lesions = npt.NDArray[np.int32]

_ALL_NEIGHBOURS = ndimage.generate_binary_structure(3, 3)


def number_components(mask: Mask) -> Lesions:
    """Number the components of a mask, voxels that share a corner being together."""
    lesions, _ = ndimage.label(mask, _ALL_NEIGHBOURS, output=np.int32)
    return lesions
