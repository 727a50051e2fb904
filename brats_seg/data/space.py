"""Room on disk: how much prepared cases need, and what is said when there is not enough."""

import logging
from collections.abc import Sequence
from math import prod
from pathlib import Path

from brats_seg.cases.case import Case
from brats_seg.cases.nifti import read_geometry
from brats_seg.config import StoreConfig
from brats_seg.data.case_folder import folder_bytes, free_bytes
from brats_seg.errors import CaseError, EnvironmentalError
from brats_seg.labels import MODALITIES

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
