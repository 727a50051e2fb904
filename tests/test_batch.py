"""Test batches in one process and several: failures stay with their case, files are written whole."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pandas as pd
import psutil
import pytest

from brats_seg import PredictionSettings, Predictor, export_model, load_model
from brats_seg.cases.case import Case
from brats_seg.cases.find import find_cases, find_inputs
from brats_seg.cases.index import index_cases
from brats_seg.errors import CaseError, EnvironmentalError, LayoutError, UsageError
from brats_seg.inference import batch
from brats_seg.inference.method import Scan
from brats_seg.inference.predict import Prediction
from brats_seg.inference.results import OutputFolder, Record, result_files
from tests.bad_cases import BAD_CASES, break_in_ten_ways
from tests.builders import FORKS, make_volumes, touch, write_case, write_nifti
from tests.inference_builders import (
    CASES,
    CPU,
    PLAIN_SETTINGS,
    make_model,
    predict_into,
    write_fold,
    write_run,
)

PREDICTOR = Predictor(model=make_model(settings=PLAIN_SETTINGS))


def test_one_bad_case_is_one_row_and_the_others_are_predicted(tmp_path: Path) -> None:
    for case_id in CASES[:4]:
        write_case(tmp_path / "scans", case_id, seed=int(case_id[-1]))
    break_in_ten_ways(tmp_path / "scans")
    out = tmp_path / "out"
    done, outcomes = predict_into(tmp_path / "scans", out)
    assert (len(done.predicted), done.n_skipped, len(done.failures)) == (4, 0, 10)
    case_ids = [outcome.record.case_id for outcome in outcomes]
    assert case_ids == sorted(case_ids)
    failures = pd.read_csv(out / "failures.csv")
    assert failures["case_id"].tolist() == list(BAD_CASES)
    assert set(failures["error"]) == {"CaseError"}
    for case_id, message in zip(failures["case_id"], failures["message"], strict=True):
        assert f"found {BAD_CASES[case_id]}" in message
    assert sorted(path.name for path in out.glob("*.nii.gz")) == [f"{n}.nii.gz" for n in CASES[:4]]
    # the tables hold volumes and records
    for row in pd.read_csv(out / "volumes.csv").to_dict("records"):
        label_map = np.asarray(nib.load(out / f"{row['case_id']}.nii.gz").dataobj)
        parts = {"wt": [1, 2, 4], "tc": [1, 4], "et": [4], "ed": [2], "ncr": [1]}
        for part, values in parts.items():
            assert row[f"{part}_ml"] == pytest.approx(np.isin(label_map, values).sum() / 1000)
        assert (row["et_components"] >= 1, row["convention"]) == (True, "brats2017")
    record = json.loads((out / "manifest.jsonl").read_text().splitlines()[0])
    assert len(record["inputs"]) == 4
    assert (record["model"], record["outputs"]) == ("model", [f"{CASES[0]}.nii.gz"])
    assert min(record["seconds"], record["peak_memory_mb"]) > 0
    assert outcomes[0].record.model_dump(mode="json") == record


@pytest.fixture(scope="module")
def two_folds(tiny_prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs of four cases each, a checkpoint without its split, and exports."""
    root = tmp_path_factory.mktemp("folds")
    run = write_fold(root / "first", tiny_prepared, CASES[4:])
    write_fold(root / "second", tiny_prepared, CASES[:2], seed=1)
    shutil.copy(run / "best.pt", root / "alone.pt")
    export_model([run], root / "public")
    return root


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["first"], ["yes"] * 4 + ["no"] * 2),
        (["first", "second"], ["yes"] * 6),
        # the other member may have been trained on any case
        (["first", "alone.pt"], ["yes"] * 4 + ["unknown"] * 2),
        (["alone.pt"], ["unknown"] * 6),
        (["public"], ["yes"] * 4 + ["no"] * 2),
    ],
)
def test_an_ensemble_was_trained_on_the_cases_of_any_member(two_folds, models, expected):
    model = load_model([two_folds / name for name in models], CPU)
    assert [model.seen(case_id) for case_id in CASES] == expected


