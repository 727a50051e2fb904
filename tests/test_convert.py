"""DICOM examinations become cases, on the grid of their series, without a word of their headers."""

import gzip
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pydicom")
pytest.importorskip("dcm2niix")

from brats_seg.cases.case import Case
from brats_seg.cli import use
from brats_seg.dicom import convert, preprocess
from brats_seg.dicom.preprocess import ScanOptions
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.inference import batch
from brats_seg.labels import MODALITIES
from tests.builders import Run, call, check_json, make_volumes, touch, write_case
from tests.dicom_builders import HEADERS, oriented_affine, write_examination, write_series
from tests.inference_builders import NAMES

PATIENT = ("DOE", "JOHN", "HOSPITAL", "19700101", "ACC1")
"""Words that identify the patient."""


def only_case(root: Path, **series: str) -> Case:
    options = ScanOptions(series=series)
    ((_, case),) = convert.convert_studies(root / "dicom", root / "scans", options)
    return case


def test_nothing_written_or_logged_names_the_patient(tmp_path, caplog, capfd):
    write_examination(tmp_path / "dicom", ImageComments="DOE JOHN")
    with caplog.at_level("DEBUG"):
        assert only_case(tmp_path).usable
    shown = caplog.text + "".join(capfd.readouterr())
    assert 'dicom: t1c: series 2 "AX T1 POST" (16 slices, 1x1x1 mm), T1 by its' in shown
    files = [path for path in (tmp_path / "scans").rglob("*") if path.is_file()]
    assert len(files) == 5
    contents = [path.read_bytes() for path in files]
    contents = [gzip.decompress(one) if one[:2] == b"\x1f\x8b" else one for one in contents]
    for text in (shown, *(content.decode("latin-1") for content in contents)):
        assert not any(word in text for word in PATIENT)


def test_watching_takes_an_examination_once_and_says_nothing_else(tmp_path, monkeypatch, caplog):
    def sleep(_: float) -> None:
        rounds.append(0)
        if len(rounds) == 3:
            (tmp_path / "dicom" / "notes.txt").touch()
        if len(rounds) == 6:
            raise KeyboardInterrupt

    rounds, taken = list[int](), list[Case]()
    for name in "ab":
        write_examination(tmp_path / "dicom" / name, study=name)
    monkeypatch.setattr(batch, "time", SimpleNamespace(sleep=sleep))
    watched = batch.watched_scans(tmp_path / "dicom", tmp_path / "out", quiet_s=1)
    with pytest.raises(KeyboardInterrupt):
        taken.extend(chain.from_iterable(watched))
    assert len(taken) == 2
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_nothing_is_converted_again(tmp_path, monkeypatch, caplog):
    write_examination(tmp_path / "dicom")
    first = only_case(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "run", lambda *_: pytest.fail("converted again"))
        assert only_case(tmp_path) == first
    # an interruption leaves no record of what other series have replaced
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "write_json", lambda *_: None)
        only_case(tmp_path, t1n="2", t1c="1")
    assert preprocess.read_source(tmp_path / "scans/dicom") is None
    affine, array = oriented_affine("LPS"), make_volumes()[0]
    header = {**HEADERS["t1n"], "SeriesDescription": "AX T1 PRE"}
    paths = write_series(tmp_path / "dicom/new", array, affine, number=9, **header)
    assert only_case(tmp_path).usable
    assert [*preprocess.read_source(tmp_path / "scans/dicom").series["t1n"].files] == paths


def test_folders_of_one_name_on_two_media_are_two_cases(tmp_path: Path) -> None:
    cases = []
    for medium in "121":
        write_examination(tmp_path / medium / "DICOM", study=medium)
        ((_, case),) = convert.convert_studies(tmp_path / medium, tmp_path, ScanOptions())
        cases.append(case)
    assert (cases[0], cases[0].case_id) == (cases[2], "DICOM")
    assert cases[1].case_id.startswith("study-")


def test_what_an_interrupted_batch_has_converted_is_not_taken_for_scans(tmp_path: Path) -> None:
    write_examination(tmp_path / "dicom/a", study="1")
    write_examination(tmp_path / "dicom/b", study="2", edge_mm=2)
    first, second = (batch.find_scans([tmp_path / "dicom"], tmp_path / "dicom/out") for _ in "ab")
    assert second == first
    assert [case.usable for case in first] == [True, False]


