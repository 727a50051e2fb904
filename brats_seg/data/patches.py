"""Choose the patches of an epoch, and the place of each of them in its case.

The choice depends only on the seed of the run, the epoch, the case and the number of the patch, not
on the number of workers, on restarts, or on the order of the cases.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg.voxels.box import Box, Triple, rounded_up

ORIGIN: Triple = (0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchKey:
    """Key of one patch of an epoch."""

    epoch: int
    case_id: str
    draw: int
    """Number of the patch among those of its case in the epoch, from 0."""


def stable_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on every part, the same in every process."""
    # repr distinguishes 1 from "1", and separates the parts
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def patch_seed(seed: int, key: PatchKey, purpose: str) -> int:
    """Return the seed of a patch for one purpose, such as its place."""
    return stable_seed(seed, key.epoch, key.case_id, key.draw, purpose)


def epoch_patches(
    case_ids: Iterable[str], epoch: int, per_case: int, seed: int
) -> tuple[PatchKey, ...]:
    """Return the patches of an epoch, `per_case` of every case, in random order."""
    keys = [
        PatchKey(epoch=epoch, case_id=case_id, draw=draw)
        for case_id in sorted(case_ids)
        for draw in range(per_case)
    ]
    order = np.random.default_rng(stable_seed(seed, epoch, "order")).permutation(len(keys))
    return tuple(keys[place] for place in order)


def choose_box(
    rng: np.random.Generator,
    *,
    shape: Triple,
    size: Triple,
    foreground_fraction: float,
    foreground: Sequence[npt.NDArray[np.int32]],
) -> Box:
    """Place a patch in a case.

    A fraction of the patches is centred on a random voxel of a random region of the case, and then
    shifted into the case; the others are placed uniformly. If the case is smaller than the patch,
    the patch extends beyond it on both sides.

    Args:
        rng: Generator of this patch.
        shape: Voxels of the case.
        size: Voxels of the patch.
        foreground_fraction: Probability of a patch on tumour, if the case has any.
        foreground: Voxels (n, 3) of every region.
    """
    slack = np.subtract(shape, size)
    present = [voxels for voxels in foreground if len(voxels)]
    if rng.random() < foreground_fraction and present:
        voxels = present[rng.integers(len(present))]
        start = voxels[rng.integers(len(voxels))] - np.floor_divide(size, 2)
    else:
        start = rng.integers(np.maximum(slack, 0), endpoint=True)
    start = np.where(slack < 0, slack // 2, np.clip(start, 0, np.maximum(slack, 0)))
    return Box.at((int(start[0]), int(start[1]), int(start[2])), size)


def whole_box(shape: Triple, multiple: Triple) -> Box:
    """Return the box of a whole case, its size rounded up to multiples that a network takes."""
    return Box.at(ORIGIN, rounded_up(shape, multiple))
