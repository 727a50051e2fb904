"""DICOM examinations become cases, on the grid of their series, without a word of their headers."""

import json
import stat
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydicom")
pytest.importorskip("dcm2niix")

from brats_seg.cases.case import Case, load_case
from brats_seg.cases.find import find_inputs
from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.dicom import convert
from brats_seg.dicom.convert import (
    DicomOptions,
    cases_of_dicom,
    convert_studies,
    read_source,
)
from brats_seg.dicom.preprocess import unready_words
from brats_seg.errors import EnvironmentalError
from brats_seg.labels import MODALITIES
from brats_seg.voxels.grids import turn_of, turned
from tests.builders import Run, check_json, make_volumes
from tests.dicom_builders import HEADERS, oriented_affine, write_examination, write_series

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


def only_case(root: Path, options: DicomOptions | None = None) -> Case:
    (case,) = cases_of_dicom(root / "dicom", root / "scans", options or DicomOptions())
    return case


@pytest.mark.parametrize("name", ["sagittal", "coronal", "oblique"])
def test_voxels_keep_their_value_and_their_place(tmp_path: Path, name: str) -> None:
    axes, degrees = ORIENTATIONS[name]
    volumes = write_examination(tmp_path / "dicom", axes, degrees=degrees)

    case = only_case(tmp_path)

    affine = oriented_affine(axes, degrees)
    turn = turn_of(affine)
    loaded = load_case(case, with_label=False)
    for volume, array in zip(loaded.volumes, volumes, strict=True):
        np.testing.assert_array_equal(volume.array, turned(array, turn))
    # the voxel that came first in the series is where the series says
    first = np.argwhere(turned(np.arange(array.size).reshape(array.shape), turn) == 0)[0]
    there = loaded.volumes[0].geometry.affine @ [*first, 1]
    np.testing.assert_allclose(there[:3], affine[:3, 3], atol=1e-4)


def test_nothing_written_names_the_patient(tmp_path: Path) -> None:
    write_examination(tmp_path / "dicom", ImageComments="DOE JOHN")

    case = only_case(tmp_path)

    assert case.usable
    for path in (tmp_path / "scans").rglob("*.*"):
        content = path.read_bytes()
        if path.suffix == ".gz":
            import gzip

            content = gzip.decompress(content)
        assert not any(word in content for word in (b"DOE", b"JOHN", b"4711", b"19700101", b"ACC1"))


