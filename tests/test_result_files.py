"""Test the names of result files, and the descriptions of label values for other programs."""

import json
import shutil
import subprocess
from pathlib import Path

import nibabel as nib
import pytest

from brats_seg.errors import UsageError
from brats_seg.inference.batch import predict_folder
from brats_seg.inference.results import (
    bids_labels,
    bids_name,
    check_names,
    itk_snap_labels,
    key_of,
    slicer_colours,
)
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import BRATS2017, CONVENTIONS
from tests.builders import Run, write_case
from tests.inference_builders import write_run


def test_itk_snap_gets_each_value_with_its_colour() -> None:
    lines = [line for line in itk_snap_labels(BRATS2017).splitlines() if not line.startswith("#")]

    assert [line.split() for line in lines] == [
        ["0", "0", "0", "0", "0", "0", "0", '"Clear', 'Label"'],
        ["1", "240", "228", "66", "1", "1", "1", '"NCR/NET"'],
        ["2", "86", "180", "233", "1", "1", "1", '"ED"'],
        ["4", "213", "94", "0", "1", "1", "1", '"ET"'],
    ]


def test_3d_slicer_gets_each_value_with_its_colour() -> None:
    lines = slicer_colours(BRATS2017).splitlines()

    assert lines[1:] == [
        "0 background 0 0 0 0",
        "1 NCR/NET 240 228 66 255",
        "2 ED 86 180 233 255",
        "4 ET 213 94 0 255",
    ]


def test_bids_gets_each_value_with_its_colour() -> None:
    assert bids_labels(BRATS2017).splitlines() == [
        "index\tname\tcolor",
        "1\tNCR/NET\t#f0e442",
        "2\tED\t#56b4e9",
        "4\tET\t#d55e00",
    ]


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_all_values_of_a_convention_are_described_in_different_colours(convention) -> None:
    rows = [line.split() for line in slicer_colours(convention).splitlines()[1:]]

    assert {int(row[0]) for row in rows} == convention.values
    assert len({tuple(row[2:]) for row in rows}) == len(rows)
    # a value, a name without spaces, and four numbers
    assert {len(row) for row in rows} == {6}


@pytest.mark.parametrize(
    ("case_id", "name"),
    [
        ("sub-01", "sub-01"),
        ("sub-01_ses-pre", "sub-01_ses-pre"),
        ("BraTS2021_00000", "sub-BraTS202100000"),
        ("sub-01_ses-", "sub-sub01ses"),
        ("../up", "sub-up"),
    ],
)
def test_the_name_of_a_case_in_bids(case_id: str, name: str) -> None:
    assert bids_name(case_id) == name


def test_cases_that_would_have_one_name_in_bids_are_refused() -> None:
    check_names("plain", ["a-1", "a_1"])

    with pytest.raises(UsageError, match="the cases a-1, a_1 would be called sub-a1 in BIDS"):
        check_names("bids", ["a-1", "b", "a_1"])


def test_results_in_another_layout_are_others() -> None:
    plain, bids = (
        PredictionSettings.model_validate({"layout": name}) for name in ("plain", "bids")
    )

    assert key_of(["x"], "model", plain) != key_of(["x"], "model", bids)


def test_label_maps_lie_beside_their_colours(brats_root: Path, tmp_path: Path, run: Run) -> None:
    model = write_run(tmp_path / "run")

    code, _, errors = run(
        "predict", brats_root, "-o", "out", "--model", model, "--set", "preview=false"
    )

    assert code == 0, errors
    for name in ("labels-brats2017.txt", "labels-brats2017.ctbl"):
        assert (tmp_path / "out" / name).is_file()
    assert not (tmp_path / "out" / "dataset_description.json").exists()


def test_a_bids_derivative_is_written_and_scored(tmp_path: Path, run: Run) -> None:
    """Scans of BIDS, from their folder to scores; the second time nothing is left to do."""
    for number in (1, 2):
        write_case(tmp_path / f"brats{number}", "BraTS2021_00000", seed=number)
        case = tmp_path / f"brats{number}" / "BraTS2021_00000"
        anat = tmp_path / f"raw/sub-0{number}/ses-a/anat"
        anat.mkdir(parents=True)
        for old, new in (
            ("t1", "T1w"),
            ("t1ce", "ce-gadolinium_T1w"),
            ("t2", "T2w"),
            ("flair", "FLAIR"),
            ("seg", "dseg"),
        ):
            (case / f"{case.name}_{old}.nii.gz").rename(anat / f"sub-0{number}_ses-a_{new}.nii.gz")
    command = ("predict", "raw", "-o", "derivatives", "--model", write_run(tmp_path / "run"))
    command += ("--layout", "bids", "--labels", "brats2017", "--probabilities", "--uncertainty")

    code, shown, errors = run(*command)
    again = run(*command)[1]

    assert code == 0, errors
    assert "2 predicted, 0 finished before, 0 failed" in shown
    assert "0 predicted, 2 finished before, 0 failed" in again
    out = tmp_path / "derivatives"
    description = json.loads((out / "dataset_description.json").read_text())
    assert description["DatasetType"] == "derivative"
    assert (out / "desc-brats2017_dseg.tsv").is_file()
    start = out / "sub-01/ses-a/anat/sub-01_ses-a_"
    assert {path.name.removeprefix("sub-01_ses-a_") for path in start.parent.iterdir()} == {
        "desc-brats2017_dseg.nii.gz",
        "label-WT_probseg.nii.gz",
        "label-TC_probseg.nii.gz",
        "label-ET_probseg.nii.gz",
        "desc-entropy_probseg.nii.gz",
    }
    assert nib.load(f"{start}desc-brats2017_dseg.nii.gz").get_data_dtype() == "uint8"
    code, shown, errors = run("evaluate", "raw", "derivatives")
    assert code == 0, shown + errors
    assert "over 2 cases" in shown


@pytest.mark.skipif(
    not shutil.which("bids-validator-deno"), reason="needs pip install bids-validator-deno"
)
def test_the_validator_of_bids_finds_no_error(brats_root: Path, tmp_path: Path) -> None:
    changed = {"layout": "bids", "probabilities": True, "uncertainty": True}
    settings = PredictionSettings.model_validate(changed)
    predict_folder([brats_root], [write_run(tmp_path / "run")], tmp_path / "out", settings)

    done = subprocess.run(
        ["bids-validator-deno", tmp_path / "out"], capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 0, done.stdout


def test_two_layouts_in_one_folder_are_described_both(brats_root: Path, tmp_path: Path) -> None:
    model = write_run(tmp_path / "run")
    for layout in ("plain", "bids"):
        settings = PredictionSettings.model_validate({"layout": layout, "preview": False})
        outcome = predict_folder([brats_root], [model], tmp_path / "out", settings)

        assert outcome.n_predicted == 6

    assert (tmp_path / "out" / "labels-brats2017.ctbl").is_file()
    assert (tmp_path / "out" / "BraTS2021_00000.nii.gz").is_file()
    assert len(list((tmp_path / "out").rglob("*_dseg.nii.gz"))) == 6
