"""Which examinations and series a folder holds, and what is wrong with them."""

import logging
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("pydicom")

from brats_seg.dicom.series import find_studies
from brats_seg.errors import UsageError
from tests.builders import make_volumes
from tests.dicom_builders import HEADERS, oriented_affine, write_examination, write_series

AXIAL = oriented_affine("LPS")


def write_one(folder: Path, axes: str = "LPS", **header: object) -> list[Path]:
    affine = oriented_affine(axes)
    return write_series(folder, make_volumes()[0], affine, **{**HEADERS["t1n"], **header})


def test_series_are_read_in_the_order_of_their_slices(tmp_path: Path) -> None:
    write_examination(tmp_path / "exam", degrees=(10, -7, 20))

    (study,) = find_studies(tmp_path / "exam")

    assert study.case_id == "exam"
    assert [one.number for one in study.series] == [1, 2, 3, 4]
    assert study.series[0].spacing_mm == pytest.approx((1, 1, 1))
    places = [int(path.name.split("_")[-1]) for path in study.series[0].files]
    assert places == list(range(16))
    assert [one.problem for one in study.series] == [""] * 4
    assert [one.has_agent for one in study.series] == [False, True, False, False]


def test_each_examination_is_named_after_its_own_folder(tmp_path: Path) -> None:
    write_examination(tmp_path / "all/first/DICOM", study="1")
    write_examination(tmp_path / "all/second/before", study="2")
    write_examination(tmp_path / "all/second/after", study="3")

    names = [study.case_id for study in find_studies(tmp_path / "all")]

    assert names == ["first", "second_after", "second_before"]


def test_no_value_holds_what_identifies_the_patient(tmp_path: Path) -> None:
    write_examination(tmp_path / "exam")

    (study,) = find_studies(tmp_path / "exam")

    text = str(asdict(study)).replace(str(tmp_path), "")
    assert not any(word in text for word in ("DOE", "JOHN", "4711", "1970", "ACC123", "HOUSE"))


@pytest.mark.parametrize("folder", ["Doe_J", "exam-HOSPITAL-4711", "x19700101", "john"])
def test_a_folder_that_is_called_after_the_patient_does_not_name_the_case(
    tmp_path: Path, folder: str
) -> None:
    write_one(tmp_path / folder)

    (hidden,) = find_studies(tmp_path / folder)
    (shown,) = find_studies(tmp_path / folder, with_identifiers=True)

    assert hidden.case_id.startswith("study-")
    assert shown.case_id == folder


def test_a_folder_of_an_anonymised_patient_names_the_case(tmp_path: Path) -> None:
    write_one(tmp_path / "HOSPITAL-4711", PatientIdentityRemoved="YES")

    assert find_studies(tmp_path / "HOSPITAL-4711")[0].case_id == "HOSPITAL-4711"


