"""DICOM examinations become cases, on the grid of their series, without a word of their headers.

Scans as they leave the scanner are prepared by the programs that are there, and never by downloads.
"""

import gzip
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.ndimage import binary_erosion, shift

pytest.importorskip("pydicom")
pytest.importorskip("dcm2niix")

from brats_seg.cases.case import Case
from brats_seg.cases.nifti import Volume
from brats_seg.dicom import convert
from brats_seg.errors import CaseError, EnvironmentalError
from brats_seg.labels import MODALITIES
from brats_seg.voxels.grids import Affine
from tests.builders import Run, call, check_json, make_volumes, write_case
from tests.check_builders import geometry
from tests.dicom_builders import HEADERS, oriented_affine, write_examination, write_series

PATIENT = ("DOE", "JOHN", "4711", "19700101", "ACC1")
"""Words that identify the patient."""


def only_case(root: Path) -> Case:
    (case,) = convert.cases_of_dicom(root / "dicom", root / "scans")
    return case


def test_nothing_written_or_logged_names_the_patient(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_nothing_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_examination(tmp_path / "dicom")
    first = only_case(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_run", lambda *_: pytest.fail("converted again"))
        assert only_case(tmp_path) == first
    affine, array = oriented_affine("LPS"), make_volumes()[0]
    header = {**HEADERS["t1n"], "SeriesDescription": "AX T1 PRE"}
    paths = write_series(tmp_path / "dicom/new", array, affine, number=9, **header)
    assert only_case(tmp_path).usable
    source = convert.read_source(tmp_path / "scans/dicom")
    assert source is not None
    assert [*source.series["t1n"].files] == paths


def test_an_examination_that_cannot_be_used_does_not_stop_the_others(tmp_path: Path) -> None:
    write_examination(tmp_path / "dicom/good", study="1")
    header = {"study": "2", "Modality": "CT", "SeriesDescription": "Head"}
    write_series(tmp_path / "dicom/ct", make_volumes()[0], oriented_affine("LPS"), **header)
    bad, good = convert.cases_of_dicom(tmp_path / "dicom", tmp_path / "scans")
    assert good.usable
    assert "found no series for t1n, t1c, t2w, t2f; not used: series 1" in bad.problems[0]
    assert "CT, not MR" in bad.problems[0]


def test_scans_that_are_not_ready_are_converted_and_refused_with_the_means(tmp_path: Path) -> None:
    write_examination(tmp_path / "dicom", edge_mm=2)
    for _ in range(2):
        (problem,) = only_case(tmp_path).problems
        assert "the voxels measure 2.00x2.00x2.00 mm, not 1 mm" in problem
        assert "--preprocess" in problem
        assert f"(converted files: {tmp_path}/scans/dicom)" in problem
    assert len(list((tmp_path / "scans/dicom").glob("*.nii.gz"))) == 4


def test_a_converter_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examination(tmp_path / "dicom")
    program = tmp_path / "dcm2niix"
    program.write_text("#!/bin/sh\necho DOE JOHN\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(convert, "_converter", lambda: str(program))
    (problem,) = only_case(tmp_path).problems
    assert "found exit status 3 of dcm2niix and 0 volumes; expected one" in problem
    assert "DOE" not in problem
    killed = "#!/bin/sh\nfor last; do :; done\ntouch $last/../scan.nii\nkill -9 $$\n"
    program.write_text(killed)
    assert "exit status -9 of dcm2niix and 1 volume" in only_case(tmp_path).problems[0]
    monkeypatch.setattr(convert, "_converter", str)
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


HD_BET = f"""#!{sys.executable}
# stands for HD-BET: the brain is what is darker than the scalp
import sys
import nibabel as nib
import numpy as np
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert "--save_bet_mask" in sys.argv
image = nib.load(options["-i"])
mask = (np.abs(image.get_fdata() - 650) < 250).astype(np.uint8)
nib.save(nib.Nifti1Image(mask, image.affine), options["-o"].replace(".nii.gz", "_bet.nii.gz"))
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs on the path, with a stand-in of HD-BET and its weights."""
    folder, home = tmp_path / "programs", tmp_path / "home"
    write_program(folder / "hd-bet", HD_BET)
    (home / convert.WEIGHTS).parent.mkdir(parents=True)
    (home / convert.WEIGHTS).touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(home))
    return folder


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def head(edge_mm: tuple[float, float, float] = (1, 1, 1), moved_mm: float = 0.0) -> Volume:
    """Return a small brain of several structures in a bright scalp, which is moved along X."""
    shape = tuple(int(124 / edge) for edge in edge_mm)
    affine: Affine = np.diag([*edge_mm, 1.0])
    affine[:3, 3] = -62
    x, y, z = np.indices(shape) * np.reshape(edge_mm, (3, 1, 1, 1)) - 62
    x = x - moved_mm
    scalp = (x / 44) ** 2 + (y / 50) ** 2 + (z / 42) ** 2 < 1
    inside = (x / 35) ** 2 + (y / 42) ** 2 + (z / 33) ** 2 < 1
    blob = (x - 15) ** 2 + (y + 10) ** 2 + (z - 5) ** 2 < 100
    other = (x + 12) ** 2 + (y - 20) ** 2 + z**2 < 60
    array = np.where(inside, 600, 1200) * scalp + 200 * blob - 150 * other
    return Volume(array=array.astype(np.int16), geometry=geometry(shape, affine), file="scan.nii")


@pytest.mark.parametrize(
    ("edges_mm", "n_slices", "reasons"),
    [
        ([1, 1, 1, 1], 16, []),
        ([1.03, 1.03, 1.03, 1.03], 16, []),
        ([2, 2, 2, 2], 16, ["the voxels measure 2.00x2.00x2.00 mm, not 1 mm"]),
        ([9, 9, 9, 9], 16, ["the skull does not seem", "the voxels measure 9.00"]),
        ([1, 1, 1, 1], 17, ["are not on one grid"]),
        ([9, 1, 1, 1], 16, ["are not on one grid", "the skull", "the voxels measure 9.00"]),
    ],
)
def test_what_scans_lack_is_said(edges_mm: list[float], n_slices: int, reasons: list[str]) -> None:
    """The volumes are given by their edges in mm and the slices of the last one."""
    scans = []
    for index, edge_mm in enumerate(edges_mm):
        shape = (24, 24, n_slices if index == 3 else 16)
        grid = geometry(shape, np.diag([-edge_mm, -edge_mm, edge_mm, 1.0]))
        scans.append(Volume(array=make_volumes(shape)[index], geometry=grid, file="scan.nii.gz"))
    found = convert.unready_words(scans)
    assert len(found) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, found, strict=True))


