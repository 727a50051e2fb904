"""Take a coarse sample of a case, for the checks of its modalities and of its label map.

Voxels that are 2 mm apart are enough to tell tissues from each other, and take a tenth of the time
of all. The checks of anatomy need a brain: they conclude nothing from less than `SMALLEST_BRAIN_ML`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from brats_seg.cases.nifti import Volume
from brats_seg.labels import LabelMap
from brats_seg.voxels.box import Mask, bounding_box
from brats_seg.voxels.brain import brain_mask
from brats_seg.voxels.grids import MM3_PER_ML, Spacing

STEP_MM = 2.0
"""Distance between the voxels of a sample; on coarser grids all voxels are taken."""
SMALLEST_BRAIN_ML = 50.0
"""Foreground below which a scan is no brain, but a part of one or a test object: a newborn has
300 ml."""

_LARGEST_Z = 15.0
_IQR_OF_NORMAL = 1.349
"""Interquartile range of the normal distribution of standard deviation 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BrainSample:
    """Every nth voxel of the box around the brain."""

    images: npt.NDArray[np.float32]
    """Modalities (4, x, y, z), median 0 and interquartile range 1.35 in the brain, 0 outside."""
    brain: Mask
    """Voxels (x, y, z) of the brain."""
    labels: LabelMap | None
    """Label map (x, y, z); None without one."""
    n_labelled: int
    """Labelled voxels of the sample, in the box or outside."""
    spacing_mm: Spacing
    """Distance between neighbours."""

    @property
    def voxel_ml(self) -> float:
        """Volume that a voxel of the sample stands for."""
        return prod(self.spacing_mm) / MM3_PER_ML

    @property
    def brain_ml(self) -> float:
        """Volume of the brain."""
        return int(np.count_nonzero(self.brain)) * self.voxel_ml

    @property
    def is_brain(self) -> bool:
        """Whether the foreground is large enough to be a brain."""
        return self.brain_ml >= SMALLEST_BRAIN_ML

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """Intensities (4, n) in the brain."""
        return self.images[:, self.brain]


def sample_brain(volumes: Sequence[Volume], label: Volume | None) -> BrainSample | None:
    """Sample the volumes of a case, all of one grid in the axes of BraTS.

    Returns:
        The sample; None if nothing differs from the background.
    """
    spacing_mm = volumes[0].geometry.spacing_mm
    every, between_mm = _steps(spacing_mm)
    mask = brain_mask([volume.array for volume in volumes], every)
    box = bounding_box(mask)
    if box is None:
        return None
    brain = np.ascontiguousarray(mask[box.slices])
    images = np.zeros((len(volumes), *box.shape), dtype=np.float32)
    for image, volume in zip(images, volumes, strict=True):
        image[brain] = _standardised(volume.array[every][box.slices][brain])
    labels = None if label is None else label.array[every]
    return BrainSample(
        images=images,
        brain=brain,
        labels=None if labels is None else np.ascontiguousarray(labels[box.slices]),
        n_labelled=0 if labels is None else int(np.count_nonzero(labels)),
        spacing_mm=between_mm,
    )


def sample_crop(image: npt.NDArray[np.generic], spacing_mm: Spacing) -> BrainSample:
    """Sample a brain crop (4, x, y, z) that is normalised, and exactly 0 outside the brain.

    The scale of the modalities does not matter, so that the result is that of `sample_brain` for the
    scan that the crop was made from.
    """
    every, between_mm = _steps(spacing_mm)
    images = image[(slice(None), *every)].astype(np.float32)
    brain = (images != 0).any(axis=0)
    for modality in images:
        modality[brain] = _standardised(modality[brain])
    return BrainSample(images=images, brain=brain, labels=None, n_labelled=0, spacing_mm=between_mm)


def _steps(spacing_mm: Spacing) -> tuple[tuple[slice, slice, slice], Spacing]:
    """Return which voxels are in a sample, and the distance between them."""
    x, y, z = (max(1, round(STEP_MM / mm)) for mm in spacing_mm)
    every = (slice(None, None, x), slice(None, None, y), slice(None, None, z))
    return every, (spacing_mm[0] * x, spacing_mm[1] * y, spacing_mm[2] * z)


def _standardised(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """Return intensities with median 0 and the spread of a standard deviation of 1.

    Quartiles are not moved by tumours, vessels or a few voxels of the background.
    """
    numbers = values.astype(np.float64)
    low, middle, high = np.percentile(numbers, [25, 50, 75])
    # huge intensities overflow to infinity, which is cut like other outliers
    with np.errstate(over="ignore"):
        spread = (high - low) / _IQR_OF_NORMAL or numbers.std() or 1.0
        return ((numbers - middle) / spread).clip(-_LARGEST_Z, _LARGEST_Z).astype(np.float32)
