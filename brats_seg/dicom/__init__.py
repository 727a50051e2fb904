"""Read the DICOM series of an examination as a case, and write its label map as a DICOM segmentation.

The rest of the package calls these functions by way of `wings`.
"""

from brats_seg.dicom.convert import DEFAULT_OPTIONS, cases_of_dicom, read_source
from brats_seg.dicom.segmentation import write_segmentation

__all__ = ["DEFAULT_OPTIONS", "cases_of_dicom", "read_source", "write_segmentation"]