def test_nothing_logged_names_the_patient(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    write_examination(tmp_path / "dicom")

    with caplog.at_level("DEBUG"):
        only_case(tmp_path)

    shown = caplog.text + "".join(capfd.readouterr())
    assert 'dicom: t1c: series 2 "AX T1 POST" (16 slices, 1x1x1 mm), T1 by its' in shown
    assert not any(word in shown for word in ("DOE", "JOHN", "4711", "19700101", "ACC1"))


def test_what_is_converted_is_not_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examination(tmp_path / "dicom")
    first = only_case(tmp_path)
    monkeypatch.setattr(convert, "_run_converter", lambda *_: pytest.fail("converted again"))

    assert only_case(tmp_path) == first

    monkeypatch.undo()
    series = write_series(
        tmp_path / "dicom/new",
        make_volumes()[0],
        oriented_affine("LPS"),
        number=9,
        **HEADERS["t1n"],
    )
    assert only_case(tmp_path).usable
    source = read_source(tmp_path / "scans/dicom")
    assert source is not None
    assert [*source.series["t1n"].files] == series


def test_a_folder_of_dicom_files_is_found_by_the_ordinary_search(tmp_path: Path) -> None:
    write_examination(tmp_path / "dicom")
    asked: list[Path] = []

    find_inputs(
        [tmp_path / "dicom"],
        of_dicom=lambda path: asked.append(path) or cases_of_dicom(path, tmp_path / "scans"),
    )
    (again,) = find_inputs([tmp_path / "scans"], of_dicom=lambda path: pytest.fail("no DICOM"))

    assert asked == [tmp_path / "dicom"]
    assert again.case_id == "dicom"


def test_an_examination_that_cannot_be_used_does_not_stop_the_others(tmp_path: Path) -> None:
    write_examination(tmp_path / "dicom/good", study="1")
    write_series(
        tmp_path / "dicom/ct",
        make_volumes()[0],
        oriented_affine("LPS"),
        study="2",
        Modality="CT",
        SeriesDescription="Head",
    )

    bad, good = cases_of_dicom(tmp_path / "dicom", tmp_path / "scans")

    assert good.usable
    assert "found no series for t1n, t1c, t2w, t2f; not used: series 1" in bad.problems[0]
    assert "CT, not MR" in bad.problems[0]


def volumes_of(*edges_mm: float, shape: tuple[int, int, int] = (24, 24, 16)) -> list[Volume]:
    """Return four modalities with voxels of these edges; the last has another shape."""
    found = []
    shapes = [(24, 24, 16)] * 3 + [shape]
    for place, (edge_mm, own) in enumerate(zip(edges_mm, shapes, strict=True)):
        affine = np.diag([-edge_mm, -edge_mm, edge_mm, 1.0])
        grid = Geometry(shape=own, affine=affine, qform=affine, qform_code=1, sform_code=1)
        found.append(Volume(array=make_volumes(own)[place], geometry=grid, file="scan.nii.gz"))
    return found


@pytest.mark.parametrize(
    ("volumes", "words"),
    [
        (volumes_of(1, 1, 1, 1), []),
        (volumes_of(1.03, 1.03, 1.03, 1.03), []),
        (volumes_of(2, 2, 2, 2), ["the voxels measure 2.00x2.00x2.00 mm, not 1 mm"]),
        (volumes_of(9, 9, 9, 9), ["the skull does not seem", "the voxels measure 9.00"]),
        (volumes_of(1, 1, 1, 1, shape=(24, 24, 17)), ["are not on one grid"]),
        (
            volumes_of(9, 1, 1, 1),
            ["are not on one grid", "the skull does not seem", "the voxels measure 9.00"],
        ),
    ],
)
def test_what_scans_lack_is_said(volumes: list[Volume], words: list[str]) -> None:
    found = unready_words(volumes)

    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_scans_that_are_not_ready_are_converted_and_refused_with_the_means(tmp_path: Path) -> None:
    affine = oriented_affine("LPS") @ np.diag([2, 2, 2, 1])
    for number, (modality, array) in enumerate(zip(MODALITIES, make_volumes(), strict=True)):
        folder = tmp_path / f"dicom/{number}"
        write_series(folder, array, affine, number=number, **HEADERS[modality])

    for _ in range(2):
        (problem,) = only_case(tmp_path).problems
        assert "the voxels measure 2.00x2.00x2.00 mm, not 1 mm" in problem
        assert "--preprocess" in problem
        assert f"the converted files in {tmp_path}/scans/dicom" in problem
    assert len(list((tmp_path / "scans/dicom").glob("*.nii.gz"))) == 4


def test_without_the_converter_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examination(tmp_path / "dicom")
    monkeypatch.setattr(convert, "_converter", str)

    with pytest.raises(EnvironmentalError, match=r"pip install 'brats_seg\[dicom\]'"):
        only_case(tmp_path)


def test_a_converter_that_fails_is_a_problem_of_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examination(tmp_path / "dicom")
    program = tmp_path / "dcm2niix"
    program.write_text("#!/bin/sh\necho DOE JOHN\nexit 3\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(convert, "_converter", lambda: str(program))

    (problem,) = only_case(tmp_path).problems

    assert "found 0 volumes made of it by dcm2niix (exit code 3); expected one volume" in problem
    assert "DOE" not in problem


def test_the_command_prints_its_series_as_json(tmp_path: Path, run: Run) -> None:
    write_examination(tmp_path / "dicom")

    code, shown, errors = run(
        "convert", str(tmp_path / "dicom"), "-o", str(tmp_path / "scans"), "--json"
    )

    assert code == 0, errors
    check_json("convert", shown)
    (case,) = json.loads(shown)["cases"]
    assert [one["modality"] for one in case["series"]] == list(MODALITIES)
    assert "1 of 1 case can be predicted" in errors


def test_a_series_that_a_person_names_is_taken(tmp_path: Path) -> None:
    write_examination(tmp_path / "dicom")

    (done,) = convert_studies(
        tmp_path / "dicom", tmp_path / "scans", DicomOptions(series={"t1c": "1", "t1n": "2"})
    )

    numbers = {one.modality: one.number for one in done.study.series}
    assert (numbers["t1c"], numbers["t1n"]) == (1, 2)