def test_two_patients_in_one_folder_are_two_cases(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_examination(tmp_path / "exam", study="1")
    write_examination(tmp_path / "exam", study="2", PatientID="OTHER-9", PatientName="ROE^JANE")

    with caplog.at_level(logging.WARNING):
        studies = find_studies(tmp_path / "exam")

    assert [len(study.series) for study in studies] == [4, 4]
    assert all(study.case_id.startswith("study-") for study in studies)
    assert "exam holds 2 patients: each examination is a case" in caplog.text


def test_one_examination_of_two_patients_cannot_be_used(tmp_path: Path) -> None:
    write_one(tmp_path / "exam/a", number=1)
    write_one(tmp_path / "exam/b", number=2, PatientID="OTHER-9")

    problems = [study.problem for study in find_studies(tmp_path / "exam")]

    assert problems == ["the images of one examination name several patients"] * 2


@pytest.mark.parametrize("place", [1, 8])
def test_a_missing_slice_is_seen(tmp_path: Path, place: int) -> None:
    paths = write_one(tmp_path / "exam", axes="PIR")
    paths[place].unlink()

    (series,) = find_studies(tmp_path / "exam")[0].series

    assert "2.00 mm between two neighbours, and 1.00 mm between most" in series.problem


def test_slices_that_the_header_counts_and_that_are_not_there_are_seen(tmp_path: Path) -> None:
    write_one(tmp_path / "exam", ImagesInAcquisition=20)

    assert find_studies(tmp_path / "exam")[0].series[0].problem == "slices are missing: 16 of 20"


def test_a_localiser_has_slices_of_several_directions(tmp_path: Path) -> None:
    for axes in ("LPS", "PIR", "LIP"):
        write_one(tmp_path / "exam" / axes, axes=axes, InstanceNumber=1)
    # one series: the identifiers of the images must differ
    for number, path in enumerate((tmp_path / "exam").rglob("IM*")):
        change(path, SOPInstanceUID=f"1.2.{number}")

    (series,) = find_studies(tmp_path / "exam")[0].series

    assert series.problem == "its slices have several directions"


def test_several_volumes_in_one_series_are_seen(tmp_path: Path) -> None:
    for time in ("1", "2"):
        for path in write_one(tmp_path / "exam" / time):
            change(path, SOPInstanceUID=f"1.2.{time}.{path.name.split('_')[-1]}")

    (series,) = find_studies(tmp_path / "exam")[0].series

    assert "several images at one place" in series.problem


def test_copies_of_the_files_and_other_files_do_not_matter(tmp_path: Path) -> None:
    write_one(tmp_path / "exam/a")
    write_one(tmp_path / "exam/copy")
    (tmp_path / "exam/notes").write_text("nothing of DICOM")
    (tmp_path / "exam/empty").touch()

    (series,) = find_studies(tmp_path / "exam")[0].series

    assert len(series.files) == 16
    assert not series.problem


def test_a_segmentation_beside_its_scans_does_not_matter(tmp_path: Path) -> None:
    write_one(tmp_path / "exam/a")
    write_one(tmp_path / "exam/b", number=2, Modality="SEG", PatientName="", PatientID="")

    (study,) = find_studies(tmp_path / "exam")

    assert (len(study.series), study.problem) == (1, "")


def test_values_that_are_not_as_the_standard_says_are_not_quoted(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    for path in write_one(tmp_path / "exam"):
        # a date that is none, which pydicom warns of
        path.write_bytes(path.read_bytes().replace(b"19700101", b"DOE 1970"))

    assert find_studies(tmp_path / "exam")[0].series[0].problem == ""
    assert not [str(one.message) for one in recwarn if "DOE" in str(one.message)]


def test_a_folder_of_a_very_long_path_is_named_by_a_hash(tmp_path: Path) -> None:
    write_one(tmp_path / "all" / ("n" * 120) / ("m" * 120), study="1")
    write_one(tmp_path / "all" / ("n" * 120) / "other", study="2")

    names = [study.case_id for study in find_studies(tmp_path / "all")]

    assert names == ["n" * 120 + "_other", *[name for name in names if name.startswith("study-")]]


def test_a_damaged_file_is_a_missing_slice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_one(tmp_path / "exam")[5]
    path.write_bytes(path.read_bytes()[:300])

    (series,) = find_studies(tmp_path / "exam")[0].series

    assert "slices are missing" in series.problem


def test_a_series_of_two_echoes_is_two(tmp_path: Path) -> None:
    write_one(tmp_path / "exam/a", EchoTime=20, RepetitionTime=3000)
    for path in write_one(tmp_path / "exam/b", EchoTime=90, RepetitionTime=3000):
        change(path, SOPInstanceUID=f"1.2.{path.name.split('_')[-1]}")

    found = find_studies(tmp_path / "exam")[0].series

    assert [(one.number, one.echo_ms, len(one.files)) for one in found] == [
        (1, 20.0, 16),
        (1, 90.0, 16),
    ]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("no image")

    with pytest.raises(UsageError, match="holds no DICOM images"):
        find_studies(tmp_path)


def change(path: Path, **header: str) -> None:
    """Change elements of a file."""
    import pydicom

    image = pydicom.dcmread(path)
    for name, value in header.items():
        setattr(image, name, value)
    image.save_as(path)
