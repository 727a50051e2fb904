"""A scan and its label map on one grid, which everything about a tumour is measured on.

The axes are those of BraTS. Shapes: the scan is `(X, Y, Z)`, the box around brain and tumour
`(x, y, z)`, at the spacing of the files.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from brats_seg.cases.checks import check_one_grid
from brats_seg.cases.nifti import Volume
from brats_seg.cases.orientation import oriented
from brats_seg.data.box import Box, bounding_box
from brats_seg.inference.scan import Scan
from brats_seg.labels import LabelConvention, LabelMap, RegionMasks, check_values, regions_of

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tumour:
    """The tumour of a case, in its brain."""

    image: npt.NDArray[np.float32]
    """(4, x, y, z): mean 0 and standard deviation 1 inside the brain, 0 around it."""
    label_map: LabelMap
    """(x, y, z)"""
    convention: LabelConvention
    """The numbering of the label map."""
    spacing_mm: tuple[float, float, float]

    @property
    def brain(self) -> Mask:
        """The voxels (x, y, z) that are tissue."""
        return (self.image != 0).any(axis=0)

    @property
    def regions(self) -> RegionMasks:
        """(3, x, y, z) in the order of `REGIONS`."""
        return regions_of(self.label_map, self.convention)

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel."""
        return prod(self.spacing_mm)


def tumour_of(scan: Scan, labels: Volume, convention: LabelConvention) -> Tumour:
    """Put a scan and its label map together; labels outside the brain are kept.

    Raises:
        CaseError: The label map lies on another grid.
        LabelError: It holds values that its convention does not know.
    """
    check_one_grid(scan.case_id, [("the scan", scan.geometry), (labels.file, labels.geometry)])
    check_values(np.unique(labels.array).tolist(), convention, scan.case_id)
    labels = oriented(labels)
    image = scan.on_scan_spacing(scan.image)
    x, y, z = labels.geometry.shape
    # a scan that was resampled comes back whole
    own = scan.box if scan.resampling is None else Box.at((0, 0, 0), (x, y, z))
    labelled = bounding_box(labels.array > 0)
    box = own if labelled is None else own.joined(labelled)
    placed = np.zeros((len(image), *box.shape), dtype=np.float32)
    placed[(slice(None), *own.seen_from(box.start).slices)] = image
    return Tumour(
        image=placed,
        label_map=np.ascontiguousarray(labels.array[box.slices]),
        convention=convention,
        spacing_mm=labels.geometry.spacing_mm,
    )