@pytest.mark.usefixtures("one_process")
def test_cases_that_the_model_was_trained_on_are_marked(two_folds, tiny_scans, run, tmp_path):
    for name in ("first", "alone.pt"):
        batch.predict_folder([tiny_scans], [two_folds / name], tmp_path / name, PLAIN_SETTINGS)
    _, said, _ = run("evaluate", tiny_scans, "first", "-o", "scores.csv")
    _, unknown, _ = run("evaluate", tiny_scans, "alone.pt", "-o", "unknown.csv")
    report = "report", "first", "--reference", tiny_scans
    run(*report, "--no-case-pages")
    run(*report, "--case", CASES[3], "--case", CASES[4])
    scores = pd.read_csv("scores.csv")
    volumes = pd.read_csv("first/volumes.csv")["in_training"].tolist()
    assert scores["in_training"][::3].tolist() == volumes == ["yes"] * 4 + ["no"] * 2
    dice = scores[scores["region"] == "wt"].groupby("in_training")["dice"].mean()
    others, every = re.findall(r"over ([^\n]*)\n.*?wt +([\d.]+)", said, re.DOTALL)
    trained = "4 cases that the model was trained on"
    assert others == (f"2 cases, without {trained}", f"{dice['no']:.3f}")
    assert every[0] == f"6 cases, with {trained}"
    assert f"{CASES[3]}: the model was trained on them" in said
    for case_id in (CASES[0], CASES[4]):
        Path(f"first/{case_id}.nii.gz").unlink()
    _, lacking, _ = run("evaluate", tiny_scans, "first", "-o", "lacking.csv")
    assert f"2 cases, without {trained}; 1 without a prediction, with the worst scores" in lacking
    assert f"6 cases, with {trained}; 2 without a prediction, with the worst scores" in lacking
    assert "trained on" not in unknown
    assert "in_training" not in pd.read_csv("unknown.csv")
    assert pd.read_csv("alone.pt/volumes.csv")["in_training"].isna().all()
    cohort = Path("first/cohort.html").read_text()
    assert cohort.count(">trained on</span>") == 4
    assert cohort.index(f"without {trained}") < cohort.index(f"with {trained}")
    pages = [Path(f"first/reports/{case_id}.html").read_text() for case_id in CASES[3:5]]
    assert ["was trained on this patient" in page for page in pages] == [True, False]


def test_a_case_is_done_again_when_what_it_depends_on_changes(brats_root, tmp_path):
    out = tmp_path / "out"
    assert len(predict_into(brats_root, out)[0].predicted) == 6
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.nii.gz")}

    def n_predicted(**changes: object) -> int:
        return len(predict_into(brats_root, out, **changes)[0].predicted)

    again, outcomes = predict_into(brats_root, out)
    assert (len(again.predicted), again.n_skipped) == (0, 6)
    assert not any(outcome.is_new for outcome in outcomes)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert len(pd.read_csv(out / "volumes.csv")) == 6
    path = brats_root / "BraTS2021_00002" / "BraTS2021_00002_t1.nii.gz"
    write_nifti(path, make_volumes(seed=9)[0])
    assert n_predicted() == 1
    (out / "BraTS2021_00001.nii.gz").unlink()
    assert n_predicted() == 1
    for changes in ({"labels": "brats2023"}, {"layout": "bids"}):
        assert n_predicted(settings=PLAIN_SETTINGS.model_copy(update=changes)) == 6
        assert len([*out.rglob("*.nii.gz")]) == 6
    assert n_predicted(model=replace(make_model(), fingerprint="other")) == 6
    # what it does not write itself would be of another prediction
    names = result_files("plain", "BraTS2021_00001", "brats2017")
    companions = [*names.probabilities, names.uncertainty, names.preview, names.page]
    (out / "probabilities").symlink_to(touch(tmp_path / "disk", "x"))
    paths = [touch(out, name) / name for name in (*companions, *names.dicom)]
    assert n_predicted(settings=PredictionSettings(preview=False, device="cpu")) == 6
    assert not any(path.exists() for path in paths)
    # a line that was cut off costs its case
    manifest = out / "manifest.jsonl"
    manifest.write_text(manifest.read_text()[:-30])
    assert (n_predicted(), n_predicted()) == (1, 0)
    # a drive that is away says nothing about a case; of one that fails, nothing remains
    present = path.rename(tmp_path / "away")
    path.symlink_to(tmp_path / "unmounted")
    assert (n_predicted(), (out / "BraTS2021_00002.nii.gz").exists()) == (0, True)
    present.rename(path)
    assert n_predicted() == 0
    touch(out, result_files("plain", "BraTS2021_00002", "").page)
    path.write_bytes(b"cut off")
    assert n_predicted() == 0
    assert not [*out.rglob("BraTS2021_00002*")]
    # the process may be killed after each case; its page stays, and so does what is outside
    record = OutputFolder(touch(out, names.page)).records()["BraTS2021_00001"]
    for outputs in ((*record.outputs, "../disk/x"), record.outputs):
        OutputFolder(out).append(
            record.model_copy(update={"convention": "msd", "outputs": outputs})
        )
    assert all(path.exists() for path in (out / names.page, tmp_path / "disk/x"))
    conventions = pd.read_csv(out / "volumes.csv")["convention"].tolist()
    assert conventions == ["brats2017", "msd", *["brats2017"] * 3]


