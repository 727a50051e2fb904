"""Write the measurements and the outlines of the regions of a label map as DICOM.

The structured report (TID 1500) has the volume of each region and the diameters of its largest lesion,
the structure set (RTSTRUCT) the outlines of each region on the slices of the series.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from contourpy import contour_generator

from brats_seg.cases.nifti import Volume, oriented
from brats_seg.evaluation.lesions import list_lesions
from brats_seg.figures.sections import REGION_COLOURS
from brats_seg.labels import LabelConvention, RegionMasks, regions_of

_REGIONS = (
    ("Whole tumour", ("108369006", "SCT", "Neoplasm")),
    ("Tumour core", ("108369006", "SCT", "Neoplasm")),
    ("Enhancing tumour", ("C113842", "NCIt", "Enhancing Lesion")),
)
"""Name and code (value, scheme, meaning) of each region."""
_MEASURES = (
    (("118565006", "SCT", "Volume"), "mL"),
    (("103339001", "SCT", "Long axis"), "mm"),
    (("103340004", "SCT", "Short axis"), "mm"),
    (("L0JK", "IBSI", "Maximum 3D Diameter of a Mesh"), "mm"),
)
"""Volume of a region, the two diameters of its largest lesion in an axial section, and that in space."""
_LEVEL = 0.51
"""Share of the way to a neighbour after which an outline runs: readers that round it to pixels, and
those that ask which centres are inside, both recover the mask."""


def structured_report(
    segmentation: Any, label_map: Volume, convention: LabelConvention, about: Mapping[str, Any]
) -> Any:
    """Return the `highdicom.sr.Comprehensive3DSR` of a label map that was written as a segmentation."""
    from highdicom import sr
    from pydicom.sr.codedict import codes
    from pydicom.sr.coding import Code
    from pydicom.uid import generate_uid

    upright, groups = oriented(label_map), []
    lesions = list_lesions(regions_of(upright.array, convention), upright.geometry.affine)
    for (name, code), listed in zip(_REGIONS, lesions, strict=True):
        values = [sum((one.ml for one in listed.lesions), listed.others_ml)]
        for one in listed.lesions[:1]:
            values += [one.axial.longest_mm, one.axial.perpendicular_mm, one.longest_mm]
        measurements = [
            sr.Measurement(Code(*what), round(value, 3), Code(unit, "UCUM", unit))
            for value, (what, unit) in zip(values, _MEASURES, strict=False)
        ]
        uid = generate_uid(entropy_srcs=[about["sop_instance_uid"], name])
        group = sr.MeasurementsAndQualitativeEvaluations(
            sr.TrackingIdentifier(uid, name), finding_type=Code(*code), measurements=measurements
        )
        groups.append(group)
    uid = generate_uid(entropy_srcs=["brats_seg"])
    device = sr.DeviceObserverIdentifyingAttributes(uid, "brats_seg")
    observer = sr.ObserverContext(codes.DCM.Device, device)
    content = sr.MeasurementReport(
        sr.ObservationContext(observer_device_context=observer),
        procedure_reported=Code("24590-2", "LN", "MR Brain"),
        imaging_measurements=groups,
        title=codes.DCM.ImagingMeasurementReport,
    )
    return sr.Comprehensive3DSR([segmentation], content[0], is_complete=True, **about)


def structure_set(
    image: Any,
    slices: Sequence[tuple[Any, npt.NDArray[np.float64]]],
    regions: RegionMasks,
    about: Mapping[str, Any],
) -> Any:
    """Return the RTSTRUCT, a `pydicom.Dataset`, of region masks (3, slice, row, column).

    `slices` has the reference to each slice of the series of `image`, and the matrix from its pixels
    (column, row, 1) to mm. A hole is an outline inside another one of the same slice.
    """
    from highdicom.base import SOPClass
    from pydicom.uid import RTStructureSetStorage

    uids = {"study_instance_uid": image.StudyInstanceUID, "sop_class_uid": RTStructureSetStorage}
    dataset: Any = SOPClass(modality="RTSTRUCT", **uids, **about)
    dataset.copy_patient_and_study_information(image)
    dataset.StructureSetLabel, dataset.ApprovalStatus = "brats_seg", "UNAPPROVED"
    dataset.StructureSetDate = dataset.StructureSetTime = None
    frame, references = image.FrameOfReferenceUID, [reference for reference, _ in slices]
    series = item(SeriesInstanceUID=image.SeriesInstanceUID, ContourImageSequence=references)
    # a retired class, which readers expect
    study = item(
        ReferencedSOPClassUID="1.2.840.10008.3.1.2.3.1", RTReferencedSeriesSequence=[series]
    )
    study.ReferencedSOPInstanceUID = image.StudyInstanceUID
    referenced = item(FrameOfReferenceUID=frame, RTReferencedStudySequence=[study])
    dataset.ReferencedFrameOfReferenceSequence = [referenced]
    dataset.StructureSetROISequence, dataset.ROIContourSequence = [], []
    dataset.RTROIObservationsSequence = []
    parts = zip(_REGIONS, REGION_COLOURS, regions, strict=True)
    for number, ((name, _), colour, masks) in enumerate(parts, start=1):
        roi = item(ROINumber=number, ROIName=name, ReferencedFrameOfReferenceUID=frame)
        roi.ROIGenerationAlgorithm = "AUTOMATIC"
        outlines = item(ReferencedROINumber=number, ContourSequence=_outlines(masks, slices))
        outlines.ROIDisplayColor = list(bytes.fromhex(colour.removeprefix("#")))
        observed = item(ObservationNumber=number, ReferencedROINumber=number)
        observed.RTROIInterpretedType = observed.ROIInterpreter = None
        dataset.StructureSetROISequence.append(roi)
        dataset.ROIContourSequence.append(outlines)
        dataset.RTROIObservationsSequence.append(observed)
    return dataset


def item(**elements: Any) -> Any:
    """Return a `pydicom.Dataset` of elements."""
    from pydicom.dataset import Dataset

    dataset = Dataset()
    for name, value in elements.items():
        setattr(dataset, name, value)
    return dataset


def _outlines(masks: Iterable[Any], slices: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Return the closed outlines of the masks (row, column) of slices."""
    outlines = []
    for mask, (reference, to_mm) in zip(masks, slices, strict=True):
        lines = contour_generator(z=np.pad(mask, 1).astype(float)).lines(_LEVEL)
        for line in map(np.asarray, lines if mask.any() else ()):
            # the last point is the first one
            points = np.pad(line[:-1] - 1, ((0, 0), (0, 1)), constant_values=1) @ to_mm.T
            outline = item(ContourImageSequence=[reference], ContourGeometricType="CLOSED_PLANAR")
            outline.NumberOfContourPoints = len(points)
            outline.ContourData = np.round(points, 3).ravel().tolist()
            outlines.append(outline)
    return outlines
