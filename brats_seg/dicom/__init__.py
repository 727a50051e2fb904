"""Bring scans from the scanner to a result: read DICOM, prepare scans, write what scanners and archives read.

The rest of the package calls these functions by way of `wings`.
"""

from brats_seg.dicom.convert import convert_studies
from brats_seg.dicom.preprocess import ScanOptions, prepare_cases, read_source
from brats_seg.dicom.segmentation import write_segmentation

__all__ = ["ScanOptions", "convert_studies", "prepare_cases", "read_source", "write_segmentation"]
