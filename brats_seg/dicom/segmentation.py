"""Write a label map as a DICOM segmentation of the series of t1c that it was predicted from.

Report and structure set are written beside it. The voxels of the segmentation are those of the series:
each takes the label at its position, the nearest one where the label map has another grid. Each tissue
is a segment with a coded name. The patient's name and number are written only if the user asked for
them; the UIDs of the examination are, because without them the segmentation refers to no images.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import map_coordinates

from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.dicom import series
from brats_seg.dicom.preprocess import ScanSource
from brats_seg.errors import EnvironmentalError
from brats_seg.files import whole_file
from brats_seg.labels import LabelConvention, LabelMap, regions_of

REFERENCE = "t1c"
"""Modality whose series a segmentation belongs to."""
_TO_DICOM = np.diag([-1.0, -1.0, 1.0])
"""From the axes of NIfTI, right, front and head, to those of DICOM: left, back and head."""
_IMAGE = [
    *("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "Modality"),
    *("FrameOfReferenceUID", "PositionReferenceIndicator", "Rows", "Columns", "PixelSpacing"),
    *("SliceThickness", "SpacingBetweenSlices", "ImagePositionPatient", "InstanceNumber"),
    *("ImageOrientationPatient", "SeriesNumber", "NumberOfFrames", "DimensionIndexSequence"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"),
    "DimensionOrganizationSequence",
]
"""Elements of the images that a segmentation needs and that do not name the patient."""
_PATIENT = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID"),
    *("StudyDate", "StudyTime", "ReferringPhysicianName"),
)
"""Elements that every DICOM object has, which are empty where the user did not ask for them."""
_TISSUES = {
    "NCR/NET": ("Necrotic and non-enhancing tumour core", ("6574001", "SCT", "Necrosis")),
    "NCR": ("Necrotic tumour core", ("6574001", "SCT", "Necrosis")),
    "NETC": ("Non-enhancing tumour core", ("C81175", "NCIt", "Non-Enhancing Lesion")),
    "NET": ("Non-enhancing tumour core", ("C81175", "NCIt", "Non-Enhancing Lesion")),
    "ED": ("Oedema", ("79654002", "SCT", "Edema")),
    "SNFH": ("Oedema and infiltration (FLAIR hyperintensity)", ("79654002", "SCT", "Edema")),
    "ET": ("Enhancing tumour", ("C113842", "NCIt", "Enhancing Lesion")),
}
"""Name and code (value, scheme, meaning) of each tissue that predictions have."""
_ABNORMAL = ("49755003", "SCT", "Morphologically Abnormal Structure")
_BRAIN = ("12738006", "SCT", "Brain")
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

    The remark of its networks is a parameter of the algorithm, and begins in the name of the series.
    Returns nothing, or the reason why none was written: the DICOM files are gone or damaged.
    `EnvironmentalError` is raised if pydicom or highdicom is not installed, or the file cannot be written.
    """
    # matplotlib takes long to import
    from brats_seg.dicom.report import structure_set, structured_report

    files = source.series[REFERENCE].files
    try:
        # pydicom warns with values that may identify the patient
        with warnings.catch_warnings(action="ignore"):
            images = [_image(file, with_identifiers=source.with_identifiers) for file in files]
            slices = list(_slices(images))
            on_images = _label_map_on(images[0], slices, label_map, geometry)
            # an equal label map gets the same UIDs, so that an archive stores it once
            digest = hashlib.sha256(label_map.tobytes() + convention.name.encode()).hexdigest()
            about = [_about(images[0], digest, index, remark) for index in range(len(paths))]
            volume = Volume(array=label_map, geometry=geometry, file=paths[0].name)
            segmentation = _segmentation(images, on_images, convention, remark, about[0])
            written = (
                segmentation,
                structured_report(segmentation, volume, convention, about[1]),
                structure_set(images[0], slices, regions_of(on_images, convention), about[2]),
            )
    except series.HEADER_ERRORS as error:
        # its message may quote what identifies the patient
        why = f"are gone or not as the standard says ({type(error).__name__})"
        return f"no DICOM segmentation was written: files of its series, such as {files[0]}, {why}"
    for path, dataset in zip(paths, written, strict=True):
        with whole_file(path) as temporary:
            dataset.save_as(temporary)
    return ""


def _image(path: Path, *, with_identifiers: bool) -> Any:
    """Return the header of an image, without what may identify the patient unless it is wanted."""
    header = series.read_header(path, None if with_identifiers else _IMAGE)
    for name in _PATIENT:
        if name not in header:
            setattr(header, name, None)
    if not header.get("FrameOfReferenceUID"):
        header.FrameOfReferenceUID = _uid(header.SeriesInstanceUID, "frame of reference")
    return header


