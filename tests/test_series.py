"""Which examinations and series a folder holds, and what is wrong with them."""

from dataclasses import asdict
from itertools import count
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("pydicom")

import pydicom

from brats_seg.dicom.convert import convert_studies
from brats_seg.dicom.preprocess import ScanOptions
from brats_seg.dicom.series import Series, find_studies
from brats_seg.errors import UsageError
from tests.builders import make_volumes, touch
from tests.dicom_builders import HEADERS, oriented_affine, write_examination, write_series


def write_one(folder: Path, axes: str = "LPS", **header: object) -> list[Path]:
    affine = oriented_affine(axes)
    return write_series(folder, make_volumes()[0], affine, **{**HEADERS["t1n"], **header})


def only_series(folder: Path) -> Series:
    ((series,),) = [study.series for study in find_studies(folder)]
    return series


def test_a_series_that_is_not_converted_whole_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("dcm2niix")
    write_examination(tmp_path / "exam")
    (path,) = (tmp_path / "exam/SE2").glob("*_15")
    content, whole = path.read_bytes(), "; expected one volume of 16 slices"
    for changed, problem in (
        (content, ""),
        (content[:-100], f"found a file that is cut off inside its pixels, {path.name}{whole}"),
        (content[: content.index(b"\xe0\x7f")], f"found exit 0 of dcm2niix and 1 volume{whole}"),
        (content.replace(b"101010", b"101011"), f"found exit 0 of dcm2niix and 2 volumes{whole}"),
        (content.replace(b"600 ", b"601 "), ""),
    ):
        path.write_bytes(changed)
        ((_, case),) = convert_studies(tmp_path / "exam", tmp_path / "scans", ScanOptions())
        assert (case.usable, problem in "".join(case.problems)) == (not problem, True)
    path.write_bytes(content[:900])
    (study,) = find_studies(tmp_path / "exam")
    problems = [series.problem[:18] for series in study.series if series.problem]
    assert problems == ["a file is cut off,"]


def test_series_are_read_in_the_order_of_their_slices(tmp_path: Path) -> None:
    write_examination(tmp_path / "exam", degrees=(10, -7, 20))
    (study,) = find_studies(tmp_path / "exam")
    assert study.case_id == "exam"
    assert [series.number for series in study.series] == [1, 2, 3, 4]
    assert study.series[0].spacing_mm == (pytest.approx(1), pytest.approx(1), 1)
    assert [int(path.name.split("_")[-1]) for path in study.series[0].files] == [*range(16)]
    assert [series.problem for series in study.series] == [""] * 4
    assert [series.has_agent for series in study.series] == [False, True, False, False]
    text = str(asdict(study)).replace(str(tmp_path), "")
    words = ("DOE", "JOHN", "HOSPITAL", "19700101", "ACC123", "HOUSE")
    assert not any(word in text for word in words)


def test_each_examination_is_named_after_its_own_folder(tmp_path: Path) -> None:
    long = "n" * 120
    for study, folder in enumerate(("first/DICOM", "second/before", "second/after", long)):
        write_one(tmp_path / "all" / folder, study=str(study))
    write_one(tmp_path / "all" / long / ("m" * 120), study="9")
    write_one(tmp_path / "all" / long / "other", study="10")
    names = [study.case_id for study in find_studies(tmp_path / "all")]
    # neither a folder that holds others nor a very long path is a name
    assert names[:4] == ["first", f"{long}_other", "second_after", "second_before"]
    assert [name.startswith("study-") for name in names[4:]] == [True, True]


NAMES = {"Li_Na": "LI^NA", "山田太郎": "Yamada^Tarou=山田^太郎", "Mu\u0308ller": "MÜLLER^JÖRG"}


@pytest.mark.parametrize("folder", ["Doe_J", "exam-HOSPITAL-4711", "x19700101", "john", *NAMES])
def test_a_folder_named_after_the_patient_does_not_name_the_case(tmp_path, folder):
    header = {"PatientName": NAMES.get(folder, "DOE^JOHN"), "SpecificCharacterSet": "ISO_IR 192"}
    write_one(tmp_path / "real" / folder, **header)
    write_one(tmp_path / "anonymised" / folder, PatientIdentityRemoved="YES", **header)
    (hidden,) = find_studies(tmp_path / "real" / folder)
    (shown,) = find_studies(tmp_path / "real" / folder, with_identifiers=True)
    (anonymised,) = find_studies(tmp_path / "anonymised" / folder)
    assert hidden.case_id.startswith("study-")
    assert shown.case_id == anonymised.case_id == folder


def test_two_patients_are_two_cases(tmp_path: Path) -> None:
    """Of two patients in one examination, neither can be used."""
    write_one(tmp_path / "exam", study="1")
    write_one(tmp_path / "exam", study="1", number=2, PatientName="Doe^John^^^")
    write_one(tmp_path / "exam", study="2", PatientID="OTHER-9", PatientName="ROE^JANE")
    studies = find_studies(tmp_path / "exam")
    write_one(tmp_path / "exam", study="1", number=3, PatientID="OTHER-9")
    problems = [study.problem for study in find_studies(tmp_path / "exam")]
    assert sorted((len(study.series), study.problem) for study in studies) == [(1, ""), (2, "")]
    assert all(study.case_id.startswith("study-") for study in studies)
    named = "the images of one examination name several patients"
    assert sorted(problems) == ["", named, named]


