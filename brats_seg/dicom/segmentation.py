"""Write a label map as DICOM: segmentation, report and structure set of the series that it was predicted from.

The voxels of the segmentation are those of the series of t1c: each takes the nearest label. Each tissue
is a segment with a coded name. The report (TID 1500) has the volume of each region and the diameters of
its largest lesion, the structure set (RTSTRUCT) the outlines of each region. The patient's name and
number are written only if the user asked for them; the UIDs of the examination are, because without
them the segmentation refers to no images.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from nibabel.affines import apply_affine
from scipy.ndimage import map_coordinates

from brats_seg.cases.nifti import Geometry, Volume, oriented
from brats_seg.dicom import series
from brats_seg.dicom.preprocess import ScanSource, check_installed
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.evaluation.lesions import list_lesions
from brats_seg.files import table_beside, whole_file
from brats_seg.labels import LabelConvention, LabelMap, RegionMasks, regions_of

SERIES_MODALITY = "t1c"
"""Modality whose series a segmentation belongs to."""
_IMAGE_TAGS = [*series.ELEMENTS["image"], *series.GROUPS]
_CODES = table_beside(__file__)
"""Names and codes of tissues, regions and measures."""
_LEVEL = 0.51
"""Share of the way to a neighbour after which an outline runs: readers that round it to pixels, and
those that ask which centres are inside, both recover the mask."""
_CHARACTERS = "ISO_IR 192"
"""UTF-8, whatever the images have."""
_SERIES_OFFSET = 1000
"""Added to the number of the source series for that of the segmentation."""


def write_segmentation(
    paths: Sequence[Path],
    label_map: LabelMap,
    geometry: Geometry,
    convention: LabelConvention,
    source: ScanSource,
    remark: str = "",
) -> str:
    """Write a label map (X, Y, Z), on the grid `geometry`, as DICOM segmentation, report and structure set.

    The remark of its networks is a parameter of the algorithm.
    Returns nothing, or the reason why none was written: the DICOM files are gone, damaged or elsewhere, or pydicom or
    highdicom is not installed. `EnvironmentalError` is raised if the file cannot be written.
    """
    files = source.series[SERIES_MODALITY].files
    try:
        check_installed("dicom", "pydicom", "highdicom")
        # pydicom warns with values that may identify the patient
        with warnings.catch_warnings(action="ignore"):
            images = [_image(file, source) for file in files]
            slices = list(_slices(images))
            on_images = _labels_at_pixels(images[0], slices, label_map, geometry)
            # an equal label map gets the same UIDs, so that an archive stores it once
            digest = hashlib.sha256(label_map.tobytes() + convention.name.encode()).hexdigest()
            about = [_common(images[0], digest, index) for index in range(len(paths))]
            volume = Volume(array=label_map, geometry=geometry, file=paths[0].name)
            segmentation = _segmentation(images, on_images, convention, remark, about[0])
            written = (
                segmentation,
                _structured_report(segmentation, volume, convention, about[1]),
                _structure_set(images[0], slices, regions_of(on_images, convention), about[2]),
            )
    except (EnvironmentalError, UsageError) as error:
        return f"no DICOM segmentation was written: {error}"
    except Exception as error:  # noqa: BLE001 - pydicom and highdicom raise errors of many kinds
        # its message may quote what identifies the patient
        why = f"are gone or not as the standard says ({type(error).__name__})"
        return f"no DICOM segmentation was written: files of its series, such as {files[0].name}, {why}"
    for path, dataset in zip(paths, written, strict=True):
        dataset.SpecificCharacterSet = _CHARACTERS
        with whole_file(path) as temporary:
            dataset.save_as(temporary)
    return ""


def _image(path: Path, source: ScanSource) -> Any:
    """Return the header of an image, without what may identify the patient unless it is wanted."""
    header = series.read_header(path, None if source.with_identifiers else _IMAGE_TAGS)
    # it may be empty by the standard, and readers of segmentations need it
    thickness_mm = header.get("SliceThickness") or source.series[SERIES_MODALITY].spacing_mm[2]
    header.SliceThickness = thickness_mm
    # what is written is in UTF-8
    header.decode()
    header.SpecificCharacterSet = _CHARACTERS
    for name in series.ELEMENTS["patient"]:
        header.setdefault(name, None)
    if not header.get("FrameOfReferenceUID"):
        header.FrameOfReferenceUID = _uid(header.SeriesInstanceUID, "frame of reference")
    return header


def _slices(images: Sequence[Any]) -> Iterator[tuple[Any, npt.NDArray[np.float64]]]:
    """Yield the reference to each slice, and the matrix from its pixels (column, row, 1) to mm."""
    from highdicom import ReferencedImageSequence

    for image in images:
        frames = series.read_frames(image)
        for number, frame in enumerate(frames, start=1):
            (along, down, _), position = series.read_plane(frame)
            row_mm, column_mm = map(float, frame["PixelSpacing"])
            reference = ReferencedImageSequence([image], number if len(frames) > 1 else None)
            yield reference, np.stack([along * column_mm, down * row_mm, position], axis=1)


def _labels_at_pixels(
    image: Any, slices: Sequence[tuple[Any, Any]], label_map: LabelMap, geometry: Geometry
) -> npt.NDArray[np.uint8]:
    """Return the labels (slice, row, column) at the positions of the pixels of DICOM images.

    Pixels take the nearest label; outside of the label map it is 0. `UsageError` is raised if the label map
    does not end where the slices do.
    """
    # from the axes of DICOM, left, back and head, to those of NIfTI, right, front and head
    to_voxel = np.linalg.inv(geometry.affine) @ np.diag([-1.0, -1.0, 1.0, 1.0])
    rows, columns = np.indices((image.Rows, image.Columns))
    pixels = np.stack([columns, rows, np.ones_like(rows)]).reshape(3, -1)
    labelled, corners = [], []
    for _, to_mm in slices:
        voxels = apply_affine(to_voxel, (to_mm @ pixels).T)
        corners += [voxels[0], voxels[-1]]
        labelled.append(map_coordinates(label_map, np.rint(voxels).T, order=0))
    ends = np.min(corners, axis=0), np.max(corners, axis=0) - geometry.shape + 1
    # dcm2niix may place slices 2 mm off
    if np.abs(ends * np.array(geometry.spacing_mm)).max() > 3:
        msg = f"the scans do not lie on the slices of their {SERIES_MODALITY} series any more, as after registration to an atlas"
        raise UsageError(msg)
    return np.stack(labelled).reshape(-1, *rows.shape)


def _segmentation(
    images: Sequence[Any],
    on_images: npt.NDArray[np.uint8],
    convention: LabelConvention,
    remark: str,
    about: Mapping[str, Any],
) -> Any:
    """Return a `highdicom.seg.Segmentation` with a segment for each tissue of the convention."""
    from highdicom import AlgorithmIdentificationSequence, color, seg
    from pydicom.sr import Code, codes

    from brats_seg.figures.cases import tissue_colours

    algorithm = AlgorithmIdentificationSequence(
        name="brats_seg",
        version=version("brats_seg"),
        family=codes.DCM.ArtificialIntelligence,
        parameters={"remark": remark} if remark else None,
    )
    values, names = sorted(convention.painted), dict(convention.meanings)
    colours = tissue_colours(convention)
    descriptions = [
        seg.SegmentDescription(
            segment_number=number,
            segment_label=label,
            segmented_property_category=codes.SCT.MorphologicallyAbnormalStructure,
            segmented_property_type=Code(*code),
            algorithm_type="AUTOMATIC",
            algorithm_identification=algorithm,
            anatomic_regions=[codes.SCT.Brain],
            display_color=color.CIELabColor.from_string(colours[value]),
        )
        for number, value in enumerate(values, start=1)
        for label, code in [_CODES["tissues"][names[value]]]
    ]
    masks = np.stack([on_images == value for value in values], axis=-1).astype(np.uint8)
    return seg.Segmentation(
        source_images=images,
        pixel_array=masks,
        segmentation_type="BINARY",
        segment_descriptions=descriptions,
        content_creator_name="brats_seg",
        content_label="TUMOUR",
        content_description="Brain tumour, research use only",
        omit_empty_frames=bool(masks.any()),
        **about,
    )


def _structured_report(
    segmentation: Any, label_map: Volume, convention: LabelConvention, about: Mapping[str, Any]
) -> Any:
    """Return the `highdicom.sr.Comprehensive3DSR` of a label map that was written as a segmentation."""
    from highdicom import sr
    from pydicom.sr import Code, codes

    upright, groups = oriented(label_map), []
    lesions = list_lesions(regions_of(upright.array, convention), upright.geometry.affine)
    for (name, code), listed in zip(_CODES["regions"], lesions, strict=True):
        values = [sum((lesion.ml for lesion in listed.lesions), listed.others_ml)]
        for lesion in listed.lesions[:1]:
            values += [lesion.axial.longest_mm, lesion.axial.perpendicular_mm, lesion.longest_mm]
        measurements = [
            sr.Measurement(Code(*meaning), round(value, 3), Code(unit, "UCUM", unit))
            for value, (meaning, unit) in zip(values, _CODES["measures"], strict=False)
        ]
        uid = _uid(about["sop_instance_uid"], name)
        group = sr.MeasurementsAndQualitativeEvaluations(
            sr.TrackingIdentifier(uid, name), finding_type=Code(*code), measurements=measurements
        )
        groups.append(group)
    device = sr.DeviceObserverIdentifyingAttributes(_uid(), "brats_seg")
    observer = sr.ObserverContext(codes.DCM.Device, device)
    content = sr.MeasurementReport(
        sr.ObservationContext(observer_device_context=observer),
        procedure_reported=Code("24590-2", "LN", "MR Brain"),
        imaging_measurements=groups,
        title=codes.DCM.ImagingMeasurementReport,
    )
    return sr.Comprehensive3DSR([segmentation], content[0], is_complete=True, **about)


def _structure_set(
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

    from brats_seg.figures.sections import REGION_COLOURS

    uids = {"study_instance_uid": image.StudyInstanceUID, "sop_class_uid": RTStructureSetStorage}
    dataset: Any = SOPClass(modality="RTSTRUCT", **uids, **about)
    dataset.copy_patient_and_study_information(image)
    dataset.StructureSetLabel, dataset.ApprovalStatus = "brats_seg", "UNAPPROVED"
    dataset.StructureSetDate = dataset.StructureSetTime = None
    frame, references = image.FrameOfReferenceUID, [item for (item,), _ in slices]
    source = _item(SeriesInstanceUID=image.SeriesInstanceUID, ContourImageSequence=references)
    study = _item(RTReferencedSeriesSequence=[source])
    # a retired class, which readers expect
    study.ReferencedSOPClassUID = "1.2.840.10008.3.1.2.3.1"
    study.ReferencedSOPInstanceUID = image.StudyInstanceUID
    referenced = _item(FrameOfReferenceUID=frame, RTReferencedStudySequence=[study])
    dataset.ReferencedFrameOfReferenceSequence = [referenced]
    dataset.StructureSetROISequence, dataset.ROIContourSequence = [], []
    dataset.RTROIObservationsSequence = []
    parts = zip(_CODES["regions"], REGION_COLOURS, regions, strict=True)
    for number, ((name, _), colour, masks) in enumerate(parts, start=1):
        roi = _item(ROINumber=number, ROIName=name, ReferencedFrameOfReferenceUID=frame)
        roi.ROIGenerationAlgorithm = "AUTOMATIC"
        outlines = _item(ReferencedROINumber=number, ContourSequence=_outlines(masks, slices))
        outlines.ROIDisplayColor = list(bytes.fromhex(colour.removeprefix("#")))
        observed = _item(ObservationNumber=number, ReferencedROINumber=number)
        observed.RTROIInterpretedType = observed.ROIInterpreter = None
        dataset.StructureSetROISequence.append(roi)
        dataset.ROIContourSequence.append(outlines)
        dataset.RTROIObservationsSequence.append(observed)
    return dataset


def _item(**elements: Any) -> Any:
    """Return a `pydicom.Dataset` of elements."""
    from pydicom.dataset import Dataset

    dataset = Dataset()
    dataset.update(elements)
    return dataset


def _outlines(masks: Iterable[Any], slices: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Return the closed outlines of the masks (row, column) of slices."""
    from contourpy import contour_generator

    outlines = []
    for mask, (reference, to_mm) in zip(masks, slices, strict=True):
        lines = contour_generator(z=np.pad(mask, 1).astype(float)).lines(_LEVEL)
        for line in map(np.asarray, lines if mask.any() else ()):
            # the last point is the first one
            points = np.pad(line[:-1] - 1, ((0, 0), (0, 1)), constant_values=1) @ to_mm.T
            outline = _item(ContourImageSequence=reference, ContourGeometricType="CLOSED_PLANAR")
            outline.NumberOfContourPoints = len(points)
            outline.ContourData = np.round(points, 3).ravel().tolist()
            outlines.append(outline)
    return outlines


def _common(image: Any, digest: str, index: int) -> dict[str, Any]:
    """Return what the objects of a series have in common: segmentation (index 0), report, structure set."""
    series_uid = image.SeriesInstanceUID
    return {
        "series_instance_uid": _uid(series_uid, "series", index),
        # what names the patient is another object
        "sop_instance_uid": _uid(series_uid, digest, image.PatientID, image.PatientName, index),
        "series_number": int(image.get("SeriesNumber") or 0) + _SERIES_OFFSET + index,
        "instance_number": 1,
        "manufacturer": "brats_seg",
        "manufacturer_model_name": "brats_seg",
        "software_versions": version("brats_seg"),
        "device_serial_number": "0",
        "series_description": "brats_seg, research use only",
    }


def _uid(*parts: object) -> str:
    """Return a UID that is the same for the same texts."""
    from pydicom.uid import generate_uid

    return str(generate_uid(entropy_srcs=["brats_seg", *map(str, parts)]))
