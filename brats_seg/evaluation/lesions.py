"""Which voxels are one lesion: numbered components, merged, joined and dropped.

Lesions are an integer array `(X, Y, Z)`: 0 outside, else the lesion's number. Numbers may be
missing from the row.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from brats_seg.cases.groups import first_of_group
from brats_seg.data.box import bounding_box
from brats_seg.evaluation.surface import Mask

Lesions = npt.NDArray[np.int32]

_ALL_NEIGHBOURS = ndimage.generate_binary_structure(3, 3)
_DILATION = ndimage.generate_binary_structure(3, 2)

_TOUCHING = (
    ("netc", ("et", "rc")),
    ("et", ("netc", "rc")),
    ("rc", ("et", "netc")),
    ("snfh", ("et", "rc", "netc")),
)
"""Tissues in the order in which their lesions are joined, and the tissues that join them."""


def number_components(mask: Mask) -> Lesions:
    """Number the components of a mask, voxels that share a corner being together."""
    lesions, _ = ndimage.label(mask, _ALL_NEIGHBOURS, output=np.int32)
    return lesions


def number_lesions(mask: Mask, dilation: int) -> Lesions:
    """Number the components of a mask, those whose dilations touch being one lesion."""
    lesions = np.zeros(mask.shape, np.int32)
    box = bounding_box(mask)
    if box is not None:
        # where two dilations meet outside the box, they meet at its edge as well
        cut = mask[box.slices]
        lesions[box.slices] = np.where(cut, number_components(dilated(cut, dilation)), 0)
    return lesions


def dilated(mask: Mask, steps: int) -> Mask:
    """Grow a mask by so many steps, at least one, over its faces and edges."""
    return ndimage.binary_dilation(mask, _DILATION, iterations=steps)


def without_small(lesions: Lesions, minimum_mm3: float, voxel_mm3: float) -> Lesions:
    """Drop the lesions of that volume and below."""
    kept = np.bincount(lesions.ravel()) * voxel_mm3 > minimum_mm3
    return np.where(kept[lesions], lesions, 0)


def join_touching(lesions: Mapping[str, Lesions]) -> dict[str, Lesions]:
    """Join the lesions of a tissue that touch the same lesion of another tissue.

    Goes over `netc`, `et`, `rc` and `snfh` twice, as BraTS 2024 does for adult glioma, so that
    lesions joined late join others; lesions of other regions stay as they are. Lesions linked by a
    chain of shared neighbours all become one.
    """
    grown = {name: dilated(lesions[name] > 0, 1) for name, _ in _TOUCHING}
    touched = {
        (tissue, name): _touched(lesions[tissue], lesions[name], grown[name])
        for tissue, neighbours in _TOUCHING
        for name in neighbours
    }
    # the lesion that each lesion is part of by now
    part_of = {name: list(range(int(lesions[name].max()) + 1)) for name, _ in _TOUCHING}
    for _ in range(2):
        for tissue, neighbours in _TOUCHING:
            keys = [[(tissue, lesion)] for lesion in part_of[tissue]]
            for name in neighbours:
                for lesion, neighbour in touched[tissue, name]:
                    keys[lesion].append((name, part_of[name][neighbour]))
            part_of[tissue] = list(first_of_group(keys))
    joined = {name: np.array(part_of[name], np.int32)[lesions[name]] for name in part_of}
    return {name: joined.get(name, numbered) for name, numbered in lesions.items()}


def _touched(lesions: Lesions, neighbours: Lesions, grown: Mask) -> list[tuple[int, int]]:
    """Return the pairs of a lesion and a neighbour that one dilation of the latter reaches."""
    near = np.argwhere(grown & (lesions > 0))
    offsets = np.argwhere(_DILATION)
    around = np.pad(neighbours, 1)[tuple((near[:, None] + offsets).transpose(2, 0, 1))]
    here = np.broadcast_to(lesions[tuple(near.T)][:, None], around.shape)
    return sorted(set(zip(here[around > 0].tolist(), around[around > 0].tolist(), strict=True)))
