"""Read the DICOM series of an examination as a case, and write its label map as a DICOM segmentation."""
