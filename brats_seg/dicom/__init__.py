"""Bring scans from the scanner to a result: read DICOM, prepare scans, write what scanners and archives read.

The rest of the package calls these functions by way of `wings`.
"""

from brats_seg.dicom.convert import cases_of_dicom
from brats_seg.dicom.preprocess import ScanOptions, prepare_cases, read_source
from brats_seg.dicom.segmentation import write_segmentation

__all__ = ["ScanOptions", "cases_of_dicom", "prepare_cases", "read_source", "write_segmentation"]
