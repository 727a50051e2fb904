"""Find the brain in a scan, crop to the box around it, and normalise its intensities.

`voxels.brain` says which voxels belong to the brain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg.cases.nifti import Volume
from brats_seg.errors import CaseError
from brats_seg.labels import LabelMap
from brats_seg.voxels.box import Box, bounding_box
from brats_seg.voxels.brain import Array, brain_mask, normalised

_CHECK_SCAN = "View the scan, and export it again or leave the case out."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Brain:
    """A case cropped to the brain and normalised."""

    box: Box
    """Position of the crop in the scan."""
    image: npt.NDArray[np.float32]
    """Image (4, x, y, z), mean 0 and standard deviation 1 inside the brain, exactly 0 around it."""
    labels: LabelMap | None
    """Label map (x, y, z); None without one."""
    means: tuple[float, ...]
    """Mean of each modality inside the brain, in the units of the scan."""
    stds: tuple[float, ...]
    """Standard deviation of each modality inside the brain, in the units of the scan."""


def extract_brain(case_id: str, volumes: Sequence[Volume], label: Volume | None) -> Brain:
    """Crop checked volumes of one grid to the brain and normalise them.

    The box contains all labels, including those outside the brain.

    Raises:
        CaseError: There is no brain, or a modality has no contrast inside it.
    """
    mask = brain_mask([volume.array for volume in volumes])
    box = bounding_box(mask)
    if box is None:
        found = "no voxel that differs from the background"
        raise CaseError(case_id, volumes[0].file, found, "a brain", _CHECK_SCAN)
    if label is not None:
        labelled = bounding_box(label.array > 0)
        box = box if labelled is None else box.joined(labelled)
    # x varies fastest in files; with reversed axes the arrays are read in the order of the memory
    inside = np.ascontiguousarray(mask[box.slices].T)
    image = np.empty((len(volumes), *box.shape), dtype=np.float32)
    normalised = np.zeros(inside.shape, dtype=np.float32)
    spread = []
    for volume, modality in zip(volumes, image, strict=True):
        values, mean, std = _normalise(case_id, volume, volume.array[box.slices].T[inside])
        normalised[inside] = values
        modality[...] = normalised.T
        spread.append((mean, std))
    return Brain(
        box=box,
        image=image,
        labels=None if label is None else np.ascontiguousarray(label.array[box.slices]),
        means=tuple(mean for mean, _ in spread),
        stds=tuple(std for _, std in spread),
    )


def _normalise(case_id: str, volume: Volume, values: Array) -> tuple[Array, float, float]:
    """Return the normalised values, with the mean and the standard deviation before."""
    values, mean, std = normalised(values)
    if std == 0:
        found = f"the value {mean:g} in the whole brain"
        raise CaseError(case_id, volume.file, found, "a scan with contrast", _CHECK_SCAN)
    return values, mean, std