def test_what_is_missing_is_named(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HD-BET would download its weights."""
    (Path.home() / convert.WEIGHTS).unlink()
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    install = r"is not installed: pip install 'brats_seg\[preprocess\]'"
    no_weights = f"hd-bet has no weights in {Path.home() / convert.WEIGHTS}"
    with pytest.raises(EnvironmentalError, match=f"greedy {install}; {no_weights}"):
        convert.check_tools()
    (tools / "hd-bet").unlink()
    with pytest.raises(EnvironmentalError, match=f"greedy {install}; hd-bet {install}"):
        convert.check_tools()


def test_a_head_of_large_voxels_is_resampled_and_stripped(tools: Path) -> None:
    images = [head((2, 2, 2))] * 4
    done, steps = convert.prepare("me", images)
    assert {volume.geometry.spacing_mm for volume in done} == {(1.0, 1.0, 1.0)}
    assert steps == ("resampled to 1 mm", "brain of t1c found by HD-BET")
    brain = np.abs(head().array - 650) < 250
    for volume in done:
        assert np.mean((volume.array > 0) != brain) < 0.02


@pytest.mark.parametrize("option", ["--preprocess", "--identifiers", "--series=t1c=5"])
def test_an_option_for_dicom_is_refused_with_nifti_files(tmp_path: Path, option: str) -> None:
    """Also where DICOM examinations are given beside them, before anything is converted."""
    write_examination(tmp_path / "dicom")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/best.pt").touch()
    case = write_case(tmp_path / "scans")
    endings = {"t1n": "t1", "t1c": "t1ce", "t2w": "t2", "t2f": "flair"}
    single = [f"--{name}={case / case.name}_{end}.nii.gz" for name, end in endings.items()]

    for inputs in (["scans"], ["dicom", "scans"], single):
        ended = call(tmp_path, "predict", *inputs, "-o", "out", "--model", "run", option)
        parts = (option[:8], f"found NIfTI files of {case.name}", "brats-seg convert")
        assert (ended.code, [part in ended.err for part in parts]) == (2, [True] * 3)
    assert not (tmp_path / "out").exists()
    # DICOM files alone are taken: the model is missing, or the programs of preprocessing
    ended = call(tmp_path, "predict", "dicom", "-o", "out", "--model", "run", option)
    assert ended.code in (2, 3)
    assert "NIfTI" not in ended.err
    assert call(tmp_path, "convert", "scans", "-o", "out", option).code in (2, 3)


@pytest.mark.slow
def test_a_modality_that_was_moved_is_registered_to_t1c(tools: Path) -> None:
    pytest.importorskip("picsl_greedy")
    moved = head((2, 2, 4), moved_mm=9.0)
    done, steps = convert.prepare("me", [moved, head((2, 2, 2)), head((2, 2, 3)), moved])
    assert "registered to it by greedy" in steps[0]
    first, fixed = done[0].array, done[1].array
    # away from the border, where thick slices mix brain and scalp
    inside = binary_erosion(np.abs(head().array - 650) < 250, iterations=6)
    assert np.corrcoef(first[inside], fixed[inside])[0, 1] > 0.9
    apart = shift(head().array.astype(np.float32), (9, 0, 0), order=1)
    assert np.corrcoef(apart[inside], fixed[inside])[0, 1] < 0.5


def test_a_program_that_fails_is_a_problem_of_its_case(tools: Path) -> None:
    write_program(tools / "hd-bet", "#!/bin/sh\necho out of memory >&2\nexit 9\n")
    with pytest.raises(CaseError, match="hd-bet failed with exit code 9: out of memory"):
        convert.prepare("me", [head((4, 4, 4))] * 4)
