"""Test batches: failures stay with their case, finished cases are kept, files are written whole."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pandas as pd
import pytest

from brats_seg.cases.find import find_inputs
from brats_seg.cases.index import index_cases
from brats_seg.errors import EnvironmentalError, LayoutError, UsageError
from brats_seg.inference.batch import (
    BatchOutcome,
    CaseOutcome,
    CaseWork,
    check_apart,
    finish_batch,
    local_outcomes,
    predict_folder,
)
from brats_seg.inference.model import Model
from brats_seg.inference.predict import Predictor
from brats_seg.inference.results import OutputFolder
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import MODALITIES
from tests.bad_cases import BAD_CASES, break_in_ten_ways
from tests.builders import SHAPE, make_volumes, write_case, write_nifti
from tests.inference_builders import make_model, write_run

SETTINGS = PredictionSettings(preview=False)
PREDICTOR = Predictor(model=make_model(settings=SETTINGS))


def run(
    inputs: Sequence[Path],
    output: Path,
    *,
    model: Model | None = None,
    settings: PredictionSettings = SETTINGS,
) -> tuple[BatchOutcome, list[CaseOutcome]]:
    folder = OutputFolder(output)
    cases = find_inputs(inputs)
    endings: list[CaseOutcome] = []
    with folder.opened():
        work = CaseWork(
            predictor=Predictor(model=replace(model or make_model(), settings=settings)),
            output=folder,
            earlier=folder.records(),
        )
        outcome = finish_batch(
            local_outcomes(cases, work), folder, len(cases), on_case=endings.append
        )
    return outcome, endings


def case_ids(endings: list[CaseOutcome]) -> list[str]:
    return [ending.record.case_id for ending in endings]


def test_one_bad_case_is_one_row_and_the_others_are_predicted(tmp_path: Path) -> None:
    """Write four good cases and ten bad ones, each with another defect."""
    for number in range(4):
        write_case(tmp_path / "scans", f"BraTS2021_{number:05d}", seed=number)
    break_in_ten_ways(tmp_path / "scans")

    outcome, endings = run([tmp_path / "scans"], tmp_path / "out")

    failures = pd.read_csv(tmp_path / "out" / "failures.csv")
    assert (outcome.n_predicted, outcome.n_skipped, len(outcome.failures)) == (4, 0, 10)
    assert case_ids(endings) == sorted(case_ids(endings))
    assert failures["case_id"].tolist() == list(BAD_CASES)
    assert set(failures["error"]) == {"CaseError"}
    for message, case_id, words in zip(
        failures["message"], failures["case_id"], BAD_CASES.values(), strict=True
    ):
        assert message.startswith(f"case {case_id}, file ")
        assert f"found {words}" in message
        assert "; expected " in message
        # what to do comes after what was expected
        assert message.rstrip().endswith(".")
    label_maps = sorted(path.name for path in (tmp_path / "out").glob("*.nii.gz"))
    assert label_maps == [f"BraTS2021_{n:05d}.nii.gz" for n in range(4)]


def test_the_tables_hold_volumes_and_failures(tmp_path: Path) -> None:
    write_case(tmp_path / "scans", seed=1)

    _, (ending,) = run([tmp_path / "scans"], tmp_path / "out")

    label_map = np.asarray(nib.load(tmp_path / "out" / "BraTS2021_00000.nii.gz").dataobj)
    (row,) = pd.read_csv(tmp_path / "out" / "volumes.csv").to_dict("records")
    assert row["case_id"] == "BraTS2021_00000"
    assert row["convention"] == "brats2017"
    assert row["wt_ml"] == pytest.approx(np.count_nonzero(label_map) / 1000)
    assert row["tc_ml"] == pytest.approx(np.isin(label_map, [1, 4]).sum() / 1000)
    assert row["et_ml"] == pytest.approx((label_map == 4).sum() / 1000)
    assert row["ed_ml"] == pytest.approx((label_map == 2).sum() / 1000)
    assert row["ncr_ml"] == pytest.approx((label_map == 1).sum() / 1000)
    assert row["et_components"] >= 1
    (line,) = (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert len(record["inputs"]) == 4
    assert record["model"] == "model"
    assert record["outputs"] == ["BraTS2021_00000.nii.gz"]
    assert record["seconds"] > 0
    assert record["peak_memory_mb"] > 0
    assert record["settings"]["window"] == "auto"
    assert ending.record.model_dump(mode="json") == record


def test_a_finished_case_is_not_done_again(brats_root: Path, tmp_path: Path) -> None:
    first, _ = run([brats_root], tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.nii.gz")}

    second, endings = run([brats_root], tmp_path / "out")

    assert (first.n_predicted, second.n_predicted, second.n_skipped) == (6, 0, 6)
    assert not any(ending.is_new for ending in endings)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert len((tmp_path / "out" / "manifest.jsonl").read_text().splitlines()) == 6
    assert len(pd.read_csv(tmp_path / "out" / "volumes.csv")) == 6


def test_a_case_is_done_again_when_anything_it_depends_on_has_changed(
    brats_root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run([brats_root], out)

    def n_predicted(**changes: object) -> int:
        return run([brats_root], out, **changes)[0].n_predicted  # type: ignore[arg-type]

    path = brats_root / "BraTS2021_00002" / "BraTS2021_00002_t1.nii.gz"
    write_nifti(path, make_volumes(seed=9)[0])
    assert n_predicted() == 1
    (out / "BraTS2021_00001.nii.gz").unlink()
    assert n_predicted() == 1
    assert n_predicted(settings=PredictionSettings(preview=False, labels="brats2023")) == 6
    assert n_predicted(model=replace(make_model(), fingerprint="other")) == 6
    assert n_predicted(settings=PredictionSettings(preview=False, device="cpu")) == 6
    assert n_predicted() == 0


def test_a_scan_that_was_mended_is_predicted_and_leaves_the_list(
    brats_root: Path, tmp_path: Path
) -> None:
    path = brats_root / "BraTS2021_00002" / "BraTS2021_00002_t1.nii.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:99])
    assert len(run([brats_root], tmp_path / "out")[0].failures) == 1

    path.write_bytes(whole)
    outcome, _ = run([brats_root], tmp_path / "out")

    assert (outcome.n_predicted, outcome.n_skipped, outcome.failures) == (1, 5, ())
    assert pd.read_csv(tmp_path / "out" / "failures.csv").empty
    assert len(pd.read_csv(tmp_path / "out" / "volumes.csv")) == 6


def test_a_manifest_line_that_was_cut_off_costs_its_case(brats_root: Path, tmp_path: Path) -> None:
    run([brats_root], tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.jsonl"
    manifest.write_text(manifest.read_text()[:-30])

    outcome, _ = run([brats_root], tmp_path / "out")

    assert (outcome.n_predicted, outcome.n_skipped) == (1, 5)
    assert run([brats_root], tmp_path / "out")[0].n_skipped == 6


def test_results_are_not_taken_for_scans(brats_root: Path, tmp_path: Path) -> None:
    """The folder of results lies among the scans, or is given as input again, or alone."""
    settings = PredictionSettings(preview=False, probabilities=True, uncertainty=True)
    run([brats_root], brats_root / "out", settings=settings)

    assert len(index_cases(brats_root).cases) == 6
    assert run([brats_root], brats_root / "out", settings=settings)[0].n_skipped == 6
    with pytest.raises(LayoutError, match="holds no cases"):
        find_inputs([brats_root / "out"])


def test_results_among_the_scans_themselves_are_refused(tmp_path: Path) -> None:
    folder = write_case(tmp_path)

    with pytest.raises(UsageError, match="holds scans: give another folder"):
        check_apart(find_inputs([tmp_path]), OutputFolder(folder))


def test_a_mistake_of_the_program_ends_one_case_only(
    brats_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(CaseWork):
        __slots__ = ()

        def predict(self, read):
            return CaseWork.predict(self, read) if read.case_id != "BraTS2021_00003" else [][1]

    folder = OutputFolder(tmp_path / "out")
    with folder.opened():
        work = Fails(predictor=PREDICTOR, output=folder, earlier={})
        outcome = finish_batch(local_outcomes(find_inputs([brats_root]), work), folder, 6)

    (failure,) = outcome.failures
    assert failure.error == "IndexError"
    assert "case BraTS2021_00003: list index out of range" in failure.message
    assert outcome.n_predicted == 5
    assert "IndexError" in caplog.text


def test_a_read_only_output_folder_is_an_error_of_the_machine(
    brats_root: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(EnvironmentalError, match=r"file/out/brats_seg\.json cannot be written"):
        run([brats_root], tmp_path / "file" / "out")


def test_a_disk_that_fills_ends_the_batch_and_loses_nothing(
    brats_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    n_free = 14

    def fills(descriptor: int) -> None:
        nonlocal n_free
        n_free -= 1
        if n_free < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fills)
        with pytest.raises(EnvironmentalError, match="the disk is full"):
            run([brats_root], tmp_path / "out")

    assert not list((tmp_path / "out").glob(".*-*"))
    for path in (tmp_path / "out").glob("*.nii.gz"):
        assert np.asarray(nib.load(path).dataobj).shape == SHAPE
    outcome, _ = run([brats_root], tmp_path / "out")
    assert outcome.n_skipped >= 1
    assert outcome.n_predicted + outcome.n_skipped == 6


def test_two_batches_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with (
        OutputFolder(tmp_path).opened(),
        pytest.raises(UsageError, match="another process predicts into"),
        OutputFolder(tmp_path).opened(),
    ):
        pass


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "previews").mkdir()
    for name in (".123-a.nii.gz", "previews/.123-a.png", ".mine"):
        (tmp_path / name).touch()

    with OutputFolder(tmp_path).opened():
        left = {path.name for path in tmp_path.rglob(".*")}
        # as of a worker that was killed during the batch
        (tmp_path / "previews" / ".456-a.png").touch()

    assert left == {".mine", ".predicting.lock"}
    assert {path.name for path in tmp_path.rglob(".*")} == left


def test_ctrl_c_leaves_only_whole_files(brats_root: Path, tmp_path: Path) -> None:
    def interrupt(ending: CaseOutcome) -> None:
        raise KeyboardInterrupt

    folder = OutputFolder(tmp_path / "out")
    with folder.opened():
        work = CaseWork(predictor=PREDICTOR, output=folder, earlier={})
        endings = local_outcomes(find_inputs([brats_root]), work)
        with pytest.raises(KeyboardInterrupt):
            finish_batch(endings, folder, 6, on_case=interrupt)

    finished = [p.name.removesuffix(".nii.gz") for p in (tmp_path / "out").glob("*.nii.gz")]
    assert sorted(folder.records()) == sorted(finished)
    assert 1 <= len(finished) < 6
    assert sorted(pd.read_csv(tmp_path / "out" / "volumes.csv")["case_id"]) == sorted(finished)


@pytest.mark.slow
def test_killed_at_any_moment_the_next_start_finishes_and_repeats_nothing(tmp_path: Path) -> None:
    """The process is killed after the first, second, ... label map."""
    for number in range(8):
        write_case(tmp_path / "scans", f"BraTS2021_{number:05d}", seed=number, shape=(40, 40, 32))
    model, out = write_run(tmp_path / "run"), tmp_path / "out"
    command = [sys.executable, "-m", "brats_seg", "predict", tmp_path / "scans"]
    options = ["--model", model, "--precision", "fp32", "--set", "preview=false"]
    for n_kill in range(1, 4):
        process = subprocess.Popen(
            [*map(str, [*command, "-o", out, *options])], stdout=subprocess.PIPE
        )
        while len(list(out.glob("*.nii.gz"))) < 2 * n_kill and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        finished = OutputFolder(out).records().keys()
        assert len(finished) < 8
        assert all((out / f"{case_id}.nii.gz").exists() for case_id in finished)
    subprocess.run([*map(str, [*command, "-o", out, *options])], check=True, capture_output=True)
    undisturbed = tmp_path / "undisturbed"
    subprocess.run(
        [*map(str, [*command, "-o", undisturbed, *options])], check=True, capture_output=True
    )

    lines = (out / "manifest.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert not [path for path in out.glob(".*") if path.name != ".predicting.lock"]
    for path in undisturbed.glob("*.nii.gz"):
        assert path.read_bytes() == (out / path.name).read_bytes()
    for name in ("volumes.csv", "failures.csv"):
        assert (undisturbed / name).read_text() == (out / name).read_text()


def test_each_bad_name_is_one_row_of_the_failures(tmp_path: Path) -> None:
    folder = write_case(tmp_path, "BraTS2021_00000", labelled=False)
    good = {m: str(p) for m, p in zip(MODALITIES, sorted(folder.iterdir()), strict=True)}
    (tmp_path / "loop.nii").symlink_to("loop.nii")
    os.mkfifo(tmp_path / "pipe.nii")
    paths = ["a\0b.nii", "n" * 300, "\ud800.nii", "loop.nii", "pipe.nii", str(tmp_path)]
    rows = [{"case_id": f"bad{place}", **good, "t1n": path} for place, path in enumerate(paths)]
    rows += [{"case_id": name, **good} for name in ("caf\udce9", "x" * 300, "two\nlines", "good")]
    (tmp_path / "cases.json").write_text(json.dumps(rows))
    run = write_run(tmp_path / "run")

    outcome = predict_folder([tmp_path / "cases.json"], [run], tmp_path / "out", SETTINGS)

    assert (outcome.n_predicted, len(outcome.failures)) == (1, 9)
    failures = pd.read_csv(tmp_path / "out" / "failures.csv")
    assert set(failures["error"]) == {"CaseError"}
    assert failures["message"].str.contains("found").all()
    assert len((tmp_path / "out" / "manifest.jsonl").read_text().splitlines()) == 10
