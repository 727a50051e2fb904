"""Test the commands `predict` and `export`: output, files and exit codes."""

import json
import logging
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from brats_seg.labels import MODALITY_SUBSETS
from tests.builders import Run, check_json, write_case
from tests.inference_builders import IDENTITY, write_run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_a_failed_case_ends_it_with_one_and_is_named(
    run: Run, brats_root: Path, model: Path, tmp_path: Path
) -> None:
    (brats_root / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz").write_bytes(b"")

    code, shown, _ = run(
        "predict", brats_root, "-o", "out", "--model", model, "--set", "preview=false"
    )

    assert code == 1
    assert "FAILED  case BraTS2021_00003, file BraTS2021_00003_t2.nii.gz: found an empty" in shown
    assert "5 predicted, 0 finished before, 1 failed" in shown


def test_machines_read_a_line_of_json_for_each_case(
    run: Run, brats_root: Path, model: Path
) -> None:
    (brats_root / "notes.zip").touch()
    next(brats_root.glob("*_00003/*_t2.nii.gz")).write_bytes(b"")

    code, shown, said = run(
        "predict", brats_root, "-o", "out", "--model", model, "--json", "--set", "preview=false"
    )

    records = {record["case_id"]: record for record in check_json("predict", shown)}
    assert code == 1
    assert len(records) == 6
    assert [name for name, record in records.items() if "message" in record] == ["BraTS2021_00003"]
    # what a person should know does not get between the lines
    assert "archives are not read" in said


def test_one_case_of_two_files_is_for_models_that_were_trained_for_it(
    run: Run, model: Path, tmp_path: Path
) -> None:
    folder = write_case(tmp_path / "scans", labelled=False)
    flags = [
        f"--{modality}={folder}/BraTS2021_00000_{name}.nii.gz"
        for modality, name in (("t1c", "t1ce"), ("t2f", "flair"))
    ]
    identity = replace(IDENTITY, subsets=MODALITY_SUBSETS)
    trained = write_run(tmp_path / "trained", identity=identity)

    refused = run("predict", *flags, "-o", "refused", "--model", model, "--set", "preview=false")
    done = run("predict", *flags, "-o", "out", "--model", trained, "--set", "preview=false")

    assert refused[0] == 1
    assert "found no t1n, t2w; expected t1n, t1c, t2w, t2f, as the model was trained" in refused[1]
    assert done[0] == 0, done[2]
    assert "note: no t1n, t2w: predicted from t1c and t2f alone" in done[1]


def test_the_label_convention_is_said_if_it_is_not_that_of_the_release(
    run: Run, model: Path, tmp_path: Path
) -> None:
    for case_id in ("BraTS2021_00000", "patient_1", "patient_2"):
        write_case(tmp_path / "scans", case_id, labelled=False)
    flags = ("-o", "out", "--model", model, "--set", "preview=false")

    first = run("predict", "scans", *flags)
    again = run("predict", "scans", *flags)
    asked = run("predict", "scans", *flags, "--labels", "brats2023")
    shown, _ = run("predict", "scans", *flags, "--json")[1:]

    expected = (
        "label convention written for 2 cases: brats2017 (1 NCR/NET, 2 ED, 4 ET); the names of "
        "the scans show no release, and the model was trained on this convention; --labels chooses"
    )
    assert expected in first[1]
    assert expected in again[1]
    assert first[1].count("convention written for") == 1
    assert "for 1 case: brats2023 (1 NCR, 2 ED, 3 ET); asked for; the release" in asked[1]
    records = {record["case_id"]: record for record in map(json.loads, shown.splitlines())}
    assert records["BraTS2021_00000"]["convention_reason"] == ""
    assert "no release" in records["patient_1"]["convention_reason"]


def test_every_option_reaches_the_record(
    run: Run, brats_root: Path, model: Path, tmp_path: Path
) -> None:
    shutil.rmtree(brats_root / "BraTS2021_00001")
    flags = [
        "--window",
        "16,16,16",
        "--set",
        "overlap=0.25",
        "--tta",
        "--set",
        "thresholds=0.4,0.5,0.6",
        "--set",
        "smallest_mm3=9,8,7",
        "--set",
        "smallest_et_mm3=50",
        "--probabilities",
        "--uncertainty",
        "--set",
        "preview=false",
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--labels",
        "brats2023",
    ]

    code, _, errors = run("predict", brats_root, "-o", "out", "--model", model, *flags)

    assert code == 0, errors
    line = (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()[0]
    record = json.loads(line)
    assert record["settings"] == {
        "device": "cpu",
        "precision": "fp32",
        "window": [16, 16, 16],
        "overlap": 0.25,
        "tta": True,
        "thresholds": [0.4, 0.5, 0.6],
        "smallest_mm3": [9, 8, 7],
        "smallest_et_mm3": 50,
        "labels": "brats2023",
        "probabilities": True,
        "uncertainty": True,
        "preview": False,
        "report": False,
        "layout": "plain",
    }
    assert record["convention"] == "brats2023"
    assert all((tmp_path / "out" / name).is_file() for name in record["outputs"])
    assert len(record["outputs"]) == 5


def test_export_says_what_the_model_card_names_and_what_it_lacks(
    run: Run, model: Path, tmp_path: Path
) -> None:
    plain = run("export", model, "-o", "model")
    licensed = run("export", model, "-o", "other", "--license", "CC0", "--count-cases")

    assert "wrote 1 network to model, fingerprint " in plain[1]
    assert "states no licence; --license names one" in plain[1]
    assert "--count-cases" not in licensed[1]
    assert "--license" not in licensed[1]
    assert "- licence: CC0\n" in (tmp_path / "other" / "README.md").read_text()


def test_a_damaged_model_is_refused_before_any_case(
    run: Run, brats_root: Path, model: Path, tmp_path: Path
) -> None:
    run("export", model, "-o", "model")
    path = tmp_path / "model" / "member0.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 8
    path.write_bytes(content)

    code, _, errors = run("predict", brats_root, "-o", "out", "--model", "model")

    assert code == 2
    assert "member0.safetensors is damaged" in errors
    assert not (tmp_path / "out").exists()


@pytest.fixture(autouse=True)
def log_handlers() -> object:
    """Leave the log as it was: the program sets its own handler."""
    log = logging.getLogger("brats_seg")
    before = log.handlers, log.level
    yield
    log.handlers, log.level = before


@pytest.mark.parametrize("at_once", [False, True], ids=["between cases", "within a case"])
def test_ctrl_c_says_where_the_results_are_and_how_to_go_on(
    run: Run, brats_root: Path, model: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    place = "inference.predict.entropy" if at_once else "cli.predict.print_outcome"
    monkeypatch.setattr(f"brats_seg.{place}", interrupted)
    flags = ("-o", "out", "--model", model, "--set", "preview=false", "--uncertainty")

    code, _, said = run("predict", brats_root, *flags)

    n_done = 0 if at_once else 1
    assert code == 128 + signal.SIGINT
    assert f"interrupted after {n_done} of 6 cases. Results are in out; the same command" in said
    assert f"brats-seg predict {brats_root} -o out --model {model} --set preview=false" in said