def test_a_label_map_is_not_taken_for_that_of_an_earlier_record(tmp_path, monkeypatch):
    """The process is killed when the label map is replaced, and the new record not written yet."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # the new record is equal to the first one, to the millisecond
    monkeypatch.setattr(batch, "round", lambda *_: 0.5, raising=False)
    monkeypatch.setattr("brats_seg.inference.predict.peak_memory_mb", lambda _: 1)
    write_case(tmp_path / "scans", CASES[0])
    predict = partial(predict_into, tmp_path / "scans", tmp_path / "out")
    predict()
    label_map = (tmp_path / "out" / f"{CASES[0]}.nii.gz").read_bytes()
    other = PLAIN_SETTINGS.model_copy(update={"labels": "brats2023"})
    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            predict(settings=other)
    assert (tmp_path / "out" / f"{CASES[0]}.nii.gz").read_bytes() != label_map
    assert [predict()[0].n_skipped for _ in range(2)] == [0, 1]
    assert (tmp_path / "out" / f"{CASES[0]}.nii.gz").read_bytes() == label_map
    assert not [*(tmp_path / "out").glob(".*.writing")]


def test_results_stay_when_the_drive_of_the_scans_goes_away_during_a_prediction(tmp_path):
    scans, out = tmp_path / "scans", tmp_path / "out"

    class Fails(Predictor):
        def predict_scan(self, scan: Scan) -> Prediction:
            shutil.rmtree(scans)
            raise CaseError(scan.case.case_id, "(all)", "no memory", "some", "")

    write_case(scans, CASES[0])
    predict_into(scans, out)
    folder, predictor = OutputFolder(out), Fails(model=make_model())
    (lost,) = batch.local_outcomes(find_inputs([scans]), predictor, folder)
    assert (lost.is_new, lost.record.error) == (False, "CaseError")
    assert (out / f"{CASES[0]}.nii.gz").exists()


def test_no_result_depends_on_a_label_map(brats_root: Path, tmp_path: Path) -> None:
    cases, run = find_cases(brats_root).cases[:1], write_run(tmp_path / "run")
    for n_predicted in (1, 0):
        done = batch.predict_folder(cases, [run], tmp_path / "out", PLAIN_SETTINGS)
        assert (len(done.predicted), done.failures) == (n_predicted, ())
        cases[0].path_of(cases[0].label).unlink(missing_ok=True)


def test_a_finished_case_is_found_again_below_a_folder_of_any_name(tmp_path: Path) -> None:
    """The name is not UTF-8, and has a separator of lines; that of another case is too long for a file."""
    scans = tmp_path / os.fsdecode(b"caf\xe9\xe2\x80\xa8")
    write_case(scans, CASES[0])
    write_case(scans, "x").rename(scans / ("x" * 250))
    (predicted, _), (again, _) = (predict_into(scans, tmp_path / "out") for _ in range(2))
    assert (predicted.predicted, again.predicted, again.n_skipped) == ((CASES[0],), (), 1)


def test_results_in_place_of_those_of_other_scans_say_so(tmp_path: Path) -> None:
    """Scans that were moved are the same."""
    for number, seed in enumerate([0, 0, 1]):
        scans = write_case(tmp_path / f"P{number}", "20240301", seed=seed).parent
        predict_into(scans, tmp_path / "out")
        (record,) = OutputFolder(tmp_path / "out").records().values()
        text = f"these results replace those of other scans, such as {tmp_path}/P1/"
        assert any(warning.startswith(text) for warning in record.warnings) == (number == 2)


def test_results_are_not_taken_for_scans(brats_root: Path, tmp_path: Path) -> None:
    settings = PredictionSettings(preview=False, probabilities=True, uncertainty=True)
    predict_into(brats_root, brats_root / "out", settings=settings)
    assert len(index_cases(brats_root).cases) == 6
    (brats_root / "out/BraTS2021_00001.nii.gz").unlink()
    assert predict_into(brats_root, brats_root / "out", settings=settings)[0].n_skipped == 5
    with pytest.raises(LayoutError, match="holds no cases"):
        find_inputs([brats_root / "out"])
    for output in (brats_root, brats_root.parent, brats_root / "BraTS2021_00000"):
        with pytest.raises(UsageError, match="holds scans: give another folder"):
            batch.check_apart(find_inputs([brats_root]), output)
    batch.check_apart(find_inputs([brats_root.rename(tmp_path / "scans")]), tmp_path)
    with pytest.raises(LayoutError, match="more does not exist"):  # a string is not left out
        batch.find_scans([tmp_path / "scans", "more"], tmp_path)


def test_a_bug_ends_one_case_and_ctrl_c_leaves_only_whole_files(tiny_scans, tmp_path, caplog):
    class Fails(Predictor):
        __slots__ = ()

        def predict_scan(self, scan: Scan) -> Prediction:
            return Predictor.predict_scan(self, scan) if scan.case.case_id != CASES[0] else [][1]

    def interrupt(outcome: batch.CaseOutcome) -> None:
        if isinstance(outcome.record, Record):
            raise KeyboardInterrupt

    def finish(on_case: Callable[[batch.CaseOutcome], None]) -> batch.BatchOutcome:
        with folder.opened():
            cases, predictor = find_inputs([tiny_scans]), Fails(model=PREDICTOR.model)
            outcomes = batch.local_outcomes(cases, predictor, folder)
            return batch.finish_batch(outcomes, folder, 6, on_case=on_case)

    folder = OutputFolder(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        finish(interrupt)
    finished = [p.name.removesuffix(".nii.gz") for p in (tmp_path / "out").glob("*.nii.gz")]
    assert 1 <= len(finished) < 6
    assert sorted(folder.records().keys() - {CASES[0]}) == sorted(finished)
    assert sorted(pd.read_csv(tmp_path / "out" / "volumes.csv")["case_id"]) == sorted(finished)
    done = finish(lambda outcome: None)
    (failure,) = done.failures
    assert (failure.case_id, failure.error) == (CASES[0], "IndexError")
    assert (done.n_skipped, len(done.predicted)) == (len(finished), 5 - len(finished))
    assert "IndexError" in caplog.text


def test_a_folder_is_locked_and_leftovers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("brats_seg.files._GRACE_S", 0.1)
    touch(tmp_path, ".1-0a1b2c-a.nii", "scans/a/b/.1-0a1b2c-c", "previews/.1-0a1b2c-a.png", ".mine")
    with OutputFolder(tmp_path).opened():
        left = {path.name for path in tmp_path.rglob(".*")}
        with pytest.raises(UsageError, match="another process"), OutputFolder(tmp_path).opened():
            pass
        # as of a worker that was killed during the batch
        (tmp_path / "previews" / ".456-0a1b2c-a.png").touch()
    assert left == {".mine", ".predicting.lock"}
    assert {path.name for path in tmp_path.rglob(".*")} == left


def test_scans_are_taken_as_they_come_and_a_bad_one_once(tmp_path, monkeypatch, caplog):
    """A case arrives in two parts, another is damaged and mended, a third changes after its result."""
    source, root, out = tmp_path / "source", tmp_path / "in", tmp_path / "out"
    for case_id in CASES[:3]:
        write_case(source, case_id, seed=int(case_id[-1]), labelled=False)
    damaged = f"{CASES[1]}/{CASES[1]}_t1.nii.gz"
    (root / CASES[0]).mkdir(parents=True)
    (root / "notes.nii.gz").touch()
    events = []

    def arrive() -> Iterator[None]:
        first = sorted((source / CASES[0]).iterdir())
        for path in first[:2]:
            shutil.copy(path, root / CASES[0])
        yield
        # the look between finds two of four files, and that they have just changed
        for path in first[2:]:
            shutil.copy(path, root / CASES[0])
        shutil.copytree(source / CASES[1], root / CASES[1])
        (root / damaged).write_bytes(b"cut off")
        yield from (None,) * 4
        shutil.copy(source / damaged, root / damaged)
        shutil.copytree(source / CASES[2], root / CASES[2])
        yield from (None,) * 4
        write_nifti(root / CASES[2] / f"{CASES[2]}_t2.nii.gz", make_volumes(seed=9)[2])
        yield from (None,) * 4
        raise KeyboardInterrupt

    def on_case(outcome: batch.CaseOutcome) -> None:
        events.append((outcome.record.case_id, isinstance(outcome.record, Record)))

    arrivals = arrive()
    next(arrivals)
    run = write_run(tmp_path / "run")
    batches = batch.watched_scans(root, out, quiet_s=1)
    clock = SimpleNamespace(sleep=lambda _: next(arrivals), monotonic=time.monotonic)
    monkeypatch.setattr(batch, "time", clock)
    with pytest.raises(KeyboardInterrupt):
        batch.predict_folder(batches, [run], out, PLAIN_SETTINGS, on_case=on_case)
    assert [case_id for case_id, _ in events] == [CASES[n] for n in (0, 1, 1, 2, 2)]
    assert [is_good for _, is_good in events] == [True, False, True, True, True]
    # once for each of four arrivals
    assert sum("such as notes.nii.gz" in record.message for record in caplog.records) == 4
    # the row of the failure went with the failure
    assert pd.read_csv(out / "failures.csv").empty
    assert pd.read_csv(out / "volumes.csv")["case_id"].tolist() == list(CASES[:3])
    again = batch.predict_folder([root], [run], out, PLAIN_SETTINGS)
    assert (len(again.predicted), again.n_skipped) == (0, 3)


def test_scans_in_folders_of_their_names_are_taken_when_they_are_whole(tmp_path, monkeypatch):
    """As Kaggle unpacks some archives: `x.nii.gz/y.nii`. A file of another case changes after each look."""
    for path in [*write_case(tmp_path / "in", CASES[0], labelled=False).iterdir()]:
        whole = path.rename(tmp_path / path.name)
        path.mkdir()
        whole = whole.rename(path / "inside.nii.gz")
    looks, taken = list[int](), list[tuple[int, int]]()

    def sleep(_: float) -> None:
        looks.append(0)
        if len(looks) == 8:
            raise KeyboardInterrupt
        if len(looks) < 4:
            whole.write_bytes(whole.read_bytes() + b"more")

    late = tmp_path / "in" / f"{CASES[1]}_t1.nii.gz"
    monkeypatch.setattr(batch, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(batch, "find_inputs", lambda *a, **b: late.touch() or find_inputs(*a, **b))
    watched = batch.watched_scans(tmp_path / "in", tmp_path / "out", quiet_s=1)
    with pytest.raises(KeyboardInterrupt):
        taken.extend((len(looks), len(cases)) for cases in watched)
    assert taken == [(4, 1)]


@pytest.fixture
def job(brats_root: Path, tmp_path: Path) -> batch.Job:
    run = write_run(tmp_path / "run")
    return batch.Job(
        model_paths=(run,),
        fingerprint=load_model([run], CPU).fingerprint,
        settings=PredictionSettings(preview=False, precision="fp32", device="cpu"),
        output_path=tmp_path / "out",
    )


def check_same_results(brats_root: Path, job: batch.Job, tmp_path: Path) -> None:
    local = tmp_path / "local"
    batch.predict_folder([brats_root], job.model_paths, local, job.settings)
    for path in local.glob("*.nii.gz"):
        assert path.read_bytes() == (job.output_path / path.name).read_bytes()
    tables = [folder / "volumes.csv" for folder in (local, job.output_path)]
    assert not tables[1].exists() or tables[0].read_text() == tables[1].read_text()


def dies(case: Case, job: batch.Job, n_deaths: int) -> batch.CaseOutcome:
    deaths = job.output_path / "deaths"
    if case.case_id == CASES[2] and (not deaths.exists() or deaths.stat().st_size < n_deaths):
        with deaths.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return batch.run_case(case, job)


def test_a_worker_does_a_case_as_the_batch_and_refuses_a_changed_model(brats_root, job, tmp_path):
    cases = find_inputs([brats_root])
    assert all(batch.run_case(case, job).is_new for case in cases)
    check_same_results(brats_root, job, tmp_path)
    # a worker of a cluster does several batches
    for is_new in (True, False):
        outcome = batch.run_case(cases[0], job)
        OutputFolder(job.output_path).append(outcome.record)
        assert outcome.is_new == is_new
    write_run(job.model_paths[0], seed=5)
    batch._predictor.cache_clear()
    with pytest.raises(UsageError, match="the model changed while the batch was running"):
        batch.run_case(cases[0], job)


def test_pages_that_cannot_be_written_are_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "find_wing", lambda _: None)
    with pytest.raises(UsageError, match=r"need brats_seg\.pages, which is missing"):
        batch.predict_folder([], [], tmp_path, PredictionSettings(report=True))


def tree() -> list[psutil.Process]:
    processes = [here := psutil.Process(), *here.children(recursive=True)]
    return [one for one in processes if one.status() != psutil.STATUS_ZOMBIE]


def listening() -> set[int]:
    connections = (one for process in tree() for one in process.net_connections("inet"))
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def dies_at_once(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "n_deaths", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 9))]
)
def test_processes_predict_without_a_port(brats_root, job, tmp_path, monkeypatch, n_deaths):
    """A death costs a retry; a case that kills three processes is a failure."""
    (write_case(brats_root, "BraTS2021_00099") / "BraTS2021_00099_t1.nii.gz").unlink()
    if n_deaths:
        monkeypatch.setattr(batch, "run_case", partial(dies, n_deaths=n_deaths))
    before, n_processes, opened = listening(), [len(tree())], set[int]()
    with socket.create_server(("127.0.0.1", 0)) as control:
        assert listening() - before == {control.getsockname()[1]}

    def observe(_: batch.CaseOutcome) -> None:
        n_processes.append(len(tree()))
        opened.update(listening() - before)

    n_workers = 2 if n_deaths else 1
    inputs = [brats_root], job.model_paths, job.output_path, job.settings
    done = batch.predict_folder(*inputs, workers=n_workers, on_case=observe)
    killed = {CASES[2]: "KilledWorker"} if n_deaths > 3 else {}
    errors = {failure.case_id: failure.error for failure in done.failures}
    assert errors == killed | {"BraTS2021_00099": "CaseError"}
    assert len(done.predicted) == 6 - len(killed)
    assert (max(n_processes) >= n_processes[0] + n_workers, opened) == (True, set())
    if n_deaths:
        assert (job.output_path / "deaths").read_text() == "x" * min(n_deaths, 3)
    if not killed:
        check_same_results(brats_root, job, tmp_path)


@pytest.mark.parametrize(("n_cases", "n_started"), [(0, 1), (2, 2), (9, 3)])
def test_no_process_is_started_without_a_case(job, monkeypatch, n_cases, n_started):
    started: list[ThreadPoolExecutor] = []

    def start(*_: object, **__: object) -> ThreadPoolExecutor:
        started.append(ThreadPoolExecutor(1))
        return started[-1]

    monkeypatch.setattr(batch, "worker_pool", start)
    with suppress(AttributeError):
        next(batch.shared_outcomes([None] * n_cases, job, 3), None)
    assert len(started) == n_started


@pytest.mark.parametrize(
    ("address", "found", "is_safe"),
    [
        ("scheduler", "encryption required", True),
        ("ftp://localhost:1", "unknown address scheme", True),
        ("tcp://127.0.0.1:1", "encryption required", True),
        ("tls://127.0.0.1:1", "TLS expects", True),
        ("tcp://127.0.0.1:1", "no answer|refused", False),
        ("silent", "no answer", False),
    ],
)
def test_an_address_needs_a_safe_scheduler(address, found, is_safe, job, monkeypatch):
    dask = pytest.importorskip("dask")
    # its settings have defaults once it is imported
    pytest.importorskip("distributed")
    monkeypatch.setattr(batch, "ANSWER_S", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        dask.config.set({"distributed.comm.require-encryption": None if is_safe else False}),
    ):
        if address == "silent":
            address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        message = rf"no dask scheduler answers at {address} \(.*({found})"
        with pytest.raises(EnvironmentalError, match=message):
            next(batch.shared_outcomes([], job, address))


def test_without_dask_and_without_processes_the_remedy_is_named(job, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "distributed", None)
        with pytest.raises(EnvironmentalError, match=r"pip install brats_seg\[cluster\]"):
            next(batch.shared_outcomes([], job, "tls://127.0.0.1:1"))
    cancelled = Future[batch.CaseOutcome]()
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    with monkeypatch.context() as patched:
        patched.setattr(batch, "_cluster", lambda *_: nullcontext(lambda _: cancelled))
        with pytest.raises(EnvironmentalError, match="the dask scheduler has ended"):
            next(batch.shared_outcomes([Case.named("a", {})], job, "tls://127.0.0.1:1"))


@pytest.mark.slow
def test_killed_processes_are_an_error_of_the_machine(job, monkeypatch):
    monkeypatch.setattr(batch, "get_context", lambda _: FORKS)
    monkeypatch.setattr(batch, "user_value", lambda _: None)
    monkeypatch.setattr(batch, "torch", SimpleNamespace(set_num_threads=dies_at_once))
    with pytest.raises(EnvironmentalError, match=r"process was killed, .*Use fewer --workers"):
        next(batch.shared_outcomes([], job, 1))
