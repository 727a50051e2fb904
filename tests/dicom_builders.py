"""Made-up DICOM examinations for tests: series of any orientation, of a small brain."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import EnhancedMRImageStorage, ExplicitVRLittleEndian, MRImageStorage, generate_uid

from brats_seg.labels import MODALITIES
from tests.builders import make_volumes

Affine = npt.NDArray[np.float64]

PATIENT = {"PatientName": "DOE^JOHN", "PatientID": "HOSPITAL-4711", "PatientBirthDate": "19700101"}
TO_DICOM = np.diag([-1.0, -1.0, 1.0])
"""From the axes of NIfTI to those of DICOM."""
ORIENTATIONS = {
    "axial": ("LPS", (0, 0, 0)),
    "axial, from above": ("LPI", (0, 0, 0)),
    "sagittal": ("PIL", (0, 0, 0)),
    "sagittal, from the left": ("PIR", (0, 0, 0)),
    "coronal": ("LIP", (0, 0, 0)),
    "coronal, from behind": ("LIA", (0, 0, 0)),
    "oblique": ("PIR", (10, -7, 20)),
}
"""Directions of rows, columns and slices, and the angles by which they are turned."""
_T1 = {"EchoTime": 12, "RepetitionTime": 600, "ScanningSequence": "SE"}
_FLAIR = {"EchoTime": 110, "RepetitionTime": 9000, "InversionTime": 2500}
HEADERS: dict[str, dict[str, Any]] = {
    "t1n": {"SeriesDescription": "AX T1", **_T1},
    "t1c": {"SeriesDescription": "AX T1 POST", "ContrastBolusAgent": "GADOVIST", **_T1},
    "t2w": {"SeriesDescription": "AX T2", **_T1, "EchoTime": 95, "RepetitionTime": 4500},
    "t2f": {"SeriesDescription": "AX FLAIR", "ScanningSequence": ["SE", "IR"], **_FLAIR},
}
"""What tells the four modalities apart."""


def oriented_affine(axes: str, degrees: tuple[float, float, float] = (0, 0, 0)) -> Affine:
    """Return an affine of 1 mm whose axes run towards `axes`, such as LPS, turned by angles.

    The first axis runs along the rows of an image, the second down its columns, the third from
    slice to slice.
    """
    directions = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}
    affine = np.eye(4)
    affine[:3, :3] = 0
    for column, letter in enumerate(axes):
        row, sign = directions[letter]
        affine[row, column] = sign
    for axis, angle in enumerate(np.radians(degrees)):
        one, other = [index for index in range(3) if index != axis]
        turn = np.eye(3)
        turn[one, one] = turn[other, other] = np.cos(angle)
        turn[one, other], turn[other, one] = -np.sin(angle), np.sin(angle)
        affine[:3, :3] = turn @ affine[:3, :3]
    affine[:3, 3] = (12.5, -31.25, 7.0)
    return affine


def write_series(
    folder: Path,
    array: npt.NDArray[Any],
    affine: Affine,
    *,
    study: str = "1",
    number: int = 1,
    **header: Any,
) -> list[Path]:
    """Write an array (column, row, slice) as a series, a file for each slice; more as given."""
    folder.mkdir(parents=True, exist_ok=True)
    to_dicom = TO_DICOM @ affine[:3, :3]
    along, down = (to_dicom[:, axis] / np.linalg.norm(to_dicom[:, axis]) for axis in (0, 1))
    edges = np.linalg.norm(affine[:3, :3], axis=0)
    paths = []
    for index in range(array.shape[2]):
        image = _image(np.ascontiguousarray(array[:, :, index].T), study, number, index)
        position = TO_DICOM @ (affine @ np.array([0, 0, index, 1]))[:3]
        image.ImagePositionPatient = [f"{value:.9g}" for value in position]
        image.ImageOrientationPatient = [f"{value:.9g}" for value in (*along, *down)]
        image.PixelSpacing = [float(edges[1]), float(edges[0])]
        image.SliceThickness = image.SpacingBetweenSlices = float(edges[2])
        for name, value in {**PATIENT, **header}.items():
            setattr(image, name, value)
        # names that do not tell the order of the slices
        path = folder / f"IM{(index * 7) % 101:04d}_{study}_{number}_{index}"
        image.save_as(path, enforce_file_format=True)
        paths.append(path)
    return paths


def write_examination(
    folder: Path,
    axes: str = "LPS",
    *,
    degrees: tuple[float, float, float] = (0, 0, 0),
    study: str = "1",
    edge_mm: float = 1,
    **header: Any,
) -> npt.NDArray[np.int16]:
    """Write the four modalities of a small brain as one examination, and return their arrays."""
    volumes = make_volumes()
    affine = oriented_affine(axes, degrees) @ np.diag([edge_mm, edge_mm, edge_mm, 1])
    for number, (modality, array) in enumerate(zip(MODALITIES, volumes, strict=True), start=1):
        values = {**HEADERS[modality], **header}
        write_series(folder / f"SE{number}", array, affine, study=study, number=number, **values)
    return volumes


def write_enhanced(
    path: Path, array: npt.NDArray[Any], affine: Affine, *, number: int, **header: Any
) -> Path:
    """Write an array (column, row, slice) as enhanced MR: one file, in another order of slices."""
    image = _image(array[:, :, 0].T, "enhanced", number, 0)
    image.file_meta.MediaStorageSOPClassUID = image.SOPClassUID = EnhancedMRImageStorage
    to_dicom = TO_DICOM @ affine[:3, :3]
    edges = np.linalg.norm(affine[:3, :3], axis=0)
    order = np.random.default_rng(0).permutation(array.shape[2])
    image.PixelData = np.stack([array[:, :, index].T for index in order]).astype("<i2").tobytes()
    image.NumberOfFrames = len(order)
    image.ImageType = ["ORIGINAL", "PRIMARY", "M", "NONE"]
    echo, times, modifier, measures, plane = (Dataset() for _ in range(5))
    echo.EffectiveEchoTime = header.pop("EchoTime")
    times.RepetitionTime = header.pop("RepetitionTime")
    modifier.InversionTimes = header.pop("InversionTime", None)
    header.pop("ScanningSequence")
    measures.PixelSpacing = [float(edges[1]), float(edges[0])]
    measures.SliceThickness = measures.SpacingBetweenSlices = float(edges[2])
    plane.ImageOrientationPatient = [
        f"{value:.9g}" for axis in (0, 1) for value in to_dicom[:, axis] / edges[axis]
    ]
    shared = Dataset()
    shared.MREchoSequence, shared.MRTimingAndRelatedParametersSequence = [echo], [times]
    shared.MRModifierSequence, shared.PixelMeasuresSequence = [modifier], [measures]
    shared.PlaneOrientationSequence = [plane]
    image.SharedFunctionalGroupsSequence = [shared]
    image.PerFrameFunctionalGroupsSequence = [_frame(affine, int(index)) for index in order]
    if header.pop("ContrastBolusAgent", ""):
        image.ContrastBolusAgentSequence = [Dataset()]
    for name, value in {**PATIENT, **header}.items():
        setattr(image, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save_as(path, enforce_file_format=True)
    return path


def _frame(affine: Affine, index: int) -> Dataset:
    position, content, frame = Dataset(), Dataset(), Dataset()
    world = TO_DICOM @ (affine @ np.array([0, 0, index, 1]))[:3]
    position.ImagePositionPatient = [f"{value:.9g}" for value in world]
    content.StackID, content.InStackPositionNumber = "1", index + 1
    content.DimensionIndexValues = [1, index + 1]
    frame.PlanePositionSequence, frame.FrameContentSequence = [position], [content]
    return frame


def _image(pixels: npt.NDArray[Any], study: str, number: int, index: int) -> Dataset:
    image = Dataset()
    image.file_meta = FileMetaDataset()
    image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    image.file_meta.MediaStorageSOPClassUID = image.SOPClassUID = MRImageStorage
    uid = generate_uid(entropy_srcs=[study, str(number), str(index)])
    image.file_meta.MediaStorageSOPInstanceUID = image.SOPInstanceUID = uid
    image.StudyInstanceUID = generate_uid(entropy_srcs=[study])
    image.SeriesInstanceUID = generate_uid(entropy_srcs=[study, str(number)])
    image.FrameOfReferenceUID = generate_uid(entropy_srcs=[study, "frame"])
    image.Modality, image.Manufacturer = "MR", "MADE UP"
    image.SeriesNumber, image.InstanceNumber = number, index + 1
    image.StudyDate, image.StudyTime, image.AcquisitionTime = "20200101", "101010", "101010"
    image.StudyID, image.AccessionNumber, image.PatientSex = "S1", "ACC123", "O"
    image.ReferringPhysicianName = "HOUSE^GREGORY"
    image.ImageType = ["ORIGINAL", "PRIMARY", "M"]
    image.Rows, image.Columns = pixels.shape
    image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
    image.BitsAllocated = image.BitsStored = 16
    image.HighBit, image.PixelRepresentation = 15, 1
    image.PixelData = pixels.astype("<i2").tobytes()
    return image
