"""The functions of this wing that the rest of the package calls, by way of `wings`."""

from brats_seg.dicom.convert import DEFAULT_OPTIONS, cases_of_dicom, read_source
from brats_seg.dicom.segmentation import write_segmentation

__all__ = ["DEFAULT_OPTIONS", "cases_of_dicom", "read_source", "write_segmentation"]