def test_examinations_that_cannot_be_used_stop_no_others_and_name_no_patient(
    tmp_path: Path,
) -> None:
    write_examination(tmp_path / "dicom/good", study="1")
    write_examination(tmp_path / "dicom/DOE_JOHN", study="3", edge_mm=2)
    folder, affine = tmp_path / "dicom/HOSPITAL-4711", oriented_affine("LPS")
    write_series(folder, make_volumes()[0], affine, study="2", Modality="CT")
    done = convert.convert_studies(tmp_path / "dicom", tmp_path / "scans", ScanOptions())
    problems = [problem for _, case in done for problem in case.problems]
    assert [case.usable for _, case in done] == [True, False, False]
    assert "found no series for t1n, t1c, t2w, t2f; not used: series 1" in "".join(problems)
    assert "CT, not MR" in "".join(problems)
    assert not any(word in problem for word in PATIENT for problem in problems)


def test_scans_that_are_not_ready_are_converted_and_refused_with_the_means(tmp_path: Path) -> None:
    write_examination(tmp_path / "dicom", edge_mm=2)
    for _ in range(2):
        (problem,) = only_case(tmp_path).problems
        assert "the voxels measure 2.00x2.00x2.00 mm, not 1 mm" in problem
        assert "or use predict --preprocess" in problem
        assert f"(converted files: {tmp_path}/scans/dicom)" in problem
    assert len(list((tmp_path / "scans/dicom").glob("*.nii.gz"))) == 4


def test_a_converter_that_fails_is_reported(tmp_path, monkeypatch):
    write_examination(tmp_path / "dicom")
    program = tmp_path / "dcm2niix"
    program.write_text("#!/bin/sh\necho DOE JOHN\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("dcm2niix.bin", str(program))
    (problem,) = only_case(tmp_path).problems
    assert "found exit 3 of dcm2niix and 0 volumes; expected one" in problem
    assert "DOE" not in problem
    program.write_text("#!/bin/sh\nfor last; do :; done\ntouch $last/../scan.nii\nkill -9 $$\n")
    assert "exit -9 of dcm2niix and 0 volumes" in only_case(tmp_path).problems[0]
    monkeypatch.setattr(preprocess, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentalError, match=r"pip install 'brats_seg\[dicom\]'"):
        only_case(tmp_path)


def test_the_command_prints_the_series_as_json(tmp_path: Path, run: Run) -> None:
    write_examination(tmp_path / "dicom")
    command = ["convert", tmp_path / "dicom", "-o", tmp_path / "scans", "--json"]
    for named, numbers in ((["t1c=1", "t1n=2"], [2, 1, 3, 4]), ([], [1, 2, 3, 4])):
        code, shown, errors = run(*command, *(f"--series={text}" for text in named))
        assert code == 0, errors
        (printed,) = check_json("convert", shown)
        (case,) = printed["cases"]
        number_of = {one["modality"]: one["number"] for one in case["series"]}
        assert [number_of[modality] for modality in MODALITIES] == numbers
        assert "1 of 1 case can be predicted" in errors


@pytest.mark.parametrize("option", ["--identifiers", "--series=t1c=5"])
def test_an_option_for_dicom_is_refused_with_nifti_files(tmp_path: Path, option: str) -> None:
    write_examination(tmp_path / "dicom")
    touch(tmp_path, "run/best.pt")
    case = write_case(tmp_path / "scans")
    single = [f"--{name}={case / case.name}_{end}.nii.gz" for name, end in NAMES.items()]
    for inputs in (["scans"], ["dicom", "scans"], single):
        ended = call(tmp_path, "predict", *inputs, "-o", "out", "--model", "run", option)
        assert (ended.code, "leave them out for NIfTI files" in ended.err) == (2, True)
    assert not (tmp_path / "out").exists()
    # DICOM files alone are taken: the model is missing
    ended = call(tmp_path, "predict", "dicom", "-o", "out", "--model", "run", option)
    assert (ended.code in (2, 3), "NIfTI" in ended.err) == (True, False)


def test_an_option_for_dicom_is_refused_where_its_wing_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("brats_seg.wings.find_wing", lambda _: None)
    with pytest.raises(UsageError, match=r"need brats_seg.dicom, which is missing"):
        use.predict(tmp_path / "out", data=[tmp_path], preprocess=True)
