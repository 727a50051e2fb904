"""List the lesions of a label map: volume, centre and diameters of each connected component.

These are sizes for a table that a person reads. Lesions of the challenges, which are merged by
dilation before they are scored, are those of `lesionwise`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import ndimage

from brats_seg.labels import REGIONS, RegionMasks
from brats_seg.voxels.box import Box, Mask, bounding_box
from brats_seg.voxels.grids import MM3_PER_ML, Affine
from brats_seg.voxels.shapes import (
    Lesions,
    SectionDiameters,
    longest_diameter_mm,
    number_components,
    section_diameters,
)

MOST_LISTED = 10
"""Lesions of a region that are measured at most, the largest first."""
LEAST_LISTED_ML = 0.1
"""Volume from which a lesion is measured, if it is not the largest: the others are small islands."""
LEAST_MM = 10.0
"""Diameter from which a lesion is measurable by RANO, if both diameters have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesion:
    """One connected component of a region."""

    region: str
    """One of `REGIONS`."""
    number: int
    """Place by volume in its region, from 1."""
    ml: float
    """Volume."""
    centre_mm: tuple[float, float, float]
    """Centre of mass in the coordinates of the file (NIfTI: to the right, to the front, up)."""
    longest_mm: float
    """Longest diameter in space."""
    axial: SectionDiameters
    """Perpendicular diameters in the axial section where their product is largest."""

    @property
    def is_measurable(self) -> bool:
        """Whether both axial diameters have the 10 mm that RANO asks for."""
        # as it is shown: 9.98 mm is no other measurement than 10.0
        return round(self.axial.perpendicular_mm, 1) >= LEAST_MM


@dataclass(frozen=True, kw_only=True, slots=True)
class LesionList:
    """The lesions of a region."""

    region: str
    """One of `REGIONS`."""
    lesions: tuple[Lesion, ...]
    """The largest, and others from `LEAST_LISTED_ML`; at most `MOST_LISTED`."""
    n_others: int
    """Lesions that are not listed."""
    others_ml: float
    """Their volume."""


def list_lesions(regions: RegionMasks, affine: Affine) -> tuple[LesionList, ...]:
    """List the lesions of each region of a label map.

    Args:
        regions: Region masks (3, X, Y, Z), in the axes of BraTS: Z is across axial sections.
        affine: (4, 4), from the voxels of the masks to millimetres.

    Example:
        >>> regions = np.zeros((3, 8, 8, 8), bool)
        >>> regions[0, 2:5, 3, 3] = True
        >>> (wt, tc, et) = list_lesions(regions, np.eye(4))
        >>> wt.lesions[0].ml, wt.lesions[0].centre_mm, wt.lesions[0].longest_mm, et.lesions
        (0.003, (3.0, 3.0, 3.0), 3.0, ())
    """
    box = bounding_box(np.logical_or.reduce(regions))
    if box is None:
        return tuple(
            LesionList(region=name, lesions=(), n_others=0, others_ml=0.0) for name in REGIONS
        )
    here = affine.copy()
    here[:3, 3] += affine[:3, :3] @ box.start
    cut = (region[box.slices] for region in regions)
    bottom = box.start[2]
    return tuple(_listed(name, mask, here, bottom) for name, mask in zip(REGIONS, cut, strict=True))


def _listed(region: str, mask: Mask, affine: Affine, bottom: int) -> LesionList:
    """List the lesions of a part of a volume, whose lowest section is `bottom` in the volume."""
    components = number_components(mask)
    n_voxels = np.bincount(components.ravel())
    n_voxels[0] = 0
    ml = n_voxels * abs(float(np.linalg.det(affine[:3, :3]))) / MM3_PER_ML
    # by size, and of equal ones the first
    order = np.argsort(-n_voxels, kind="stable")[: np.count_nonzero(n_voxels)]
    n_listed = min(MOST_LISTED, max(1, int(np.count_nonzero(ml >= LEAST_LISTED_ML))))
    others = order[n_listed:]
    found = enumerate(_cut_out(components, order[:n_listed].tolist()), 1)
    return LesionList(
        region=region,
        lesions=tuple(
            _measured(region, number, box, cut, affine, bottom) for number, (box, cut) in found
        ),
        n_others=others.size,
        others_ml=float(ml[others].sum()),
    )


def _cut_out(components: Lesions, numbers: list[int]) -> Iterator[tuple[Box, Mask]]:
    """Yield the box of each component, and its mask in the box."""
    sides = ndimage.find_objects(components)
    for number in numbers:
        x, y, z = sides[number - 1]
        box = Box(start=(x.start, y.start, z.start), stop=(x.stop, y.stop, z.stop))
        yield box, components[box.slices] == number


def _measured(region: str, number: int, box: Box, cut: Mask, affine: Affine, bottom: int) -> Lesion:
    x_mm, y_mm, z_mm = map(float, np.linalg.norm(affine[:3, :3], axis=0))
    spacing_mm = (x_mm, y_mm, z_mm)
    centre = np.argwhere(cut).mean(axis=0) + box.start
    x, y, z = map(float, affine[:3, :3] @ centre + affine[:3, 3])
    axial = section_diameters(cut, spacing_mm)
    return Lesion(
        region=region,
        number=number,
        ml=int(np.count_nonzero(cut)) * x_mm * y_mm * z_mm / MM3_PER_ML,
        centre_mm=(x, y, z),
        longest_mm=longest_diameter_mm(cut, spacing_mm),
        axial=replace(axial, index=axial.index + box.start[2] + bottom),
    )