def as_one_series(folder: Path, *axes: str) -> None:
    """Write images under one UID of the series; those of the images differ."""
    numbers = count()
    for index, one in enumerate(axes):
        for path in write_one(folder / str(index), axes=one):
            change(path, SOPInstanceUID=f"1.2.{next(numbers)}")


GAP = "2.00 mm between two neighbours, and 1.00 mm between most"


def without_slice(folder: Path, index: int) -> None:
    write_one(folder, axes="PIR")[index].unlink()


def with_slices_off(folder: Path, step_mm: tuple[float, ...], first_mm: float = 7) -> None:
    affine = oriented_affine("LPS")
    affine[:3, 2] = step_mm
    path, *_ = write_series(folder, make_volumes()[0], affine, **HEADERS["t1n"])
    change(path, ImagePositionPatient=[-12.5, 31.25, first_mm])


def with_rows_of_three_bytes(folder: Path) -> None:
    path, rows = write_one(folder)[5], b"\x28\x00\x10\x00US"
    path.write_bytes(path.read_bytes().replace(rows + b"\2\0", rows + b"\3\0\0"))


def with_copies_and_other_files(folder: Path) -> None:
    for name in ("a", "copy"):
        write_one(folder / name)
    for number, kind in enumerate(("SEG", "SR", "RTSTRUCT"), start=2):
        write_one(folder / "b", number=number, Modality=kind, PatientName="", PatientID="")
    (touch(folder, "empty") / "notes").write_text("nothing of DICOM")


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda folder: without_slice(folder, 1), GAP),
        (lambda folder: without_slice(folder, 8), GAP),
        (lambda folder: with_slices_off(folder, (0, 0.14, 1)), "up to 2.1 mm off an even stack"),
        (lambda folder: with_slices_off(folder, (0, 0, 1.6), 6.85), "up to 2.1 mm off an even"),
        (with_rows_of_three_bytes, "slices are missing"),
        (lambda folder: write_one(folder, ImagesInAcquisition=20), "are missing: 16 of 20"),
        (lambda folder: as_one_series(folder, "LPS", "PIR", "LIP"), "several directions"),
        (lambda folder: as_one_series(folder, "LPS", "LPS"), "several images at one place"),
        (with_copies_and_other_files, ""),
        (lambda folder: write_one(folder, PixelSpacing=None), "the size of its pixels"),
        (lambda folder: write_one(folder, PixelSpacing=[0, 0]), "the size of its pixels"),
        (lambda folder: write_one(folder, PhotometricInterpretation="MONOCHROME1"), "MONOCHROME1"),
        (lambda folder: write_one(folder, RescaleSlope=-1), "its rescale slope is -1"),
        (lambda folder: write_one(folder, RescaleSlope=2), ""),
    ],
)
def test_the_problem_of_a_series_is_reported(tmp_path, write, problem):
    write(tmp_path / "exam")
    series = only_series(tmp_path / "exam")
    assert problem in series.problem
    assert problem or (len(series.files), series.problem) == (16, "")


def test_values_outside_the_standard_are_missing_and_not_quoted(tmp_path, recwarn):
    for path in write_one(tmp_path / "exam"):
        # a date that is none, which pydicom warns of, and a time that is no number
        content = path.read_bytes().replace(b"DS\x04\x0012.0", b"DS\x04\x0012,5")
        path.write_bytes(content.replace(b"19700101", b"DOE 1970"))
    series = only_series(tmp_path / "exam")
    assert (series.echo_ms, series.repetition_ms, series.problem) == (None, 600, "")
    assert not [str(one.message) for one in recwarn if "DOE" in str(one.message)]


def test_files_that_are_cut_off_are_left_out_with_a_warning(tmp_path, caplog):
    _, short, *_, path = write_one(tmp_path / "exam")
    short.write_bytes(short.read_bytes()[:300])
    (touch(tmp_path, "exam/empty.dcm") / "exam/DICOMDIR").write_bytes(short.read_bytes())
    image = pydicom.dcmread(path)
    image.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    image.save_as(path)
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "exam/scan_t1.nii.gz").symlink_to("nowhere")
    assert "slices are missing" in only_series(tmp_path / "exam").problem
    assert caplog.messages[-1].endswith(f"left out: {path.name}, {short.name}, empty.dcm")


def test_a_header_may_say_that_there_was_no_agent(tmp_path: Path) -> None:
    for agent in ("SANS", "ohne KM", "NO CONTRAST", "W/O", "None.", "N.A.", "Gadovist"):
        folder = tmp_path / quote(agent, safe="")
        write_one(folder, ContrastBolusAgent=agent)
        assert only_series(folder).has_agent == (agent == "Gadovist"), agent


def test_a_series_of_two_echoes_is_two(tmp_path: Path) -> None:
    both = {"RepetitionTime": 3000, "ImagesInAcquisition": 32}
    write_one(tmp_path / "exam/a", EchoTime=20, **both)
    for path in write_one(tmp_path / "exam/b", EchoTime=90, **both):
        change(path, SOPInstanceUID=f"1.2.{path.name.split('_')[-1]}")
    (study,) = find_studies(tmp_path / "exam")
    assert [(one.echo_ms, len(one.files)) for one in study.series] == [(20.0, 16), (90.0, 16)]
    assert [one.problem for one in study.series] == ["", ""]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("no image")
    with pytest.raises(UsageError, match="holds no DICOM images; expected the folder"):
        find_studies(tmp_path)


def change(path: Path, **header: object) -> None:
    image = pydicom.dcmread(path)
    for name, value in header.items():
        setattr(image, name, value)
    image.save_as(path)
