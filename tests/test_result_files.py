"""Test names, previews and descriptions of results, in both layouts."""

import json
from pathlib import Path

import matplotlib.image
import nibabel as nib
import numpy as np
import pytest

from brats_seg import PredictionSettings, Predictor, predict_folder
from brats_seg.cases.find import find_inputs
from brats_seg.cases.layouts import bids_name
from brats_seg.inference.results import label_tables, with_names_checked, write_preview
from brats_seg.labels import BRATS2017, CONVENTIONS
from brats_seg.voxels.regions import Decoding
from tests.builders import Run, make_case, make_volumes, write_case
from tests.inference_builders import make_model, read_scan, write_run, write_scan


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_other_programs_get_each_value_with_its_tissue_and_colour(convention) -> None:
    texts = label_tables("bids", convention)
    snap, slicer, bids = (
        [line.split() for line in texts[name].splitlines() if not line.startswith(("#", "index"))]
        for name in (
            *(f"labels-{convention.name}.{kind}" for kind in ("txt", "ctbl")),
            next(name for name in texts if name.endswith("_dseg.tsv")),
        )
    )
    if convention == BRATS2017:
        assert snap[0] == ["0", "0", "0", "0", "0", "0", "0", '"Clear', 'Label"']
        assert snap[3] == ["4", "213", "94", "0", "1", "1", "1", '"ET"']
        assert slicer[0] == ["0", "background", "0", "0", "0", "0"]
        assert slicer[1] == ["1", "NCR/NET", "240", "228", "66", "255"]
        assert bids[1] == ["2", "ED", "#56b4e9"]
    assert {int(row[0]) for row in slicer} == convention.values
    assert len({tuple(row[2:]) for row in slicer}) == len(slicer)
    named = [(value, f'"{tissue}"', *colour) for value, tissue, *colour, _ in slicer[1:]]
    assert named == [(value, tissue, *colour) for value, *colour, _, _, _, tissue in snap[1:]]
    rows = [(value, tissue, *bytes.fromhex(colour[1:])) for value, tissue, colour in bids]
    assert rows == [(value, tissue, *map(int, colour)) for value, tissue, *colour, _ in slicer[1:]]
    assert json.loads(texts["dataset_description.json"])["DatasetType"] == "derivative"
    plain = {f"labels-{convention.name}.txt", f"labels-{convention.name}.ctbl"}
    assert {*label_tables("plain", convention)} == plain


def test_names_in_bids_are_safe_and_the_second_case_that_would_have_one_fails() -> None:
    names = map(bids_name, ("sub-01_ses-pre", "BraTS2021_00000", "sub-01_ses-", "../up"))
    assert [*names] == ["sub-01_ses-pre", "sub-BraTS202100000", "sub-sub01ses", "sub-up"]
    cases = [make_case(name) for name in ("a-1", "b", "a_1", "--")]
    assert with_names_checked(cases, "plain", {}) == tuple(cases)
    problems = [" ".join(case.problems) for case in with_names_checked(cases, "bids", {})]
    assert [bool(text) for text in problems] == [False, False, True, True]
    assert "sub-a1 in BIDS, which has letters and digits only: it is that of a-1" in problems[2]


def test_no_case_takes_the_name_in_bids_of_another_one_that_was_predicted_before(tmp_path):
    """The second one arrives alone in a later batch."""
    bids, run = PredictionSettings(preview=False, layout="bids"), write_run(tmp_path / "run")
    inputs = [tmp_path / "first", tmp_path / "second"]
    for seed, (folder, case_id) in enumerate(zip(inputs, ("a-1", "a_1"), strict=True)):
        write_case(folder, case_id, seed=seed)
    batches = [find_inputs([folder]) for folder in inputs]
    done = predict_folder(iter(batches), [run], tmp_path / "out", bids)
    failed = [(failure.case_id, "sub-a1" in failure.message) for failure in done.failures]
    assert (done.predicted, failed) == (("a-1",), [("a_1", True)])
    both = predict_folder(inputs, [run], tmp_path / "out", bids)
    assert (both.predicted, both.n_skipped, len(both.failures)) == ((), 1, 1)
    (label_map,) = (tmp_path / "out").rglob("*.nii.gz")
    predict_folder(inputs[:1], [run], tmp_path / "alone", bids)
    alone = tmp_path / "alone" / label_map.relative_to(tmp_path / "out")
    assert label_map.read_bytes() == alone.read_bytes()


def test_a_bids_derivative_is_written_and_scored(tmp_path: Path, run: Run) -> None:
    names = {"t1": "T1w", "t1ce": "ce-gadolinium_T1w", "t2": "T2w", "flair": "FLAIR", "seg": "dseg"}
    for number in (1, 2):
        case = write_case(tmp_path / f"brats{number}", "BraTS2021_00000", seed=number)
        anat = tmp_path / f"raw/sub-0{number}/ses-a/anat"
        anat.mkdir(parents=True)
        for old, new in names.items():
            (case / f"{case.name}_{old}.nii.gz").rename(anat / f"sub-0{number}_ses-a_{new}.nii.gz")
    command = ("predict", "raw", "-o", "derivatives", "--model", write_run(tmp_path / "run"))
    command += ("--layout", "bids", "--convention", "brats2017", "--probabilities", "--uncertainty")
    code, shown, errors = run(*command)
    again = run(*command)[1]
    assert code == 0, errors
    assert "2 predicted, 0 finished before, 0 failed" in shown
    assert "0 predicted, 2 finished before, 0 failed" in again
    out = tmp_path / "derivatives"
    assert (out / "dataset_description.json").is_file()
    start = out / "sub-01/ses-a/anat/sub-01_ses-a_"
    ends = ("desc-brats2017_dseg", *(f"label-{region}_probseg" for region in ("WT", "TC", "ET")))
    expected = {Path(f"{start}{end}.nii.gz") for end in (*ends, "desc-entropy_probseg")}
    assert {*start.parent.iterdir()} == expected
    assert nib.load(f"{start}desc-brats2017_dseg.nii.gz").get_data_dtype() == "uint8"
    code, shown, errors = run("evaluate", "raw", "derivatives")
    assert code == 0, shown + errors
    assert "over 2 cases" in shown


def preview_of(folder: Path, decoding: Decoding | None = None) -> np.ndarray:
    scan, path = read_scan(folder), folder.with_suffix(".png")
    predictor = Predictor(model=make_model(decoding=decoding or Decoding()))
    write_preview(scan, predictor.predict_scan(scan), path)
    return matplotlib.image.imread(path)


def n_coloured(picture: np.ndarray) -> int:
    return int((np.ptp(picture[..., :3], axis=-1) > 0.2).sum())


def test_a_tumour_is_outlined_on_scans_of_any_grid(tmp_path: Path) -> None:
    folder = write_case(tmp_path, labelled=False)
    with_tumour = preview_of(folder)
    without = preview_of(folder, Decoding(thresholds=(1 - 1e-9,) * 3))
    assert with_tumour.shape == (990, 1350, 4)
    # the legend is coloured in both
    assert n_coloured(with_tumour) > n_coloured(without) + 500
    for index, affine in enumerate((np.diag([1.0, 1.0, 3.0, 1.0]), np.eye(4)[[2, 0, 1, 3]])):
        scan = write_scan(tmp_path / f"scan{index}", make_volumes(), affine)
        assert n_coloured(preview_of(scan)) > n_coloured(without)
