"""A label map becomes a DICOM segmentation of its series, voxel for voxel, that others can read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.path import Path as MatplotlibPath

pytest.importorskip("pydicom")
pytest.importorskip("highdicom")
pytest.importorskip("dcm2niix")

import highdicom
import pydicom

from brats_seg.cases.case import Case
from brats_seg.cases.nifti import Geometry, Volume, oriented, read_volume
from brats_seg.dicom import preprocess
from brats_seg.dicom.convert import convert_studies
from brats_seg.dicom.modalities import sort_series
from brats_seg.dicom.preprocess import ScanOptions, ScanSource, read_source
from brats_seg.dicom.segmentation import write_segmentation
from brats_seg.evaluation.lesions import list_lesions
from brats_seg.figures.cases import tissue_colours
from brats_seg.labels import BRATS2017, CONVENTIONS, LabelConvention, LabelMap, regions_of
from tests import dicom_builders
from tests.builders import Run, check_json, make_label_map, make_volumes
from tests.check_builders import geometry
from tests.dicom_builders import HEADERS, ORIENTATIONS, Affine, oriented_affine
from tests.inference_builders import write_run

NECROSIS, OEDEMA, ENHANCING = ("6574001", "SCT"), ("79654002", "SCT"), ("C113842", "NCIt")


def converted(root: Path, name: str = "axial", **header: Any) -> tuple[Case, Geometry, ScanSource]:
    axes, degrees = ORIENTATIONS[name]
    header = {"StudyDescription": "Jo D", **header}
    dicom_builders.write_examination(root / "dicom", axes, degrees=degrees, **header)
    ((_, case),) = convert_studies(root / "dicom", root / "scans", ScanOptions())
    source = read_source(root / "scans/dicom")
    assert source is not None
    return case, grid_of(case), source


@pytest.fixture(scope="module")
def axial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Geometry, ScanSource]:
    return converted(tmp_path_factory.mktemp("axial"))[1:]


def grid_of(case: Case) -> Geometry:
    return read_volume(case.path_of(case.files["t1c"]), case_id=case.case_id).geometry


def moved(labels: npt.NDArray[Any], affine: Affine, grid: Geometry) -> npt.NDArray[Any]:
    """Return voxels of one grid on another that has the same voxels in another order."""
    indices = np.c_[np.indices(labels.shape).reshape(3, -1).T, np.ones(labels.size)]
    voxels = np.rint(indices @ (np.linalg.inv(grid.affine) @ affine).T)[:, :3].astype(int)
    result = np.zeros(grid.shape, dtype=labels.dtype)
    result[tuple(voxels.T)] = labels.ravel()
    return result


def check_voxels(
    path: Path, affine: Affine, labels: LabelMap, convention: LabelConvention = BRATS2017
) -> None:
    """Compare with the segment numbers (column, row, slice) as the bits of the file alone say them."""
    image = pydicom.dcmread(path)
    bits = np.unpackbits(np.frombuffer(image.PixelData, np.uint8), bitorder="little")
    n_frames = int(image.NumberOfFrames)
    frames = bits[: n_frames * image.Rows * image.Columns].reshape(n_frames, image.Rows, -1)
    numbers = np.zeros(labels.shape, dtype=np.uint8)
    inverse = np.linalg.inv(affine)
    plane = image.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
    along, down = np.reshape([float(v) for v in plane.ImageOrientationPatient], (2, 3))
    for frame, groups in zip(frames, image.PerFrameFunctionalGroupsSequence, strict=True):
        position = [float(v) for v in groups.PlanePositionSequence[0].ImagePositionPatient]
        number = groups.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        for row, column in np.argwhere(frame):
            world = dicom_builders.TO_DICOM @ (np.array(position) + column * along + row * down)
            voxel = tuple(np.rint(inverse @ [*world, 1])[:3].astype(int))
            assert numbers[voxel] == 0
            numbers[voxel] = number
    np.testing.assert_array_equal(numbers, numbered(labels, convention))


def numbered(labels: LabelMap, convention: LabelConvention) -> LabelMap:
    return np.searchsorted([0, *sorted(convention.painted)], labels).astype(np.uint8)


def three(path: Path) -> list[Path]:
    return [path.with_name(f"{path.stem}{end}.dcm") for end in ("", "-report", "-structures")]


def masks_of(path: Path, images: Sequence[Path], shape: tuple[int, int]) -> list[Any]:
    """Return the masks (slice, row, column) of pixels in an odd number of outlines."""
    regions, series = [], [pydicom.dcmread(image, stop_before_pixels=True) for image in images]
    for roi in pydicom.dcmread(path).ROIContourSequence:
        masks = {image.SOPInstanceUID: np.zeros(shape, bool) for image in series}
        headers = {image.SOPInstanceUID: image for image in series}
        for contour in roi.ContourSequence:
            header = headers[contour.ContourImageSequence[0].ReferencedSOPInstanceUID]
            points = np.reshape(contour.ContourData, (-1, 3)).astype(float)
            away = points - np.array(header.ImagePositionPatient, float)
            along, down = np.reshape(header.ImageOrientationPatient, (2, 3)).astype(float)
            assert np.abs(away @ np.cross(along, down)).max() < 0.01
            row_mm, column_mm = map(float, header.PixelSpacing)
            outline = MatplotlibPath(np.c_[away @ along / column_mm, away @ down / row_mm])
            rows, columns = np.indices(shape)
            inside = outline.contains_points(np.c_[columns.ravel(), rows.ravel()])
            masks[header.SOPInstanceUID] ^= inside.reshape(shape)
        regions.append(np.stack(list(masks.values())))
    return regions


QUICK = ("axial", "coronal, from behind", "oblique")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in ORIENTATIONS],
)
def test_every_voxel_returns_to_its_place_and_other_programs_read_it(tmp_path, name):
    case, grid, source = converted(tmp_path, name)
    affine, labels = oriented_affine(*ORIENTATIONS[name]), make_label_map()
    paths = three(tmp_path / "a.dcm")
    for file, array in zip(case.images, make_volumes(), strict=True):
        scan = read_volume(case.path_of(file), case_id="me")
        np.testing.assert_array_equal(scan.array, moved(array, affine, scan.geometry))
    on_scan = moved(labels, affine, grid)
    assert write_segmentation(paths, on_scan, grid, BRATS2017, source) == ""
    check_voxels(paths[0], affine, labels)
    drawn = regions_of(labels, BRATS2017)
    series = sorted(source.series["t1c"].files, key=lambda path: int(path.name.split("_")[-1]))
    masks = masks_of(paths[2], series, (labels.shape[1], labels.shape[0]))
    for mask, region in zip(masks, drawn, strict=True):
        np.testing.assert_array_equal(mask.transpose(2, 1, 0), region)
    # necrosis is a hole of the enhancing tumour
    assert (drawn[1] & ~drawn[2]).any()
    report = highdicom.sr.srread(paths[1])
    groups = report.content.get_image_measurement_groups()
    measured = [{one.name.value: one.value for one in group.get_measurements()} for group in groups]
    upright = oriented(Volume(array=on_scan, geometry=grid, file=""))
    listed = list_lesions(regions_of(upright.array, BRATS2017), upright.geometry.affine)
    for values, region, lesions in zip(measured, drawn, listed, strict=True):
        largest = lesions.lesions[0]
        assert values["118565006"] == pytest.approx(region.sum() / 1000, abs=1e-3)
        assert values["103339001"] == pytest.approx(largest.axial.longest_mm, abs=1e-3)
        assert values["103340004"] == pytest.approx(largest.axial.perpendicular_mm, abs=1e-3)
        assert values["L0JK"] == pytest.approx(largest.longest_mm, abs=1e-3)
    segmentation, *others = [pydicom.dcmread(path) for path in paths]
    evidence = report.CurrentRequestedProcedureEvidenceSequence[0].ReferencedSeriesSequence[0]
    assert evidence.ReferencedSOPSequence[0].ReferencedSOPInstanceUID == segmentation.SOPInstanceUID
    assert len({one.SeriesInstanceUID for one in (segmentation, *others)}) == 3
    assert {one.StudyInstanceUID for one in others} == {segmentation.StudyInstanceUID}
    colours = [
        highdicom.color.CIELabColor.from_dicom_value(one.RecommendedDisplayCIELabValue).to_rgb()
        for one in segmentation.SegmentSequence
    ]
    expected = tissue_colours(BRATS2017)
    for value, colour in zip((1, 2, 4), colours, strict=True):
        np.testing.assert_allclose(colour, list(bytes.fromhex(expected[value][1:])), atol=2)


def test_an_empty_label_map_has_a_report_without_diameters(tmp_path, axial, caplog):
    grid, source = axial
    paths = three(tmp_path / "a.dcm")
    assert write_segmentation(paths, np.zeros(grid.shape, np.uint8), grid, BRATS2017, source) == ""
    groups = highdicom.sr.srread(paths[1]).content.get_image_measurement_groups()
    assert [[one.value for one in group.get_measurements()] for group in groups] == [[0.0]] * 3
    assert not any(roi.ContourSequence for roi in pydicom.dcmread(paths[2]).ROIContourSequence)
    assert not caplog.text


REMARK = "Taught on made-up brains, not on patients: Dice .8, .6, .6. Train your own."


def test_slices_of_no_thickness_have_that_of_their_distance(tmp_path: Path) -> None:
    _, grid, source = converted(tmp_path, SliceThickness=None)
    write_segmentation(three(tmp_path / "a.dcm"), make_label_map(), grid, BRATS2017, source)
    (shared,) = pydicom.dcmread(tmp_path / "a.dcm").SharedFunctionalGroupsSequence
    assert shared.PixelMeasuresSequence[0].SliceThickness == 1


def test_enhanced_mr_with_all_slices_in_one_file_is_read_and_segmented(tmp_path: Path) -> None:
    affine, labels = oriented_affine(*ORIENTATIONS["oblique"]), make_label_map()
    volumes = make_volumes()
    for number, (modality, array) in enumerate(zip(HEADERS, volumes, strict=True), start=1):
        path = tmp_path / f"dicom/{number}"
        dicom_builders.write_enhanced(path, array, affine, number=number, **HEADERS[modality])
    (done,) = convert_studies(tmp_path / "dicom", tmp_path / "scans", ScanOptions())
    # by their times alone as well: they stand elsewhere than in other files
    series = [replace(one, description="") for one in done.study.series]
    assert [one.modality for one in sort_series(series)] == [*HEADERS]
    assert [(one.n_slices, len(one.files)) for one in series] == [(16, 1)] * 4
    scan = read_volume(done.case.path_of(done.case.files["t1c"]), case_id="me")
    np.testing.assert_array_equal(scan.array, moved(volumes[1], affine, scan.geometry))
    source = read_source(tmp_path / "scans/dicom")
    assert source
    on_scan = moved(labels, affine, scan.geometry)
    write_segmentation(three(tmp_path / "a.dcm"), on_scan, scan.geometry, BRATS2017, source)
    check_voxels(tmp_path / "a.dcm", affine, labels)


def test_a_label_map_on_another_grid_is_sampled_and_one_elsewhere_refused(tmp_path, axial):
    coarse, source = axial
    affine = coarse.affine @ np.diag([0.5, 0.5, 0.5, 1])
    affine[:3, 3] = (coarse.affine @ [-0.25, -0.25, -0.25, 1])[:3]
    labels = moved(make_label_map(), oriented_affine("LPS"), coarse)
    repeated = labels.repeat(2, 0).repeat(2, 1).repeat(2, 2)
    fine = geometry(repeated.shape, affine)
    write_segmentation(three(tmp_path / "fine.dcm"), repeated, fine, BRATS2017, source)
    check_voxels(tmp_path / "fine.dcm", oriented_affine("LPS"), make_label_map())
    affine[2, 3] += 4
    remark = write_segmentation([], repeated, geometry(repeated.shape, affine), BRATS2017, source)
    assert "the scans do not lie on the slices of their t1c series any more" in remark


@pytest.mark.parametrize(("with_identifiers", "name"), [(False, ""), (True, "DOE^JOHN")])
def test_the_patient_is_named_only_if_asked_for(tmp_path, axial, with_identifiers, name):
    grid, source = axial
    source = source.model_copy(update={"with_identifiers": with_identifiers})
    empty = np.zeros(grid.shape, np.uint8)
    write_segmentation(three(tmp_path / "a.dcm"), empty, grid, BRATS2017, source)
    image = pydicom.dcmread(tmp_path / "a.dcm")
    assert str(image.PatientName) == name
    assert str(image.PatientID) == ("HOSPITAL-4711" if with_identifiers else "")
    one = pydicom.dcmread(source.series["t1c"].files[0], stop_before_pixels=True)
    assert image.StudyInstanceUID == one.StudyInstanceUID
    assert image.FrameOfReferenceUID == one.FrameOfReferenceUID
    assert (image.get("PatientBirthDate") == "19700101") == with_identifiers
    content = b"".join(path.read_bytes() for path in three(tmp_path / "a.dcm"))
    # with letters: random UIDs have digits alone
    words = (b"DOE^", b"HOSPITAL", b"HOUSE", b"ACC123", b"Jo D")
    assert any(word in content for word in words) == with_identifiers


def test_an_archive_takes_what_names_the_patient_for_other_objects(tmp_path, axial):
    grid, source = axial
    empty, uids = np.zeros(grid.shape, np.uint8), []
    for with_identifiers in (False, True, True):
        chosen = source.model_copy(update={"with_identifiers": with_identifiers})
        write_segmentation(three(tmp_path / "a.dcm"), empty, grid, BRATS2017, chosen)
        uids.append([pydicom.dcmread(path).SOPInstanceUID for path in three(tmp_path / "a.dcm")])
    assert uids[1] == uids[2]
    assert not {*uids[0]} & {*uids[1]}


@pytest.mark.parametrize("with_identifiers", [False, True])
def test_images_of_any_characters_have_a_segmentation(tmp_path, with_identifiers):
    name = "Yamada^Tarou=\u5c71\u7530^\u592a\u90ce"
    header = {"PatientName": name, "SpecificCharacterSet": ["", "ISO 2022 IR 87"]}
    _, grid, source = converted(tmp_path, **header)
    source = source.model_copy(update={"with_identifiers": with_identifiers})
    paths, empty = three(tmp_path / "a.dcm"), np.zeros(grid.shape, np.uint8)
    assert write_segmentation(paths, empty, grid, BRATS2017, source) == ""
    names = [str(pydicom.dcmread(path).PatientName) for path in paths]
    assert names == [name if with_identifiers else ""] * 3


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda one: one.name)
def test_every_tissue_that_a_prediction_has_is_coded(tmp_path, axial, convention):
    grid, source = axial
    labels = moved(make_label_map(convention=convention), oriented_affine("LPS"), grid)
    path = tmp_path / "a.dcm"
    write_segmentation(three(path), labels, grid, convention, source)
    segments = pydicom.dcmread(path).SegmentSequence
    assert len(segments) == 3
    codes = [one.SegmentedPropertyTypeCodeSequence[0] for one in segments]
    assert {OEDEMA, ENHANCING} <= {(one.CodeValue, one.CodingSchemeDesignator) for one in codes}
    (enhancing,) = [one.SegmentNumber for one in segments if "Enhancing" in one.SegmentLabel]
    drawn = make_label_map(convention=convention)
    check_voxels(path, oriented_affine("LPS"), drawn, convention)
    expected = make_label_map() == 4
    np.testing.assert_array_equal(numbered(drawn, convention) == enhancing, expected)


def test_predict_takes_a_folder_of_dicom_files(tmp_path: Path, run: Run) -> None:
    dicom_builders.write_examination(tmp_path / "exam")
    model, output = write_run(tmp_path / "run", remark=REMARK), tmp_path / "out"
    command = ["predict", tmp_path / "exam", "-o", output, "--model", model, "--json"]
    command += ["--set", "preview=false", "--set", "thresholds=0.1,0.1,0.1"]
    first, again, named = run(*command), run(*command), run(*command, "--identifiers")
    assert [one.code for one in (first, again, named)] == [0, 0, 0], first.err
    (record,) = check_json("predict", first.out)
    assert record["outputs"] == [*(path.name for path in three(Path("exam.dcm"))), "exam.nii.gz"]
    assert "1 predicted, 0 finished before" in first.err
    assert "0 predicted, 1 finished before" in again.err
    # the scans are the same, and the segmentation is not
    assert "1 predicted, 0 finished before" in named.err
    segmentation = pydicom.dcmread(output / "exam.dcm")
    assert str(segmentation.PatientName) == "DOE^JOHN"
    (algorithm,) = segmentation.SegmentSequence[0].SegmentationAlgorithmIdentificationSequence
    assert REMARK in algorithm.AlgorithmParameters
    assert segmentation.SeriesDescription == "brats_seg, research use only"
    label_map = nib.load(output / "exam.nii.gz")
    labels = np.asarray(label_map.dataobj).astype(np.uint8)
    assert labels.any()
    check_voxels(output / "exam.dcm", label_map.affine, labels)
    assert "DOE" not in (output / "manifest.jsonl").read_text()
    assert "replace" not in named.err
    dicom_builders.write_examination(tmp_path / "exam", "RPS")
    assert "these results replace those of other scans" in run(*command).err


def test_without_the_packages_there_is_a_reason(tmp_path, axial, monkeypatch):
    grid, source = axial
    monkeypatch.setattr(preprocess, "find_spec", lambda name: None)
    paths, empty = three(tmp_path / "a.dcm"), np.zeros(grid.shape, np.uint8)
    remark = write_segmentation(paths, empty, grid, BRATS2017, source)
    assert "highdicom not installed: pip install 'brats_seg[dicom]'" in remark


def test_without_a_segmentation_there_is_the_label_map(tmp_path: Path, run: Run) -> None:
    case, _, _ = converted(tmp_path)
    next((tmp_path / "dicom/SE2").iterdir()).write_text("no DICOM")
    command = ["predict", tmp_path / "scans", "-o", "out", "--model", write_run(tmp_path / "run")]
    done = run(*command, "--set", "preview=false")
    assert done.code == 0, done.err
    said = "no DICOM segmentation was written: files of its series, such as IM0000_1_2_0,"
    assert said in done.out
    assert [*tmp_path.glob(f"out/{case.case_id}.*")] == [tmp_path / f"out/{case.case_id}.nii.gz"]