def _slices(images: Sequence[Any]) -> Iterator[tuple[Any, npt.NDArray[np.float64]]]:
    """Yield the reference to each slice, and the matrix from its pixels (column, row, 1) to mm."""
    from brats_seg.dicom.report import item

    for image in images:
        frames = series.frames_of(image)
        for number, frame in enumerate(frames, start=1):
            directions, position = series.plane_of(frame)
            row_mm, column_mm = map(float, frame["PixelSpacing"])
            to_mm = [directions[0] * column_mm, directions[1] * row_mm, position]
            reference = item(ReferencedSOPClassUID=image.SOPClassUID)
            reference.ReferencedSOPInstanceUID = image.SOPInstanceUID
            if len(frames) > 1:
                reference.ReferencedFrameNumber = number
            yield reference, np.stack(to_mm, axis=1)


def _label_map_on(
    image: Any, slices: Sequence[tuple[Any, Any]], label_map: LabelMap, geometry: Geometry
) -> npt.NDArray[np.uint8]:
    """Return the labels (slice, row, column) at the positions of the pixels of DICOM images.

    Pixels take the nearest label; outside of the label map it is 0.
    """
    to_voxel = np.linalg.inv(geometry.affine)
    rows, columns = np.indices((image.Rows, image.Columns))
    pixels = np.stack([columns, rows, np.ones_like(rows)]).reshape(3, -1)
    labelled = []
    for _, to_mm in slices:
        transform = to_voxel[:3, :3] @ (_TO_DICOM @ to_mm)
        transform[:, 2] += to_voxel[:3, 3]
        labels = map_coordinates(label_map, np.rint(transform @ pixels), order=0)
        labelled.append(labels.reshape(rows.shape))
    return np.stack(labelled)


def _segmentation(
    images: Sequence[Any],
    on_images: npt.NDArray[np.uint8],
    convention: LabelConvention,
    remark: str,
    about: Mapping[str, Any],
) -> Any:
    """Return a `highdicom.seg.Segmentation` with a segment for each tissue of the convention."""
    try:
        from highdicom import AlgorithmIdentificationSequence
        from highdicom.color import CIELabColor
        from highdicom.seg import Segmentation, SegmentDescription
    except ImportError:
        msg = f"a DICOM segmentation needs highdicom: {series.INSTALL_DICOM}"
        raise EnvironmentalError(msg) from None
    from pydicom.sr.codedict import codes
    from pydicom.sr.coding import Code

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
        SegmentDescription(
            segment_number=number,
            segment_label=label,
            segmented_property_category=Code(*_ABNORMAL),
            segmented_property_type=Code(*code),
            algorithm_type="AUTOMATIC",
            algorithm_identification=algorithm,
            anatomic_regions=[Code(*_BRAIN)],
            display_color=CIELabColor.from_rgb(*bytes.fromhex(colours[value].removeprefix("#"))),
        )
        for number, value in enumerate(values, start=1)
        for label, code in [_TISSUES[names[value]]]
    ]
    masks = np.stack([on_images == value for value in values], axis=-1).astype(np.uint8)
    return Segmentation(
        source_images=images,
        pixel_array=masks,
        segmentation_type="BINARY",
        segment_descriptions=descriptions,
        content_creator_name="brats_seg",
        content_label="TUMOUR",
        content_description="Brain tumour, research use only",
        **about,
    )


def _about(image: Any, digest: str, index: int, remark: str) -> dict[str, Any]:
    """Return what the objects of a series have in common: segmentation (index 0), report, structure set."""
    series_uid = image.SeriesInstanceUID
    return {
        "series_instance_uid": _uid(series_uid, "series", index),
        "sop_instance_uid": _uid(series_uid, digest, index),
        "series_number": int(image.get("SeriesNumber") or 0) + _SERIES_OFFSET + index,
        "instance_number": 1,
        "manufacturer": "brats_seg",
        "manufacturer_model_name": "brats_seg",
        "software_versions": version("brats_seg"),
        "device_serial_number": "0",
        # an element of 64 characters
        "series_description": shorten(
            f"brats_seg (research use only) {remark}", 64, placeholder="..."
        ),
    }


def _uid(*parts: object) -> str:
    """Return a UID that is the same for the same texts."""
    from pydicom.uid import generate_uid

    return str(generate_uid(entropy_srcs=["brats_seg", *map(str, parts)]))
